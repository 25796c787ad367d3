"""The search: what it finds keeps the limit, beats every plain schedule, and can be built again."""

import pytest

from megatron_ext.schedules.build import build
from megatron_ext.schedules.check import checked
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.families import FAMILIES
from megatron_ext.schedules.lower import lower
from megatron_ext.schedules.search import Candidate, Recipe, pareto, search, trade_off
from megatron_ext.schedules.simulate import simulate
from scripts.bench.schedules import LARGE, RANKS, searched
from scripts.bench.validate_simulator import DATA, read

COSTS = Costs(forward=1.0, backward=1.9, weight=0.8, output_s=0.2, output_t=0.1)
full = pytest.mark.full


def makespan(schedule, costs=COSTS) -> float:
    return simulate(lower(schedule), costs).makespan


@pytest.mark.parametrize("limit", [3.5, 4.0, 5.0])
def test_the_best_keeps_the_limit_and_beats_the_plain_ones(limit):
    found = search(4, 24, COSTS, vocab="vocab-2", limit=limit)
    best = found[0]
    assert [c.makespan for c in found] == sorted(c.makespan for c in found)
    assert all(c.memory <= limit for c in found)
    again = best.recipe.build(4, 24, "vocab-2", COSTS)
    checked(again)
    assert makespan(again) == best.makespan
    assert max(again.in_flight(rank) for rank in range(4)) / again.chunks == best.memory
    for name in FAMILIES:
        plain = build(4, 24, pipeline=name, vocab="vocab-2")
        if max(plain.in_flight(rank) for rank in range(4)) / plain.chunks <= limit:
            assert best.makespan <= makespan(plain) * (1 + 1e-9), name


def test_more_memory_is_never_slower_and_the_trade_off_says_so():
    times = [search(4, 16, COSTS, limit=limit)[0].makespan for limit in (2.5, 3.0, 4.0)]
    assert times == sorted(times, reverse=True)
    found = search(4, 16, COSTS, limit=4.0)
    front = pareto(found)
    assert [c.memory for c in front] == sorted({c.memory for c in front})
    lines = trade_off(found).splitlines()
    assert len(lines) == len(front) + 1
    assert str(front[-1].recipe) in lines[-1]


def test_pareto_drops_what_is_beaten():
    def candidate(memory, time):
        return Candidate(Recipe("1f1b"), time, 1.0, 0.0, memory)

    a, b, c, d = candidate(2, 9.0), candidate(3, 9.0), candidate(3, 8.0), candidate(5, 8.5)
    assert pareto([d, c, b, a]) == [a, c]


def test_extra_memory_is_used_and_checked():
    plain = build(4, 24, pipeline="v-half")
    more = build(4, 24, pipeline="v-half", extra=(1, 1))
    checked(more)
    assert {more.in_flight(rank) - plain.in_flight(rank) for rank in range(4)} <= {1, 2}
    assert more.cap(0) == plain.cap(0) + 2
    assert makespan(more, Costs()) <= makespan(plain, Costs())


def test_nothing_fits():
    with pytest.raises(ValueError, match=r"holds only 1 microbatches: the least is 2.5"):
        search(4, 8, COSTS, limit=1.0)


def test_interlaced_is_only_searched_in_1f1b():
    found = search(4, 8, COSTS, vocab="interlaced", limit=6.0)
    assert {c.recipe.pipeline for c in found} == {"1f1b"}


# The recipes that the search finds for rows of the table; the searches themselves are in the whole matrix.
KNOWN = {
    (2048, 256000): Recipe("v-half", 2, (3, 1)),
    (4096, 256000): Recipe("v-half", 2),
}


@pytest.mark.parametrize(("sequence", "vocabulary"), KNOWN)
def test_a100_within_two_percent_of_compute(sequence, vocabulary):
    run = next(
        r for r in read(DATA) if (r.method, r.seq_length, r.vocab) == ("vocab-2", sequence, vocabulary)
    )
    schedule = KNOWN[sequence, vocabulary].build(RANKS, 128, "vocab-2", run.costs)
    checked(schedule)
    compute = max(
        128 * (run.costs.of("F", r) + run.costs.of("B", r))
        + 128 * sum(run.costs.of(kind, r) for kind in ("S", "T", "IF", "IB"))
        for r in range(RANKS)
    )
    assert max(schedule.in_flight(rank) for rank in range(RANKS)) <= 2 * RANKS
    assert compute < makespan(schedule, run.costs) <= 1.02 * compute


SIZES = sorted({(run.seq_length, run.vocab) for run in read(DATA)})


@full
@pytest.mark.parametrize(("sequence", "vocabulary"), SIZES)
def test_a100_rows(sequence, vocabulary):
    """The better of vocab-1 and vocab-2 is within 2 % of compute, within the limit."""
    rows = [
        searched(run)
        for run in read(DATA)
        if (run.seq_length, run.vocab) == (sequence, vocabulary) and run.mode in ("vocab-1", "vocab-2")
    ]
    assert len(rows) == 2
    assert all(row["memory"] <= (RANKS if vocabulary >= LARGE else RANKS + 1) for row in rows)
    assert min(row["best over compute"] for row in rows) <= 1.02
