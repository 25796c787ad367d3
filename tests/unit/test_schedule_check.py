"""Programs and schedules made wrong on purpose are refused, with the reason and the place."""

from dataclasses import replace

import pytest

from megatron_ext.schedules.action import Action, parse, parse_row
from megatron_ext.schedules.build import build
from megatron_ext.schedules.check import ScheduleError, check, checked
from megatron_ext.schedules.lower import Stuck, lower
from megatron_ext.schedules.simulate import Deadlock

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlap"])


def program(vocab="vocab-2", p=2, m=3, overlap=False, **options):
    return lower(build(p, m, vocab=vocab, **options), overlap=overlap)


def edited(good, rank, edit):
    """The program with the list of one rank changed by `edit(list of words)`."""
    words = [str(action) for action in good.ranks[rank]]
    edit(words)
    rows = list(good.ranks)
    rows[rank] = parse_row(" ".join(words))
    return replace(good, ranks=tuple(rows))


def remove(word):
    return lambda words: words.remove(word)


def insert(word, at):
    return lambda words: words.insert(at, word)


def move(word, before):
    """Move a word in front of another one."""

    def edit(words):
        words.remove(word)
        words.insert(words.index(before), word)

    return edit


def swap(one, other):
    def edit(words):
        a, b = words.index(one), words.index(other)
        words[a], words[b] = words[b], words[a]

    return edit


def refused(bad):
    """The text of the error: its first line, and the rows of the grid."""
    with pytest.raises(ScheduleError) as caught:
        check(bad)
    first, *rows = str(caught.value).split("\n")
    assert first.endswith(". The program, with the place marked >here<:")
    assert [row.split(":")[0] for row in rows] == [f"  rank {r}" for r in range(bad.schedule.p)]
    return first.removesuffix(". The program, with the place marked >here<:"), rows


def marked(rows):
    """(rank, word) of every mark in the grid."""
    return [(r, word[1:-1]) for r, row in enumerate(rows) for word in row.split() if word[0] == ">"]


@BOTH
@pytest.mark.parametrize("vocab", ["off", "vocab-1", "vocab-2", "naive", "interlaced"])
def test_good_programs_pass(vocab, overlap):
    check(program(vocab, overlap=overlap))
    assert checked(build(2, 3, vocab=vocab), overlap=overlap).ranks == program(vocab, overlap=overlap).ranks


@BOTH
def test_missing_pass(overlap):
    text, rows = refused(edited(program(overlap=overlap), 0, remove("IB1")))
    assert text == "rank 0 should run IB for microbatches 0 to 2, but runs 2 of them; IB1 is missing"
    assert [rank for rank, _ in marked(rows)] == [0]


def test_pass_twice():
    text, rows = refused(edited(program(), 1, insert("F0", 20)))
    assert text == "rank 1 has F0 2 times"
    assert marked(rows) == [(1, "F0")]


def test_collective_twice():
    text, rows = refused(edited(program(), 1, insert("C0(0)", 20)))
    assert text == "rank 1 has C0(0) 2 times"
    assert marked(rows) == [(1, "C0(0)")]


def test_microbatch_that_does_not_exist():
    text, _ = refused(edited(program("off"), 0, lambda words: words.__setitem__(words.index("F2"), "F3")))
    assert text == "rank 0 should run F for microbatches 0 to 2, but runs 3 of them; F2 is missing"


def test_loss_on_another_rank_than_the_last():
    text, rows = refused(edited(program(), 0, insert("L0", 12)))
    assert text == "rank 0 has L0, which has no place here"
    assert marked(rows) == [(0, "L0")]


def test_backward_pass_in_an_evaluation():
    text, rows = refused(edited(program("off", forward_only=True), 0, lambda words: words.append("B0")))
    assert text == "rank 0 has B0, which has no place here"
    assert marked(rows) == [(0, "B0")]


def test_naive_pass_elsewhere():
    text, _ = refused(edited(program("vocab-1"), 0, lambda words: words.append("U0")))
    assert text == "rank 0 has U0, which has no place here"


@BOTH
def test_dependency_after_its_consumer(overlap):
    good = program(overlap=overlap)
    text, rows = refused(edited(good, 1, move("S1", "C0(1)")))
    assert text == "rank 1: S1 needs C0(1), which comes after it"
    assert marked(rows) == [(1, "S1")]


def test_backward_pass_before_the_statistics():
    text, rows = refused(edited(program(), 1, move("B0", "C1(0)")))
    assert text == "rank 1: B0 needs C1(0), which comes after it"
    assert marked(rows) == [(1, "B0")]


def test_launch_before_its_data():
    text, rows = refused(edited(program("off"), 0, move("SF(0)", "F0")))
    assert text == "rank 0: SF(0) needs F0, which comes after it"
    assert marked(rows) == [(0, "SF(0)")]


def test_missing_launch():
    text, rows = refused(edited(program(), 1, remove("RF(2)")))
    assert text == "rank 1: F2 needs RF(2), which is missing"
    assert marked(rows) == [(1, "F2")]


def test_missing_broadcast():
    text, rows = refused(edited(program(), 0, remove("G(1)")))
    assert text == "rank 0: T1 needs G(1), which is missing"
    assert marked(rows) == [(0, "T1")]


@BOTH
def test_order_of_collectives_differs(overlap):
    good = program("vocab-2", p=3, m=3, overlap=overlap)
    at = [good.ranks[0].index(parse(word)) for word in ("e(1)", "e(2)")]
    assert at[0] < at[1]
    words = [str(action) for action in good.ranks[1]]
    # Both inputs exist in front of the two launches, so that only the order is wrong.
    words.remove("e(1)")
    words.insert(words.index("e(2)") + 1, "e(1)")
    bad = edited(good, 1, lambda row: row.__setitem__(slice(None), words))
    text, rows = refused(bad)
    assert text == "collective order: rank 1 launches e(2) where the other ranks have e(1)"
    assert marked(rows) == [(1, "e(2)")]


def test_collective_that_nobody_needs_is_missing():
    """e(2) is awaited on rank 0 only; without it on rank 1 the others would wait for ever."""
    text, _ = refused(edited(program(), 1, remove("e(2)")))
    assert text.startswith("collective order: rank 1 launches ")
    assert text.endswith(" where the other ranks have e(2)")


def test_last_collective_is_missing():
    good = program("vocab-1")
    last = good.schedule.collectives[-1]
    assert str(last) == "g(2)"
    bad = edited(good, 0, lambda words: (words.remove("g(2)"), words.remove("IB2"), words.append("IB2")))
    text, _ = refused(bad)
    assert text == "rank 0: IB2 needs g(2), which is missing"


def test_fewer_and_more_collectives():
    """Of an order that is right as far as it goes."""
    good = program(forward_only=True)
    last = str(good.schedule.collectives[-1])
    assert last == "C1(2)"
    text, _ = refused(edited(good, 0, remove(last)))
    assert text == "collective order: rank 0 launches fewer collectives than the others"
    one_less = replace(good.schedule, collectives=good.schedule.collectives[:-1])
    text, rows = refused(replace(good, schedule=one_less))
    assert text == "collective order: rank 0 launches more collectives than the others"
    assert marked(rows) == [(0, last)]


@BOTH
def test_order_of_transfers_differs(overlap):
    good = program("off", p=2, m=3, forward_only=True, overlap=overlap)
    text, rows = refused(edited(good, 0, lambda words: words.__setitem__(slice(None), order(words))))
    assert text == ("transfer order: rank 0 sends SF of microbatches [1, 0, 2], rank 1 receives [0, 1, 2]")
    assert marked(rows) == [(1, "RF(0)")]


def order(words):
    """Passes first, then the sends with the first two swapped."""
    passes = [word for word in words if word[0] == "F"]
    return [*passes, "SF(1)", "SF(0)", "SF(2)"]


def test_transfer_that_nobody_sends():
    text, rows = refused(edited(program("off", forward_only=True), 0, remove("SF(2)")))
    assert text == "transfer order: rank 0 sends SF of microbatches [0, 1], rank 1 receives [0, 1, 2]"
    assert [rank for rank, _ in marked(rows)] == [1]


def test_gradients_in_another_order():
    """Rank 1 of 3 gives them away late and swapped."""
    good = program("off", p=3)

    def late(words):
        words.remove("SB(0)")
        words.insert(words.index("SB(1)") + 1, "SB(0)")

    text, rows = refused(edited(good, 1, late))
    assert text == "transfer order: rank 1 sends SB of microbatches [1, 0, 2], rank 0 receives [0, 1, 2]"
    assert marked(rows) == [(0, "RB(0)")]


def three_ranks(overlap):
    """Rank 1 of 3 waits for F1 before it runs B0, and rank 0 makes F1 after B0."""
    good = program("off", p=3, m=3, overlap=overlap)
    row = "F0 SF(0) RB(0) B0 F1 SF(1) RB(1) B1 F2 SF(2) RB(2) B2"
    return edited(good, 0, lambda words: words.__setitem__(slice(None), row.split()))


@BOTH
def test_deadlock_between_passes(overlap):
    text, rows = refused(three_ranks(overlap))
    assert text.startswith("ranks wait for each other: rank 0 at ")
    places = dict(marked(rows))
    assert places[0] == ("B0" if overlap else "RB(0)")
    assert set(places) == {0, 1, 2}
    for rank, word in places.items():
        assert f"rank {rank} at {word}" in text


def test_order_that_only_asynchronous_launches_survive():
    """Rank 0 sends before it comes to the collective, rank 1 receives after it."""
    good = program(p=2, m=3)
    words = [str(action) for action in good.ranks[1]]
    first = words.index("RF(0)")
    assert words.index("e(0)") < first
    bad = edited(good, 1, move("RF(0)", "IF0"))
    text, rows = refused(bad)
    assert text.startswith("ranks wait for each other: ")
    assert (1, "RF(0)") in marked(rows)
    check(replace(bad, overlap=True))


@BOTH
def test_one_microbatch_too_many(overlap):
    good = program("off", p=2, m=4, overlap=overlap)
    bad = edited(good, 0, move("F2", "B0"))
    bad = edited(bad, 0, lambda words: (words.remove("SF(2)"), words.insert(words.index("F2") + 1, "SF(2)")))
    text, rows = refused(bad)
    assert text == "rank 0 holds 3 microbatches at F2, and 2 are allowed"
    assert marked(rows) == [(0, "F2")]


def schedule_with(schedule, rank, edit):
    words = [str(action) for action in schedule.ranks[rank]]
    edit(words)
    rows = list(schedule.ranks)
    rows[rank] = parse_row(" ".join(words))
    return replace(schedule, ranks=tuple(rows))


@BOTH
def test_schedule_that_cannot_be_executed(overlap):
    """Without a program there is still a grid: of the passes, with the place of every rank."""
    bad = schedule_with(build(2, 3, vocab="vocab-2"), 1, move("S0", "F0"))
    with pytest.raises(Stuck) as stuck:
        lower(bad, overlap=overlap)
    assert stuck.value.places == (5, 3)
    with pytest.raises(ScheduleError) as caught:
        checked(bad, overlap=overlap)
    first, *rows = str(caught.value).split("\n")
    assert first.startswith("the schedule cannot be executed: rank 0 at ")
    assert "rank 1 at S0. The program" in first
    assert (1, "S0") in marked(rows)
    assert [rank for rank, _ in marked(rows)] == [0, 1]


def test_schedule_with_a_missing_pass():
    """Nobody waits for T, so the lists are complete, and what is missing is counted."""
    schedule = build(2, 3, vocab="vocab-2")
    with pytest.raises(
        ScheduleError, match="rank 0 should run T for microbatches 0 to 2, but runs 2 of them"
    ):
        checked(schedule_with(schedule, 0, remove("T2")))
    with pytest.raises(ScheduleError, match="the schedule cannot be executed: rank 0 at B2, rank 1 at F2"):
        checked(schedule_with(build(2, 3), 0, remove("F2")))
    with pytest.raises(ScheduleError, match="executed: rank 0 at B2, rank 1 at its end"):
        checked(schedule_with(build(2, 3), 1, remove("B2")))


def test_schedule_with_wrong_collectives():
    schedule = build(2, 3, vocab="vocab-2")
    order = list(schedule.collectives)
    a, b = order.index(parse("C0(0)")), order.index(parse("C1(0)"))
    order[a], order[b] = order[b], order[a]
    with pytest.raises(ScheduleError, match="the schedule cannot be executed: "):
        checked(replace(schedule, collectives=tuple(order)))
    missing = tuple(action for action in schedule.collectives if action != parse("g(1)"))
    with pytest.raises(ScheduleError, match="the schedule cannot be executed: rank 0 at IB1"):
        checked(replace(schedule, collectives=missing))


def test_loss_on_a_wrong_rank_in_a_schedule():
    moved = schedule_with(build(2, 3, vocab="vocab-2"), 1, remove("L1"))
    moved = schedule_with(moved, 0, insert("L1", 11))
    with pytest.raises(ScheduleError, match="rank 1 at "):
        checked(moved)


def test_long_rows_are_cut_around_the_place():
    text, rows = refused(edited(program("vocab-2", p=4, m=16), 2, move("S9", "C0(9)")))
    assert text == "rank 2: S9 needs C0(9), which comes after it"
    for row in rows:
        assert row.count(" ... ") + row.endswith(" ...") == 2
        assert len(row.split()) <= 2 + 2 + 25
    assert marked(rows) == [(2, "S9")]


def test_errors_are_value_errors():
    for kind in (ScheduleError, Stuck, Deadlock):
        assert issubclass(kind, ValueError)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"vocab": "vocab-3"},
            "pipeline '1f1b' with vocabulary 'vocab-3': there are 1f1b, interleaved, zb-h1, ",
        ),
        ({"pipeline": "gpipe"}, "pipeline 'gpipe' with vocabulary 'off': there are 1f1b"),
        ({"p": 0}, "0 ranks and 2 microbatches: both must be at least 1"),
        ({"m": 0}, "2 ranks and 0 microbatches: both must be at least 1"),
        ({"m": -1}, "2 ranks and -1 microbatches: both must be at least 1"),
    ],
)
def test_what_cannot_be_built(options, text):
    sizes = {"p": 2, "m": 2} | {name: options[name] for name in ("p", "m") if name in options}
    kinds = {name: value for name, value in options.items() if name not in sizes}
    with pytest.raises(ValueError, match="^" + text.replace("'", ".")):
        build(sizes["p"], sizes["m"], **kinds)


@pytest.mark.parametrize(
    "text", ["F3", "B12", "IF0", "IB7", "S0", "U4", "T1", "L2", "e(3)", "g(0)", "C0(8)", "C3(1)", "G(2)"]
)
def test_text_of_an_action(text):
    assert str(parse(text)) == text


def test_text_of_launches_and_chunks():
    assert parse("SF(2)") == Action("SF", 2)
    assert parse("RB(11)") == Action("RB", 11)
    assert str(Action("F", 3, 1)) == "F3.1"
    assert parse("F3.1") == Action("F", 3, 1)
    assert str(Action("SB", 3, 1)) == "SB(3.1)"
    assert parse("SB(3.1)") == Action("SB", 3, 1)
    assert parse_row(" F0  S0 \n C1(0)") == (Action("F", 0), Action("S", 0), Action("C1", 0))
    assert parse_row("") == ()


@pytest.mark.parametrize(
    "text", ["", "F", "3", "F-1", "F(3)", "C1", "C4(0)", "C03", "SF3", "X1", "F3 ", "e()"]
)
def test_text_that_is_no_action(text):
    with pytest.raises(ValueError, match="is no action: use forms like F3, S0, C1") as caught:
        parse(text)
    assert str(caught.value).startswith(f"{text!r} is no action")


@pytest.mark.parametrize(
    ("rank", "kind"), [(1, "SF"), (0, "RF"), (0, "SB"), (1, "RB")], ids=["SF", "RF", "SB", "RB"]
)
def test_transfer_to_nowhere(rank, kind):
    made = lower(build(2, 3, vocab="vocab-2"))
    rows = list(made.ranks)
    rows[rank] = (*rows[rank], Action(kind, 0))
    with pytest.raises(ScheduleError, match=rf"rank {rank} launches {kind}\(0\), which has no place"):
        check(replace(made, ranks=tuple(rows)))


@pytest.mark.parametrize("kind", ["C2", "C3"])
def test_barrier_of_another_algorithm(kind):
    made = lower(build(2, 3, vocab="vocab-2"))
    extra = Action(kind, 0)
    schedule = replace(made.schedule, collectives=(*made.schedule.collectives, extra))
    rows = tuple((*row, extra) for row in made.ranks)
    with pytest.raises(ScheduleError, match="has no place here"):
        check(replace(made, schedule=schedule, ranks=rows))
