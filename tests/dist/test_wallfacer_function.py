"""Around the attention call: plain ring bit for bit, results attached later, buffers, memory and errors."""

import itertools
import logging

import pytest

from megatron_ext.wallfacer.geometry import Geometry
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.sequence import whole
from megatron_ext.wallfacer.tiles import CAUSAL
from tests.ranks import ranks


def _plain_ring(q, k, v, scale):
    """Zigzag ring attention of one layer, written on its own: forward only."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    half = q.shape[0] // 2
    held = torch.stack((k, v), dim=1)
    out = lse = None
    for step in range(size):
        coming = torch.empty_like(held)
        if step + 1 < size:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, held, (rank + 1) % size),
                    dist.P2POp(dist.irecv, coming, (rank - 1) % size),
                ]
            )
        home = (rank - step) % size
        rows = slice(half, None) if home > rank else slice(None)
        keys = slice(None, half) if home < rank else slice(None)
        heads = [x.permute(1, 2, 0, 3) for x in (q[rows], held[keys, 0], held[keys, 1])]
        part, part_lse = flash(*heads, 0.0, home == rank, scale=scale)
        part, part_lse = part.permute(2, 0, 1, 3), part_lse.permute(2, 0, 1)
        if out is None:
            out, lse = part.contiguous(), part_lse.contiguous()
        else:
            out[rows].lerp_(part, torch.sigmoid(part_lse - lse[rows]).unsqueeze(-1))
            lse[rows] = torch.logaddexp(lse[rows], part_lse)
        if step + 1 < size:
            for work in works:
                work.wait()
            held = coming
    return out


@ranks(4)
def test_teams_of_one_are_a_plain_ring():
    import torch

    from tests.dist import wallfacer_cases as w

    case = w.Case(batch=2)
    engine = w.rings(Geometry(4, 1, 1))
    q, k, v = (w.own_part(x, case.layout, engine.rank, 4) for x in case.tensors()[:3])
    outcome = w.compute(engine, case)
    assert torch.equal(outcome.found[0], _plain_ring(q, k, v, case.scale))
    hop = 2 * k.numel() * 4
    assert outcome.forward == {("send", "wallfacer-ring"): 3 * hop}


@ranks(4)
def test_runs_repeat_bit_for_bit():
    import torch

    from tests.dist import wallfacer_cases as w

    for shape, backward in itertools.product(((2, 2), (2, 1), (1, 1)), ("keys", "queries")):
        engine = w.rings(Geometry(4, *shape), Options(backward=backward))
        first, second = (w.compute(engine, w.Case()).found for _ in range(2))
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)


class _Counting:
    """A kernel that counts its calls."""

    def __init__(self, kernel):
        self.kernel, self.name = kernel, kernel.name
        self.calls = {"forward": 0, "backward": 0}

    def forward(self, *args, **kwargs):
        self.calls["forward"] += 1
        return self.kernel.forward(*args, **kwargs)

    def backward(self, *args, **kwargs):
        self.calls["backward"] += 1
        return self.kernel.backward(*args, **kwargs)


@ranks(4)
def test_attached_results_repeat_nothing():
    import torch

    from megatron_ext.traffic import ledger
    from tests.dist import wallfacer_cases as w

    case = w.Case(sink=True)
    for shape, keep in (((2, 2), "own"), ((2, 1), "team"), ((1, 1), "own")):
        engine = w.rings(Geometry(4, *shape), Options(keep=keep, head_chunks=2))
        tensors = [w.own_part(x, case.layout, engine.rank, 4) for x in case.tensors()[:4]]
        grad = tensors.pop(3)
        leaves = [x.requires_grad_() for x in (*tensors, case.tensors()[4])]
        what = {"layout": case.layout, "mask": case.mask, "scale": case.scale}
        out = engine.attend(*leaves[:3], **what, sink=leaves[3])
        wanted = [out, *torch.autograd.grad(out, leaves, grad)]
        result = engine.run(*leaves[:3], **what, sink=leaves[3])
        assert not result.out.requires_grad
        key = (leaves[0].device, leaves[0].dtype, leaves[0].shape[-1])
        counting = engine._kernels[key] = _Counting(engine._kernels[key])
        ledger().drain()
        again = engine.attach(result, *leaves[:3], **what, sink=leaves[3])
        assert counting.calls == {"forward": 0, "backward": 0}
        assert ledger().drain() == []
        assert not result.out.requires_grad
        found = [again, *torch.autograd.grad(again, leaves, grad)]
        assert counting.calls["forward"] == 0 < counting.calls["backward"]
        engine._kernels[key] = counting.kernel
        for one, other in zip(wanted, found, strict=True):
            assert torch.equal(one, other)


@ranks(4)
def test_members_without_keys_stay_at_minus_infinity():
    import torch

    from megatron_ext.wallfacer import forward
    from tests.dist import wallfacer_cases as w

    engine = w.rings(Geometry(4, 2, 2))
    seen = []
    original = forward._final_shares

    def watch(chunk, own, *rest):
        seen.append(own.clone())
        return original(chunk, own, *rest)

    forward._final_shares = watch
    outcome = w.compute(engine, w.Case())
    forward._final_shares = original
    front = seen[0][:16]
    if engine.rank == 1:
        assert (front == -torch.inf).all()
    else:
        assert front.isfinite().all()
    assert seen[0][16:].isfinite().all()
    assert all(x.isfinite().all() for x in outcome.found)


@ranks(8)
def test_buffers_take_what_the_formula_says():
    from megatron_ext.wallfacer.memory import memory
    from megatron_ext.wallfacer.plan import make_plan
    from megatron_ext.wallfacer.volume import Cost, Shape
    from tests.dist import wallfacer_cases as w

    case = w.Case(query_heads=8, key_heads=4, layout=whole(64), head_dim=8)
    shape = Shape(case.batch, case.query_heads, case.key_heads, case.head_dim, 4)
    choices = [
        Options(backward="keys"),
        Options(backward="queries", statistics="out"),
        Options(backward="queries", movement="direct", head_chunks=2),
        Options(backward="keys", keep="team", head_chunks=4),
    ]
    for (team, bundle), options in itertools.product(((1, 1), (2, 2), (2, 1), (4, 2)), choices):
        engine = w.rings(Geometry(8, team, bundle), options)
        cost = Cost(make_plan(engine.geometry, case.layout, case.mask), shape, options)
        wanted = memory(cost, engine.rank)
        engine.scratch.peak_bytes = 0
        w.compute(engine, case)
        assert engine.scratch.peak_bytes == max(wanted.forward, wanted.backward), (engine.geometry, options)
        q, k, v = (w.own_part(x, case.layout, engine.rank, 8) for x in case.tensors()[:3])
        engine.scratch.peak_bytes = 0
        engine.run(q, k, v, layout=case.layout, mask=case.mask, scale=1.0)
        assert engine.scratch.peak_bytes == memory(cost, engine.rank, attached=True).forward


@ranks(4)
def test_buffers_are_used_again():
    from tests.dist import wallfacer_cases as w

    engine = w.rings(Geometry(4, 2, 1), Options(head_chunks=2))

    def held() -> set[int]:
        return {x.data_ptr() for free in engine.scratch._free.values() for x in free}

    w.compute(engine, w.Case())
    before = held()
    w.compute(engine, w.Case(seed=1))
    assert held() == before
    w.compute(engine, w.Case(layout=whole(32)))  # of other shapes, which take their place
    assert len(held()) <= len(before)


@ranks(2)
def test_errors():
    import torch

    from tests.dist import wallfacer_cases as w

    engine = w.rings(Geometry(2, 2, 1))
    what = {"layout": whole(8), "mask": CAUSAL, "scale": 1.0}
    x = torch.randn(4, 1, 2, 8)
    with pytest.raises(
        ValueError, match=r"8 tokens on 2 context-parallel ranks has 4 rows.*layout of 16 tokens"
    ):
        engine.attend(torch.randn(8, 1, 2, 8), *[torch.randn(8, 1, 2, 8)] * 2, **what)
    with pytest.raises(ValueError, match=r"must be \[n, b, hq, d\]"):
        engine.attend(x, x, torch.randn(4, 1, 2, 4), **what)
    with pytest.raises(ValueError, match="use one type"):
        engine.attend(x, x, x.double(), **what)
    with pytest.raises(ValueError, match="3 query heads on 2 key heads"):
        engine.attend(torch.randn(4, 1, 3, 8), x, x, **what)
    with pytest.raises(ValueError, match="is not one of"):
        engine.attach(engine.run(x, x, x, **what), x[..., :4], x[..., :4], x[..., :4], **what)


@ranks(4)
def test_unbalanced_layouts_warn_once():
    from tests.dist import wallfacer_cases as w

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("megatron_ext.wallfacer").addHandler(handler)
    engine = w.rings(Geometry(4, 2, 2))
    for _ in range(2):
        w.compute(engine, w.Case(layout=whole(64, "contiguous")))
    expected = 1 if engine.rank == 0 else 0
    assert sum("not balanced" in message for message in messages) == expected
