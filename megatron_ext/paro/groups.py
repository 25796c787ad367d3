"""Process groups of PaRO from Megatron's arguments: pure rank lists."""

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_ext import layout
from megatron_ext.layout import DEFAULT_ORDER, TP_PP_DP_ORDER, Groups, megatron_grid, members_per_node, within
from megatron_ext.paro.strategy import Level

if TYPE_CHECKING:
    from megatron_ext.features import Group


def data_parallel_groups(args: Namespace) -> Groups:
    """Rank lists of the data-parallel x context-parallel groups, whose order is that of PaRO's ranks."""
    grid = megatron_grid(
        args.world_size,
        tp=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        pp=args.pipeline_model_parallel_size,
        order=TP_PP_DP_ORDER if args.use_tp_pp_dp_mapping else DEFAULT_ORDER,
    )
    return grid.groups("cp", "dp")


def group_size(args: Namespace) -> int:
    """Members per group: what was asked for, else the data-parallel ranks on one node.

    Raises:
        ValueError: nodes have different numbers of them, or nothing says how many ranks a node has.
    """
    if args.paro_group_size is not None:
        return args.paro_group_size
    return members_per_node(data_parallel_groups(args), ranks_per_node(os.environ, args.world_size))


def ranks_per_node(environ: Mapping[str, str], world_size: int) -> int:
    """What torchrun sets. Raises ValueError where something else started the ranks and does not say it."""
    text = environ.get("LOCAL_WORLD_SIZE", "1" if world_size == 1 else "")
    if text.isascii() and text.isdigit():
        return int(text)
    given = f"is {text!r}" if text else "is not set"
    raise ValueError(
        f"LOCAL_WORLD_SIZE {given}, so the number of ranks on a node is not known. Start the ranks with "
        "torchrun, or export it (with srun: LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE)"
    )


def rank_lists(args: Namespace) -> dict[str, Groups]:
    """Members of a group, ranks of one place in all groups, and all data-parallel ranks."""
    everyone = data_parallel_groups(args)
    m = group_size(args)
    places = layout.Grid(member=m, group=len(everyone[0]) // m)
    return {
        "members": within(everyone, places.groups("member")),
        "groups": within(everyone, places.groups("group")),
        "flat": everyone,
    }


def statistics_groups(args: Namespace, level: Level) -> Groups:
    """Ranks that together hold every part of the model's optimizer states exactly once."""
    everyone = data_parallel_groups(args)
    n = len(everyone[0])
    size = {Level.N: 1, Level.I: group_size(args), Level.G: n}[level]
    return [
        tuple(sorted(rank for ranks in everyone for rank in ranks[start : start + size]))
        for start in range(0, n, size)
    ]


def paro_groups(args: Namespace) -> "Mapping[str, Group]":
    """The process groups in use, by name: two communicators of a set, since both directions overlap."""
    from megatron_ext.features import Group
    from megatron_ext.paro.strategy import Strategy

    found = {}
    for name, ranks in rank_lists(args).items():
        if name == "flat" and args.paro_comm != "flat":
            continue  # nothing goes over all ranks at once
        for direction in ("", "-grads"):
            key = f"paro-{name}{direction}"
            found[key] = Group(ranks, communicator=key)
    level = Strategy.parse(args.paro_strategy).optimizer
    found["paro-stats"] = Group(statistics_groups(args, level))
    return found
