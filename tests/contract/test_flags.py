"""Our flags and rules against Megatron's own parser and validation (imports megatron, runs nothing)."""

import argparse
import copy
import dataclasses
import math
import random
import shlex

import pytest

from megatron_ext import config, configfile, features, parse_errors, rules
from megatron_ext.problems import UserError
from megatron_ext.rules_cpu import GPU_OPTIONS
from megatron_ext.rules_files import OUTPUT_FOLDERS, data_given, one_data_source, tokenizer_given
from megatron_ext.rules_pipeline import ACCOUNT_FOR, FIRST_LAST, PIPELINE_RULES, VIRTUAL, virtual_stages
from megatron_ext.rules_sizes import SIZE_FLAGS, SIZE_RULES
from megatron_ext.rules_training import (
    DATA_OPTIONS,
    batch_sizes,
    evaluation_batch,
    learning_rate,
    one_training_length,
    positions_cover_sequence,
    required_options,
    save_interval_given,
)
from tests.unit.stock_args import DEFAULTS, GPT
from tests.unit.test_config import EveryKind


def megatron_parser(*configs):
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(prog="pretrain_gpt.py", allow_abbrev=False)
    return config.add_arguments(add_megatron_arguments(parser), configs)


@pytest.fixture(scope="module")
def parser():
    return megatron_parser(*features.configs())


# --- flags -------------------------------------------------------------------------------------------------


def test_our_flags_are_in_megatrons_help(parser):
    # Only our group is formatted: a stock help text with a bare % would break the whole.
    (ours,) = [group for group in parser._action_groups if group.title == "megatron_ext RunConfig"]
    formatter = parser._get_formatter()
    formatter.add_arguments(ours._group_actions)
    text = " ".join(formatter.format_help().split())
    for field in dataclasses.fields(config.RunConfig):
        assert f"--{field.name.replace('_', '-')} " in text
    assert (
        "--ext-config EXT_CONFIG YAML file with arguments in Megatron's spelling; the command line wins."
        in text
    )
    assert "--ext-check NAME[,NAME...] Self-checks at run time" in text


@pytest.mark.parametrize("configs", [features.configs(), [EveryKind]], ids=["ours", "every kind"])
def test_both_parsers_agree(configs):
    from megatron.training.argument_utils import ArgumentGroupFactory

    full = argparse.ArgumentParser(add_help=False)
    for dataclass in configs:
        ArgumentGroupFactory(dataclass).build_group(full)
    light = config.light_parser(configs)
    assert list(full._option_string_actions) == list(light._option_string_actions)
    for name, theirs in full._option_string_actions.items():
        ours = light._option_string_actions[name]
        for attribute in ("dest", "default", "nargs", "choices", "const", "metavar"):
            assert getattr(ours, attribute) == getattr(theirs, attribute), (name, attribute)
        assert type(ours) is type(theirs), name
        if "enum_type_handler" not in str(theirs.type):
            assert ours.type is theirs.type, name


def test_both_parsers_read_the_same(parser):
    argv = shlex.split(
        "--num-layers 2 --ext-report out --ext-check bytes,replicas --ext-dump-grads-step 3 --bf16"
    )
    full, light = parser.parse_args(argv), config.preparse(argv)
    assert {name: getattr(full, name) for name in vars(light)} == vars(light)
    assert rules.explicit_flags(argv, parser) == {
        "num_layers",
        "ext_report",
        "ext_check",
        "ext_dump_grads_step",
        "bf16",
    }


def test_stock_has_no_flag_of_ours(parser):
    stock = megatron_parser()
    ours = config.light_parser(features.configs())
    assert not set(ours._option_string_actions) & set(stock._option_string_actions)


def test_unknown_names_get_the_nearest_stock_name(parser):
    for wrong, right in {
        "--tensor-model-paralel-size": "--tensor-model-parallel-size",
        "--tensor_model_parallel_size": "--tensor-model-parallel-size",
        "--ext-reprot": "--ext-report",
        "--num-layer": "--num-layers",
        "--micro-batchsize": "--micro-batch-size",
    }.items():
        text = parse_errors.unknown_flag_error(parser, f"unrecognized arguments: {wrong} 3")
        assert f"did you mean {right}" in text


def test_enum_options(parser):
    mended = copy.copy(parser)
    mended.error = lambda message: pytest.fail(message)
    mended._actions = [copy.copy(action) for action in parser._actions]
    parse_errors.guard_enum_choices(mended)
    backend = next(action for action in mended._actions if action.dest == "attention_backend")
    assert backend.type("unfused").name == "unfused"
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"'flsh' \(choose from flash, fused, unfused, local, auto\)"
    ):
        backend.type("flsh")


def test_config_file_reaches_the_parser(parser, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {num-layers: 4, swiglu: true, norm-epsilon: 1.0e-5, window-size: [], split: '990,8,2'}\n"
        "run: {data-path: [0.3, a, 0.7, b], null-tokenizer-pad-id: -1}\n"
        "load: {use-checkpoint-opt-param-scheduler: true}\n"
        "off: {gradient-accumulation-fusion: false, bf16: false}\n"
    )
    found = configfile.load(str(path), {})
    assert [text.split(": ")[1] for text in found.unknown_left_out(parser._option_string_actions)] == [
        "gradient-accumulation-fusion"
    ]
    del found.entries["--window-size"]
    args = parser.parse_args(configfile.merge(found.argv, ["--num-layers", "6"]))
    assert (args.num_layers, args.swiglu, args.layernorm_epsilon, args.split) == (6, True, 1e-5, "990,8,2")
    assert args.data_path == ["0.3", "a", "0.7", "b"]
    assert (args.use_checkpoint_opt_param_scheduler, args.null_tokenizer_pad_id) == (True, -1)


def test_stock_names_with_underscores_are_known(parser):
    names = {name for name in parser._option_string_actions if "_" in name}
    assert set(configfile.UNDERSCORED.values()) == names


def test_stock_names_can_be_keys(parser):
    for name in parser._option_string_actions:
        assert name == "-h" or configfile._KEY.fullmatch(name), name


# --- rules -------------------------------------------------------------------------------------------------


def test_unit_tests_use_stock_defaults(parser):
    stock = vars(parser.parse_args([]))
    stock["attention_backend"] = stock["attention_backend"].name
    assert {name: stock[name] for name in DEFAULTS} == DEFAULTS


def test_rules_read_every_argument_that_they_name(parser):
    args = parser.parse_args([])
    args.world_size = 1
    assert [text.partition(".")[0] for text in rules.run(args, rules.base_rules())][1:] == [
        "No data is given",
        "--tokenizer-type is not given",
    ]
    assert rules.cpu_problems(args, set()) == []
    assert features.conflicts(args, []) == []


def test_flags_in_messages_exist(parser):
    known = parser._option_string_actions
    for table in (SIZE_FLAGS, FIRST_LAST, ACCOUNT_FOR, VIRTUAL, DATA_OPTIONS, OUTPUT_FOLDERS):
        assert {known[flag].dest: flag for flag in table.values()} == table
    for option in GPU_OPTIONS:
        assert known[option.flag.split()[0]].dest == option.dest


@pytest.fixture
def stock_refuses(parser, monkeypatch):
    """Whether stock refuses sizes: in validate_args, in its configuration, or when it builds layers."""
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.tensor_parallel.utils import divide
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.training import arguments

    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 10)

    def refuses(args):
        args = copy.deepcopy(args)
        try:
            arguments.validate_args(args)
            made = arguments.core_transformer_config_from_args(args)
            batches = ConstantNumMicroBatchesCalculator(
                args.global_batch_size,
                args.micro_batch_size,
                args.data_parallel_size,
                args.decrease_batch_size_if_needed,
                0,
            )
            layers = [
                get_num_layers_to_build(made, chunk, stage)
                for stage in range(made.pipeline_model_parallel_size)
                for chunk in range(made.virtual_pipeline_model_parallel_size or 1)
            ]
            if min(layers) < 0 or sum(layers) != made.num_layers:
                return f"stock builds {layers} layers of {made.num_layers}"
            divide(made.ffn_hidden_size, made.tensor_model_parallel_size)
            divide(made.num_attention_heads, made.num_query_groups)
            if args.sequence_parallel:
                divide(args.seq_length // args.context_parallel_size, args.tensor_model_parallel_size)
            group = made.microbatch_group_size_per_vp_stage
            if made.virtual_pipeline_model_parallel_size and (
                group > batches.get()
                or group < made.pipeline_model_parallel_size
                or 0 < batches.get() % group < made.pipeline_model_parallel_size
            ):
                # The checks of forward_backward_pipelining_with_interleaving, which needs a model.
                return "microbatches"
        except (AssertionError, TypeError, ValueError, ZeroDivisionError) as error:
            return repr(error)
        return None

    return refuses


def small_gpt(parser):
    """A small job on one process that stock accepts, as its parser returns it."""
    given = GPT | {"transformer_impl": "local", "no_persist_layer_norm": True, "rank": 0, "world_size": 1}
    return argparse.Namespace(**(vars(parser.parse_args([])) | given))


# Options that act together, and values for them; None and False leave an option out.
THEMES = {
    "heads": {
        "num_attention_heads": [2, 4, 6, 8, 12],
        "hidden_size": [48, 64, 96, 100],
        "kv_channels": [None, None, 16],
    },
    "groups": {
        "group_query_attention": [True],
        "num_query_groups": [1, 2, 3, 4, 8],
        "num_attention_heads": [4, 6, 12, 24],
        "hidden_size": [96],
    },
    "ffn": {"ffn_hidden_size": [None, 96, 100, 102], "swiglu": [False, True], "hidden_size": [64, 80]},
    "sequence": {
        "sequence_parallel": [True],
        "seq_length": [16, 24, 30, 32, 33, 36],
        "max_position_embeddings": [32, 36],
    },
    "layers": {"num_layers": [1, 2, 4, 6, 7, 8, 12]},
    "interleaved": {
        "num_layers": [4, 6, 8, 12],
        "num_layers_per_virtual_pipeline_stage": [None, 1, 2],
        "num_virtual_stages_per_pipeline_rank": [None, 1, 2, 3],
        "microbatch_group_size_per_vp_stage": [None, None, None, 3, 4],
        "overlap_p2p_comm": [True, True, True, False],
    },
    "uneven": {
        "num_layers": [4, 6, 8],
        "decoder_first_pipeline_num_layers": [None, 0, 1, 2, 3],
        "decoder_last_pipeline_num_layers": [None, None, 1, 2],
        "num_virtual_stages_per_pipeline_rank": [None, None, 1, 2],
    },
    "counted": {
        "num_layers": [4, 6, 7, 8, 10],
        "account_for_embedding_in_pipeline_split": [False, True],
        "account_for_loss_in_pipeline_split": [False, True],
        "decoder_first_pipeline_num_layers": [None, None, None, 2],
    },
    "batch": {
        "global_batch_size": [0, 8, 12, 16, 24, 48],
        "micro_batch_size": [0, 1, 2, 3],
        "decrease_batch_size_if_needed": [False, False, True],
        "eval_global_batch_size": [None, None, 48],
        "eval_micro_batch_size": [None, None, 2],
    },
}
GRID = {
    "tensor_model_parallel_size": [1, 1, 2, 3, 4],
    "pipeline_model_parallel_size": [1, 2, 2, 3, 4],
    "context_parallel_size": [1, 1, 1, 1, 2],
}


def random_sizes(rng):
    """A grid that mostly fits the processes, a batch that mostly fits the grid, and one or two themes."""
    changes = {name: rng.choice(values) for name, values in GRID.items()}
    if rng.random() < 0.02:
        changes[rng.choice(list(GRID))] = 0
    ranks = math.prod(changes.values()) or 1
    changes["world_size"] = ranks * rng.choice([1, 1, 2, 3])
    changes["global_batch_size"] = rng.choice([None, 1, 2, 4, 6, 8])
    if changes["global_batch_size"]:
        changes["global_batch_size"] *= 2 * changes["world_size"] // ranks
    if rng.random() < 0.1:
        changes["world_size"] = rng.choice([1, 2, 4, 6, 8, 12])
    for theme in rng.sample(sorted(THEMES), k=rng.choice([1, 1, 1, 2])):
        changes |= {name: rng.choice(values) for name, values in THEMES[theme].items()}
    return changes


@pytest.mark.parametrize(
    ("seed", "cases"), [(1, 400), pytest.param(2, 3000, marks=pytest.mark.full)], ids=["some", "many"]
)
def test_rules_refuse_exactly_what_stock_refuses(parser, stock_refuses, capsys, seed, cases):
    """Both ways: nothing that works is refused, and no bad size gets past the rules to stock's asserts."""
    checked = (*SIZE_RULES, *PIPELINE_RULES, batch_sizes, evaluation_batch, positions_cover_sequence)
    rng = random.Random(seed)
    base = small_gpt(parser)
    alone, wrong, accepted = set(), [], 0
    for _ in range(cases):
        changes = random_sizes(rng)
        args = argparse.Namespace(**(vars(base) | changes))
        ours, theirs = [rule.__name__ for rule in checked if rule(args)], stock_refuses(args)
        alone |= set(ours) if len(ours) == 1 else set()
        accepted += not ours
        if bool(ours) != bool(theirs):
            wrong.append((changes, ours, theirs))
        capsys.readouterr()
    assert not wrong, "\n".join(map(str, wrong[:5])) + f"\n{len(wrong)} in all"
    assert accepted > cases // 8
    assert alone == {rule.__name__ for rule in checked}, "every rule must be the only one to refuse some case"


def test_virtual_stages_are_counted_as_stock_does(parser, stock_refuses, capsys):
    from megatron.training import arguments

    base = small_gpt(parser)
    base.world_size, base.pipeline_model_parallel_size = 2, 2
    for option, value, chunks in [
        (None, None, 1),
        ("num_layers_per_virtual_pipeline_stage", 1, 4),
        ("num_layers_per_virtual_pipeline_stage", 4, 1),
        ("num_virtual_stages_per_pipeline_rank", 2, 2),
    ]:
        args = copy.copy(base)
        if option:
            setattr(args, option, value)
        assert virtual_stages(args) == chunks
        arguments.validate_args(args)
        assert (args.virtual_pipeline_model_parallel_size or 1) == chunks


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_type": None},
        {"vocab_size": None},
        {"tokenizer_type": "NullMultimodalTokenizer", "vocab_size": None},
        {"tokenizer_type": "SentencePieceTokenizer"},
        {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "/no/such/file"},
        {"tokenizer_type": "TikTokenizer"},
        {"tokenizer_type": "TikTokenizer", "tokenizer_model": "/no/such/file"},
        {"tokenizer_type": "HuggingFaceTokenizer"},
    ],
)
def test_stock_builds_no_tokenizer_that_a_rule_refuses(parser, changes):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = argparse.Namespace(**(vars(small_gpt(parser)) | changes))
    assert tokenizer_given(args)
    with pytest.raises((AssertionError, TypeError, ValueError)):
        build_tokenizer(args)


def test_stock_builds_no_dataset_without_data(parser):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = small_gpt(parser)
    assert data_given(args) is None
    args.mock_data = False
    assert data_given(args)
    dataset = GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    with pytest.raises(Exception, match="GPTDataset failed to build as a mock data generator"):
        BlendedMegatronDatasetBuilder(GPTDataset, [8, 8, 8], lambda: True, dataset).build()


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        (required_options, {"num_layers": None}),
        (required_options, {"seq_length": None}),
        (required_options, {"hidden_size": None}),
        (required_options, {"num_attention_heads": None}),
        (required_options, {"max_position_embeddings": None}),
        (required_options, {"micro_batch_size": None}),
        (save_interval_given, {"save": "ckpt"}),
        (save_interval_given, {"save": "ckpt", "save_interval": 0}),
        (one_training_length, {"train_samples": 100}),
        (batch_sizes, {"step_batch_size_schedule": "0:16"}),
        (learning_rate, {"min_lr": 1.0}),
        (one_data_source, {"mock_data": True, "data_path": ["a"]}),
        (one_data_source, {"mock_data": True, "valid_data_path": ["a"]}),
        (one_data_source, {"mock_data": False, "data_path": ["a"], "test_data_path": ["a"]}),
        (one_data_source, {"mock_data": False, "data_path": ["a"], "data_args_path": "a"}),
        (one_data_source, {"mock_data": False, "test_data_path": ["a"], "per_split_data_args_path": "a"}),
    ],
)
def test_stock_refuses_too(parser, stock_refuses, rule, changes):
    assert stock_refuses(small_gpt(parser)) is None
    args = argparse.Namespace(**(vars(small_gpt(parser)) | changes))
    assert rule(args)
    assert stock_refuses(args)


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": None},
        {"train_iters": None},
        {"lr_warmup_iters": 10},
        {"lr_warmup_iters": 5, "lr_decay_iters": 4},
        {"lr_warmup_fraction": 1.0},
        {"train_iters": None, "train_samples": 100, "lr_warmup_samples": 200},
    ],
)
def test_stock_has_no_schedule_that_a_rule_refuses(parser, monkeypatch, changes):
    from types import SimpleNamespace

    from megatron.training import training

    optimizer = SimpleNamespace(param_groups=[])

    def build(args):
        args.start_weight_decay = args.end_weight_decay = 0.0
        monkeypatch.setattr(training, "get_args", lambda: args)
        training.get_optimizer_param_scheduler(optimizer)

    build(small_gpt(parser))
    args = argparse.Namespace(**(vars(small_gpt(parser)) | changes))
    assert learning_rate(args) or required_options(args)
    # Stock's own refusal is a bare Exception or a TypeError here.
    with pytest.raises((Exception, AssertionError)):
        build(args)


def test_bad_config_file_names_the_file(tmp_path):
    with pytest.raises(UserError, match=r"gone\.yaml: cannot be read"):
        configfile.load(str(tmp_path / "gone.yaml"))


def test_catalogue_holds_every_patch():
    from tests.unit.test_features import TABLE

    stock = features.patch_catalogue(())
    assert {"launcher", "cpu", "groups", "record", "grads"} <= {patch.feature for patch in stock}
    assert [patch.feature for patch in features.patch_catalogue(TABLE)[len(stock) :]] == ["fast", "dense"]
