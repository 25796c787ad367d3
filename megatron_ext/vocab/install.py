"""What the launcher needs from vocabulary parallelism: process groups and patches. Imports nothing heavy."""

import functools
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from megatron_ext.layout import DEFAULT_ORDER, TP_PP_DP_ORDER, megatron_grid
from megatron_ext.patching import Patch
from megatron_ext.vocab.checkpoint import name_buffers_apart, refuse_foreign_buffers

if TYPE_CHECKING:
    from megatron_ext.features import Context, Group


def vocab_groups(args: Namespace) -> "dict[str, Group]":
    """Groups over tp x pp ranks; each has a communicator of its own, since all of them overlap with
    others."""
    from megatron_ext.features import Group

    grid = megatron_grid(
        args.world_size,
        tp=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        pp=args.pipeline_model_parallel_size,
        order=TP_PP_DP_ORDER if args.use_tp_pp_dp_mapping else DEFAULT_ORDER,
    )
    axes = {
        "vocab-pipe": ("pp",),
        "vocab-tensor": ("tp",),
        "vocab-shards": ("tp", "pp"),
        "pipeline-forward": ("pp",),
        "pipeline-backward": ("pp",),
    }
    return {name: Group(grid.groups(*names), communicator=name) for name, names in axes.items()}


def vocab_patches(context: "Context") -> list[Patch]:
    """The model shares out its vocabulary layers as it is built, and the schedule runs their passes."""
    flags, registry = context.flags, context.groups

    def model(original: Any) -> Any:
        from megatron_ext.vocab.model import after_init

        return after_init(lambda: registry["vocab-pipe"], original)

    def schedule(original: Any) -> Any:
        from megatron_ext.vocab.schedule import choose

        return choose(functools.cache(lambda: _schedule(flags, registry)), original)

    optimizer = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.__init__"
    return [
        Patch(
            optimizer,
            name_buffers_apart,
            "wrap",
            "names of its own for flat optimizer buffers in checkpoints",
            "vocab",
        ),
        Patch(
            "megatron.training.checkpointing:_load_base_checkpoint",
            refuse_foreign_buffers,
            "wrap",
            "flat buffers of a run without the feature are refused",
            "vocab",
            needs=("load_dir", "args"),
        ),
        Patch(
            "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
            model,
            "wrap",
            "share the vocabulary layers out to all pipeline stages",
            "vocab",
            needs=("position_embedding_type", "scatter_embedding_sequence_parallel"),
        ),
        Patch(
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            schedule,
            "wrap",
            "pipeline schedule with vocabulary passes",
            "vocab",
        ),
    ]


def _schedule(flags: Namespace, registry: Any) -> Any:
    import torch
    from megatron.training import get_args

    from megatron_ext.record import on_gpu
    from megatron_ext.schedules.costs import Costs
    from megatron_ext.schedules.trace import StepTrace
    from megatron_ext.vocab.functional import LossTerms, Saving
    from megatron_ext.vocab.output import OutputOptions
    from megatron_ext.vocab.schedule import make_schedule

    options = OutputOptions(
        mode=flags.vocab_parallel,
        saving=Saving(flags.vocab_save, flags.vocab_chunk_size),
        terms=LossTerms(flags.vocab_label_smoothing, flags.vocab_z_loss),
        sum_dtype=torch.float32 if flags.vocab_sum_dtype == "fp32" else None,
        fused=get_args().gradient_accumulation_fusion,
    )
    trace = None
    if flags.ext_trace:
        rank = torch.distributed.get_rank()
        trace = StepTrace(
            flags.ext_trace, rank, registry["vocab-pipe"].rank(), flags.ext_trace_step, on_gpu()
        )
    costs = Costs.read(flags.vocab_costs) if flags.vocab_costs else None
    overlap = flags.vocab_overlap == "on"
    return make_schedule(
        registry,
        options,
        overlap=overlap,
        costs=costs,
        trace=trace,
        check_bytes="bytes" in flags.ext_check,
    )
