"""Documents, windows and sinks: parity with dense attention, and nothing leaks where it must not."""

import itertools

import pytest

from megatron_ext.wallfacer.geometry import Geometry
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.sequence import packed, whole
from megatron_ext.wallfacer.tiles import BIDIRECTIONAL, CAUSAL, Mask
from tests.ranks import ranks

BOTH = (Options(backward="keys"), Options(backward="queries", movement="direct", head_chunks=2))


def _check(size: int, shapes, cases, options=BOTH):
    from tests.dist import wallfacer_cases as w

    for shape, choice in itertools.product(shapes, options):
        engine = w.rings(Geometry(size, *shape), choice)
        for case in cases:
            w.check(engine, case, w.FP64)


@ranks(4)
def test_packed_documents():
    import torch

    from tests.dist.wallfacer_cases import Case

    layouts = [
        packed([0, 64, 80, 256], [0, 61, 62, 220]),  # odd lengths, and a document of one token
        packed([0, 8, 16, 24], [0, 1, 1, 9]),  # one token, none, all
        packed(range(0, 161, 8)),
    ]
    cases = [
        Case(layout=layout, head_dim=4, mask=mask, dtype=torch.float64)
        for layout, mask in itertools.product(layouts, (CAUSAL, BIDIRECTIONAL))
    ]
    _check(4, [(2, 2)], cases)
    _check(4, [(1, 1), (2, 1)], cases[:1])


@pytest.mark.full
@ranks(4, timeout=600)
def test_packed_documents_of_the_specification():
    from tests.dist import wallfacer_cases as w

    for filled in (None, [0, 251, 252, 900]):
        case = w.Case(layout=packed([0, 256, 320, 1024], filled))
        for choice in BOTH:
            w.check(w.rings(Geometry(4, 2, 2), choice), case, w.FP32)


@ranks(4)
def test_rows_without_keys_are_zero():
    import torch

    from tests.dist import wallfacer_cases as w

    case = w.Case(layout=packed([0, 64], [0, 21]), dtype=torch.float64)
    for shape in ((2, 2), (1, 1)):
        engine = w.rings(Geometry(4, *shape))
        outcome = w.compute(engine, case)
        spans = case.layout.spans(engine.rank, 4)
        padding = torch.cat([torch.arange(start, start + length) for start, length in spans]) >= 21
        assert padding.any()
        for found in outcome.found:
            assert found.isfinite().all()
            assert not found[padding].any()
        q, k, v = (w.own_part(x, case.layout, engine.rank, 4) for x in case.tensors()[:3])
        result = engine.run(q, k, v, layout=case.layout, mask=case.mask, scale=case.scale)
        team = engine.geometry.team(engine.geometry.team_of(engine.rank))
        everything = sum(length for rank in team for _, length in case.layout.spans(rank, 4))
        filled = sum(run.length for run in engine_rows(engine, case))
        assert result.lse.shape[0] == everything
        assert int((result.lse == -torch.inf).sum()) == (everything - filled) * case.query_heads


def engine_rows(engine, case):
    from megatron_ext.wallfacer.plan import make_plan

    plan = make_plan(engine.geometry, case.layout, case.mask)
    return plan.queries(engine.geometry.team_of(engine.rank)).runs


@ranks(4)
def test_documents_do_not_leak():
    import torch

    from tests.dist import wallfacer_cases as w

    class Nudged(w.Case):
        def tensors(self):
            tensors = super().tensors()
            for x in tensors[:4]:
                x[:32] += 1.0
            return tensors

    layout = packed([0, 32, 64])
    engine = w.rings(Geometry(4, 2, 2))
    before = w.compute(engine, w.Case(layout=layout)).found
    after = w.compute(engine, Nudged(layout=layout)).found
    for one, other in zip(before, after, strict=True):
        assert not torch.equal(one[:8], other[:8])
        assert torch.equal(one[8:], other[8:])


@ranks(4)
def test_documents_in_one_sequence():
    import torch

    from tests.dist.wallfacer_cases import Case

    cases = [
        Case(layout=whole(64, split, cuts=(3, 40)), mask=mask, head_dim=4, dtype=torch.float64)
        for split, mask in (("zigzag", CAUSAL), ("contiguous", BIDIRECTIONAL))
    ]
    _check(4, [(1, 1), (2, 2)], cases)


@ranks(8)
def test_sliding_windows():
    import torch

    from tests.dist.wallfacer_cases import Case

    def case(mask: Mask, layout=None) -> Case:
        return Case(mask=mask, layout=layout or whole(128), head_dim=4, dtype=torch.float64)

    _check(8, [(1, 1)], [case(Mask(5, 0)), case(Mask(30, 0)), case(Mask(6, 3))])
    _check(8, [(2, 1), (2, 2), (4, 2)], [case(Mask(5, 0))])
    _check(8, [(2, 1)], [case(Mask(7, 0), packed([0, 32, 128], [0, 30, 90]))])


@ranks(4)
def test_sinks():
    import torch

    from tests.dist.wallfacer_cases import Case

    padded = packed([0, 32, 64], [0, 20, 30])
    cases = [
        Case(sink=True, dtype=torch.float64),
        Case(sink=True, dtype=torch.float64, layout=padded, batch=1, mask=Mask(9, 0)),
    ]
    _check(4, [(1, 1), (2, 2), (4, 1)], cases)
