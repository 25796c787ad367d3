"""What the launcher needs from WallFacer: process groups and patches. Imports nothing heavy."""

import functools
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from megatron_ext.hooks import bound
from megatron_ext.layout import DEFAULT_ORDER, TP_PP_DP_ORDER, Groups, megatron_grid
from megatron_ext.patching import Patch
from megatron_ext.wallfacer.config import WallfacerConfig
from megatron_ext.wallfacer.geometry import Geometry
from megatron_ext.wallfacer.groups import rank_lists
from megatron_ext.wallfacer.options import Options

if TYPE_CHECKING:
    from megatron_ext.features import Context, Group
    from megatron_ext.wallfacer.attention import Recomputation, Setup

COMM_TYPE = "wallfacer"
"""The value of --cp-comm-type that turns it on."""


def geometry_of(args: Namespace) -> Geometry:
    """Teams and bundles of a run, once the team size is a number."""
    team = int(args.wallfacer_team_size)
    bundle = team if args.wallfacer_kv_bundle is None else args.wallfacer_kv_bundle
    return Geometry(args.context_parallel_size, team, bundle, args.wallfacer_order or "gpa")


def options_of(flags: Namespace) -> Options:
    """The other choices."""
    return Options(
        backward=flags.wallfacer_backward,
        keep=flags.wallfacer_keep,
        movement=flags.wallfacer_movement or "relocate",
        head_chunks=flags.wallfacer_head_chunks,
        sum_type=flags.wallfacer_sum_dtype,
        grad_type=flags.wallfacer_grad_dtype,
        kernel=flags.wallfacer_kernel,
    )


def wallfacer_agreement(args: Namespace) -> dict[str, object]:
    """What ranks must agree on: `auto` reads a file, and what is sent follows from all flags."""
    flags = {field.name: getattr(args, field.name) for field in fields(WallfacerConfig)}
    for name in ("wallfacer_bandwidths", "wallfacer_memory"):
        del flags[name]  # how a choice was found does not matter, if it is the same
    return {f"--{name.replace('_', '-')}": value for name, value in flags.items()}


def context_groups(args: Namespace) -> Groups:
    """Rank lists of Megatron's context-parallel groups."""
    grid = megatron_grid(
        args.world_size,
        tp=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        pp=args.pipeline_model_parallel_size,
        order=TP_PP_DP_ORDER if args.use_tp_pp_dp_mapping else DEFAULT_ORDER,
    )
    return grid.groups("cp")


def wallfacer_groups(args: Namespace) -> "Mapping[str, Group]":
    """Groups of teams, bundles and rings; each has a communicator of its own, since several are in use at
    once."""
    from megatron_ext.features import Group

    contexts = context_groups(args)
    lists = rank_lists(geometry_of(args), contexts)
    found = {name: Group(groups, communicator=name) for name, groups in lists.items()}
    return found | {"wallfacer-context": Group(contexts)}


def wallfacer_adjust(args: Namespace, flags: Namespace) -> None:
    """Let the planner choose what the flags leave to it."""
    if flags.wallfacer_team_size == "auto":
        from megatron_ext.wallfacer.resolve import resolve

        resolve(args, flags)


def wallfacer_describe(args: Namespace, flags: Namespace) -> dict[str, Any]:
    """What the run record says: what was chosen, by whom, and what follows from it."""
    geometry = geometry_of(args)
    return {
        "ranks": geometry.size,
        "team_size": geometry.team_size,
        "kv_bundle": geometry.bundle_size,
        "ring_length": geometry.ring_length,
        "order": geometry.order,
        "backward": flags.wallfacer_backward,
        "movement": options_of(flags).movement if geometry.bundle_size > 1 else None,
        "chosen_by": getattr(flags, "wallfacer_chosen_by", "flags"),
    }


def wallfacer_patches(context: "Context") -> list[Patch]:
    """Core attention of the layers that ask for it, a microbatch's number of tokens, and checks of a step."""
    flags, registry = context.flags, context.groups

    @functools.cache
    def recomputation() -> "Recomputation":
        from megatron_ext.wallfacer.attention import Recomputation

        return Recomputation()

    setup = functools.cache(lambda: make_setup(flags, registry, recomputation()))
    context.step_fields["wallfacer"] = lambda: setup().rings.take_ran()

    def tokens(original: Any) -> Any:
        from megatron_ext.wallfacer.loss import over_all_tokens

        return over_all_tokens(lambda: registry["wallfacer-context"], original)

    def step(original: Any) -> Any:
        from megatron_ext.wallfacer.check import around_step

        return around_step(setup, "bytes" in flags.ext_check, original)

    return [
        Patch(
            "megatron.core.transformer.attention:Attention.__init__",
            functools.partial(_our_core_attention, setup),
            "wrap",
            "layers with --cp-comm-type wallfacer are built with its core attention",
            "wallfacer",
            needs=("submodules", "cp_comm_type"),
        ),
        Patch(
            "megatron.core.tensor_parallel.random:checkpoint",
            functools.partial(_will_be_recomputed, recomputation),
            "wrap",
            "layers keep results only where they are recomputed, which frozen ones are not",
            "wallfacer",
        ),
        Patch(
            "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
            tokens,
            "wrap",
            "a microbatch's loss is divided by its tokens on all context-parallel ranks",
            "wallfacer",
            needs=("loss_func", "config", "collect_non_loss_data"),
        ),
        Patch(
            "megatron.training.training:train_step",
            step,
            "wrap",
            "every kept attention result was used, and bytes are those of the formulas",
            "wallfacer",
            needs=("model", "iteration"),
        ),
    ]


def make_setup(flags: Namespace, registry: Any, recomputation: "Recomputation") -> "Setup":
    """What all layers of this rank share. The process groups must exist."""
    import torch.distributed as dist

    from megatron_ext.wallfacer.attention import Setup
    from megatron_ext.wallfacer.function import Rings
    from megatron_ext.wallfacer.groups import groups_of

    context = registry["wallfacer-context"]
    team = int(flags.wallfacer_team_size)
    geometry = Geometry(
        context.size(), team, flags.wallfacer_kv_bundle or team, flags.wallfacer_order or "gpa"
    )
    groups = groups_of(registry.__getitem__, geometry)
    rings = Rings(geometry, groups, options_of(flags), context.rank())
    ranks = tuple(dist.get_process_group_ranks(context))
    calls = [] if "bytes" in flags.ext_check else None
    return Setup(rings, ranks, calls=calls, recomputation=recomputation)


def _will_be_recomputed(recomputation: Callable[[], "Recomputation"], original: Callable) -> Callable:
    """Wrap of `checkpoint`: whether its function will run again, which autograd decides by its inputs."""

    @functools.wraps(original)
    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        import torch

        wanted = any(isinstance(x, torch.Tensor) and x.requires_grad for x in (*args, *kwargs.values()))
        state = recomputation()
        before, state.comes = state.comes, wanted and torch.is_grad_enabled()
        try:
            return original(*args, **kwargs)
        finally:
            state.comes = before

    return checkpoint


def _our_core_attention(setup: Callable[[], "Setup"], original: Callable) -> Callable:
    """Layers are made from submodules of a spec: replace one of them, whichever spec it is."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        call = bound(original, (self, *args), kwargs)
        if call["cp_comm_type"] == COMM_TYPE:
            from megatron_ext.wallfacer.attention import WallFacerAttention

            ours = functools.partial(WallFacerAttention, setup=setup())
            call["submodules"] = replace(call["submodules"], core_attention=ours)
        original(**call)

    return __init__
