"""The builder against the published orders: golden strings, the closed form, and Megatron's 1F1B."""

import pytest

from megatron_ext.schedules.build import build
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lower import lower
from megatron_ext.schedules.simulate import simulate
from tests.unit import schedule_oracle as oracle

VOCAB = pytest.mark.parametrize("vocab", ["vocab-1", "vocab-2"])


def words(actions):
    return [str(action) for action in actions]


def built_row(schedule, rank):
    return oracle.in_slots(words(schedule.ranks[rank]), schedule.m)


def built_collectives(schedule):
    return oracle.with_gradients_in_c0(words(schedule.collectives), schedule.m)


@VOCAB
def test_oracle_agrees_with_itself(vocab):
    """The closed form gives the golden strings, so that a typo in one of the two is seen."""
    for rank, row in enumerate(oracle.golden_rows(vocab)):
        assert oracle.closed_form_row(4, 8, rank, vocab) == row
    assert oracle.closed_form_collectives(4, 8, vocab) == oracle.GOLDEN_COLLECTIVES[vocab].split()


def test_oracle_classes():
    assert oracle.slot_classes(4) == ["BFS", "BSF", "BSF", "BSF"]
    assert oracle.extra_slots(4) == [3, 2, 1, 0]
    assert oracle.slot_classes(8) == ["BSF", "BFS", "BSF", "BSF", "BFS", "BSF", "BSF", "BSF"]
    assert oracle.extra_slots(8) == [5, 5, 4, 3, 3, 2, 1, 0]


@VOCAB
@pytest.mark.parametrize("rank", range(4))
def test_golden_rows(vocab, rank):
    assert built_row(build(4, 8, vocab=vocab), rank) == oracle.golden_rows(vocab)[rank]


@pytest.mark.parametrize(("vocab", "items"), [("vocab-2", 33), ("vocab-1", 41)])
def test_golden_collectives(vocab, items):
    found = built_collectives(build(4, 8, vocab=vocab))
    assert found == oracle.GOLDEN_COLLECTIVES[vocab].split()
    assert len(found) == items


@VOCAB
def test_gradient_of_the_losses_travels_with_the_next_hidden_states(vocab):
    """G(j) stands right in front of C0(j+1), which the published implementation sends as one tensor."""
    sequence = words(build(4, 8, vocab=vocab).collectives)
    for j in range(7):
        assert sequence[sequence.index(f"G({j})") + 1] == f"C0({j + 1})"


def first_closed_form(p, vocab):
    """The smallest number of microbatches for which the closed form is defined."""
    return p + oracle.BARRIERS[vocab]


def sizes(vocab):
    for p in range(2, 13):
        first = first_closed_form(p, vocab)
        for m in sorted({first, first + 1, first + 4, 2 * p + 3, 3 * p + 1}):
            if m >= first:
                yield p, m


@VOCAB
def test_closed_form(vocab):
    """Equal but for the IBs behind the last slot, which wait here until their gradient is about to come."""
    for p, m in sizes(vocab):
        schedule = build(p, m, vocab=vocab)
        assert built_collectives(schedule) == oracle.closed_form_collectives(p, m, vocab), (p, m)
        for rank in range(p):
            found, expected = built_row(schedule, rank), oracle.closed_form_row(p, m, rank, vocab)
            if p <= 4:
                assert found == expected, (p, m, rank)
                continue
            last = f"S{m}" if vocab == "vocab-1" else f"S{m - 1}"
            split = expected.index(last) + 1
            assert found[:split] == expected[:split], (p, m, rank)
            assert sorted(found) == sorted(expected), (p, m, rank)
            no_inputs = [[w for w in row if w[:2] != "IB"] for row in (found, expected)]
            assert no_inputs[0] == no_inputs[1], (p, m, rank)
            returned = [w for w in found if w[:2] == "IB"]
            assert returned == [f"IB{i}" for i in range(m)], (p, m, rank)


@VOCAB
@pytest.mark.parametrize(("p", "extra"), [(4, 0), (5, 3), (8, 9), (12, 2)])
def test_makespan_is_that_of_the_closed_form(vocab, p, extra):
    """What the published order reaches: no communication time, passes of 1, 2 and 0.1."""
    m = first_closed_form(p, vocab) + extra
    costs = Costs(1.0, 2.0, output_s=0.1, output_t=0.1)
    found = simulate(lower(build(p, m, vocab=vocab)), costs).makespan
    assert found == pytest.approx(m * 3.2 + (p - 1) * 3)


def test_without_vocabulary_passes_it_is_stock_1f1b():
    for p in range(1, 13):
        for m in range(1, 3 * p + 1):
            schedule = build(p, m)
            assert schedule.collectives == ()
            for rank in range(p):
                assert words(schedule.ranks[rank]) == oracle.stock_row(p, m, rank), (p, m, rank)


def test_forward_only_without_vocabulary_passes():
    schedule = build(3, 4, forward_only=True)
    assert [words(row) for row in schedule.ranks] == [["F0", "F1", "F2", "F3"]] * 3
