"""The fourteen strategies, why the other thirteen are refused, and the nested blocks that ranks hold."""

import itertools

import pytest

from megatron_ext.paro.blocks import Grid
from megatron_ext.paro.strategy import NAMES, STRATEGIES, Level, Strategy, why_not

FOURTEEN = "NNN NNI NII INI III NNG NIG NGG ING IIG IGG GNG GIG GGG".split()
ALL = ["".join(letters) for letters in itertools.product("NIG", repeat=3)]
GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (4, 2), (2, 4), (3, 3), (1, 8), (8, 1), (5, 3)]
grids = pytest.mark.parametrize(("k", "m"), GRIDS)


def test_there_are_fourteen():
    assert sorted(NAMES) == sorted(FOURTEEN)
    assert [str(strategy) for strategy in STRATEGIES] == list(NAMES)


@pytest.mark.parametrize("text", FOURTEEN)
def test_names_and_strategies_are_one_to_one(text):
    strategy = Strategy.parse(text)
    assert str(strategy) == text
    assert strategy == Strategy(*(Level[letter] for letter in text))
    assert why_not(text) is None


@pytest.mark.parametrize("text", sorted(set(ALL) - set(FOURTEEN)))
def test_the_other_thirteen_are_refused_with_the_rule(text):
    with pytest.raises(ValueError, match=f"^{text} splits ") as error:
        Strategy.parse(text)
    message = str(error.value)
    p, g, o = (Level[letter] for letter in text)
    assert ("parameters (" in message) == (p > o)
    assert ("gradients (" in message) == (g > o)
    assert f"optimizer states ({text[2]})" in message
    assert "at least as finely as both; choose one of NNN," in message
    assert all(name in message for name in FOURTEEN)


def test_thirteen_are_invalid():
    assert sum(why_not(text) is not None for text in ALL) == 13


@pytest.mark.parametrize("text", ["", "NN", "NNNN", "nig", "NXG", "ddp", "N G"])
def test_other_texts_are_refused(text):
    with pytest.raises(
        ValueError, match="write three letters, for parameters, gradients and optimizer states"
    ):
        Strategy.parse(text)


@grids
@pytest.mark.parametrize("blocks", [1, 3, 64])
def test_parts_of_every_level_partition_the_buffer(k, m, blocks):
    padded = blocks * k * m
    places = [Grid.of(rank, k, m) for rank in range(k * m)]
    for level, copies in ((Level.N, k * m), (Level.I, k), (Level.G, 1)):
        held = [0] * padded
        for grid in places:
            begin, end = grid.range(level, padded)
            assert end - begin == padded // grid.parts(level)
            for element in range(begin, end):
                held[element] += 1
        assert held == [copies] * padded


@grids
def test_parts_are_nested_and_where_the_other_ranks_expect_them(k, m):
    padded = 2 * k * m
    for rank in range(k * m):
        grid = Grid.of(rank, k, m)
        assert (grid.rank, grid.n) == (rank, k * m)
        assert (grid.group, grid.member) == divmod(rank, m)
        fine, coarse = grid.range(Level.G, padded), grid.range(Level.I, padded)
        assert coarse[0] <= fine[0] < fine[1] <= coarse[1]
        # Over the groups of one member, blocks lie in the order of the groups; over members, slices do.
        assert fine[0] == coarse[0] + 2 * grid.group
        assert coarse[0] == 2 * k * grid.member
        assert grid.block == grid.member * k + grid.group


@grids
def test_within_is_the_difference_of_ranges(k, m):
    padded = 4 * k * m
    buffer = list(range(padded))
    for rank in range(k * m):
        grid = Grid.of(rank, k, m)
        for outer, level in itertools.combinations_with_replacement(Level, 2):
            held = buffer[slice(*grid.range(outer, padded))]
            assert held[grid.within(level, outer, padded)] == buffer[slice(*grid.range(level, padded))]


def test_within_needs_the_coarser_level_outside():
    with pytest.raises(AssertionError):
        Grid.of(0, 2, 2).within(Level.N, Level.G, 8)


def test_padding_and_what_it_is_for():
    grid = Grid.of(5, 3, 2)
    assert [grid.padded(numel) for numel in (0, 1, 6, 7)] == [0, 6, 6, 12]
    with pytest.raises(AssertionError, match="7 elements are not a multiple of 6 ranks"):
        grid.range(Level.G, 7)


@pytest.mark.parametrize(("group", "member"), [(2, 0), (0, 2), (-1, 0)])
def test_places_outside_of_the_grid(group, member):
    with pytest.raises(AssertionError):
        Grid(2, 2, group, member)
