"""Rank layouts: partition, coordinates, agreement with Megatron, and every message."""

import re
from itertools import chain, combinations

import pytest

from megatron_ext.layout import (
    DEFAULT_ORDER,
    TP_PP_DP_ORDER,
    Grid,
    megatron_expert_grid,
    megatron_grid,
    members_per_node,
    split_by_node,
    within,
)

LAYOUTS = [
    (8, {"tp": 2, "cp": 2, "pp": 2}),
    (12, {"tp": 3, "pp": 2}),
    (16, {"tp": 2, "pp": 4}),
    (24, {"tp": 2, "cp": 3, "gtp_remat": 2}),
    (64, {"tp": 8, "cp": 2, "pp": 2}),
    (512, {"tp": 8, "cp": 4, "pp": 4}),
    (4096, {"tp": 8, "cp": 4, "pp": 16}),
]
ORDERS = [DEFAULT_ORDER, TP_PP_DP_ORDER]


def subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return list(chain.from_iterable(combinations(names, n) for n in range(len(names) + 1)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("world", "sizes"), LAYOUTS)
def test_groups_partition_the_world_and_agree_with_coordinates(world, sizes, order):
    grid = megatron_grid(world, **sizes, order=order)
    assert grid.size == world
    coords = [grid.coords(rank) for rank in range(world)]
    assert [grid.rank(**at) for at in coords] == list(range(world))
    for axes in subsets(grid.names):
        groups = grid.groups(*axes)
        assert sorted(chain.from_iterable(groups)) == list(range(world))
        fixed = [name for name in grid.names if name not in axes]
        for group in groups:
            assert list(group) == sorted(group)
            assert len({tuple(coords[rank][name] for name in fixed) for rank in group}) == 1
        for rank in (0, 1, world // 2 + 1, world - 1):
            assert [grid.group_of(rank, *axes)] == [group for group in groups if rank in group]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("world", "sizes"), LAYOUTS)
def test_dense_groups_are_those_of_megatron(world, sizes, order):
    from megatron.core import parallel_state  # seconds to import, so only here

    grid = megatron_grid(world, **sizes, order=order)
    theirs = parallel_state.RankGenerator(
        **{"tp": 1, "cp": 1, "pp": 1, "gtp_remat": 1, **sizes},
        ep=1,
        dp=grid["dp"],
        order=parallel_state._inject_gtp_remat_axis(order, after="tp"),
    )
    for axes in subsets(grid.names)[1:]:
        assert [list(group) for group in grid.groups(*axes)] == theirs.get_ranks("-".join(axes))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("world", "sizes"),
    [(8, {"ep": 4}), (16, {"tp": 2, "ep": 2, "pp": 2}), (256, {"ep": 8, "pp": 4, "gtp_remat": 2})],
)
def test_expert_groups_are_those_of_megatron(world, sizes, order):
    from megatron.core import parallel_state  # seconds to import, so only here

    grid = megatron_expert_grid(world, **sizes, order=order)
    theirs = parallel_state.RankGenerator(
        **{"tp": 1, "ep": 1, "pp": 1, "gtp_remat": 1, **sizes},
        cp=1,
        dp=grid["dp"],
        order=parallel_state._inject_gtp_remat_axis(order, after="ep"),
    )
    for axes in subsets(grid.names)[1:]:
        assert [list(group) for group in grid.groups(*axes)] == theirs.get_ranks("-".join(axes))


def test_the_axis_varies_fastest_first():
    grid = megatron_grid(16, tp=2, pp=2)
    assert grid.axes == (("tp", 2), ("cp", 1), ("dp", 4), ("pp", 2))
    assert grid.coords(11) == {"tp": 1, "cp": 0, "dp": 1, "pp": 1}
    assert grid.groups("tp")[:2] == [(0, 1), (2, 3)]
    assert grid.groups("pp")[:2] == [(0, 8), (1, 9)]
    assert grid.groups("pp", "tp")[1] == (2, 3, 10, 11)
    assert grid.groups() == [(rank,) for rank in range(16)]
    assert megatron_grid(16, tp=2, pp=2, order=TP_PP_DP_ORDER).groups("dp")[1] == (1, 5, 9, 13)


def test_grid_is_a_value():
    assert Grid(tp=2, dp=4) == Grid({"tp": 2, "dp": 4}) == Grid([("tp", 2), ("dp", 4)])
    assert len({Grid(tp=2, dp=4), Grid(tp=2, dp=4), Grid(dp=4, tp=2)}) == 2
    with pytest.raises(AttributeError):
        Grid(tp=2).axes = ()


def test_split_gives_the_axes_of_a_cube_of_8():
    grid = megatron_grid(16, tp=8).split("tp", l=2, j=2, i=2)
    assert grid.names == ("l", "j", "i", "cp", "dp", "pp")
    assert grid.coords(13) == {"l": 1, "j": 0, "i": 1, "cp": 0, "dp": 1, "pp": 0}
    assert grid.groups("l")[4:6] == [(8, 9), (10, 11)]
    assert grid.groups("j")[:2] == [(0, 2), (1, 3)]
    assert grid.groups("i")[:2] == [(0, 4), (1, 5)]
    assert grid.groups("i", "l")[0] == (0, 1, 4, 5)
    assert grid.groups("l", "j", "i") == megatron_grid(16, tp=8).groups("tp")
    assert grid.groups("dp") == megatron_grid(16, tp=8).groups("dp")


def test_split_keeps_ranks_at_4096():
    whole = megatron_grid(4096, tp=64, pp=8)
    parts = whole.split("tp", x=4, y=4, z=4)
    assert parts.groups("x", "y", "z", "cp") == whole.groups("tp", "cp")
    for rank in range(0, 4096, 97):
        at = parts.coords(rank)
        assert at["x"] + 4 * at["y"] + 16 * at["z"] == whole.coords(rank)["tp"]


def test_teams_and_rings_of_context_parallelism():
    """Teams of 2 inside rings of 2 on 8 context-parallel ranks, for each tensor-parallel coordinate."""
    rings = Grid(a=2, i=2, g=2)
    groups = megatron_grid(16, tp=2, cp=8).groups("cp")
    assert within(groups[:1], rings.groups("a")) == [(0, 2), (4, 6), (8, 10), (12, 14)]
    assert within(groups[:1], rings.groups("i")) == [(0, 4), (2, 6), (8, 12), (10, 14)]
    assert within(groups, rings.groups("a", "i", "g")) == groups


@pytest.mark.parametrize("order", ORDERS)
def test_within_splits_combined_axes_that_are_not_neighbours(order):
    groups = megatron_grid(32, tp=2, cp=2, pp=2, order=order).groups("cp", "dp")
    members = within(groups, Grid(member=4, group=2).groups("member"))
    across = within(groups, Grid(member=4, group=2).groups("group"))
    assert sorted(chain.from_iterable(members)) == sorted(chain.from_iterable(across)) == list(range(32))
    for group in groups:
        assert group[:4] in members
        assert (group[1], group[5]) in across


def test_split_by_node():
    groups = megatron_grid(4096, tp=2, cp=2, pp=8).groups("cp", "dp")
    inside, across = split_by_node(groups, 8)
    assert {len(group) for group in inside} == {4}
    assert {len({rank // 8 for rank in group}) for group in inside} == {1}
    assert {len(group) for group in across} == {len(groups[0]) // 4}
    assert {len({rank // 8 for rank in group}) for group in across} == {len(groups[0]) // 4}
    assert sorted(chain.from_iterable(inside)) == sorted(chain.from_iterable(across)) == list(range(4096))
    assert members_per_node(groups, 4096) == len(groups[0])
    assert members_per_node(groups, 1) == 1


BAD = {
    "world not divisible": (
        lambda: megatron_grid(6, tp=2, pp=2),
        "6 ranks cannot hold a whole number of model copies of tp 2 x pp 2 = 4 ranks: start a multiple of 4 "
        "ranks (for example 8), or change --tensor-model-parallel-size, --pipeline-model-parallel-size",
    ),
    "expert world": (
        lambda: megatron_expert_grid(2, ep=4),
        "start a multiple of 4 ranks (for example 4), or change --expert-model-parallel-size",
    ),
    "no world": (
        lambda: megatron_grid(0),
        "0 ranks cannot hold a whole number of model copies of one rank = 1 ranks",
    ),
    "size 0": (lambda: megatron_grid(8, cp=0), "--context-parallel-size is 0: use a whole number of ranks"),
    "order": (
        lambda: megatron_grid(8, order="tp-dp"),
        "axis order 'tp-dp' must name tp, cp, ep, dp and pp once",
    ),
    "axis size": (lambda: Grid(tp=0), "axis 'tp' has size 0: use a whole number of ranks, at least 1"),
    "axis type": (lambda: Grid(tp=2.0), "axis 'tp' has size 2.0: use a whole number"),
    "axis twice": (
        lambda: Grid([("tp", 2), ("tp", 2)]),
        "axis 'tp' is named 2 times in tp, tp: give each axis a name of its own",
    ),
    "split into a name in use": (lambda: Grid(tp=4, x=2).split("tp", x=2, y=2), "axis 'x' is named 2 times"),
    "unknown axis": (lambda: Grid(tp=2).groups("dp"), "no axis 'dp' on this grid: its axes are tp"),
    "unknown axis size": (lambda: Grid(tp=2)["dp"], "no axis 'dp' on this grid: its axes are tp"),
    "unknown coordinate": (lambda: Grid(tp=2).rank(dp=0), "no axis 'dp' on this grid: its axes are tp"),
    "coordinate": (lambda: Grid(tp=2).rank(tp=2), "coordinate tp=2 is not on the axis: use 0 to 1"),
    "rank": (lambda: Grid(tp=2).coords(2), "rank 2 is not on a grid of 2 ranks: use 0 to 1"),
    "split": (
        lambda: Grid(tp=8).split("tp", x=2, y=2),
        "axis 'tp' has 8 ranks, but x 2 x y 2 = 4: choose sizes whose product is 8, or make the axis 4 ranks",
    ),
    "within, group too long": (
        lambda: within([(0, 1, 2, 3, 4)], Grid(a=2, b=2).groups("a")),
        "the group [0, 1, 2, 3, 4] has 5 ranks, but the split is one of 4 places: choose sub-group sizes "
        "whose product is 5",
    ),
    "a long group is cut short": (
        lambda: within([range(100)], Grid(a=2).groups("a")),
        "the group [0, 1, 2, 3, 4, 5, 6, 7, ... 99] has 100 ranks",
    ),
    "within, group too short": (
        lambda: within([(0, 1)], Grid(a=4).groups("a")),
        "has 2 ranks, but the split",
    ),
    "within, unsorted": (
        lambda: within([(1, 0)], Grid(a=2).groups("a")),
        "the group [1, 0] is not sorted",
    ),
    "node size": (lambda: members_per_node([(0, 1)], 0), "0 ranks per node: use a whole number of ranks"),
    "uneven nodes": (
        lambda: members_per_node([(0, 1, 2, 3, 4, 5)], 4),
        "with 4 ranks per node the groups do not have the same number of ranks on each node "
        "(2 on node 1 of the group [0, 1, 2, 3, 4, 5]; 4 on node 0 of the group [0, 1, 2, 3, 4, 5]): choose "
        "parallel sizes that divide 4, or start the same number of ranks on every node",
    ),
    "no group": (lambda: members_per_node([], 4), "on each node (no group): choose"),
    "uneven groups": (
        lambda: split_by_node([(0, 1), (2, 3, 4, 5)], 2),
        "groups of [2, 4] ranks cannot be split alike: pass groups of one length",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_every_message(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
