"""What features can be combined with: stock's options as data, and which of them run on CPU."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.rules_sizes import data_parallel

WORKS = "works"
UNTESTED = "untested"


@dataclass(frozen=True)
class StockOption:
    """Something of stock Megatron that a feature works with or not."""

    name: str
    title: str
    on: Callable[[Namespace], bool]
    """Whether freshly parsed arguments (with `world_size`) use it."""
    cpu: str
    """WORKS or UNTESTED under --cpu, or why it needs a GPU."""


def _is_set(*names: str) -> Callable[[Namespace], bool]:
    return lambda args: any(getattr(args, name, None) for name in names)


def _above_one(name: str) -> Callable[[Namespace], bool]:
    return lambda args: getattr(args, name) > 1


def _sequence_parallel(args: Namespace) -> bool:
    return args.sequence_parallel and args.tensor_model_parallel_size > 1


def _cuda_graphs(args: Namespace) -> bool:
    return args.cuda_graph_impl != "none" or args.enable_cuda_graph or args.external_cuda_graph


_TE = "needs Transformer Engine"

STOCK_OPTIONS: tuple[StockOption, ...] = (
    StockOption("tp", "tensor parallelism", _above_one("tensor_model_parallel_size"), WORKS),
    StockOption("sp", "sequence parallelism", _sequence_parallel, WORKS),
    StockOption("pp", "pipeline parallelism", _above_one("pipeline_model_parallel_size"), WORKS),
    StockOption(
        "interleaved",
        "interleaved pipeline",
        _is_set("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
        WORKS,
    ),
    StockOption("dp", "data parallelism", lambda args: data_parallel(args) > 1, WORKS),
    StockOption("distopt", "distributed optimizer", _is_set("use_distributed_optimizer"), WORKS),
    StockOption(
        "instances",
        "several optimizer instances",
        _above_one("num_distributed_optimizer_instances"),
        WORKS,
    ),
    StockOption("overlap", "overlapped gradients and parameters", _is_set("overlap_grad_reduce"), WORKS),
    StockOption("cp", "context parallelism", _above_one("context_parallel_size"), _TE),
    StockOption(
        "recompute", "recomputation", _is_set("recompute_granularity", "recompute_activations"), WORKS
    ),
    StockOption("bf16", "bf16", _is_set("bf16"), WORKS),
    StockOption("fp16", "fp16 with loss scaling", _is_set("fp16"), WORKS),
    StockOption("fp8", "fp8 and fp4", _is_set("fp8", "fp4"), _TE),
    StockOption("moe", "mixture of experts", _is_set("num_experts"), UNTESTED),
    StockOption("mla", "multi-latent attention", _is_set("multi_latent_attention"), UNTESTED),
    StockOption("mtp", "multi-token prediction", _is_set("mtp_num_layers"), UNTESTED),
    StockOption("hybrid", "hybrid models", _is_set("hybrid_layer_pattern", "hybrid_override_pattern"), _TE),
    StockOption("fsdp", "Megatron-FSDP", _is_set("use_megatron_fsdp"), WORKS),
    StockOption("fsdp2", "torch FSDP2", _is_set("use_torch_fsdp2"), "needs CUDA"),
    StockOption("graphs", "CUDA graphs", _cuda_graphs, "needs CUDA"),
)
