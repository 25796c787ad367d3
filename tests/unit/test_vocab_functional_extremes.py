"""The split output layer where exponentials overflow, vanish, or lose their digits."""

import itertools

import pytest
import torch

from megatron_ext.vocab import functional as ops
from megatron_ext.vocab import functional_rows
from tests.ranks import ranks
from tests.unit import vocab_functional_cases as cases
from tests.unit.vocab_functional_cases import ALGORITHMS, SAVINGS, Case, distance

SAVING_IDS = [saving.mode for saving in SAVINGS]
EVERY = list(itertools.product(ALGORITHMS, SAVINGS))


def huge_logits() -> Case:
    """Logits between -1e4 and 1e4 without rounding: multiples of 1250, one hidden dim at a time.

    Rows [0, 40) of the vocabulary have all large logits, [40, 80) all small ones.
    """
    generator = torch.Generator().manual_seed(3)
    n, h, vocab = 64, 8, 80
    x = torch.nn.functional.one_hot(torch.arange(n) % h, h) * 1e4
    weight = torch.randint(1, 9, (vocab, h), generator=generator) / 8
    weight[40:] *= -1
    labels = torch.randint(0, vocab, (n,), generator=generator)
    labels[::7] = -100
    return Case(x, weight, labels, torch.rand(n, generator=generator)).to(torch.float32)


@ranks(1)
def test_logits_of_ten_thousand():
    case = huge_logits()
    for terms in (cases.PLAIN, ops.LossTerms(0.1, 1e-4)):
        expected = cases.dense(case, terms)
        assert expected.loss.max() > 1e4
        for (algorithm, saving), sizes in itertools.product(EVERY, ([40, 40], [80], [7, 33, 39, 1])):
            found = cases.run(case, sizes, algorithm, saving, terms)
            for mine, wanted in zip(found, expected, strict=True):
                assert distance(mine, wanted) <= 1e-6, (terms, algorithm, saving, sizes)


@pytest.mark.parametrize(("algorithm", "saving"), EVERY[3:])
def test_a_shard_far_below_has_no_share(algorithm, saving):
    case = huge_logits()
    states = [
        ops.output_pass(
            case.x,
            case.weight[lo : lo + 40],
            case.labels,
            lo,
            lo + 40,
            saving=saving,
            with_input_gradient=algorithm == "vocab-2",
            terms=cases.PLAIN,
        )
        for lo in (0, 40)
    ]
    stats = ops.merge_statistics(torch.stack([state.stats for state in states]), 80, cases.PLAIN)
    assert torch.equal(stats.share(states[0].stats), torch.ones(64))
    assert torch.equal(stats.share(states[1].stats), torch.zeros(64))


@pytest.mark.parametrize(("algorithm", "saving"), EVERY)
def test_a_shard_of_infinitely_small_logits(algorithm, saving):
    """fp16 logits below -65504 are -inf; a shard full of them adds nothing, without NaN."""
    case = cases.make_case(torch.float16, n=24, h=16, vocab=60)
    case.x = case.x.abs() + 20.0
    case.weight[20:40] = -250.0
    case.labels[:] = torch.arange(24) % 20
    assert (case.x @ case.weight.t())[:, 20:40].isneginf().all()
    expected = cases.closed_form(
        Case(case.x, torch.cat([case.weight[:20], case.weight[40:]]), case.labels, case.g)
    )
    found = cases.run(case, [20, 20, 20], algorithm, saving)
    assert (found.loss - expected.loss).abs().max() <= 1e-5
    assert distance(found.dx, expected.dx) <= 2e-3
    assert distance(found.dw[:20], expected.dw[:20]) <= 2e-3
    assert torch.equal(found.dw[20:40], torch.zeros(20, 16))


@pytest.mark.parametrize(("algorithm", "saving"), EVERY)
def test_labels_that_nobody_owns(algorithm, saving):
    """Loss relative to the maximum, and a gradient without target: as in stock."""
    case = cases.make_case(torch.float64, n=20, h=8, vocab=40)
    case.labels = torch.tensor([-100, -1, 40, 10**12] * 5)
    found = cases.run(case, [15, 25], algorithm, saving)
    logits = case.x @ case.weight.t()
    torch.testing.assert_close(found.loss, torch.logsumexp(logits, 1) - logits.amax(1))
    dx = (logits.softmax(1) * case.g.unsqueeze(1)) @ case.weight
    torch.testing.assert_close(found.dx, dx)


@pytest.mark.parametrize(("algorithm", "saving"), EVERY)
def test_masked_microbatch_has_zero_gradients(algorithm, saving):
    case = cases.make_case(torch.float32, n=20, h=8, vocab=40)
    case.g.zero_()
    found = cases.run(case, [15, 25], algorithm, saving)
    assert found.loss.isfinite().all()
    assert torch.equal(found.dx, torch.zeros(20, 8))
    assert torch.equal(found.dw, torch.zeros(40, 8))


@pytest.mark.parametrize(("algorithm", "saving"), EVERY)
def test_an_overflow_is_not_hidden(algorithm, saving):
    """An infinite logit must reach the loss and the gradients, where loss scaling looks for it."""
    case = cases.make_case(torch.float32, n=20, h=8, vocab=40)
    case.x[3] = torch.inf
    found = cases.run(case, [15, 25], algorithm, saving)
    assert found.loss.isnan().nonzero().flatten().tolist() == [3]
    assert found.dx.isnan().any(dim=1).nonzero().flatten().tolist() == [3]
    assert found.dw.isnan().all()


@pytest.mark.parametrize("saving", SAVINGS, ids=SAVING_IDS)
def test_fp16_probabilities_keep_their_digits(saving, monkeypatch):
    """One likely word, and 0.4 % shared by so many others that each one is 0 in fp16."""
    vocab = 2**17
    x = torch.tensor([[17.375, 0.0]])
    weight = torch.tensor([[0.0, 1.0]]).repeat(vocab, 1)
    weight[5] = torch.tensor([1.0, 0.0])
    case = Case(x, weight, torch.tensor([-100]), torch.ones(1)).to(torch.float16)
    exact = cases.closed_form(case.to(torch.float64)).dx
    saving = ops.Saving(saving.mode, vocab)
    scaled = distance(cases.run(case, [vocab], "vocab-2", saving).dx, exact)
    monkeypatch.setattr(functional_rows, "FP16_SCALE", 1.0)
    unscaled = distance(cases.run(case, [vocab], "vocab-2", saving).dx, exact)
    assert scaled <= 5e-4
    assert unscaled > 1.5e-3
