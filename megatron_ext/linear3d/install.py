"""What the launcher needs from 3-D linear layers: patches. Imports nothing heavy."""

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_ext.hooks import bound
from megatron_ext.linear3d.check import bytes_patch
from megatron_ext.linear3d.checkpoint import grid_name, name_buffers_apart, refuse_foreign_buffers
from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.groups import GROUPS, grid_of
from megatron_ext.linear3d.layouts import RESIDUAL
from megatron_ext.linear3d.rules import is_auto, vocab_mode
from megatron_ext.patching import Patch

if TYPE_CHECKING:
    from megatron_ext.features import Context

NAME = "linear3d"


def linear3d_adjust(args: Namespace, flags: Namespace) -> None:
    """Megatron's sequence parallelism means "activations differ on tensor-parallel ranks": dropout needs
    it."""
    if is_auto(args):
        from megatron_ext.linear3d.auto import choose

        args.linear_3d = flags.linear_3d = choose(args)
        flags.linear_3d_chosen_by = "planner"
    args.sequence_parallel = args.tensor_model_parallel_size > 1
    args.gradient_accumulation_fusion = False  # ours are no linears of stock's


def linear3d_describe(args: Namespace, flags: Namespace) -> dict[str, Any]:
    """What the run record says: the grid, by whom it was chosen, and how layers work on it."""
    grid = grid_of(flags)
    return {
        "grid": list(grid.sizes),
        "order": grid.order,
        "save": flags.linear_3d_save,
        "vocab": vocab_mode(flags),
        "overlap": flags.linear_3d_overlap,
        "sum": sum_of(flags, args),
        "chosen_by": getattr(flags, "linear_3d_chosen_by", "flags"),
    }


def linear3d_patches(context: "Context") -> list[Patch]:
    """The model, the shape between stages, gradients of vectors, and checkpoints."""
    flags = context.flags
    setup = functools.cache(lambda: make_setup(flags, context.groups))
    grid = functools.cache(lambda: grid_of(flags))

    def model(original: Any) -> Any:
        from megatron_ext.linear3d.model import after_init

        return after_init(setup, original)

    schedules = "megatron.core.pipeline_parallel.schedules"
    return [
        *([bytes_patch()] if "bytes" in flags.ext_check else []),
        Patch(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            functools.partial(_heads_on_a_plane, grid),
            "wrap",
            "attention heads are split over the axes j and l, not over all tensor-parallel ranks",
            NAME,
        ),
        Patch(
            "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
            model,
            "wrap",
            "a model on the grid",
            NAME,
            needs=(
                *("config", "transformer_layer_spec", "max_sequence_length", "position_embedding_type"),
                *("pg_collection", "vp_stage"),
            ),
        ),
        Patch(
            f"{schedules}:get_tensor_shapes",
            functools.partial(_residual_shape, grid),
            "wrap",
            "shape of activations between pipeline stages",
            NAME,
            needs=("config", "tp_group"),
        ),
        Patch(
            "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
            _sum_vectors,
            "wrap",
            "sum gradients of norms and biases over the axes along which they are equal",
            NAME,
            needs=("model",),
        ),
        Patch(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
            functools.partial(name_buffers_apart, lambda: grid_name(flags)),
            "wrap",
            "names of its own for flat optimizer buffers in checkpoints",
            NAME,
        ),
        Patch(
            "megatron.training.checkpointing:_load_base_checkpoint",
            refuse_foreign_buffers,
            "wrap",
            "flat buffers of another layout are refused",
            NAME,
            needs=("load_dir", "args"),
        ),
    ]


def make_setup(flags: Namespace, registry: Any) -> Any:
    """What all model chunks of this rank share."""
    from megatron.core import parallel_state
    from megatron.training import get_args

    from megatron_ext.linear3d.chain import Overlap
    from megatron_ext.linear3d.comm import GridComm
    from megatron_ext.linear3d.model import Setup
    from megatron_ext.record import on_gpu

    args = get_args()
    groups = {name: registry[f"{NAME}-{name}"] for name in GROUPS}
    rank = parallel_state.get_tensor_model_parallel_rank()
    on = flags.linear_3d_overlap
    overlap = Overlap(
        **{name: on in (name, "all") for name in ("grads", "prefetch", "defer")},
        after_hooks=bool(args.overlap_param_gather),
    )
    comm = GridComm(grid_of(flags), groups, rank, sum_of(flags, args))
    if "layouts" in flags.ext_check:
        from megatron_ext.linear3d.tags import Tags

        comm.tags = Tags(comm.grid)
    return Setup(
        comm=comm,
        save=flags.linear_3d_save,
        vocab=vocab_mode(flags),
        overlap=overlap,
        keep_layers=flags.linear_3d_keep_layers,
        fused_attention=on_gpu() and args.attention_backend.name != "unfused",
    )


def sum_of(flags: Namespace, args: Namespace) -> str:
    """ "ordered" or "native": what --linear-3d-sum means for this job."""
    if flags.linear_3d_sum != "auto":
        return flags.linear_3d_sum
    wide = not (args.bf16 or args.fp16)
    return "native" if wide and args.distributed_backend == "nccl" else "ordered"


def _heads_on_a_plane(grid: Callable[[], Grid3D], original: Callable) -> Callable:
    """Stock's validation of a config divides heads by the tensor-parallel size; the grid divides them
    less."""

    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        tp = self.tensor_model_parallel_size
        if tp != grid().ranks or not self.num_attention_heads % tp:
            return original(self, *args, **kwargs)
        kept = {
            name: getattr(self, name)
            for name in (
                "tensor_model_parallel_size",
                "sequence_parallel",
                "tensor_parallel_num_weight_shards",
            )
        }
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = tp
        self.tensor_model_parallel_size = grid().size("jl")
        self.sequence_parallel = kept["sequence_parallel"] and grid().size("jl") > 1
        self.tensor_parallel_num_weight_shards = None
        try:
            return original(self, *args, **kwargs)
        finally:
            for name, value in kept.items():
                setattr(self, name, value)

    return __post_init__


def _residual_shape(grid: Callable[[], Grid3D], original: Callable) -> Callable:
    @functools.wraps(original)
    def get_tensor_shapes(*args: Any, **kwargs: Any) -> list[tuple[int, ...]]:
        call = bound(original, args, kwargs)
        parts = call["tp_group"].size() if call["config"].sequence_parallel else 1
        shapes = original(*args, **kwargs)
        whole = ((shape[0] * parts, *shape[1:]) for shape in shapes)
        return [RESIDUAL.local_shape(grid(), shape) for shape in whole]

    return get_tensor_shapes


def _sum_vectors(original: Callable) -> Callable:
    @functools.wraps(original)
    def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.utils import unwrap_model

        from megatron_ext.linear3d.model import sum_vectors

        chunks = bound(original, args, kwargs)["model"]
        result = original(*args, **kwargs)
        for chunk in chunks:
            model = unwrap_model(chunk)
            sum_vectors(model)
            model.grid_chain.step_ends()
        return result

    return finalize_model_grads
