"""Layouts, tiles and plans: every visible pair is computed once, evenly, and nothing else."""

import itertools

import pytest

from megatron_ext.wallfacer.geometry import Geometry, shapes
from megatron_ext.wallfacer.plan import Plan, Step, make_plan
from megatron_ext.wallfacer.sequence import Layout, gathered, packed, whole
from megatron_ext.wallfacer.tiles import BIDIRECTIONAL, CAUSAL, Mask, Tile, tiles

MASKS = [CAUSAL, BIDIRECTIONAL, Mask(3, 0), Mask(0, 0), Mask(5, 2), Mask(left=4), Mask(right=3)]


def _layouts(size: int) -> list[Layout]:
    whole_length, part = 4 * size, 2 * size
    return [
        whole(whole_length),
        whole(whole_length, "contiguous"),
        whole(whole_length, cuts=(3, whole_length - 1)),
        packed([0, part, whole_length]),
        packed([0, part, whole_length], [0, 1, size + 2]),
        packed([0, part, whole_length], [0, 0, size + 1], "contiguous"),
    ]


def _pairs(plan: Plan, step: Step) -> list[tuple[int, int]]:
    """Positions (query, key) that a step computes."""
    rows = {r.row + i: r.position + i for r in plan.queries(step.team).runs for i in range(r.length)}
    keys = {r.row + i: r.position + i for r in plan.keys(step.bundle).runs for i in range(r.length)}
    found = []
    for tile in step.tiles:
        if tile.mode != "full":
            assert tile.q1 - tile.q0 == tile.k1 - tile.k0
        for i, j in itertools.product(range(tile.q0, tile.q1), range(tile.k0, tile.k1)):
            below, at = i - tile.q0, j - tile.k0
            if tile.mode == "full" or (at <= below if tile.mode == "causal" else at >= below):
                found.append((rows[i], keys[j]))
    return found


def _visible(layout: Layout, mask: Mask) -> list[tuple[int, int]]:
    found = []
    for document in layout.documents:
        for i, j in itertools.product(range(document.start, document.filled), repeat=2):
            before = mask.left is None or i - j <= mask.left
            if before and (mask.right is None or j - i <= mask.right):
                found.append((i, j))
    return sorted(found)


@pytest.mark.parametrize("shape", [(2, 1, 1), (4, 2, 2), (4, 1, 4), (6, 2, 3), (8, 2, 2), (8, 4, 1)])
@pytest.mark.parametrize("order", ["gpa", "agp"])
def test_every_visible_pair_once(shape: tuple[int, int, int], order: str):
    geometry = Geometry(*shape, order)
    for layout, mask in itertools.product(_layouts(geometry.size), MASKS):
        plan = Plan(geometry, layout, mask)
        wanted = _visible(layout, mask)
        for steps in (plan.key_steps, plan.query_steps):
            done = [
                pair for rank in range(geometry.size) for step in steps(rank) for pair in _pairs(plan, step)
            ]
            assert sorted(done) == wanted, (layout, mask, steps)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_zigzag_is_balanced_at_every_step(size: int):
    for team, bundle in shapes(size):
        plan = make_plan(Geometry(size, team, bundle), whole(2 * size), CAUSAL)
        steps = [plan.key_steps(rank) for rank in range(size)]
        assert {step.area for rank in steps for step in rank} == {2.0 * team * bundle}
        assert set(plan.work()) == {2.0 * size}
        assert plan.warning() is None


def test_tiles_of_eight_ranks():
    # D: one causal call. F: all rows, front half of the keys. B: back half of the rows, all keys.
    kinds = {(0, 4, 0, 4, "causal"): "D", (0, 4, 0, 2, "full"): "F", (2, 4, 0, 4, "full"): "B"}
    plan = make_plan(Geometry(8, 2, 2), whole(16), CAUSAL)
    found = []
    for rank in range(8):
        calls = [step.tiles for step in plan.key_steps(rank)]
        assert all(len(call) == 1 for call in calls)
        found.append("".join(kinds[t.q0, t.q1, t.k0, t.k1, t.mode] for (t,) in calls))
    assert found == ["DB", "BB", "BF", "BD", "FD", "FB", "FF", "DF"]


def test_unbalanced_layouts_are_named():
    plan = make_plan(Geometry(4, 2, 2), whole(16, "contiguous"), CAUSAL)
    assert sorted(area / 16 for area in plan.work()) == [0.0, 2.0, 2.0, 4.0]  # in pairs of shares
    assert "2.00 times the mean on rank 2, 0.00 times on rank 1" in plan.warning()
    assert "use the zigzag split" in plan.warning()
    assert make_plan(Geometry(4, 2, 2), whole(16, "contiguous"), BIDIRECTIONAL).warning() is None


def test_fresh_tiles():
    plan = make_plan(Geometry(8, 2, 2), whole(16), CAUSAL)
    assert [tile.fresh for step in plan.key_steps(0) for tile in step.tiles] == [True, False]
    # All rows after the back half only: some are written for the first time, so the tile is not fresh.
    assert [tile.fresh for step in plan.key_steps(2) for tile in step.tiles] == [True, False]
    apart = Plan(Geometry(2, 1, 1), packed([0, 4, 8]), CAUSAL)
    first = apart.key_steps(0)[0]
    assert len(first.tiles) == 2
    assert all(tile.fresh for tile in first.tiles)


def test_window_skips_steps():
    window = Mask(5, 0)
    assert make_plan(Geometry(8, 1, 1), whole(160), window).key_hops(0, 0) == (0, 1, 7)
    assert make_plan(Geometry(8, 1, 1), whole(160), window).query_hops(0, 0) == (0, 1, 7)
    assert make_plan(Geometry(8, 1, 1), whole(160), CAUSAL).key_hops(0, 0) == tuple(range(8))
    uneven = make_plan(Geometry(8, 2, 1), whole(160), window)
    assert [uneven.key_hops(g, a) for g, a in uneven.geometry.rings()] == [(0, 3), (0, 1)]
    assert uneven.query_hops(0, 0) == (0, 1)
    # Group 1 sees nothing of bundle 2, and its ring never moves.
    gone = make_plan(Geometry(8, 4, 2), whole(160), window)
    assert gone.key_hops(0, 3) == ()
    assert gone.transfers(0, 3, "keys") == gone.transfers(0, 3, "queries") == (0, 0)


def test_transfers():
    plan = make_plan(Geometry(8, 1, 1), whole(160), CAUSAL)
    assert plan.transfers(0, 0, "keys") == (7, 7)
    assert plan.transfers(0, 0, "queries") == (7, 8)
    no_ring = make_plan(Geometry(4, 2, 2), whole(160), CAUSAL)
    assert no_ring.transfers(0, 0, "keys") == no_ring.transfers(0, 0, "queries") == (0, 0)


def test_documents_apart_have_few_tiles():
    plan = make_plan(Geometry(4, 2, 2), packed([0, 64, 128, 256]), CAUSAL)
    for rank in range(4):
        (step,) = plan.key_steps(rank)
        assert len(step.tiles) == 3  # one for each document


def test_windows_use_squares_turned_round():
    (run,) = gathered(whole(8, "contiguous"), (0,), 1).runs
    assert tiles([run], [run], Mask(2, 0)) == (
        Tile(0, 2, 0, 2, "causal"),
        Tile(2, 4, 0, 2, "reverse"),
        Tile(2, 4, 2, 4, "causal"),
        Tile(4, 6, 2, 4, "reverse"),
        Tile(4, 6, 4, 6, "causal"),
        Tile(6, 8, 4, 6, "reverse"),
        Tile(6, 8, 6, 8, "causal"),
    )


def test_rows_of_a_team():
    rows = gathered(whole(16), (2, 3), 4)  # shares 2, 5 and 3, 4 of eight
    assert rows.slices == ((0, 2), (4, 4), (2, 2))
    assert [(run.position, run.length, run.row) for run in rows.runs] == [(4, 8, 0)]
    assert not rows.sorted_already
    assert gathered(whole(16), (1,), 4).sorted_already
    assert gathered(whole(16, "contiguous"), (2, 3), 4).sorted_already


def test_lengths_that_do_not_fit_name_the_next():
    with pytest.raises(ValueError, match=r"the sequence has 1000 tokens.*16 equal parts.*pad it to 1008"):
        make_plan(Geometry(8, 2, 2), whole(1000), CAUSAL)
    with pytest.raises(ValueError, match=r"the sequence has 1001 tokens.*8 equal parts.*pad it to 1008"):
        make_plan(Geometry(8, 2, 2), whole(1001, "contiguous"), BIDIRECTIONAL)
    with pytest.raises(ValueError, match=r"document 1 has 65 tokens.*pad it to 80"):
        make_plan(Geometry(8, 2, 2), packed([0, 64, 129]), CAUSAL)


def test_layouts_that_are_none():
    with pytest.raises(ValueError, match="documents end at"):
        whole(16, cuts=(4, 4))
    with pytest.raises(ValueError, match="split 'striped'"):
        whole(16, "striped")
    with pytest.raises(ValueError, match="start with 0"):
        packed([0, 8], [0, 4, 8])
    with pytest.raises(ValueError, match="document 0 has 9 tokens in a space of 8"):
        packed([0, 8], [0, 9])
    with pytest.raises(ValueError, match="mask with left=-1"):
        Mask(left=-1)


def test_empty_documents_are_left_out():
    layout = packed([0, 8, 8, 16], [0, 5, 5, 5])
    assert [(d.start, d.end, d.filled) for d in layout.documents] == [(0, 8, 5), (8, 16, 8)]
    assert make_plan(Geometry(2, 1, 1), layout, CAUSAL).work() != [0.0, 0.0]
