"""What holds for every schedule: counts, microbatches in flight, one collective order, and no deadlock."""

import time
from collections import Counter

import pytest

from megatron_ext.schedules.action import COLLECTIVES, MODES
from megatron_ext.schedules.build import build
from megatron_ext.schedules.check import check
from megatron_ext.schedules.lower import lower
from tests.unit import schedule_rendezvous

BARRIERS = {"off": 0, "vocab-2": 1, "vocab-1": 2, "naive": 3}
VOCAB = pytest.mark.parametrize("vocab", MODES)
FORWARD_ONLY = pytest.mark.parametrize("forward_only", [False, True], ids=["training", "forward-only"])


def sizes():
    """Small ones, and those around the numbers at which warm-up and cool-down change."""
    for p in (1, 2, 3, 4, 5, 8):
        for m in sorted({1, 2, p, p + 1, p + 3, 2 * p + 1}):
            yield p, m


def words(rows):
    return [[str(action) for action in row] for row in rows]


def caps(p, m, vocab):
    """Microbatches in flight by rank."""
    if vocab == "interlaced":
        return [min(3 * p // 2 - rank, m) for rank in range(p)]
    return [min(p - rank + BARRIERS[vocab], m) for rank in range(p)]


def in_flight(row):
    now = most = 0
    for word in row:
        now += (word[0] == "F") - (word[0] == "B")
        most = max(most, now)
    return most


def counts(p, m, rank, vocab, forward_only):
    """How often each pass runs on a rank."""
    kinds = {"F"} if forward_only else {"F", "B"}
    if vocab != "off":
        kinds |= {"IF", "S"} if forward_only else {"IF", "IB", "S", "T"}
        kinds |= {"U"} if vocab == "naive" else set()
        kinds |= {"L"} if rank == p - 1 else set()
    return dict.fromkeys(kinds, m)


def collective_counts(m, vocab, forward_only):
    kinds = {"off": (), "vocab-2": ("C1",), "naive": ("C1", "C2", "C3")}.get(vocab, ("C1", "C2"))
    after_t = {"vocab-1": "C2", "interlaced": "C2", "naive": "C3"}.get(vocab)
    if forward_only:
        kinds = tuple(kind for kind in kinds if kind != after_t)
    if vocab != "off":
        kinds += ("e", "C0") if forward_only else ("e", "C0", "G", "g")
    return dict.fromkeys(kinds, m)


def verify(p, m, vocab, forward_only, overlaps=(False, True)):
    """All properties of one schedule and of its programs, with blocking communication and with overlap."""
    where = (p, m, vocab, forward_only)
    schedule = build(p, m, vocab=vocab, forward_only=forward_only)
    assert Counter(a.kind for a in schedule.collectives) == collective_counts(m, vocab, forward_only), where
    for rank, row in enumerate(schedule.ranks):
        assert len(set(row)) == len(row), where
        assert Counter(a.kind for a in row) == counts(p, m, rank, vocab, forward_only), where
        if forward_only:
            assert schedule.cap(rank) == m, where
            continue
        assert schedule.cap(rank) == caps(p, m, vocab)[rank], where
        held = in_flight(words([row])[0])
        assert schedule.in_flight(rank) == held <= caps(p, m, vocab)[rank], where
        if vocab != "interlaced":
            assert held == caps(p, m, vocab)[rank], where
    for overlap in overlaps:
        program = lower(schedule, overlap=overlap)
        if len(overlaps) > 1:
            check(program)
        for rank, row in enumerate(program.ranks):
            # The passes are those of the schedule, in its order; so are the collectives.
            passes = set(schedule.ranks[rank])
            assert tuple(a for a in row if a in passes) == schedule.ranks[rank], where
            assert tuple(a for a in row if a.kind in COLLECTIVES) == schedule.collectives, where
        if not overlap:
            events = schedule_rendezvous.run(words(program.ranks), vocab)
            transfers = (p - 1) * m * (1 if forward_only else 2)
            assert events == len(schedule.collectives) + transfers, where


@VOCAB
@FORWARD_ONLY
def test_every_schedule(vocab, forward_only):
    for p, m in sizes():
        verify(p, m, vocab, forward_only)


@pytest.mark.full
@VOCAB
@FORWARD_ONLY
@pytest.mark.parametrize("p", range(1, 13))
def test_every_schedule_of_the_whole_matrix(p, vocab, forward_only):
    """Counts, order and rendezvous of every number of microbatches; with overlap and the whole check of those
    around which warm-up and cool-down change."""
    whole = {1, 2, *range(p - 1, p + 5), 2 * p - 1, 2 * p + 1, 3 * p, 4 * p + 7}
    for m in range(1, 4 * p + 8):
        verify(p, m, vocab, forward_only, *([] if m in whole else [(False,)]))


@pytest.mark.parametrize(
    ("p", "vocab", "expected"),
    [
        (4, "off", [4, 3, 2, 1]),
        (4, "vocab-2", [5, 4, 3, 2]),
        (4, "vocab-1", [6, 5, 4, 3]),
        (4, "naive", [7, 6, 5, 4]),
        (4, "interlaced", [6, 5, 4, 3]),
        (8, "off", [8, 7, 6, 5, 4, 3, 2, 1]),
        (8, "vocab-2", [9, 8, 7, 6, 5, 4, 3, 2]),
        (8, "vocab-1", [10, 9, 8, 7, 6, 5, 4, 3]),
        (8, "interlaced", [12, 11, 10, 9, 8, 7, 6, 5]),
    ],
)
def test_microbatches_in_flight(p, vocab, expected):
    """The published numbers: activations of p, p + 1, p + 2 and 1.5 p microbatches on the first rank."""
    schedule = build(p, 2 * p if p == 4 else 3 * p, vocab=vocab)
    assert [schedule.in_flight(rank) for rank in range(p)] == expected


@pytest.mark.parametrize("p", [3, 5, 7])
def test_interlaced_on_an_odd_number_of_ranks(p):
    schedule = build(p, 4 * p, vocab="interlaced")
    assert [schedule.in_flight(rank) for rank in range(p)] == [3 * p // 2 - rank for rank in range(p)]


@pytest.mark.parametrize("vocab", ["vocab-1", "vocab-2", "naive"])
def test_fewer_microbatches_than_ranks_need_no_more_than_they_have(vocab):
    schedule = build(8, 3, vocab=vocab)
    assert [schedule.in_flight(rank) for rank in range(8)] == [
        min(8 - r + BARRIERS[vocab], 3) for r in range(8)
    ]


def test_overlap_moves_launches_ahead_of_passes():
    """Every launch comes at least as early as without overlap, and receivers of C0 come before a pass."""
    schedule = build(4, 8, vocab="vocab-2")
    blocking, early = (lower(schedule, overlap=overlap) for overlap in (False, True))

    def passes_before(row, action):
        return sum(a.kind in ("F", "B") for a in row[: row.index(action)])

    moved = 0
    for rank, row in enumerate(blocking.ranks):
        for action in row:
            if action not in schedule.ranks[rank]:
                difference = passes_before(row, action) - passes_before(early.ranks[rank], action)
                assert difference >= 0, (rank, action)
                moved += difference
    assert moved > 0


def test_rendezvous_checker_can_fail():
    rows = words(lower(build(2, 2, vocab="vocab-2"), overlap=False).ranks)
    assert schedule_rendezvous.run(rows, "vocab-2") == 2 * 5 + 4
    swapped = [list(row) for row in rows]
    first, second = swapped[1].index("C0(0)"), swapped[1].index("C0(1)")
    swapped[1][first], swapped[1][second] = "C0(1)", "C0(0)"
    with pytest.raises(schedule_rendezvous.Violation, match=r"stuck: rank 0 at C0\(0\), rank 1 at C0\(1\)"):
        schedule_rendezvous.run(swapped, "vocab-2")
    early = [list(row) for row in rows]
    early[0].remove("S0")
    early[0].insert(0, "S0")
    with pytest.raises(schedule_rendezvous.Violation, match=r"rank 0: S0 without C0\(0\)"):
        schedule_rendezvous.run(early, "vocab-2")


def test_a_large_schedule_is_made_and_checked_quickly():
    """16 ranks and 128 microbatches, in processor time."""
    start = time.process_time()
    check(lower(build(16, 128, vocab="vocab-2")))
    assert time.process_time() - start < 5.0
