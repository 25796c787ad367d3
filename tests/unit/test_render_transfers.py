"""Which communication was hidden under passes and which held a rank up, on timelines written by hand."""

import pytest

from megatron_ext.schedules.action import Action, parse
from megatron_ext.schedules.build import build
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lower import Program, lower
from megatron_ext.schedules.simulate import Span, Timeline, simulate
from megatron_ext.schedules.transfers import Share, gaps, moving_since, vocabulary_shares


def timeline(text: str, overlap: bool = True, p: int = 2) -> Timeline:
    """Lines "rank lane action start end"; the program is that of one microbatch of vocab-2."""
    spans = []
    for line in text.strip().splitlines():
        rank, lane, action, start, end = line.split()
        spans.append(Span(int(rank), lane, parse(action), float(start), float(end)))
    schedule = build(p, 1, vocab="vocab-2")
    return Timeline(Program(schedule, overlap, lower(schedule).ranks), tuple(spans))


BARRIER = """
0 compute S0     0 2
0 comm    C1(0)  2 8
0 compute F0     3 6
0 compute T0     8 9
1 compute S0     0 5
1 comm    C1(0)  5 8
1 compute L0     8 9
"""


def test_a_collective_moves_once_all_ranks_are_there():
    since = moving_since(timeline(BARRIER))
    assert since == {(0, Action("C1", 0)): 5, (1, Action("C1", 0)): 5}


def test_hidden_exposed_and_early():
    shares = vocabulary_shares(timeline(BARRIER))
    # Rank 0: early 2-5, moving 5-8, of it F0 until 6, then T0 waits. Rank 1: moving 5-8, L0 waits for it.
    assert shares == {"C1": Share(early=3, moved=6, hidden=1, exposed=5)}


def test_waits_for_another_stage_do_not_expose_vocabulary_communication():
    shares = vocabulary_shares(
        timeline("""
        0 comm    e(0)  0 4
        0 compute F0    4 5
        1 comm    e(0)  0 4
        1 compute F0    6 7
        """)
    )
    # F of rank 0 needs e; F of rank 1 needs what rank 0 sends.
    assert shares == {"e": Share(early=0, moved=8, hidden=0, exposed=4)}


def test_recorded_waits_count_instead_of_gaps():
    line = timeline(BARRIER)
    wait = Span(0, "wait", Action("T", 0), 7.5, 8)
    assert vocabulary_shares(line, (wait,)) == {"C1": Share(early=3, moved=6, hidden=1, exposed=0.5)}


def test_without_overlap_all_that_is_not_hidden_is_exposed():
    shares = vocabulary_shares(timeline(BARRIER, overlap=False), ())
    assert shares == {"C1": Share(early=3, moved=6, hidden=1, exposed=5)}


def test_a_broadcast_reaches_a_receiver_whoever_else_is_late():
    since = moving_since(
        timeline(
            """
            2 comm C0(0) 1 6
            1 comm C0(0) 0 3
            0 comm C0(0) 5 6
            """,
            p=3,
        )
    )
    # The last rank sends: it waits for rank 0; rank 1 needs only the last rank.
    assert {rank: since[rank, Action("C0", 0)] for rank in range(3)} == {0: 5, 1: 1, 2: 5}


def test_point_to_point_moves_once_both_sides_are_there_and_never_after_its_end():
    since = moving_since(
        timeline("""
        0 p2p-f SF(0) 4 5
        1 p2p-f RF(0) 1 5
        1 p2p-b SB(0) 7 8
        0 p2p-b RB(0) 9 9.5
        """)
    )
    assert since[1, Action("RF", 0)] == since[0, Action("SF", 0)] == 4
    assert since[1, Action("SB", 0)] == 8  # was sent before the other side looked for it
    assert since[0, Action("RB", 0)] == 9


def test_gaps_are_the_idle_time_before_passes():
    found = gaps(timeline(BARRIER))
    assert found == (Span(0, "wait", Action("F", 0), 2, 3), *sorted_waits())


def sorted_waits() -> list[Span]:
    return [Span(0, "wait", Action("T", 0), 6, 8), Span(1, "wait", Action("L", 0), 5, 8)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("vocab", ["naive", "vocab-1", "vocab-2", "interlaced"])
def test_shares_of_simulated_steps_add_up(vocab, overlap):
    comm = dict.fromkeys(("e", "g", "C0", "C1", "C2", "C3", "G"), 0.25)
    costs = Costs(output_s=0.4, output_t=0.2, output_u=0.1, comm=comm)
    line = simulate(lower(build(3, 6, vocab=vocab), overlap=overlap), costs)
    shares = vocabulary_shares(line)
    kinds = {action.kind for action in line.program.schedule.collectives}
    assert set(shares) == kinds
    for share in shares.values():
        assert share.early == 0
        assert share.moved == pytest.approx(3 * 6 * 0.25)
        assert share.hidden + share.exposed <= share.moved + 1e-9
        if not overlap:
            assert share.exposed == pytest.approx(share.moved)
    if overlap and vocab.startswith("vocab"):
        assert sum(shares.values(), Share()).hidden > 0
