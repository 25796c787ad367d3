import pytest

from megatron_ext.compositions import STOCK_OPTIONS, UNTESTED, WORKS
from megatron_ext.rules import cpu_problems
from megatron_ext.rules_cpu import GPU_OPTIONS
from tests.unit.stock_args import gpt

LOCAL = {"transformer_impl": "local", "distributed_backend": "gloo", "attention_backend": "unfused"}


def only(explicit=(), **changes):
    """The one problem of a GPT job under --cpu with these changes."""
    found = cpu_problems(gpt(**(LOCAL | changes)), set(explicit))
    assert len(found) == 1, found
    return found[0]


def test_stock_defaults_are_never_refused():
    assert cpu_problems(gpt(), set()) == []
    assert cpu_problems(gpt(**LOCAL), set(LOCAL)) == []


@pytest.mark.parametrize("value", ["transformer_engine", "inference_optimized"])
def test_transformer_impl(value):
    text = only(["transformer_impl"], transformer_impl=value)
    assert text == (
        f"--transformer-impl {value} needs Transformer Engine, which only works on a GPU, and --cpu is set. "
        "Remove it (--cpu sets --transformer-impl local by itself), or run without --cpu."
    )


@pytest.mark.parametrize("value", ["flash", "fused"])
def test_attention_backend(value):
    text = only(["attention_backend"], attention_backend=value)
    assert f"--attention-backend {value} is a GPU kernel, and --cpu is set. Remove it" in text


def test_attention_backend_as_megatron_parses_it():
    import enum

    backend = enum.Enum("AttnBackend", "flash fused unfused local auto")
    assert "--attention-backend flash" in only(["attention_backend"], attention_backend=backend.flash)
    assert cpu_problems(gpt(attention_backend=backend.auto), {"attention_backend"}) == []


def test_distributed_backend():
    text = only(["distributed_backend"], distributed_backend="nccl")
    assert "--distributed-backend nccl sends between GPUs, and --cpu is set. Remove it" in text


def test_context_parallel():
    text = only(context_parallel_size=2)
    assert text.startswith("--context-parallel-size 2 needs Transformer Engine's attention")
    assert text.endswith("Add --cp-comm-type wallfacer, whose attention runs on CPU, or set it to 1.")
    assert cpu_problems(gpt(context_parallel_size=2, cp_comm_type=["wallfacer"]), set()) == []


def test_weight_shards():
    text = only(tensor_parallel_num_weight_shards=4, tensor_model_parallel_size=2)
    assert text.startswith("--tensor-parallel-num-weight-shards 4 needs Transformer Engine")
    assert "Set it to 2 (--tensor-model-parallel-size)" in text


def test_hybrid_model():
    assert "--hybrid-layer-pattern needs Transformer Engine" in only(hybrid_layer_pattern="M*-")
    assert cpu_problems(gpt(hybrid_layer_pattern="M*-", spec=["mine", "spec"]), set()) == []


def test_torch_fsdp2():
    text = only(use_torch_fsdp2=True)
    assert text.startswith("--use-torch-fsdp2 places parameters on CUDA devices")
    assert "Use --use-megatron-fsdp" in text
    assert cpu_problems(gpt(use_megatron_fsdp=True), set()) == []


ON = {"moe_token_dispatcher_type": "flex", "cuda_graph_impl": "local", "cpu_offloading_num_layers": 2}


@pytest.mark.parametrize("option", GPU_OPTIONS, ids=lambda option: option.dest)
def test_gpu_options(option):
    text = only(**{option.dest: ON.get(option.dest, True)})
    assert text == f"{option.flag} {option.why}, and --cpu is set. {option.instead}."
    for value in option.off:
        assert cpu_problems(gpt(**{option.dest: value}), {option.dest}) == []


def test_gpu_options_are_reported_together():
    text = only(fp8="hybrid", tp_comm_overlap=True)
    assert [line.split()[0] for line in text.splitlines()] == ["--fp8-format", "--tp-comm-overlap"]


# One way to switch each of stock's options on.
SWITCH = {
    "tp": {"tensor_model_parallel_size": 2, "world_size": 2},
    "sp": {"tensor_model_parallel_size": 2, "world_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2, "world_size": 2},
    "interleaved": {
        "pipeline_model_parallel_size": 2,
        "world_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
    },
    "dp": {"world_size": 2},
    "distopt": {"use_distributed_optimizer": True},
    "instances": {"num_distributed_optimizer_instances": 2},
    "overlap": {"overlap_grad_reduce": True},
    "cp": {"context_parallel_size": 2, "world_size": 2},
    "recompute": {"recompute_granularity": "full"},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "fp8": {"fp8": "hybrid"},
    "moe": {"num_experts": 4},
    "mla": {"multi_latent_attention": True},
    "mtp": {"mtp_num_layers": 1},
    "hybrid": {"hybrid_layer_pattern": "M*-"},
    "fsdp": {"use_megatron_fsdp": True},
    "fsdp2": {"use_torch_fsdp2": True},
    "graphs": {"cuda_graph_impl": "local"},
}


@pytest.mark.parametrize("option", STOCK_OPTIONS, ids=lambda option: option.name)
def test_table_and_rules_agree(option):
    assert not option.on(gpt())
    args = gpt(**SWITCH[option.name])
    assert option.on(args)
    refused = bool(cpu_problems(args, set()))
    assert refused == (option.cpu not in (WORKS, UNTESTED))
