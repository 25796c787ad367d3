"""Timelines worked out by hand: passes, transfers, the order on lanes, and what blocking costs."""

import pytest

from megatron_ext.schedules.action import parse_row
from megatron_ext.schedules.build import Schedule, build
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lower import Program, lower
from megatron_ext.schedules.simulate import Deadlock, simulate

SLOW = Costs(1.0, 2.0, comm={"p2p": 0.5})


def by_hand(vocab, m, *rows, overlap=True, forward_only=True):
    """A program from lists of words; simulation reads only these lists and who needs what."""
    rows = tuple(parse_row(row) for row in rows)
    schedule = Schedule(len(rows), m, "1f1b", vocab, forward_only, rows, ())
    return Program(schedule, overlap, rows)


def spans(timeline, rank, lane):
    """{action: (start, end)} of one lane."""
    return {
        str(span.action): (pytest.approx(span.start), pytest.approx(span.end))
        for span in timeline.spans
        if (span.rank, span.lane) == (rank, lane)
    }


def test_stock_with_slow_transfers():
    """2 ranks, 2 microbatches: transfers run beside passes where they can."""
    found = simulate(lower(build(2, 2)), SLOW)
    assert spans(found, 0, "compute") == {"F0": (0, 1), "F1": (1, 2), "B0": (5, 7), "B1": (8, 10)}
    assert spans(found, 1, "compute") == {
        "F0": (1.5, 2.5),
        "B0": (2.5, 4.5),
        "F1": (4.5, 5.5),
        "B1": (5.5, 7.5),
    }
    assert spans(found, 0, "p2p-f") == {"SF(0)": (1, 1.5), "SF(1)": (2, 2.5)}
    assert spans(found, 1, "p2p-f") == {"RF(0)": (1, 1.5), "RF(1)": (2, 2.5)}
    assert spans(found, 1, "p2p-b") == {"SB(0)": (4.5, 5), "SB(1)": (7.5, 8)}
    assert spans(found, 0, "p2p-b") == {"RB(0)": (4.5, 5), "RB(1)": (7.5, 8)}
    assert spans(found, 0, "comm") == {}
    assert found.makespan == 10
    assert [found.busy(rank) for rank in range(2)] == [6, 6]
    assert [found.bubble(rank) for rank in range(2)] == [pytest.approx(0.4)] * 2


def test_stock_with_blocking_transfers():
    """A launch holds its rank until the transfer is over, which cannot begin before both sides launch it."""
    found = simulate(lower(build(2, 2), overlap=False), SLOW)
    assert spans(found, 0, "compute") == {"F0": (0, 1), "F1": (1.5, 2.5), "B0": (5.5, 7.5), "B1": (9, 11)}
    assert spans(found, 1, "compute") == {"F0": (1.5, 2.5), "B0": (3, 5), "F1": (5.5, 6.5), "B1": (6.5, 8.5)}
    assert spans(found, 0, "p2p-f") == {"SF(0)": (1, 1.5), "SF(1)": (2.5, 3)}
    assert spans(found, 0, "p2p-b") == {"RB(0)": (5, 5.5), "RB(1)": (8.5, 9)}
    assert found.makespan == 11


def test_microbatches_in_flight_over_time():
    """Up when a forward pass starts, down when its backward pass ends."""
    found = simulate(lower(build(2, 2)), SLOW)
    assert found.in_flight(0) == [(0, 1), (1, 2), (7, 1), (10, 0)]
    assert found.in_flight(1) == [(1.5, 1), (4.5, 0), (4.5, 1), (7.5, 0)]
    assert [found.in_flight_peak(rank) for rank in range(2)] == [2, 1]


VOCAB_COSTS = Costs(
    1.0,
    2.0,
    output_s=0.4,
    output_t=0.6,
    loss=0.1,
    input_forward=0.1,
    input_backward=0.2,
    comm={"p2p": 0.5, "e": 0.2, "g": 0.3, "C0": 0.25, "C1": 0.15, "G": 0.05},
)


def test_vocabulary_passes_and_all_collectives():
    found = simulate(lower(build(2, 2, vocab="vocab-2")), VOCAB_COSTS)
    collectives = {
        "e(0)": (0.1, 0.3),
        "e(1)": (0.3, 0.5),  # launched at 0.2, behind e(0)
        "C0(0)": (2.8, 3.05),
        "C1(0)": (3.45, 3.6),
        "G(0)": (4.55, 4.6),
        "C0(1)": (4.6, 4.85),
        "C1(1)": (7.55, 7.7),
        "g(0)": (9.05, 9.35),
        "g(1)": (12.3, 12.6),
        "G(1)": (12.6, 12.65),
    }
    for rank in range(2):
        assert spans(found, rank, "comm") == collectives
    assert spans(found, 0, "compute") == {
        "IF0": (0, 0.1),
        "IF1": (0.1, 0.2),
        "F0": (0.3, 1.3),
        "F1": (1.3, 2.3),
        "S0": (3.05, 3.45),
        "T0": (4.6, 5.2),
        "S1": (5.2, 5.6),
        "B0": (7.05, 9.05),
        "B1": (10.3, 12.3),
        "IB0": (12.3, 12.5),
        "IB1": (12.6, 12.8),
        "T1": (12.8, 13.4),
    }
    assert spans(found, 1, "compute") == {
        "IF0": (0, 0.1),
        "IF1": (0.1, 0.2),
        "F0": (1.8, 2.8),
        "S0": (3.05, 3.45),
        "F1": (3.45, 4.45),
        "L0": (4.45, 4.55),
        "B0": (4.55, 6.55),
        "T0": (6.55, 7.15),
        "S1": (7.15, 7.55),
        "L1": (7.7, 7.8),
        "B1": (7.8, 9.8),
        "IB0": (9.8, 10.0),
        "IB1": (12.6, 12.8),
        "T1": (12.8, 13.4),
    }
    assert found.makespan == pytest.approx(13.4)
    assert found.busy(0) == pytest.approx(2 * (1 + 2 + 0.4 + 0.6 + 0.1 + 0.2))
    assert found.busy(1) == pytest.approx(2 * (1 + 2 + 0.4 + 0.6 + 0.1 + 0.2 + 0.1))
    assert found.bubble(1) == pytest.approx(1 - 8.8 / 13.4)


def test_a_slow_collective_delays_the_next_one():
    """C0(1) is launched at 2.75 and waits for C1(0), which holds the lane until 6.75."""
    row = "IF0 IF1 e(0) e(1) F0 C0(0) S0 C1(0) F1 C0(1) S1 C1(1) L0 L1"
    costs = Costs(1.0, 2.0, output_s=0.5, comm={"C0": 0.25, "C1": 5.0})
    found = simulate(by_hand("vocab-1", 2, row), costs)
    assert spans(found, 0, "comm") == {
        "e(0)": (0, 0),
        "e(1)": (0, 0),
        "C0(0)": (1, 1.25),
        "C1(0)": (1.75, 6.75),
        "C0(1)": (6.75, 7),
        "C1(1)": (7.5, 12.5),
    }
    passes = spans(found, 0, "compute")
    assert passes["F1"] == (1.75, 2.75)
    assert passes["S1"] == (7, 7.5)
    assert passes["L0"] == (7.5, 7.5)
    assert passes["L1"] == (12.5, 12.5)
    assert found.makespan == 12.5
    held = simulate(by_hand("vocab-1", 2, row, overlap=False), costs)
    assert spans(held, 0, "compute")["F1"] == (6.75, 7.75)
    assert held.makespan == 13.5


def test_a_collective_starts_when_the_last_rank_comes():
    """Costs by rank."""
    found = simulate(
        by_hand(
            "vocab-2",
            1,
            "IF0 e(0) F0 SF(0) C0(0) S0 C1(0)",
            "IF0 e(0) RF(0) F0 C0(0) S0 C1(0) L0",
        ),
        Costs(
            1.0,
            2.0,
            output_s=(0.4, 0.6),
            loss=0.7,
            input_forward=(0.1, 0.3),
            comm={"p2p": 0.5, "e": 0.2, "C0": 0.25, "C1": 0.1},
        ),
    )
    assert spans(found, 0, "comm") == {"e(0)": (0.3, 0.5), "C0(0)": (3, 3.25), "C1(0)": (3.85, 3.95)}
    assert spans(found, 0, "compute")["F0"] == (0.5, 1.5)
    assert spans(found, 1, "compute") == {
        "IF0": (0, 0.3),
        "F0": (2, 3),
        "S0": (3.25, 3.85),
        "L0": (3.95, 4.65),
    }
    assert found.makespan == pytest.approx(4.65)
    assert [found.busy(rank) for rank in range(2)] == [pytest.approx(1.5), pytest.approx(2.6)]


def test_transfers_of_a_pair_run_one_after_another():
    """SF(1) is launched at 2 and waits until SF(0) has ended at 4."""
    found = simulate(
        by_hand("off", 2, "F0 SF(0) F1 SF(1)", "RF(0) RF(1) F0 F1"),
        Costs(1.0, 2.0, comm={"p2p": 3.0}),
    )
    assert spans(found, 0, "p2p-f") == {"SF(0)": (1, 4), "SF(1)": (4, 7)}
    assert spans(found, 1, "compute") == {"F0": (4, 5), "F1": (7, 8)}
    assert found.makespan == 8


def test_directions_do_not_wait_for_each_other():
    """SF(1) is under way from 4 to 7, and the gradient of microbatch 0 comes beside it."""
    found = simulate(
        by_hand(
            "off",
            2,
            "F0 SF(0) RB(0) F1 SF(1) B0 RB(1) B1",
            "RF(0) RF(1) F0 B0 SB(0) F1 B1 SB(1)",
            forward_only=False,
        ),
        Costs(1.0, (2.0, 0.5), comm={"p2p": 3.0}),
    )
    assert spans(found, 0, "p2p-f") == {"SF(0)": (1, 4), "SF(1)": (4, 7)}
    assert spans(found, 0, "p2p-b") == {"RB(0)": (5.5, 8.5), "RB(1)": (10.5, 13.5)}


def test_pairs_do_not_wait_for_each_other():
    """Rank 1 sends to rank 2 while it receives from rank 0."""
    found = simulate(
        by_hand("off", 2, "F0 SF(0) F1 SF(1)", "RF(0) RF(1) F0 SF(0) F1 SF(1)", "RF(0) RF(1) F0 F1"),
        Costs(1.0, 2.0, comm={"p2p": 2.0}),
    )
    assert spans(found, 1, "p2p-f") == {"RF(0)": (1, 3), "RF(1)": (3, 5), "SF(0)": (4, 6), "SF(1)": (6, 8)}


def test_nothing_to_do():
    empty = simulate(by_hand("off", 1, "", ""), Costs())
    assert (empty.makespan, empty.busy(0), empty.bubble(1), empty.in_flight_peak(0)) == (0, 0, 0, 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_deadlock(overlap):
    program = by_hand("off", 1, "RB(0) F0 SF(0) B0", "RF(0) F0 B0 SB(0)", overlap=overlap)
    if overlap:
        assert simulate(program, Costs()).makespan == 6
        return
    with pytest.raises(
        Deadlock, match=r"ranks wait for each other: rank 0 at RB\(0\), rank 1 at RF\(0\)"
    ) as caught:
        simulate(program, Costs())
    assert caught.value.places == (0, 0)


def test_collectives_in_different_orders_deadlock():
    rows = ("IF0 IF1 e(0) e(1) F0 F1", "IF0 IF1 e(1) e(0)")
    with pytest.raises(Deadlock, match="rank 0 at F0") as caught:
        simulate(by_hand("vocab-1", 2, *rows), Costs())
    assert caught.value.places == (4, 4)


def test_costs_of_another_pipeline():
    with pytest.raises(ValueError, match="forward has 3 values, but there are 2 pipeline ranks"):
        simulate(lower(build(2, 2)), Costs(forward=(1.0, 1.0, 1.0)))
