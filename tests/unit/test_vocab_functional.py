"""The split output layer against stock's cross entropy and a dense fp64 reference.

Cases that differentiate or communicate run in a forked rank (tests/ranks.py).
"""

import itertools

import pytest
import torch

from megatron_ext.vocab import functional as ops
from tests.ranks import ranks
from tests.unit import vocab_functional_cases as cases
from tests.unit.vocab_functional_cases import ALGORITHMS, EVEN, SAVINGS, UNEVEN, distance, make_case

SPLITS = (EVEN, UNEVEN, [2048])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@ranks(1)
def test_fp64_equals_the_dense_layer(algorithm):
    case = make_case(torch.float64)
    expected = cases.dense(case)
    for sizes, saving in itertools.product(SPLITS, SAVINGS):
        for found, wanted in zip(cases.run(case, sizes, algorithm, saving), expected, strict=True):
            assert distance(found, wanted) <= 1e-14, (sizes, saving)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@ranks(1)
def test_fp32_equals_stock(algorithm):
    case = make_case(torch.float32)
    expected = cases.stock(case)
    for sizes, saving in itertools.product(SPLITS, SAVINGS):
        found = cases.run(case, sizes, algorithm, saving)
        assert (found.loss - expected.loss).abs().max() <= 5e-6, (sizes, saving)
        assert distance(found.dx, expected.dx) <= 1e-6, (sizes, saving)
        assert distance(found.dw, expected.dw) <= 1e-6, (sizes, saving)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@ranks(1)
def test_16_bits_are_as_exact_as_stock(algorithm, dtype):
    case = make_case(dtype)
    expected, exact = cases.stock(case), cases.dense(case)
    splits = SPLITS if dtype == torch.bfloat16 else [UNEVEN]  # fp16 products are slow on CPUs
    for sizes, saving in itertools.product(splits, SAVINGS):
        found = cases.run(case, sizes, algorithm, saving)
        assert found.dw.dtype == torch.float32  # main_grad's type, not the model's
        assert (found.loss - expected.loss).abs().max() <= 5e-6, (sizes, saving)
        assert distance(found.dx, expected.dx) <= 6e-3, (sizes, saving)
        assert distance(found.dx, exact.dx) <= 1.3 * distance(expected.dx, exact.dx), (sizes, saving)
        assert distance(found.dw, expected.dw) <= 1e-3, (sizes, saving)


@ranks(1)
def test_one_shard_gives_stocks_bits():
    for saving in (ops.Saving("softmax"), ops.Saving("logits", 300), ops.Saving("logits")):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            case = make_case(dtype)
            expected = cases.closed_form(case)
            if dtype != torch.float64:  # stock computes losses in fp32 always
                for mine, wanted in zip(expected, cases.stock(case), strict=True):
                    assert torch.equal(mine, wanted.to(mine.dtype)), "closed_form is not what stock computes"
            for algorithm in ALGORITHMS:
                found = cases.run(case, [2048], algorithm, saving)
                assert torch.equal(found.loss, expected.loss), (saving, dtype, algorithm)
                assert torch.equal(found.dw, expected.dw), (saving, dtype, algorithm)
                if algorithm != "vocab-2":  # there dX is g times a sum, in stock a sum over g times its terms
                    assert torch.equal(found.dx, expected.dx), (saving, dtype, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@ranks(1)
def test_label_smoothing_and_z_loss(algorithm):
    case = make_case(torch.float32)
    for smoothing, z_loss in ((0.1, 0.0), (0.0, 1e-4), (0.1, 1e-4), (0.3, 0.5)):
        terms = ops.LossTerms(smoothing, z_loss)
        expected = cases.dense(case, terms)
        for sizes, saving in itertools.product((UNEVEN, [2048]), SAVINGS):
            found = cases.run(case, sizes, algorithm, saving, terms)
            for mine, wanted in zip(found, expected, strict=True):
                assert distance(mine, wanted) <= 1e-6, (terms, sizes, saving)


@ranks(1)
def test_label_smoothing_is_stocks():
    case = make_case(torch.float32)
    for found, expected in zip(
        cases.run(case, UNEVEN, "vocab-2", terms=ops.LossTerms(0.1)), cases.stock(case, 0.1), strict=True
    ):
        assert distance(found, expected) <= 1e-6


def test_any_shapes_and_splits():
    """Shards of one row, chunks that divide nothing, a single token, more hidden dims than tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for trial in range(60):
        n, h, shards = draw(1, 20), draw(1, 12), draw(1, 6)
        sizes = [draw(1, 40) for _ in range(shards)]
        saving = ops.Saving(("softmax", "logits", "none")[trial % 3], draw(1, 50))
        case = make_case(torch.float64, n, h, sum(sizes), seed=trial)
        case.g[-1] = 0.5  # not all zero
        expected = cases.closed_form(case)
        for algorithm in ALGORITHMS:
            for found, wanted in zip(cases.run(case, sizes, algorithm, saving), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("saving", SAVINGS, ids=lambda saving: saving.mode)
def test_gradients_add_up_over_microbatches(saving):
    first, second = (make_case(torch.float64, 30, 8, 50, seed) for seed in (1, 2))
    second.weight = first.weight
    main_grad = torch.zeros_like(first.weight)
    for case in (first, second):
        state = ops.output_pass(
            case.x,
            case.weight,
            case.labels,
            0,
            50,
            saving=saving,
            with_input_gradient=False,
            terms=cases.PLAIN,
        )
        stats = ops.merge_statistics(state.stats.unsqueeze(0), 50, cases.PLAIN)
        ops.output_gradients(
            state,
            case.weight,
            stats,
            case.g,
            cases.PLAIN,
            lambda *parts: ops.accumulate_weight_gradient(main_grad, *parts, fused=False),
            with_input_gradient=False,
        )
    assert distance(main_grad, cases.closed_form(first).dw + cases.closed_form(second).dw) <= 1e-14


@pytest.mark.parametrize("saving", SAVINGS, ids=lambda saving: saving.mode)
def test_frozen_weight(saving):
    case = make_case(torch.float64, 30, 8, 50)
    state = ops.output_pass(
        case.x, case.weight, case.labels, 0, 50, saving=saving, with_input_gradient=False, terms=cases.PLAIN
    )
    stats = ops.merge_statistics(state.stats.unsqueeze(0), 50, cases.PLAIN)
    dx = ops.output_gradients(state, case.weight, stats, case.g, cases.PLAIN, None, with_input_gradient=True)
    assert distance(dx, cases.closed_form(case).dx) <= 1e-14


@pytest.mark.parametrize("saving", SAVINGS, ids=lambda saving: saving.mode)
def test_parameters_build_no_graph(saving):
    """Passes also run in threads, where autograd is on."""
    case = make_case(torch.float32, 30, 8, 50)
    case.weight = torch.nn.Parameter(case.weight)
    assert torch.is_grad_enabled()
    for algorithm in ALGORITHMS:
        assert not any(tensor.requires_grad for tensor in cases.run(case, [20, 30], algorithm, saving))


def test_states_are_used_once():
    case = make_case(torch.float32, 30, 8, 50)
    state = ops.output_pass(
        case.x,
        case.weight,
        case.labels,
        0,
        50,
        saving=SAVINGS[0],
        with_input_gradient=True,
        terms=cases.PLAIN,
    )
    stats = ops.merge_statistics(state.stats.unsqueeze(0), 50, cases.PLAIN)
    ops.input_gradient_part(state, case.weight, stats, cases.PLAIN)
    with pytest.raises(AssertionError, match="taken before"):
        ops.input_gradient_part(state, case.weight, stats, cases.PLAIN)
    arguments = (state, case.weight, stats, case.g, cases.PLAIN, None)
    ops.output_gradients(*arguments, with_input_gradient=False)
    with pytest.raises(AssertionError, match="computed before"):
        ops.output_gradients(*arguments, with_input_gradient=False)


def test_the_range_must_be_that_of_the_weight():
    case = make_case(torch.float32, 30, 8, 50)
    for make in (ops.output_max, lambda *a, **k: ops.output_pass(*a, with_input_gradient=False, **k)):
        with pytest.raises(AssertionError, match=r"50 rows of weight for the range \[10, 50\)"):
            make(case.x, case.weight, case.labels, 10, 50, saving=SAVINGS[0], terms=cases.PLAIN)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ops.LossTerms(label_smoothing=1.0),
            "label smoothing is 1.0, but must be at least 0 and below 1",
        ),
        (lambda: ops.LossTerms(label_smoothing=-0.1), "label smoothing is -0.1"),
        (lambda: ops.LossTerms(z_loss=-1.0), "the z-loss coefficient is -1.0, but must not be negative"),
        (lambda: ops.Saving("some"), "cannot save 'some': choose softmax, logits or none"),
        (lambda: ops.Saving("none", 0), "a chunk of 0 vocabulary rows is empty"),
    ],
)
def test_values_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()
