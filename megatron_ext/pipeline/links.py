"""Process groups for transfers between stages: one for every direction and way, see schedules/links.py."""

from argparse import Namespace
from typing import TYPE_CHECKING

from megatron_ext.layout import DEFAULT_ORDER, TP_PP_DP_ORDER, megatron_grid
from megatron_ext.schedules.placement import Placement

if TYPE_CHECKING:
    from megatron_ext.features import Group

USUAL = {"F": "next", "B": "previous"}
NAMES = {"F": "pipeline-forward", "B": "pipeline-backward"}


def link_name(direction: str, way: str) -> str:
    """Name of the group for activations ("F") or gradients ("B") that go this way."""
    return NAMES[direction] if way == USUAL[direction] else f"{NAMES[direction]}-{way}"


def link_names(place: Placement) -> dict[tuple[str, str], str]:
    """(direction, way) -> name of the group, for what a placement needs, and 1F1B's two for every one."""
    found = {(direction, way): link_name(direction, way) for direction, way in USUAL.items()}
    for direction in "FB":
        found |= {(direction, way): link_name(direction, way) for way in place.ways(direction)}
    return found


def link_groups(args: Namespace, place: Placement) -> "dict[str, Group]":
    """The groups by name: of the pipeline's ranks, each with a communicator of its own."""
    from megatron_ext.features import Group

    lists = grid_of(args).groups("pp")
    return {name: Group(lists, communicator=name) for name in link_names(place).values()}


def grid_of(args: Namespace):
    """Megatron's rank grid."""
    return megatron_grid(
        args.world_size,
        tp=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        pp=args.pipeline_model_parallel_size,
        order=TP_PP_DP_ORDER if args.use_tp_pp_dp_mapping else DEFAULT_ORDER,
    )
