"""Bytes of attention: numbers worked out by hand, the tables of the specification, and the law 1/C."""

import pytest

from megatron_ext.wallfacer.geometry import Geometry
from megatron_ext.wallfacer.memory import memory
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.plan import make_plan
from megatron_ext.wallfacer.sequence import packed, whole
from megatron_ext.wallfacer.tiles import CAUSAL, Mask
from megatron_ext.wallfacer.volume import Cost, Flow, Shape, totals

SMALL = Shape(batch=1, query_heads=4, key_heads=2, head_dim=64, itemsize=4)


def _cost(size: int, team: int, bundle: int, shape: Shape = SMALL, tokens: int = 1024, **options) -> Cost:
    plan = make_plan(Geometry(size, team, bundle), whole(tokens), CAUSAL)
    return Cost(plan, shape, Options(**options))


def _bytes(flows: list[Flow]) -> dict[str, int]:
    return {flow.what: flow.bytes for flow in flows}


def test_forward_of_eight():
    cost = _cost(8, 2, 2)
    for rank in range(8):
        wanted = {
            "gather queries": 131072,
            "gather keys": 131072,
            "gather log-sum-exps": 4096,
            "sum outputs": 131072,
            "relocate keys": 262144,
            "hops of keys": 262144,
        }
        if rank in (0, 7):
            del wanted["relocate keys"]
        assert _bytes(cost.forward(rank)) == wanted


def test_backward_of_eight_when_keys_travel():
    cost = _cost(8, 2, 2, statistics="out", backward="keys")
    for rank in range(8):
        wanted = {
            "gather queries": 131072,
            "gather gradients": 131072,
            "gather statistics": 131072,
            "gather keys": 131072,
            "relocate keys": 262144,
            "hops of keys": 262144,
            "hops of gradients": 262144,
            "return gradients": 262144,
            "sum query gradients": 131072,
            "sum key gradients": 131072,
        }
        if rank in (0, 7):
            del wanted["relocate keys"]
        assert _bytes(cost.backward(rank)) == wanted


def test_backward_of_eight_when_queries_travel():
    cost = _cost(8, 2, 2, statistics="out", backward="queries")
    for rank in range(8):
        found = _bytes(cost.backward(rank))
        assert found["hops of queries"] == 790528
        assert found["hops of gradients"] == 524288
        assert found.get("return gradients", 0) == (0 if rank in (0, 7) else 262144)


def test_dot_products_instead_of_outputs():
    keys = _cost(8, 2, 2, backward="keys").backward(0)
    assert _bytes(keys)["gather statistics"] == 2048  # 128 rows of 4 heads, 4 bytes each
    queries = _cost(8, 2, 2, backward="queries").backward(0)
    assert _bytes(queries)["hops of queries"] == 2 * (2 * 131072 + 2 * 2048)


def test_sixteen_bits():
    shape = Shape(batch=1, query_heads=4, key_heads=2, head_dim=64, itemsize=2)
    cost = _cost(8, 2, 2, shape, statistics="out", backward="keys")
    forward, backward = _bytes(cost.forward(1)), _bytes(cost.backward(1))
    assert forward == {
        "gather queries": 65536,
        "gather keys": 65536,
        "gather log-sum-exps": 4096,
        "sum outputs": 131072,
        "relocate keys": 131072,
        "hops of keys": 131072,
    }
    assert backward["hops of gradients"] == backward["return gradients"] == 262144
    assert backward["sum query gradients"] == backward["sum key gradients"] == 131072
    half = _cost(8, 2, 2, shape, sum_type="model", grad_type="model", backward="keys")
    assert _bytes(half.forward(1))["sum outputs"] == 65536
    assert _bytes(half.backward(1))["hops of gradients"] == 131072
    assert _bytes(half.backward(1))["sum query gradients"] == 65536


def test_plain_ring():
    cost = _cost(8, 1, 1, backward="keys")
    for rank in range(8):
        assert totals(cost.forward(rank)) == {("send", "wallfacer-ring"): 917504}
        assert totals(cost.backward(rank)) == {
            ("send", "wallfacer-ring"): 917504,
            ("send", "wallfacer-ring-grads"): 917504,
            ("send", "wallfacer-move-grads"): 131072,
        }


def test_teams_without_bundles():
    assert _bytes(_cost(8, 2, 1).forward(3)) == {
        "gather queries": 131072,
        "gather log-sum-exps": 4096,
        "sum outputs": 131072,
        "hops of keys": 393216,
    }


def test_single_rank_sends_nothing():
    cost = _cost(1, 1, 1)
    assert cost.forward(0) == cost.backward(0) == []


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("team", [2, 4])
def test_relocation_and_ring_are_a_team_sizeth_of_ring(size: int, team: int):
    shape = Shape(batch=1, query_heads=2, key_heads=2, head_dim=16, itemsize=4)
    cost = _cost(size, team, team, shape, tokens=8 * size)
    share = 8 * 2 * 2 * 16 * 4
    for rank in range(size):
        found = _bytes(cost.forward(rank))
        relocated = found.get("relocate keys", 0)
        assert (relocated == 0) == (cost.plan.geometry.destination(rank) == rank)
        if relocated:
            assert (relocated + found.get("hops of keys", 0)) * team == size * share


# P, C, K -> MiB per rank of transfers and of collectives, 32 key heads and 8 key heads
TABLE = {
    (8, 1, 1): (1792, 0, 448, 0),
    (8, 2, 2): (1024, 516, 256, 324),
    (8, 2, 1): (768, 260, 192, 260),
    (16, 1, 1): (1920, 0, 480, 0),
    (16, 2, 2): (1024, 258, 256, 162),
    (16, 4, 4): (512, 780, 128, 492),
    (16, 4, 1): (384, 396, 96, 396),
    (64, 1, 1): (2016, 0, 504, 0),
    (64, 2, 2): (1024, 64.5, 256, 40.5),
    (64, 4, 4): (512, 195, 128, 123),
    (64, 4, 1): (480, 99, 120, 99),
    (64, 8, 8): (256, 462, 64, 294),
}


@pytest.mark.parametrize("where", list(TABLE))
def test_table_of_volumes(where: tuple[int, int, int]):
    found = []
    for heads in (32, 8):
        shape = Shape(batch=1, query_heads=32, key_heads=heads, head_dim=128)
        cost = _cost(*where, shape, tokens=131072, sum_type="model")
        rank = next((r for r in range(where[0]) if cost.plan.geometry.destination(r) != r), 0)
        flows = cost.forward(rank)
        found += [
            sum(flow.bytes for flow in flows if flow.kind == "send") / 2**20,
            sum(flow.bytes for flow in flows if flow.kind != "send") / 2**20,
        ]
    assert tuple(found) == TABLE[where]


def test_what_travels_backward():
    def travels(key_heads: int, **options: str) -> str:
        shape = Shape(batch=1, query_heads=8, key_heads=key_heads, head_dim=128)
        return _cost(16, 2, 2, shape, tokens=4096, **options).travels()

    assert travels(8) == "queries"
    assert travels(4) == travels(1) == "keys"
    assert travels(8, backward="keys") == "keys"
    assert travels(1, backward="queries") == "queries"
    assert _cost(4, 2, 2).travels() == "keys"  # no ring, no difference


def test_moving_directly():
    gathered, direct = _cost(16, 4, 4), _cost(16, 4, 4, movement="direct")
    geometry = direct.plan.geometry
    for rank in range(16):
        before, after = (_bytes(cost.forward(rank)) for cost in (gathered, direct))
        holders = [geometry.holder(rank // 4, group) for group in range(4)]
        assert after["move keys"] == (3 if rank in holders else 4) * 65536
        assert before["gather keys"] == 3 * 65536
        assert "gather keys" not in after
        assert "sum key gradients" not in _bytes(direct.backward(rank))


def test_kept_and_attached():
    kept = _cost(8, 2, 2, keep="team")
    found = _bytes(kept.backward(1))
    assert not {"gather queries", "gather keys", "relocate keys"} & set(found)
    assert _bytes(kept.backward(1, attached=True)) == _bytes(_cost(8, 2, 2).backward(1))


def test_window_sends_less():
    plan = make_plan(Geometry(8, 1, 1), whole(1024), Mask(64, 0))
    cost = Cost(plan, SMALL, Options(backward="keys"))
    assert _bytes(cost.forward(0)) == {"hops of keys": 2 * 131072}


def test_sums_of_nccl():
    plan = make_plan(Geometry(8, 2, 2), whole(1024), CAUSAL)
    kinds = {flow.what: flow.kind for flow in Cost(plan, SMALL, Options(), native_sums=True).backward(1)}
    assert kinds["sum key gradients"] == "reduce_scatter"
    shape = Shape(batch=1, query_heads=4, key_heads=2, head_dim=64)
    half = Cost(plan, shape, Options(sum_type="model"), native_sums=True).forward(1)
    assert {flow.what: flow.kind for flow in half}["sum outputs"] == "all_to_all"


def test_peers():
    flows = {flow.what: flow.peers for flow in _cost(8, 2, 2).forward(2)}
    assert flows["gather queries"] == (2, 3)
    assert flows["relocate keys"] == (1,)
    assert flows["hops of keys"] == (0,)


MIB = 2**20
# 1024 rows of 8 heads of 64 in bf16: queries 1 MiB, keys with values 2 MiB, sums in fp32 twice that.
EVEN = Shape(batch=1, query_heads=8, key_heads=8, head_dim=64)


def test_memory_of_a_plain_ring():
    found = memory(_cost(4, 1, 1, EVEN, tokens=4096, backward="keys"), 0)
    rows = 1024 * 8 * 4  # log-sum-exps
    assert found.saved == 4 * MIB + rows
    # Keys here and coming, outputs and their log-sum-exps.
    assert found.forward == (2 + 2 + 2) * MIB + rows
    # Keys here and coming, query gradients, key gradients of a step, behind it and coming.
    assert found.backward == (2 + 2 + 2 + 4 + 4 + 4) * MIB
    assert found.kernel == 3 * MIB


def test_memory_of_teams():
    found = memory(_cost(4, 2, 2, EVEN, tokens=4096), 1)
    assert found.saved == 4 * MIB + 2 * 1024 * 8 * 4
    # While keys are sorted: gathered queries, own keys, gathered and sorted ones.
    assert found.forward == (2 + 2 + 4 + 4) * MIB
    kept = memory(_cost(4, 2, 2, EVEN, tokens=4096, keep="team"), 1)
    assert kept.saved == found.saved + (2 + 4) * MIB
    # Gradients come home: of a bundle here and there, of queries sent and received, own sums of both.
    assert kept.backward == found.backward == (8 + 8 + 4 + 4 + 2 + 4) * MIB


def test_chunks_of_heads_take_less():
    whole_call, chunks = (
        memory(_cost(16, 4, 2, EVEN, tokens=16384, head_chunks=number), 1) for number in (1, 8)
    )
    assert chunks.saved == whole_call.saved
    assert chunks.forward < 0.6 * whole_call.forward
    assert chunks.backward < 0.6 * whole_call.backward


def test_choices():
    with pytest.raises(ValueError, match="backward 'both': choose one of auto, keys, queries"):
        Options(backward="both")
    with pytest.raises(ValueError, match="head_chunks 0"):
        Options(head_chunks=0)
    Options(head_chunks=2).check_heads(8, 4)
    with pytest.raises(ValueError, match=r"6 key heads.*into 4 chunks: choose one of \[1, 2, 3, 6\]"):
        Options(head_chunks=4).check_heads(6, 6)
    with pytest.raises(ValueError, match="6 query heads on 4 key heads"):
        Options().check_heads(6, 4)


def test_documents_send_as_one_sequence():
    shape = Shape(batch=1, query_heads=4, key_heads=2, head_dim=64, itemsize=4)
    one = Cost(make_plan(Geometry(8, 2, 2), whole(1024), CAUSAL), shape, Options())
    many = Cost(make_plan(Geometry(8, 2, 2), packed([0, 256, 1024], [0, 200, 900]), CAUSAL), shape, Options())
    for rank in range(8):
        assert totals(many.forward(rank)) == totals(one.forward(rank))
        assert totals(many.backward(rank)) == totals(one.backward(rank))
