"""Outputs and gradients equal those of dense attention for every shape, and bytes equal the formulas."""

import itertools

import pytest

from megatron_ext.wallfacer.geometry import ORDERS, Geometry
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.sequence import whole
from megatron_ext.wallfacer.tiles import BIDIRECTIONAL
from tests.ranks import ranks

SIZES = (1, 2, 4)
DEFAULT = (Options(),)
BOTH = (Options(backward="keys"), Options(backward="queries"))


def _shapes(size: int) -> list[tuple[int, int]]:
    return [(c, k) for c, k in itertools.product(SIZES, SIZES) if size % (c * k) == 0]


def _check(size: int, shapes, cases, options=DEFAULT, limits=None, orders=("gpa",)):
    from tests.dist import wallfacer_cases as w

    for (team, bundle), order, choice in itertools.product(shapes, orders, options):
        engine = w.rings(Geometry(size, team, bundle, order), choice)
        for case in cases:
            w.check(engine, case, limits or w.FP32)


@ranks(4)
def test_four_ranks():
    from tests.dist.wallfacer_cases import Case

    _check(4, [*_shapes(4), (1, 4)], [Case()], BOTH)


@ranks(8)
def test_eight_ranks():
    from tests.dist.wallfacer_cases import Case

    _check(8, _shapes(8), [Case()])
    _check(8, [(2, 2), (2, 1)], [Case()], (Options(backward="queries"),))


@pytest.mark.full
@ranks(16, timeout=600)
def test_sixteen_ranks():
    from tests.dist.wallfacer_cases import Case

    _check(16, _shapes(16), [Case(layout=whole(128), head_dim=8)], BOTH)


@pytest.mark.full
@ranks(8, timeout=600)
def test_tolerances_of_the_specification():
    from tests.dist.wallfacer_cases import Case

    wide = Case(batch=2, query_heads=4, key_heads=4, layout=whole(128))
    longer = Case(layout=whole(1024), head_dim=64)
    _check(8, [(2, 2), (2, 1), (4, 1), (1, 4), (2, 4), (4, 2)], [wide, longer], BOTH)


@ranks(8)
def test_exact_up_to_rounding_in_fp64():
    import torch

    from tests.dist.wallfacer_cases import FP64, Case

    _check(8, [(2, 2)], [Case(dtype=torch.float64)], BOTH, FP64)


@ranks(4)
def test_all_choices():
    import torch

    from tests.dist.wallfacer_cases import FP64, Case

    choices = [
        Options(statistics=statistics, keep=keep, movement=movement, head_chunks=chunks, backward=backward)
        for statistics, keep, movement, chunks, backward in (
            ("out", "own", "relocate", 2, "keys"),
            ("out", "team", "direct", 1, "queries"),
            ("delta", "team", "relocate", 2, "keys"),
            ("delta", "own", "direct", 2, "queries"),
            ("delta", "team", "direct", 4, "keys"),
        )
    ]
    case = Case(query_heads=8, key_heads=4, layout=whole(32), head_dim=8, dtype=torch.float64)
    _check(4, [(2, 2), (2, 1), (1, 2)], [case], choices, FP64)


@ranks(8)
def test_placements():
    import torch

    from tests.dist.wallfacer_cases import FP64, Case

    case = Case(layout=whole(64), head_dim=8, dtype=torch.float64)
    _check(8, [(2, 2), (1, 4)], [case], (Options(movement="direct"),), FP64, ORDERS)
    _check(8, [(2, 4)], [case], BOTH, FP64, ("pag",))


@ranks(4)
def test_bidirectional():
    import torch

    from tests.dist.wallfacer_cases import FP64, Case

    case = Case(mask=BIDIRECTIONAL, layout=whole(20, "contiguous"), batch=2, dtype=torch.float64)
    _check(4, [(1, 1), (2, 2), (2, 1)], [case], BOTH, FP64)


@ranks(4)
def test_shared_key_heads_and_odd_head_dimension():
    import torch

    from tests.dist.wallfacer_cases import FP64, Case

    cases = [
        Case(query_heads=4, key_heads=1, head_dim=5, batch=2, layout=whole(32), dtype=torch.float64),
        Case(query_heads=3, key_heads=3, head_dim=80, layout=whole(32), dtype=torch.float64),
    ]
    _check(4, [(2, 2), (1, 1)], cases, BOTH, FP64)


@ranks(4)
def test_sixteen_bits_are_as_good_as_on_one_device():
    import torch

    from tests.dist import wallfacer_cases as w

    case = w.Case(dtype=torch.bfloat16, layout=whole(128), head_dim=32)
    single = w.compute(w.rings(Geometry(4, 1, 4)), case)
    alone = w.errors(case, single, 4)
    limits = {name: 2 * error + 1e-3 for name, error in alone.items()}
    _check(4, [(1, 1), (2, 2), (2, 1), (4, 1)], [case], BOTH, limits)
    rounded = {name: 4 * error + 1e-2 for name, error in alone.items()}
    _check(4, [(2, 1)], [case], (Options(sum_type="model", grad_type="model"),), rounded)


@ranks(4)
def test_peaked_softmax():
    from tests.dist import wallfacer_cases as w

    for factor in (30.0, 100.0):
        case = w.Case(factor=factor)
        # All keys on every rank: what a single device would compute.
        alone = w.errors(case, w.compute(w.rings(Geometry(4, 1, 4)), case), 4)
        limits = {name: 10 * error for name, error in alone.items()}
        _check(4, [(2, 2), (1, 1), (2, 1), (4, 1)], [case], BOTH, limits)


@ranks(4)
def test_scores_of_ten_thousand():
    from tests.dist import wallfacer_cases as w

    case = w.Case(factor=1e4)
    q, k = case.tensors()[:2]
    largest = float((q[:, 0, 0] @ k[:, 0, 0].T).abs().max()) * case.scale
    assert largest > 1e4
    alone = w.errors(case, w.compute(w.rings(Geometry(4, 1, 4)), case), 4)
    # Log-sum-exps in fp32 are as coarse as this, and so are the shares of partial outputs.
    relative = 4 * largest * 2.0**-23
    sizes = {name: float(x.abs().max()) for name, x in zip(w.NAMES, w.reference(case)[:4], strict=False)}
    limits = {name: 10 * alone[name] + relative * sizes[name] for name in alone}
    _check(4, [(2, 2), (1, 1), (2, 1)], [case], BOTH, limits)
