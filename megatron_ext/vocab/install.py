"""What the launcher needs from vocabulary parallelism: process groups and patches. Imports nothing heavy."""

import functools
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from megatron_ext.patching import Patch
from megatron_ext.pipeline.install import placement_of, plan_of, settings_of, weights_of
from megatron_ext.pipeline.links import grid_of, link_groups
from megatron_ext.vocab.checkpoint import buffer_patches

if TYPE_CHECKING:
    from megatron_ext.features import Context, Group


def vocab_groups(args: Namespace) -> "dict[str, Group]":
    """Groups over tp x pp ranks; each has a communicator of its own, since all of them overlap with
    others."""
    from megatron_ext.features import Group

    grid = grid_of(args)
    axes = {
        "vocab-pipe": ("pp",),
        "vocab-tensor": ("tp",),
        "vocab-shards": ("tp", "pp"),
    }
    own = {name: Group(grid.groups(*names), communicator=name) for name, names in axes.items()}
    return own | link_groups(args, placement_of(args))


def vocab_patches(context: "Context") -> list[Patch]:
    """The model shares out its vocabulary layers as it is built, and the schedule runs their passes."""
    flags, registry = context.flags, context.groups

    def model(original: Any) -> Any:
        from megatron_ext.vocab.model import after_init

        return after_init(lambda: registry["vocab-pipe"], lambda p: plan_of(flags).place(p), original)

    def schedule(original: Any) -> Any:
        from megatron_ext.pipeline.schedule import choose

        return choose(functools.cache(lambda: _schedule(flags, registry)), original)

    return [
        *buffer_patches("vocab"),
        Patch(
            "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
            model,
            "wrap",
            "share the vocabulary layers out to all pipeline stages",
            "vocab",
            needs=(
                "position_embedding_type",
                "scatter_embedding_sequence_parallel",
                "share_embeddings_and_output_weights",
                "vp_stage",
            ),
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
    stage = registry["vocab-pipe"].rank()
    return make_schedule(registry, plan_of(flags), weights_of(flags), options, **settings_of(flags, stage))
