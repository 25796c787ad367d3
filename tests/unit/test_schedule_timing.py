"""Makespans and bubbles of schedules: the closed formula, and orders made for measured costs."""

from random import Random

import pytest

from megatron_ext.schedules.action import MODES
from megatron_ext.schedules.build import LIST_ORDERS, build, build_listed
from megatron_ext.schedules.check import check, checked
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lower import lower
from megatron_ext.schedules.simulate import simulate
from megatron_ext.schedules.squeeze import by_block, by_kind

VOCAB = pytest.mark.parametrize("vocab", ["vocab-1", "vocab-2"])
RATIOS = (1.5, 1.8, 2.0, 2.2, 2.6)  # of a backward to a forward pass


def costs(backward=2.0, vocabulary=0.6):
    """Forward passes take 1; S and T share `vocabulary`."""
    return Costs(1.0, backward, output_s=vocabulary / 2, output_t=vocabulary / 2)


def formula(p, m, backward=2.0, vocabulary=0.6):
    """m passes of every kind, and p - 1 forward and backward passes to fill and drain the pipeline."""
    return m * (1 + backward + vocabulary) + (p - 1) * (1 + backward)


def timeline(schedule, its_costs):
    return simulate(lower(schedule), its_costs)


@VOCAB
@pytest.mark.parametrize(
    ("p", "m", "vocabulary", "makespan", "bubble"),
    [(4, 8, 0.3, 35.4, 25.42), (8, 128, 0.6, 481.8, 4.36), (8, 32, 1.2, 155.4, 13.51)],
)
def test_published_makespans(vocab, p, m, vocabulary, makespan, bubble):
    found = timeline(build(p, m, vocab=vocab), costs(vocabulary=vocabulary))
    assert found.makespan == pytest.approx(makespan, abs=1e-9)
    for rank in range(p):
        assert round(100 * found.bubble(rank), 2) == bubble


@VOCAB
@pytest.mark.parametrize("backward", [2.0, 2.2, 2.6])
@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_formula_where_backward_passes_take_long(vocab, backward, p):
    """Exact for the static order if a backward pass takes at least twice as long as a forward pass."""
    m = 3 * p + 2
    found = timeline(build(p, m, vocab=vocab), costs(backward)).makespan
    assert found == pytest.approx(formula(p, m, backward), abs=1e-9)


@VOCAB
def test_overlap_is_never_slower(vocab):
    """Blocking launches wait for the other rank even where communication takes no time."""
    schedule = build(4, 16, vocab=vocab)
    early, blocking = (simulate(lower(schedule, overlap=way), costs()).makespan for way in (True, False))
    assert early == pytest.approx(formula(4, 16), abs=1e-9)
    assert early < blocking


def test_never_slower_than_even_1f1b():
    """1F1B with the vocabulary passes spread over all ranks as if they were layers."""
    for p, m in ((4, 8), (8, 32)):
        even = simulate(lower(build(p, m)), Costs(1.2, 2.4)).makespan
        assert even == pytest.approx((m + p - 1) * 3.6)
        assert timeline(build(p, m, vocab="vocab-2"), costs()).makespan <= even


def test_gain_over_an_unbalanced_pipeline():
    """All of the output layer on the last rank of 8: its passes take p times as long as a shard's."""
    p, m, vocabulary = 8, 128, 0.6
    last = (1 + p * vocabulary / 3, 2 + 2 * p * vocabulary / 3)
    unbalanced = Costs((1.0,) * (p - 1) + last[:1], (2.0,) * (p - 1) + last[1:])
    baseline = simulate(lower(build(p, m)), unbalanced).makespan
    ours = timeline(build(p, m, vocab="vocab-2"), costs(vocabulary=vocabulary)).makespan
    assert baseline / ours == pytest.approx(2.12, abs=0.03)


@VOCAB
@pytest.mark.parametrize(
    ("p", "backward"),
    [
        *((4, backward) for backward in RATIOS),
        (8, 1.5),
        *(pytest.param(8, backward, marks=pytest.mark.full) for backward in RATIOS[1:]),
    ],
)
def test_measured_costs_reach_the_formula(vocab, p, backward):
    """Within 3 %, without more microbatches in flight."""
    m = 4 * p
    measured = costs(backward)
    static = build(p, m, vocab=vocab)
    listed = build_listed(p, m, vocab=vocab, costs=measured)
    check(lower(listed))
    assert [listed.in_flight(r) <= static.cap(r) for r in range(p)] == [True] * p
    assert listed.in_flight(0) <= p + (1 if vocab == "vocab-2" else 2)
    found = timeline(listed, measured).makespan
    assert found <= 1.03 * formula(p, m, backward)
    assert found <= timeline(static, measured).makespan


@VOCAB
def test_static_order_loses_where_backward_passes_are_short(vocab):
    """Why measured costs matter: 8 ranks, and backward passes of 1.5 forward passes."""
    p, m = 8, 32
    static = timeline(build(p, m, vocab=vocab), costs(1.5)).makespan
    assert static > 1.10 * formula(p, m, 1.5)
    listed = timeline(build_listed(p, m, vocab=vocab, costs=costs(1.5)), costs(1.5)).makespan
    assert listed < static / 1.07


def test_order_for_unequal_ranks():
    """Costs by rank, and a last rank with short passes: no worse than the static order."""
    uneven = Costs((1.0, 1.0, 1.0, 0.5), (1.6, 1.6, 1.6, 0.8), output_s=0.2, output_t=0.2, loss=0.05)
    listed = build_listed(4, 16, vocab="vocab-2", costs=uneven)
    check(lower(listed))
    assert timeline(listed, uneven).makespan <= timeline(build(4, 16, vocab="vocab-2"), uneven).makespan
    assert listed.costs in (uneven, Costs())


UNEVEN = (
    Costs((1.0, 1.0, 1.0, 0.5), (1.6, 1.6, 1.6, 0.8), output_s=0.2, output_t=0.2, loss=0.05),
    Costs((0.5, 1.0, 2.0, 1.0), (0.9, 2.1, 2.5, 3.0), output_s=0.7, output_t=0.1, loss=0.3),
    Costs(1.0, (4.0, 3.0, 2.0, 1.0), output_s=(0.1, 0.9, 0.1, 0.2), output_t=1.5, output_u=0.4, loss=2.0),
    Costs(1.0, 0.3, output_s=0.5, output_t=0.5, input_forward=0.4, input_backward=0.6),
)


@pytest.mark.parametrize("costs", UNEVEN, ids=range(len(UNEVEN)))
@pytest.mark.parametrize("vocab", ["off", "vocab-1", "vocab-2", "naive", "interlaced"])
@pytest.mark.parametrize("order", [None, *LIST_ORDERS], ids=lambda order: "-".join(order or ("block",)))
def test_every_order_for_any_costs_is_valid(costs, vocab, order):
    """Ranks may run slots and passes in different orders, and rank 0 places the input passes of all."""
    priority = by_kind(order) if order else by_block
    for m in (3, 16):
        schedule = build(4, m, vocab=vocab, costs=costs, priority=priority)
        for overlap in (False, True):
            checked(schedule, overlap=overlap)


def any_costs(random, p):
    """Pass times from nothing to twice a forward pass, for all ranks or one by one."""

    def times(low, high):
        if random.random() < 0.3:
            return tuple(random.uniform(low, high) for _ in range(p))
        return random.choice([low, high, random.uniform(low, high)])

    return Costs(times(0.3, 2), times(0.3, 4), *(times(0, 1) for _ in range(6)))


def verify_any_costs(seed):
    random = Random(seed)
    p, m = random.randint(1, 7), random.randint(1, 25)
    vocab, order = random.choice(MODES), random.choice([None, *LIST_ORDERS])
    schedule = build(
        p,
        m,
        vocab=vocab,
        costs=any_costs(random, p),
        forward_only=random.random() < 0.2,
        priority=by_kind(order) if order else by_block,
    )
    for overlap in (False, True):
        checked(schedule, overlap=overlap)


def test_random_costs():
    for seed in range(60):
        verify_any_costs(seed)


@pytest.mark.full
@pytest.mark.parametrize("block", range(10))
def test_many_random_costs(block):
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        verify_any_costs(seed)


# Found by such a search, with the order B, F, slot.
FOUND = (
    (
        "naive",
        5,
        17,
        False,
        Costs(
            (1.5594, 0.5243, 1.9128, 0.5350, 1.5056),
            (2.26100, 2.10701, 3.75484, 0.72723, 0.45792),
            output_s=(0.33427, 0.53887, 0.74322, 0.03334, 0.21746),
            output_u=1.0,
            output_t=(0.14535, 0.23114, 0.05851, 0.54356, 0.83769),
            loss=1.0,
        ),
    ),
    (
        "vocab-1",
        3,
        9,
        True,
        Costs((1.62, 1.122, 1.742), 4.0, output_s=1.0, output_t=(0.04, 0.67, 0.401), loss=1.0),
    ),
)


@pytest.mark.parametrize(("vocab", "p", "m", "forward_only", "costs"), FOUND, ids=["first inputs", "slots"])
def test_first_inputs_and_slots_wait_for_no_later_ones(vocab, p, m, forward_only, costs):
    """The first input passes come before what waits for another rank's slot; slots follow each other."""
    order = by_kind(("B", "F", "slot"))
    checked(build(p, m, vocab=vocab, costs=costs, forward_only=forward_only, priority=order))


@pytest.mark.parametrize("vocab", ["naive", "interlaced", "off"])
def test_listed_orders_of_the_other_modes_are_valid(vocab):
    listed = build_listed(4, 9, vocab=vocab, costs=costs(1.7))
    for overlap in (False, True):
        check(lower(listed, overlap=overlap))


def test_listed_forward_only():
    listed = build_listed(3, 5, vocab="vocab-2", costs=costs(1.7), forward_only=True)
    assert listed.forward_only
    check(lower(listed))


@VOCAB
def test_latency_costs_what_a_pipeline_costs(vocab):
    """0.1 forward passes per transfer: some loss, as in any 1F1B, but less than 10 %."""
    p, m = 8, 64
    slow = Costs(
        1.0,
        2.0,
        output_s=0.3,
        output_t=0.3,
        comm=dict.fromkeys(("p2p", "e", "g", "C0", "C1", "C2", "G"), 0.1),
    )
    found = timeline(build(p, m, vocab=vocab), slow).makespan
    assert formula(p, m) < found < 1.10 * formula(p, m)
