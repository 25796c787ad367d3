"""configs/*.yaml: every key is an option of Megatron's or ours; rules, stock's checks and headers agree."""

import re
from pathlib import Path

import pytest

from megatron_ext import config, configfile, features, rules

ROOT = Path(__file__).resolve().parents[2]
# Those of other scripts are tested with their script.
CONFIGS = sorted(path for path in ROOT.glob("configs/*.yaml") if not path.stem.startswith("dit-"))
# Ranks that the header of the file names.
WORLD_SIZES = {
    "gpt-cpu-small": 2,
    "gpt2-small": 8,
    "llama-7b": 8,
    "gpt-256k-vocab": 8,
    "gpt-256k-vocab-vp": 8,
    "gpt-256k-vocab-v-half": 8,
    "llama-7b-paro": 32,
    "llama-7b-tp16": 16,
    "llama-7b-tp16-3d": 16,
    "llama-7b-128k": 32,
    "llama-7b-128k-wallfacer": 32,
}
# A feature's config beside its baseline: the same job and the flags of the feature.
FEATURE_CONFIGS = {
    "gpt-256k-vocab-vp": ("gpt-256k-vocab", "vocab", ["--vocab-parallel", "vocab-2"]),
    "gpt-256k-vocab-v-half": (
        "gpt-256k-vocab",
        "pipeline vocab",
        ["--vocab-parallel", "vocab-2", "--pipeline-schedule", "v-half", "--transformer-impl", "local"],
    ),
    "llama-7b-tp16-3d": ("llama-7b-tp16", "linear3d", ["--linear-3d", "2", "4", "2"]),
    "llama-7b-paro": ("llama-7b", "paro", ["--paro-strategy", "IIG", "--paro-comm", "ho-ring"]),
    "llama-7b-128k-wallfacer": (
        "llama-7b-128k",
        "wallfacer",
        ["--cp-comm-type", "wallfacer", "--wallfacer-team-size", "auto"],
    ),
}
each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def parser():
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return config.add_arguments(parser, features.configs())


@pytest.fixture
def parse(parser, monkeypatch):
    """The arguments of a file after our rules and stock's own checks, on `world_size` Hopper GPUs."""
    from megatron.training import arguments

    def parse_file(path: Path, world_size: int):
        args = parser.parse_args([*configfile.load(str(path)).argv, "--mock-data"])
        args.rank, args.world_size = 0, world_size
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # as torchrun sets it on a node of 8 GPUs
        on = features.enabled_features(args)
        assert rules.run(args, (*rules.base_rules(), *(rule for f in on for rule in f.rules))) == []
        assert features.conflicts(args, on) == []
        monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        arguments.validate_args(args)
        return args

    return parse_file


def number_of_parameters(args) -> int:
    """Weights of a GPT with these arguments, from its shapes."""
    hidden, bias = args.hidden_size, int(args.add_bias_linear)
    queries = args.num_attention_heads * args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    qkv = queries + 2 * groups * args.kv_channels
    fan_in = args.ffn_hidden_size * (2 if args.swiglu else 1)
    norm = hidden * (2 if args.normalization == "LayerNorm" else 1)
    attention = hidden * qkv + queries * hidden + bias * (qkv + hidden)
    mlp = hidden * fan_in + args.ffn_hidden_size * hidden + bias * (fan_in + hidden)
    embedding = args.vocab_size * hidden * (2 if args.untie_embeddings_and_output_weights else 1)
    if args.position_embedding_type == "learned_absolute":
        embedding += args.max_position_embeddings * hidden
    return args.num_layers * (attention + mlp + 2 * norm) + norm + embedding


def test_all_are_listed():
    assert {path.stem for path in CONFIGS} == set(WORLD_SIZES)


@each_config
def test_every_key_is_an_option(path, parser):
    flags = [word for word in configfile.load(str(path)).argv if word.startswith("--")]
    unknown = [flag for flag in flags if flag not in parser._option_string_actions]
    assert not unknown, f"{path}: no option of Megatron or of ours"


@each_config
def test_stock_accepts_it_and_the_sizes_fit(path, parse):
    world_size = WORLD_SIZES[path.stem]
    args = parse(path, world_size)
    assert args.global_batch_size % (args.micro_batch_size * args.data_parallel_size) == 0
    assert args.num_layers % args.pipeline_model_parallel_size == 0
    assert args.hidden_size == args.num_attention_heads * args.kv_channels
    assert args.num_attention_heads % args.tensor_model_parallel_size == 0
    assert args.hidden_dropout == args.attention_dropout == 0


@each_config
def test_header_says_what_the_file_holds(path, parse):
    args = parse(path, WORLD_SIZES[path.stem])
    header = path.read_text().partition("model:")[0]
    size, unit = re.search(r"([\d.]+) ([MB]) parameters", header).groups()
    assert number_of_parameters(args) == pytest.approx(float(size) * {"M": 1e6, "B": 1e9}[unit], rel=0.03)
    batch, sequence = re.search(r"tokens +(\d+) sequences x (\d+)", header).groups()
    assert (int(batch), int(sequence)) == (args.global_batch_size, args.seq_length)
    assert f"configs/{path.name}" in header


# A V splits backward passes, which only the local layers can.
@pytest.mark.parametrize("name", [name for name in WORLD_SIZES if "cpu" not in name and "v-half" not in name])
def test_gpu_configs_use_what_a_gpu_offers(name, parse):
    args = parse(ROOT / "configs" / f"{name}.yaml", WORLD_SIZES[name])
    assert args.bf16
    # 3-D linear layers are local ones, and so are those that they are compared with.
    implementation = "local" if name.startswith("llama-7b-tp16") else "transformer_engine"
    assert args.transformer_impl == implementation
    assert args.use_distributed_optimizer
    assert args.overlap_grad_reduce
    assert args.overlap_param_gather
    assert args.sequence_parallel == (args.tensor_model_parallel_size > 1)


@pytest.mark.parametrize("name", FEATURE_CONFIGS)
def test_feature_config_is_its_baseline_and_the_flags(name, parse):
    baseline, feature, flags = FEATURE_CONFIGS[name]
    stock, ours = (configfile.load(str(ROOT / "configs" / f"{n}.yaml")).argv for n in (baseline, name))
    assert sorted(ours) == sorted(configfile.merge(stock, flags))
    for path, expected in ((baseline, []), (name, feature.split())):
        args = parse(ROOT / "configs" / f"{path}.yaml", WORLD_SIZES[path])
        assert [f.name for f in features.enabled_features(args)] == expected


def test_cpu_config_has_no_flag_that_cpu_mode_sets(parser):
    """What CPU needs is the launcher's business: the same file must be usable with and without --cpu."""
    flags = configfile.load(str(ROOT / "configs" / "gpt-cpu-small.yaml")).argv
    assert not {"--distributed-backend", "--transformer-impl", "--attention-backend"} & set(flags)
