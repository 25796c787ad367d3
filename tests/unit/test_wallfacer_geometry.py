"""Who meets whom: the tables of the specification, entered by hand, and what holds for all shapes."""

import pytest

from megatron_ext.wallfacer.geometry import ORDERS, Geometry, Place, shapes
from megatron_ext.wallfacer.groups import TrafficGroups, groups_of, rank_lists
from megatron_ext.wallfacer.picture import svg, table
from megatron_ext.wallfacer.plan import make_plan
from megatron_ext.wallfacer.sequence import whole
from megatron_ext.wallfacer.tiles import CAUSAL, Mask

SELF = "self"
# rank: team, member, group, position, bundles in order, received from, sent to
P4 = {
    0: (0, 0, 0, 0, [0], SELF, SELF),
    1: (0, 1, 0, 0, [1], 2, 2),
    2: (1, 0, 1, 0, [0], 1, 1),
    3: (1, 1, 1, 0, [1], SELF, SELF),
}
P8 = {
    0: (0, 0, 0, 0, [0, 2], SELF, SELF),
    1: (0, 1, 0, 0, [1, 3], 2, 4),
    2: (1, 0, 0, 1, [2, 0], 4, 1),
    3: (1, 1, 0, 1, [3, 1], 6, 5),
    4: (2, 0, 1, 0, [0, 2], 1, 2),
    5: (2, 1, 1, 0, [1, 3], 3, 6),
    6: (3, 0, 1, 1, [2, 0], 5, 3),
    7: (3, 1, 1, 1, [3, 1], SELF, SELF),
}
P8_NEXT = {0: 2, 1: 3, 2: 0, 3: 1, 4: 6, 5: 7, 6: 4, 7: 5}
P16 = {  # bundles in order, received from, sent to
    0: ([0, 6, 4, 2], SELF, SELF),
    1: ([1, 7, 5, 3], 2, 8),
    2: ([2, 0, 6, 4], 4, 1),
    3: ([3, 1, 7, 5], 6, 9),
    4: ([4, 2, 0, 6], 8, 2),
    5: ([5, 3, 1, 7], 10, 10),
    6: ([6, 4, 2, 0], 12, 3),
    7: ([7, 5, 3, 1], 14, 11),
    8: ([0, 6, 4, 2], 1, 4),
    9: ([1, 7, 5, 3], 3, 12),
    10: ([2, 0, 6, 4], 5, 5),
    11: ([3, 1, 7, 5], 7, 13),
    12: ([4, 2, 0, 6], 9, 6),
    13: ([5, 3, 1, 7], 11, 14),
    14: ([6, 4, 2, 0], 13, 7),
    15: ([7, 5, 3, 1], SELF, SELF),
}


def _bundles(geometry: Geometry, rank: int) -> list[int]:
    return [geometry.bundle_at(rank, step) for step in range(geometry.ring_length)]


@pytest.mark.parametrize(("size", "rows"), [(4, P4), (8, P8)])
def test_tables(size: int, rows: dict):
    geometry = Geometry(size, 2, 2)
    for rank, (team, member, group, position, bundles, source, target) in rows.items():
        assert geometry.place(rank) == Place(group, position, member)
        assert geometry.team_of(rank) == team
        assert rank in geometry.team(team)
        assert _bundles(geometry, rank) == bundles
        assert geometry.source(rank) == (rank if source == SELF else source)
        assert geometry.destination(rank) == (rank if target == SELF else target)


def test_table_of_sixteen():
    geometry = Geometry(16, 2, 2)
    for rank, (bundles, source, target) in P16.items():
        assert _bundles(geometry, rank) == bundles
        assert geometry.source(rank) == (rank if source == SELF else source)
        assert geometry.destination(rank) == (rank if target == SELF else target)
    rings = [geometry.ring(g, a) for g, a in geometry.rings()]
    assert rings == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]


def test_rings_and_teams_of_eight():
    geometry = Geometry(8, 2, 2)
    assert [geometry.team(t) for t in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [geometry.ring(g, a) for g, a in geometry.rings()] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    for rank, after in P8_NEXT.items():
        place = geometry.place(rank)
        assert geometry.ring(place.group, place.member)[geometry.ring_peers(rank, 1)[0]] == after


def test_no_ring_is_a_transpose():
    geometry = Geometry(16, 4, 4)
    assert geometry.ring_length == 1
    for team in range(4):
        for member in range(4):
            rank, other = 4 * team + member, 4 * member + team
            assert _bundles(geometry, rank) == [member]
            assert geometry.source(rank) == geometry.destination(rank) == other


def test_figure_of_the_paper():
    geometry = Geometry(64, 4, 4)
    assert geometry.ring(0, 0) == (0, 4, 8, 12)
    assert _bundles(geometry, 0) == [0, 12, 8, 4]
    assert geometry.bundle_at(4, 0) == 4
    assert geometry.bundle(4) == (16, 17, 18, 19)
    assert geometry.bundle_at(14, 0) == 14
    assert geometry.bundle(14) == (56, 57, 58, 59)


@pytest.mark.parametrize("order", ORDERS)
def test_every_shape(order: str):
    for size in range(1, 65 if order == "gpa" else 17):
        ranks = range(size)
        for team_size, bundle_size in shapes(size):
            geometry = Geometry(size, team_size, bundle_size, order)
            targets = [geometry.destination(rank) for rank in ranks]
            assert sorted(targets) == list(ranks)
            assert [geometry.source(target) for target in targets] == list(ranks)
            for team in range(geometry.num_teams):
                seen = [bundle for rank in geometry.team(team) for bundle in _bundles(geometry, rank)]
                assert sorted(seen) == list(range(geometry.num_bundles))
            for group, member in geometry.rings():
                ring = geometry.ring(group, member)
                assert list(ring) == sorted(ring)
                assert [geometry.place(rank).position for rank in ring] == list(range(len(ring)))
                home = [geometry.bundle_at(rank, 0) for rank in ring]
                assert [geometry.bundle_at(rank, len(ring)) for rank in ring] == home
            for rank in ranks:
                place = geometry.place(rank)
                for step in range(geometry.ring_length):
                    bundle = geometry.bundle_at(rank, step)
                    assert geometry.holder(bundle, place.group, step) == rank


@pytest.mark.parametrize(("team", "bundle", "product"), [(3, 1, 3), (4, 4, 16)])
def test_shapes_that_do_not_fit(team: int, bundle: int, product: int):
    with pytest.raises(ValueError, match=rf"C\*K={product}, which does not divide the P=8") as error:
        Geometry(8, team, bundle)
    assert "1x1, 1x2, 1x4, 1x8, 2x1" in str(error.value)


def test_other_errors():
    with pytest.raises(ValueError, match="team size 0: use a whole number"):
        Geometry(8, 0, 1)
    with pytest.raises(ValueError, match="order 'gp': choose one of gpa"):
        Geometry(8, 2, 2, "gp")


def test_placement():
    # Teams over two nodes of eight ranks, rings inside of them.
    geometry = Geometry(16, 2, 1, "gap")
    assert geometry.team(0) == (0, 8)
    assert geometry.ring(0, 1) == tuple(range(8, 16))
    # Groups of teams inside a node of four.
    geometry = Geometry(16, 2, 2, "pag")
    assert geometry.team(0) == (0, 2)
    assert geometry.ring(0, 0) == (0, 4, 8, 12)
    assert geometry.bundle(0) == (0, 2)


def test_groups():
    lists = rank_lists(Geometry(8, 2, 2), [tuple(range(8)), tuple(range(8, 16))])
    assert lists["wallfacer-team"] == [(r, r + 1) for r in range(0, 16, 2)]
    assert lists["wallfacer-bundle-sums"] == lists["wallfacer-bundle"] == lists["wallfacer-team-sums"]
    assert lists["wallfacer-ring"][:4] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert lists["wallfacer-ring-grads"][4:] == [(8, 10), (9, 11), (12, 14), (13, 15)]
    assert lists["wallfacer-move"] == lists["wallfacer-move-grads"] == [tuple(range(8)), tuple(range(8, 16))]
    strided = rank_lists(Geometry(2, 2, 1), [(0, 2), (1, 3)])
    assert strided["wallfacer-team"] == [(0, 2), (1, 3)]


def test_only_groups_that_something_moves_in():
    assert rank_lists(Geometry(1, 1, 1), [(0,)]) == {}
    ring = rank_lists(Geometry(4, 1, 1), [tuple(range(4))])
    assert list(ring) == ["wallfacer-ring", "wallfacer-ring-grads", "wallfacer-move-grads"]
    lean = rank_lists(Geometry(4, 4, 1), [tuple(range(4))])
    assert list(lean) == ["wallfacer-team", "wallfacer-team-sums", "wallfacer-move-grads"]
    found = groups_of(lambda name: name, Geometry(4, 4, 1))
    assert found == TrafficGroups("wallfacer-team", "wallfacer-team-sums", move_grads="wallfacer-move-grads")


def test_table_as_text():
    text = table(make_plan(Geometry(8, 2, 2), whole(8192), CAUSAL)).splitlines()
    assert len(text) == 9
    assert text[0].split() == "rank team,member group,position bundles from to next work".split()
    assert text[1].split() == "0 0,0 0,0 0,2 self self 2 C F".split()
    assert text[6].split() == "5 2,1 1,0 1,3 3 6 7 F F".split()


def test_picture():
    plan = make_plan(Geometry(8, 2, 2), whole(8192), CAUSAL)
    text = svg(plan)
    assert text.count("<polygon") == 16
    assert text.count(">bundle 3<") == 4
    assert "1.00 of the mean work" in text
    assert "8192 tokens, zigzag split; a query sees all keys before and no later one" in text
    windowed = svg(make_plan(Geometry(8, 1, 1), whole(8192), Mask(500, 0)))
    assert "3 of 8 steps" in windowed
    assert "after 7 hops" in windowed
    assert "after 2 hops" not in windowed
