"""Process groups over the axes of the grid, from Megatron's arguments: pure rank lists."""

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_ext.layout import DEFAULT_ORDER, TP_PP_DP_ORDER, Groups, megatron_grid, within
from megatron_ext.linear3d.grid import AXES, PLANES, Grid3D

if TYPE_CHECKING:
    from megatron_ext.features import Group

GROUPS = (*AXES, *PLANES, "ijl", "i-grads")
"""Axes that a group is over; the last one is a second communicator over axis i."""


def grid_of(args: Namespace) -> Grid3D:
    """The grid that --linear-3d names; "auto" has been resolved."""
    return Grid3D(*(int(size) for size in args.linear_3d), args.linear_3d_order)


def rank_lists(tensor_groups: Groups, grid: Grid3D) -> dict[str, Groups]:
    """Ranks of every group by name, within each tensor-parallel group."""
    return {name: within(tensor_groups, grid.places(name.removesuffix("-grads"))) for name in GROUPS}


def linear3d_groups(args: Namespace) -> "Mapping[str, Group]":
    """All groups, each with a communicator of its own, so that traffic is counted by axis."""
    from megatron_ext.features import Group

    ranks = megatron_grid(
        args.world_size,
        tp=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        pp=args.pipeline_model_parallel_size,
        order=TP_PP_DP_ORDER if args.use_tp_pp_dp_mapping else DEFAULT_ORDER,
    )
    lists = rank_lists(ranks.groups("tp"), grid_of(args))
    return {
        f"linear3d-{name}": Group(ranks, communicator=f"linear3d-{name}") for name, ranks in lists.items()
    }
