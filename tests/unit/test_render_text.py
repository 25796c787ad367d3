"""The grid and the tables of the terminal, against text written by hand."""

import re

import pytest

from megatron_ext.schedules import render_text
from megatron_ext.schedules.action import parse_row
from megatron_ext.schedules.build import build
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lower import lower
from megatron_ext.schedules.render_panel import Panel, Window, parse_window, units_of
from megatron_ext.schedules.simulate import simulate

_TRANSFERS = {"C0": 0.5, "C1": 0.5, "p2p": 0.25}


def _panel(p: int, m: int, vocab: str = "off", costs: Costs | None = None) -> Panel:
    return Panel("planned", simulate(lower(build(p, m, vocab=vocab)), costs or Costs()))


def _rows(panel: Panel, **options) -> list[str]:
    """The ranks' rows without their names."""
    text = render_text.grid(panel, units_of([panel], False), **options)
    return [line.removeprefix(name).strip() for line in text.splitlines() for name in _names(line)]


def _names(line: str) -> list[str]:
    return re.findall(r"^rank +\d+", line)


def test_two_ranks_without_vocabulary_parallelism():
    panel = _panel(2, 3)
    assert render_text.grid(panel, units_of([panel], False)).splitlines() == [
        "time    0                   5                   10 F",
        "rank 0  F0--F1--........B0------F2--B1------....B2------",
        "rank 1  ....F0--B0------F1--B1------F2--B2------........",
        "(F forward pass, B backward pass, . bubble)",
    ]


def test_output_passes_and_transfers_take_their_columns():
    panel = _panel(2, 2, "vocab-2", Costs(output_s=1, output_t=1, comm=_TRANSFERS))
    # By hand: F0 0-1, sent until 1.25, F0 there 1.25-2.25, C0 until 2.75, S0 until 3.75, C1 until 4.25, ...
    assert _rows(panel) == [
        "F0--F1--...S0--....T0--S1--.B0------..........B1------T1--",
        ".....F0--..S0--F1--B0------T0--S1--..B1------.........T1--",
    ]


def test_passes_without_time_are_named_below_the_grid():
    panel = _panel(2, 2, "vocab-2", Costs(output_s=1, output_t=1))
    note = render_text.grid(panel, units_of([panel], False)).splitlines()[-1]
    assert note.startswith("(")
    assert all(kind in note for kind in ("L", "IF", "IB"))
    assert not any(word in note for word in (" S,", " T,"))


def test_a_wide_grid_is_cut_with_a_note_that_says_how_to_see_the_rest():
    panel = _panel(4, 16)
    text = render_text.grid(panel, units_of([panel], False), width=60)
    assert max(len(line) for line in text.splitlines() if _names(line)) == 60
    note = next(line for line in text.splitlines() if line.startswith("(cut at"))
    width = int(re.search(r"--width (\d+)", note)[1])
    whole = render_text.grid(panel, units_of([panel], False), width=width)
    assert "(cut at" not in whole
    assert "B15" in whole
    assert "B15" not in text
    window = parse_window(re.search(r"--window (\S+)", note)[1], [panel], units_of([panel], False))
    assert window.end == panel.timeline.makespan
    assert "B15" in render_text.grid(panel, units_of([panel], False), width=width, window=window)


def test_the_window_shows_its_stretch_only():
    assert _rows(_panel(2, 3), window=Window(4, 9)) == ["B0------F2--B1------", "F1--B1------F2--B2--"]


def test_a_name_that_does_not_fit_is_shortened_to_its_kind_never_to_another_number():
    panel = _panel(2, 12, "vocab-2", Costs(output_s=0.2, output_t=0.2))
    found = re.findall(r"[STFB]\d*", "".join(_rows(panel, width=400)))
    assert {int(word[1:]) for word in found if len(word) > 1} <= set(range(12))
    # Short passes of two-digit microbatches show the letter alone.
    assert "S" in found
    assert "S1" not in "".join(_rows(panel, width=60)[0].split("F2")[1:])


def test_colours_change_nothing_but_colours():
    panel = _panel(2, 3)
    plain = render_text.grid(panel, units_of([panel], False))
    coloured = render_text.grid(panel, units_of([panel], False), colour=True)
    assert coloured != plain
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == plain


def test_table_of_ranks():
    panel = _panel(2, 3)
    rows = render_text.rank_rows(panel, units_of([panel], False))
    assert rows[1:] == [
        ["0", "9", "25.0 %", "2"],
        ["1", "9", "25.0 %", "1"],
        ["all", "9", "25.0 %", "2"],
    ]
    assert render_text.table(rows).splitlines()[2] == "0            9  25.0 %          2"


def test_lists_of_actions_are_cut_with_a_note():
    rows = [parse_row("F0 F1 B0 F10 B10"), parse_row("F0 B0")]
    assert render_text.lists(rows).splitlines() == ["rank 0  F0  F1  B0  F10 B10", "rank 1  F0  B0"]
    cut = render_text.lists(rows, width=20).splitlines()
    assert cut[0] == "rank 0  F0  F1  B0"
    assert cut[-1].startswith("(cut after 3 of 5 actions: --width 28")


@pytest.mark.parametrize(
    ("text", "start", "end"), [("0:5", 0, 5), ("2.5:99", 2.5, 12), ("m0:m0", 0, 6), ("m1:m2", 1, 12)]
)
def test_windows(text, start, end):
    panel = _panel(2, 3)
    assert parse_window(text, [panel], units_of([panel], False)) == Window(start, end)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("5", "give START:END"),
        ("a:b", "give START:END"),
        ("5:5", "nothing between these times"),
        ("7:3", "nothing between these times"),
        ("12:20", "nothing between these times"),
        ("m2:m1", "microbatches m0 to m2"),
        ("m0:m3", "microbatches m0 to m2"),
    ],
)
def test_wrong_windows(text, says):
    panel = _panel(2, 3)
    with pytest.raises(ValueError, match=re.escape(f"--window {text}: ") + ".*" + says):
        parse_window(text, [panel], units_of([panel], False))


@pytest.mark.parametrize(
    ("scale", "text"),
    [(1.0, "12.00 s"), (1e-3, "12.00 ms"), (1e-6, "12.00 us"), (1e-8, "0.1200 us"), (2000.0, "24000 s")],
)
def test_units_of_seconds(scale, text):
    panel = _panel(2, 3, costs=Costs(forward=scale, backward=2 * scale))
    assert units_of([panel], True).text(panel.timeline.makespan) == text
