"""Rules under `--cpu`: what asks for a GPU, or for a package that only works with one.

The launcher sets by itself the stock options that CPU needs (`cpu.py`), so a default is never refused: only
what the user chose. `explicit` is the set of destinations given on the command line.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ext.rules_sizes import is_hybrid, weight_shard_factor

CpuRule = Callable[[Namespace, set[str]], str | None]


@dataclass(frozen=True)
class GpuOption:
    """A stock option that has no meaning without a GPU, whenever its value is not one of `off`."""

    dest: str
    flag: str
    why: str
    instead: str = "Remove it"
    off: tuple[Any, ...] = (None, False)


NEEDS_TE = "needs Transformer Engine, which only works on a GPU"

GPU_OPTIONS = (
    GpuOption("fp8", "--fp8-format", NEEDS_TE, "Use --bf16, or no precision option for fp32"),
    GpuOption("fp4", "--fp4-format", NEEDS_TE, "Use --bf16, or no precision option for fp32"),
    GpuOption("fp8_param_gather", "--fp8-param-gather", NEEDS_TE),
    GpuOption("fp4_param_gather", "--fp4-param-gather", NEEDS_TE),
    GpuOption("te_precision_config_file", "--te-precision-config-file", NEEDS_TE),
    GpuOption("tp_comm_overlap", "--tp-comm-overlap", NEEDS_TE),
    GpuOption("delay_wgrad_compute", "--delay-wgrad-compute", NEEDS_TE),
    GpuOption("fine_grained_activation_offloading", "--fine-grained-activation-offloading", NEEDS_TE),
    GpuOption("cpu_offloading_num_layers", "--cpu-offloading-num-layers", NEEDS_TE, off=(None, 0)),
    GpuOption("use_precision_aware_optimizer", "--use-precision-aware-optimizer", NEEDS_TE),
    GpuOption("moe_permute_fusion", "--moe-permute-fusion", NEEDS_TE),
    GpuOption("layernorm_zero_centered_gamma", "--apply-layernorm-1p", "is not in torch's LayerNorm"),
    GpuOption("moe_grouped_gemm", "--moe-grouped-gemm", "needs a GPU kernel"),
    GpuOption(
        "moe_token_dispatcher_type",
        "--moe-token-dispatcher-type flex",
        "needs DeepEP, a GPU library",
        "Use --moe-token-dispatcher-type alltoall",
        off=(None, "allgather", "alltoall"),
    ),
    GpuOption("cuda_graph_impl", "--cuda-graph-impl", "captures CUDA graphs", off=(None, "none")),
    GpuOption("enable_cuda_graph", "--enable-cuda-graph", "captures CUDA graphs"),
    GpuOption("external_cuda_graph", "--external-cuda-graph", "captures CUDA graphs"),
    GpuOption("optimizer_cuda_graph", "--optimizer-cuda-graph", "captures CUDA graphs"),
    GpuOption("nccl_ub", "--use-nccl-ub", "is a feature of NCCL, and CPU ranks talk through gloo"),
    GpuOption("use_sharp", "--use-sharp", "is a feature of NCCL, and CPU ranks talk through gloo"),
)


def gpu_options(args: Namespace, explicit: set[str]) -> str | None:
    """No option is on that only has a meaning on a GPU."""
    on = [option for option in GPU_OPTIONS if getattr(args, option.dest, option.off[0]) not in option.off]
    return "\n".join(f"{o.flag} {o.why}, and --cpu is set. {o.instead}." for o in on) or None


def transformer_impl(args: Namespace, explicit: set[str]) -> str | None:
    """Layers come from Megatron's local implementation."""
    if "transformer_impl" not in explicit or args.transformer_impl == "local":
        return None
    return (
        f"--transformer-impl {args.transformer_impl} needs Transformer Engine, which only works on a GPU, "
        "and --cpu is set. Remove it (--cpu sets --transformer-impl local by itself), or run without --cpu."
    )


def attention_backend(args: Namespace, explicit: set[str]) -> str | None:
    """Attention is computed by torch operations."""
    name = getattr(args.attention_backend, "name", args.attention_backend)
    if "attention_backend" not in explicit or name not in ("flash", "fused"):
        return None
    return (
        f"--attention-backend {name} is a GPU kernel, and --cpu is set. Remove it (--cpu sets "
        "--attention-backend unfused by itself)."
    )


def distributed_backend(args: Namespace, explicit: set[str]) -> str | None:
    """Ranks talk through gloo."""
    if "distributed_backend" not in explicit or args.distributed_backend == "gloo":
        return None
    return (
        f"--distributed-backend {args.distributed_backend} sends between GPUs, and --cpu is set. Remove it "
        "(--cpu sets --distributed-backend gloo by itself)."
    )


def context_parallel(args: Namespace, explicit: set[str]) -> str | None:
    """Stock attention outside Transformer Engine asserts a context-parallel size of 1."""
    if args.context_parallel_size == 1 and not getattr(args, "hybrid_context_parallel", False):
        return None
    if "wallfacer" in (getattr(args, "cp_comm_type", None) or ()):
        return None
    return (
        f"--context-parallel-size {args.context_parallel_size} needs Transformer Engine's attention "
        "(Megatron's own supports only 1), and --cpu is set. Add --cp-comm-type wallfacer, whose attention "
        "runs on CPU, or set it to 1."
    )


def weight_shards(args: Namespace, explicit: set[str]) -> str | None:
    """Sharding weights beyond tensor parallelism is done by Transformer Engine's layers."""
    if weight_shard_factor(args) == 1:
        return None
    return (
        f"--tensor-parallel-num-weight-shards {args.tensor_parallel_num_weight_shards} {NEEDS_TE}, and --cpu "
        f"is set. Set it to {args.tensor_model_parallel_size} (--tensor-model-parallel-size), or remove it."
    )


def hybrid_model(args: Namespace, explicit: set[str]) -> str | None:
    """The layers of stock's hybrid models are Transformer Engine's."""
    if not is_hybrid(args) or args.spec is not None:
        return None
    return (
        f"--hybrid-layer-pattern {NEEDS_TE} (stock has no other layers for hybrid models), and --cpu is set. "
        "Use a GPT model (--num-layers), or give layers that work on CPU with --spec."
    )


def torch_fsdp2(args: Namespace, explicit: set[str]) -> str | None:
    """Torch's FSDP2 moves parameters to the device type of its mesh, which stock sets to CUDA."""
    if not getattr(args, "use_torch_fsdp2", False):
        return None
    return (
        "--use-torch-fsdp2 places parameters on CUDA devices, and --cpu is set. Use --use-megatron-fsdp, or "
        "--use-distributed-optimizer to shard the optimizer state only."
    )


CPU_RULES: tuple[CpuRule, ...] = (
    gpu_options,
    transformer_impl,
    attention_backend,
    distributed_backend,
    context_parallel,
    weight_shards,
    hybrid_model,
    torch_fsdp2,
)
