"""Grids, layouts and plans of 3-D linear layers: pure data."""

from itertools import pairwise, product
from math import prod

import pytest

from megatron_ext.linear3d.grid import AXES, ORDERS, PLANES, Grid3D, factorizations
from megatron_ext.linear3d.layouts import (
    COLUMN,
    EMBEDDING_SITES,
    HEAD_SITES,
    HEADS,
    INNER,
    LAYER_SITES,
    PLANE,
    POSITIONS,
    RESIDUAL,
    ROW,
    VECTOR,
    Move,
    glu_rows,
    plan_linear,
)

CUBE = Grid3D(2, 2, 2)
GRIDS = [
    CUBE,
    Grid3D(1, 8, 1),
    Grid3D(8, 1, 1),
    Grid3D(1, 1, 8),
    Grid3D(4, 2, 1),
    Grid3D(1, 4, 2),
    Grid3D(3, 3, 3),
]
SITES = [*LAYER_SITES.values(), *HEAD_SITES.values()]


def test_groups_of_the_cube():
    """The six families of section 1.1 of the specification, in the order of ranks."""
    assert CUBE.places("i") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert CUBE.places("j") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert CUBE.places("l") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert CUBE.places("ij") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert CUBE.places("il") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert CUBE.places("jl") == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_and_coordinates(order):
    grid = Grid3D(2, 3, 4, order)
    assert [grid.rank_of(grid.coords(rank)) for rank in range(24)] == list(range(24))
    for axes in (*AXES, *PLANES):
        for place in grid.places(axes):
            fixed = [{a: grid.coords(rank)[a] for a in AXES if a not in axes} for rank in place]
            assert all(one == fixed[0] for one in fixed)
            assert len(place) == grid.size(axes)


def test_bad_grids():
    with pytest.raises(ValueError, match="at least 1"):
        Grid3D(2, 0, 2)
    with pytest.raises(ValueError, match="axis order"):
        Grid3D(2, 2, 2, "ijj")
    with pytest.raises(ValueError, match="not on a grid"):
        CUBE.coords(8)


def test_factorizations():
    found = {grid.sizes for grid in factorizations(8)}
    assert len(found) == 10
    assert all(prod(sizes) == 8 for sizes in found)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("layout", [RESIDUAL, INNER, HEADS, COLUMN, ROW, PLANE, VECTOR, POSITIONS])
def test_every_element_is_held_once_per_copy(grid, layout):
    shape = (8 * 27,) * len(layout.cuts)
    copies = {}
    for rank in range(grid.ranks):
        place = tuple((s.start, s.stop) for s in layout.slices(grid, grid.coords(rank), shape))
        copies[place] = copies.get(place, 0) + 1
    assert set(copies.values()) == {grid.size(layout.replicated)}
    assert sum(prod(stop - start for start, stop in place) for place in copies) == prod(shape)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_weights_are_spread_evenly(grid):
    for site in SITES:
        local = site.weight.local_shape(grid, (432, 432))
        assert prod(local) * grid.ranks == 432 * 432


def test_local_shapes_on_the_cube():
    """Acceptance check 4: h 256, f 1024, V 1024."""
    whole = {"qkv": (768, 256), "proj": (256, 256), "fc1": (1024, 256), "fc2": (256, 1024)}
    local = {name: LAYER_SITES[name].weight.local_shape(CUBE, shape) for name, shape in whole.items()}
    assert local == {"qkv": (192, 128), "proj": (64, 128), "fc1": (256, 128), "fc2": (64, 512)}
    assert EMBEDDING_SITES["grid"].weight.local_shape(CUBE, (1024, 256)) == (256, 128)


def test_plans():
    """Which collectives each linear runs: the table of section 1.6."""
    plans = {name: (site.plan.gathers, site.plan.reduces) for name, site in LAYER_SITES.items()}
    assert plans == {
        "qkv": ((Move("j", 0),), (Move("l", 2),)),
        "proj": ((Move("l", 2),), (Move("j", 0),)),
        "fc1": ((Move("j", 0),), (Move("l", 0),)),
        "fc2": ((Move("l", 0),), (Move("j", 0),)),
    }
    head = HEAD_SITES["plane"].plan
    assert (head.gathers, head.reduces) == ((Move("j", 0), Move("l", 2)), ())
    assert EMBEDDING_SITES["plane"].plan.reduces == (Move("j", 0), Move("l", 2))
    assert EMBEDDING_SITES["grid"].plan.reduces == (Move("j", 0),)


def test_layouts_that_do_not_fit():
    with pytest.raises(ValueError, match="features of inner"):
        plan_linear(INNER, COLUMN, RESIDUAL)
    with pytest.raises(ValueError, match="features cut"):
        plan_linear(RESIDUAL, COLUMN, RESIDUAL)
    with pytest.raises(ValueError, match="not a multiple of 4"):
        HEADS.local_shape(CUBE, (8, 8, 6))


def test_where_biases_are_summed():
    """The table of section 1.4: owners of vectors, and the axes over which gradients are summed."""
    cuts = {name: (site.bias.cuts[0], site.bias.replicated) for name, site in LAYER_SITES.items()}
    assert cuts == {"qkv": ("jl", "i"), "proj": ("l", "ij"), "fc1": ("j", "il"), "fc2": ("l", "ij")}
    assert VECTOR.replicated == POSITIONS.replicated == "ij"
    for grid in GRIDS:
        for axes in ("i", "ij", "il"):
            owners = [r for r in range(grid.ranks) if grid.owns(axes, grid.coords(r))]
            assert len(owners) * grid.size(axes) == grid.ranks
            assert owners[0] == 0


def test_layers_alternate():
    """What one linear gives is what the next takes; a block returns to the residual stream."""
    order = [LAYER_SITES[name] for name in ("qkv", "proj", "fc1", "fc2", "qkv")]
    assert all(a.result == b.given for a, b in pairwise(order))
    assert HEAD_SITES["plane"].given == LAYER_SITES["fc2"].result == EMBEDDING_SITES["plane"].result


def test_degenerate_grids_are_what_they_should_be():
    """(1, T, 1) gathers and scatters the sequence alone: Megatron's tensor and sequence parallelism."""
    tp = Grid3D(1, 4, 1)
    rows = [RESIDUAL.local_shape(tp, (32, 2, 64)), INNER.local_shape(tp, (32, 2, 64))]
    assert rows == [(8, 2, 64), (32, 2, 16)]
    assert COLUMN.local_shape(tp, (64, 64)) == (16, 64)
    assert ROW.local_shape(tp, (64, 64)) == (64, 16)
    shards = Grid3D(4, 1, 1)  # weights in shards, activations cut along the batch
    assert RESIDUAL.local_shape(shards, (32, 4, 64)) == INNER.local_shape(shards, (32, 4, 64)) == (32, 1, 64)
    assert COLUMN.local_shape(shards, (64, 64)) == ROW.local_shape(shards, (64, 64)) == (16, 64)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gated_weights_keep_gate_and_up_together(grid):
    """The rows that a j-partition has after the gather over i are its gate rows and its up rows."""
    rows = 2 * 216
    for j, k in product(range(grid.gj), range(grid.gl)):
        held = [glu_rows(grid, {"i": i, "j": j, "l": k}, rows) for i in range(grid.gi)]
        half = 216 // grid.gj
        for number, start in enumerate((j * half, 216 + j * half)):
            assert held[0][number].start == start
            assert held[-1][number].stop == start + half
