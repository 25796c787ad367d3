"""Cost model and planner of WallFacer: bytes by link class, times by hand, and which choice is taken."""

import itertools

import pytest

from megatron_ext.paro.network import Link
from megatron_ext.wallfacer.cost import Links, Prediction, Sent, phase_seconds, sent, step_areas
from megatron_ext.wallfacer.geometry import ORDERS, Geometry, shapes
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.plan import make_plan
from megatron_ext.wallfacer.planner import (
    Situation,
    backwards,
    candidate,
    geometries,
    movements,
    of_each_shape,
    ranking,
    reason,
)
from megatron_ext.wallfacer.recompute import Kept
from megatron_ext.wallfacer.sequence import whole
from megatron_ext.wallfacer.tiles import BIDIRECTIONAL, CAUSAL, Mask
from megatron_ext.wallfacer.volume import Cost, Flow, Shape

MHA, GQA = Shape(1, 32, 32, 128, 2), Shape(1, 32, 4, 128, 2)
ONE_NODE = Links(Link(0.0, 1e9), ranks_per_node=64)


def situation(size=8, shape=MHA, links=ONE_NODE, length=4096, **more):
    return Situation(size=size, layout=whole(length), shape=shape, links=links, **more)


# --- bytes by class of link --------------------------------------------------------------------------------


def test_collectives_are_cut_at_the_node():
    links = Links(ranks_per_node=4)
    flow = Flow("gather queries", "all_gather", "team", 900, (0, 1, 4, 5))
    assert sent(flow, 1, links) == Sent(300, 600, 1, 2)
    assert sent(flow, 1, Links(ranks_per_node=8)) == Sent(900, 0, 3, 0)


def test_hops_go_to_one_peer():
    flow = Flow("hops of keys", "send", "ring", 700, (4,))
    assert sent(flow, 3, Links(ranks_per_node=4), hops=7) == Sent(0, 700, 0, 7)


def test_nothing_is_sent_to_oneself():
    assert sent(Flow("gather queries", "all_gather", "team", 0, (3,)), 3, ONE_NODE) == Sent()


@pytest.mark.parametrize(("size", "order"), [*itertools.product((4, 8, 16), ORDERS)])
def test_bytes_add_up_to_those_of_the_flows(size, order):
    for team, bundle in shapes(size):
        plan = make_plan(Geometry(size, team, bundle, order), whole(64 * size), CAUSAL)
        cost = Cost(plan, GQA, Options())
        ahead, back = Prediction(cost, Links(ranks_per_node=4)).bytes()
        for rank in range(size):
            assert ahead[rank].inside + ahead[rank].between == sum(f.bytes for f in cost.forward(rank))
            assert back[rank].inside + back[rank].between == sum(f.bytes for f in cost.backward(rank))


# --- times -------------------------------------------------------------------------------------------------


def test_phase_is_that_of_the_slowest_rank():
    links = Links(Link(1e-3, 1e6), ranks_per_node=2)
    assert phase_seconds([Sent(1000, 0, 1), Sent(5000, 0, 2)], links) == pytest.approx(2e-3 + 5e-3)


@pytest.mark.parametrize(("sharing", "seconds"), [(1, 3e-3), (2, 5e-3)])
def test_ranks_share_a_nic(sharing, seconds):
    links = Links(nic=Link(0.0, 1e6), ranks_per_node=2, ranks_per_nic=sharing)
    assert phase_seconds([Sent(0, 2000, 0, 1), Sent(0, 3000, 0, 1)], links) == pytest.approx(seconds)


def test_plain_ring_by_hand():
    """Three hops of keys; three of keys and of gradients behind them; gradients return."""
    size, rate = 4, 1e9
    plan = make_plan(Geometry(size, 1, 1), whole(4096), CAUSAL)
    cost = Cost(plan, MHA, Options(backward="keys"))
    kv = 2 * 1024 * 32 * 128 * 2
    found = Prediction(cost, Links(Link(0.0, rate), ranks_per_node=4)).seconds()
    assert found.forward == pytest.approx(3 * kv / rate)
    assert found.backward == pytest.approx((3 * (kv + 2 * kv) + 2 * kv) / rate)
    assert found.attention == 0
    assert found.exposed == found.total


def test_hops_hide_behind_attention():
    size = 4
    plan = make_plan(Geometry(size, 1, 1), whole(4096), CAUSAL)
    cost = Cost(plan, MHA, Options(backward="keys"))
    flops = 1e9
    found = Prediction(cost, Links(Link(0.0, 1e12), ranks_per_node=4), flops).seconds()
    pairs = 4096 * 4096 / 2 / size * 32 * 128
    assert found.attention == pytest.approx(14 * pairs / flops)
    assert found.forward == pytest.approx(4 * pairs / flops)
    assert found.exposed < 1e-3 * found.total


@pytest.mark.parametrize("mask", [CAUSAL, BIDIRECTIONAL, Mask(100, 0)])
@pytest.mark.parametrize("order", ORDERS)
def test_areas_are_those_of_the_tiles(order, mask):
    for size in (4, 8):
        for team, bundle in shapes(size):
            split = "contiguous" if mask == BIDIRECTIONAL else "zigzag"
            plan = make_plan(Geometry(size, team, bundle, order), whole(64 * size, split), mask)
            tiles = [[step.area for step in plan.key_steps(rank)] for rank in range(size)]
            assert step_areas(plan) == tiles


# --- candidates --------------------------------------------------------------------------------------------


def test_all_shapes_and_each_placement_once():
    found = list(geometries(situation(8)))
    assert {(g.team_size, g.bundle_size) for g in found} == set(shapes(8))
    assert [g.order for g in found if g.team_size == g.bundle_size == 1] == ["gpa"]
    assert len([g for g in found if (g.team_size, g.bundle_size) == (2, 2)]) == 6
    assert len([g for g in found if (g.team_size, g.bundle_size) == (2, 1)]) == 2


def test_candidates_can_be_limited():
    only = situation(8, team_size=2, bundle_size=1, order="gpa", options=Options(backward="keys"))
    assert len(ranking(only)) == 1
    assert {c.geometry.bundle_size for c in ranking(situation(8, bundle_size=2))} == {2}


def test_what_can_travel():
    assert backwards(situation(4), Geometry(4, 2, 2)) == ("keys",)
    assert backwards(situation(4), Geometry(4, 2, 1)) == ("keys", "queries")


def test_how_keys_move():
    assert movements(situation(8), Geometry(8, 2, 1)) == ("relocate",)
    assert movements(situation(8, movement="direct"), Geometry(8, 2, 1)) == ("relocate",)
    assert movements(situation(8), Geometry(8, 2, 2)) == ("relocate", "direct")
    assert movements(situation(8, movement="direct"), Geometry(8, 2, 2)) == ("direct",)


@pytest.mark.parametrize("per_node", [2, 4, 64])
def test_moving_directly_sends_less(per_node):
    """(2K-1) kv of each pass become K kv less what stays; where it is inside of nodes, no time may be
    gained."""
    links = Links(Link(0.0, 1e9), Link(0.0, 1e8), per_node)
    for team, bundle in ((1, 2), (2, 2), (2, 4), (4, 2)):
        only = situation(8, links=links, team_size=team, bundle_size=bundle, order="gpa")
        found = {c.movement: c for c in reversed(ranking(only))}  # the faster backward pass of each
        direct, relocate = found["direct"], found["relocate"]
        total = {m: c.inside + c.between for m, c in found.items()}
        for c in found.values():
            plan = make_plan(c.geometry, whole(4096), CAUSAL)
            cost = Cost(plan, MHA, Options(movement=c.movement, backward=c.backward))
            flows = [f for rank in range(8) for f in (*cost.forward(rank), *cost.backward(rank))]
            assert total[c.movement] * 8 == pytest.approx(sum(f.bytes for f in flows))
        assert total["direct"] < total["relocate"]
        assert direct.seconds.total <= relocate.seconds.total


def test_what_runs_beside_each_other_shares_the_links():
    """Queries and keys are gathered at the same time: two phases over one link take as long as both."""
    rate = 1e9
    plan = make_plan(Geometry(4, 2, 2), whole(4096), CAUSAL)
    cost = Cost(plan, MHA, Options())
    flows = cost.forward(1)
    found = Prediction(cost, Links(Link(0.0, rate), ranks_per_node=4)).seconds()
    assert found.forward == pytest.approx(sum(f.bytes for f in flows) / rate)


def test_keys_are_gathered_before_they_are_moved():
    """Inside a node and then to another one, which do not overlap."""
    rate = 1e9
    plan = make_plan(Geometry(4, 1, 2), whole(4096), CAUSAL)
    cost = Cost(plan, MHA, Options())
    gather, move, hops = (sum(f.bytes for f in cost.forward(1) if f.what.startswith(w)) for w in "grh")
    links = Links(Link(0.0, rate), Link(0.0, rate), ranks_per_node=2)
    assert gather
    assert move
    found = Prediction(cost, links).seconds()
    assert found.forward == pytest.approx((gather + move + hops) / rate)


def test_recomputed_layers_keep_their_results():
    whole_, again = (
        {(c.geometry, c.backward, c.movement): c for c in ranking(situation(8, kept=kept))}
        for kept in (Kept(32), Kept(0, 32, 1))
    )
    for key, c in again.items():
        m = c.memory
        buffers = max(m.forward, m.backward) + m.kernel
        assert c.needed == buffers + 32 * m.result + m.saved - m.result
        assert whole_[key].needed == buffers + 32 * m.saved
        assert m.result < m.saved


def test_recomputed_layers_gather_again_what_would_be_kept():
    options = Options(keep="team")
    kept_, again = (
        ranking(situation(8, options=options, kept=kept, team_size=2, bundle_size=2, order="gpa"))[0]
        for kept in (Kept(2), Kept(0, 2, 1))
    )
    assert again.inside > kept_.inside
    assert again.seconds.backward > kept_.seconds.backward
    assert again.memory.saved < kept_.memory.saved


def test_flags_of_a_choice():
    s = situation(8)
    assert candidate(s, Geometry(8, 1, 1), "keys").choices() == {
        "wallfacer_team_size": "1",
        "wallfacer_kv_bundle": 1,
        "wallfacer_backward": "keys",
    }
    assert candidate(s, Geometry(8, 2, 4, "apg"), "keys", "direct").choices() == {
        "wallfacer_team_size": "2",
        "wallfacer_kv_bundle": 4,
        "wallfacer_order": "apg",
        "wallfacer_movement": "direct",
    }


def test_of_each_shape():
    found = ranking(situation(8))
    best = of_each_shape(found)
    assert len(best) == len(shapes(8))
    assert best[0] is found[0]


# --- the choice --------------------------------------------------------------------------------------------


def test_ring_is_best_for_grouped_queries_on_few_ranks():
    found = ranking(situation(4, GQA, rate=1e12))
    assert found[0].is_ring
    assert reason(found).startswith("plain ring attention: ")


def test_ring_is_best_where_attention_hides_it():
    found = ranking(situation(8, MHA, Links(Link(0.0, 1e12), ranks_per_node=8), 1 << 17, rate=1e12))
    assert found[0].is_ring


def test_teams_are_best_on_slow_links_between_nodes():
    links = Links(Link(0.0, 300e9), Link(0.0, 5e9), ranks_per_node=4, ranks_per_nic=4)
    found = ranking(situation(16, MHA, links, 1 << 15, rate=3e14))
    best = found[0]
    ring = next(c for c in found if c.is_ring)
    assert best.geometry.team_size > 1
    assert best.seconds.total < 0.9 * ring.seconds.total
    assert "times as fast as plain ring attention" in reason(found)


def test_point_to_point_of_the_paper_falls_by_c():
    """Relocation and hops of ranks that relocate, over P transfers of a ring."""
    for size, team in ((4, 2), (8, 2), (16, 2), (16, 4)):
        c = candidate(situation(size), Geometry(size, team, team), "keys")
        share = 2 * 4096 // size * 32 * 128 * 2
        flows = Cost(make_plan(c.geometry, whole(4096), CAUSAL), MHA, Options()).forward(1)
        assert sum(f.bytes for f in flows if f.kind == "send") * team == size * share


def test_memory_limit():
    free = ranking(situation(8, kept=Kept(32)))
    limit = sorted(c.needed for c in free)[3]
    found = ranking(situation(8, kept=Kept(32), memory_limit=limit))
    assert [c.fits for c in found] == sorted((c.fits for c in found), reverse=True)
    assert all(c.needed <= limit for c in found if c.fits)
    assert not all(c.fits for c in found)
    nothing = ranking(situation(8, memory_limit=1))
    assert reason(nothing).startswith("nothing fits in memory")
    assert nothing[0].needed == min(c.needed for c in nothing)


def test_the_same_on_every_rank():
    assert ranking(situation(8)) == ranking(situation(8))
    assert [c.geometry for c in ranking.__wrapped__(situation(8))] == [
        c.geometry for c in ranking(situation(8))
    ]
