"""A timeline in the terminal: one row per rank, time to the right; and tables. ASCII, but for colours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from megatron_ext.schedules.action import Action
from megatron_ext.schedules.render_panel import (
    WORDS,
    Panel,
    Units,
    Window,
    kinds_of,
    nice_step,
    ticks,
    timeless,
    whole,
)

IDLE, FILL = ".", "-"
MOST_COLUMNS = 5  # that short passes may stretch a forward pass to
ANSI = {
    "F": 111,
    "B": 114,
    "W": 186,
    "S": 215,
    "U": 210,
    "T": 221,
    "L": 183,
    "IF": 116,
    "IB": 73,
}  # of 256 colours


@dataclass(frozen=True)
class _Piece:
    """Columns of a row that belong together: a pass, or idle time."""

    text: str
    kind: str = ""


def grid(
    panel: Panel, units: Units, *, width: int = 120, window: Window | None = None, colour: bool = False
) -> str:
    """The rows of all ranks, time in proportion, under a time axis.

    Blocks start with the pass's name and are filled up with "-"; "." is idle time. A pass too short for its
    name shows its kind alone. What does not fit into `width` columns is cut, and a note says so.
    """
    window = window or whole([panel])
    name = len(f"rank {panel.p - 1}") + 2
    room = max(width - name, 20)
    per_time = _columns_per_time(panel, window, room)
    needed = math.ceil(window.length * per_time - 1e-9)
    shown = min(needed, room)
    lines = ["time".ljust(name) + _axis(window, units, per_time, shown)]
    for rank in range(panel.p):
        pieces = _clip(_row(panel, rank, window, per_time, needed), shown)
        lines.append(f"rank {rank}".ljust(name) + "".join(_painted(piece, colour) for piece in pieces))
    lines.append(_legend(panel, colour))
    return "\n".join([*lines, *_notes(panel, window, units, per_time, shown, needed, name)])


def _columns_per_time(panel: Panel, window: Window, room: int) -> float:
    """Columns of one unit of time: enough to name forward passes and to see short ones; more if all fits."""
    lengths: dict[str, list[float]] = {}
    for span in panel.timeline.spans:
        if span.lane == "compute" and span.end > span.start:
            lengths.setdefault(span.action.kind, []).append(span.end - span.start)
    mean = {kind: sum(of) / len(of) for kind, of in lengths.items()}
    forward = mean["F"]
    label = max(len(str(span.action)) for span in panel.timeline.spans if span.action.kind == "F")
    least = max(label, min(MOST_COLUMNS, math.ceil(forward / min(mean.values()) - 1e-9)))
    fitting = math.floor(room / (window.length / forward) + 1e-9)
    return min(max(least, fitting), max(least, label + 2)) / forward


def _row(panel: Panel, rank: int, window: Window, per_time: float, needed: int) -> list[_Piece]:
    pieces, at = [], 0
    spans = (span for span in panel.timeline.spans if span.rank == rank and span.lane == "compute")
    for span in sorted(spans, key=lambda span: span.start):
        visible = window.cut(span.start, span.end)
        if visible is None:
            continue
        start, end = (math.floor((time - window.start) * per_time + 0.5) for time in visible)
        start, end = max(start, at), min(end, needed)
        if end <= start:
            continue
        if start > at:
            pieces.append(_Piece(IDLE * (start - at)))
        pieces.append(_Piece(_block(span.action, end - start), span.action.kind))
        at = end
    return [*pieces, _Piece(IDLE * (needed - at))]


def _block(action: Action, columns: int) -> str:
    name = str(action)
    if len(name) > columns:  # part of a number would be another number
        name = action.kind[:columns]
    return name.ljust(columns, FILL)


def _clip(pieces: list[_Piece], columns: int) -> list[_Piece]:
    out = []
    for piece in pieces:
        out.append(_Piece(piece.text[:columns], piece.kind))
        columns -= len(out[-1].text)
    return out


def _painted(piece: _Piece, colour: bool) -> str:
    if not colour or piece.kind not in ANSI:
        return piece.text
    return f"\033[30;48;5;{ANSI[piece.kind]}m{piece.text}\033[0m"


def _axis(window: Window, units: Units, per_time: float, shown: int) -> str:
    line = ""
    most = max(2, shown // 10)
    visible = Window(window.start, min(window.end, window.start + shown / per_time))
    for time, label in ticks(visible, units, most):
        at = math.floor((time - window.start) * per_time + 0.5)
        if at >= len(line) and at + len(label) <= shown:
            line = line.ljust(at) + label
    return f"{line} {units.name}"


def _legend(panel: Panel, colour: bool) -> str:
    kinds = kinds_of(panel.timeline.spans, ("compute",))
    samples = [
        f"{_painted(_Piece(kind, kind), colour)} {WORDS[kind].removesuffix(f' {kind}')}" for kind in kinds
    ]
    return f"({', '.join([*samples, f'{IDLE} bubble'])})"


def _notes(
    panel: Panel, window: Window, units: Units, per_time: float, shown: int, needed: int, name: int
) -> list[str]:
    notes = []
    if shown < needed:
        time = window.start + shown / per_time
        tidy = nice_step(window.length / units.size, 50) * units.size
        begin = math.floor(time / tidy + 1e-9) * tidy
        notes.append(
            f"(cut at {units.text(time)} of {units.text(window.end)}: --width {needed + name} shows all, "
            f"--window {units.number(begin)}:{units.number(window.end)} the rest)"
        )
    if kinds := timeless(panel):
        notes.append(f"(not shown, as they take no time: {', '.join(kinds)})")
    return notes


def lists(ranks: Sequence[Sequence[Action]], width: int = 120) -> str:
    """Every rank's actions in order, one column per action; cut at `width`, with a note."""
    words = [[str(action) for action in row] for row in ranks]
    column = max(len(word) for row in words for word in row) + 1
    name = len(f"rank {len(words) - 1}") + 2
    fit = max(1, (width - name) // column)
    longest = max(map(len, words))
    lines = [
        f"rank {rank}".ljust(name) + "".join(word.ljust(column) for word in row[:fit]).rstrip()
        for rank, row in enumerate(words)
    ]
    if longest > fit:
        lines.append(f"(cut after {fit} of {longest} actions: --width {name + longest * column} shows all)")
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of words under the first, the header, whose cells may have several lines; numbers to the right."""
    heads = list(zip_longest(*(reversed(cell.split("\n")) for cell in rows[0]), fillvalue=""))[::-1]
    widths = [max(map(len, column)) for column in zip(*heads, *rows[1:], strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *cells]).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([*map(line, heads), rule, *map(line, rows[1:])])


def rank_rows(panel: Panel, units: Units) -> list[list[str]]:
    """Busy time, bubble and in-flight peak of each rank, under a header; last, means and the highest peak."""
    timeline = panel.timeline
    rows = [["rank", f"busy ({units.name})", "bubble", "in flight"]]
    for rank in range(panel.p):
        rows.append(
            [
                str(rank),
                units.number(timeline.busy(rank)),
                percent(timeline.bubble(rank)),
                str(timeline.in_flight_peak(rank)),
            ]
        )
    busy = sum(timeline.busy(rank) for rank in range(panel.p)) / panel.p
    rows.append(["all", units.number(busy), percent(panel.mean_bubble()), str(panel.in_flight_peak())])
    return rows


def percent(share: float) -> str:
    """0.2542 -> "25.4 %"."""
    return f"{100 * share:.1f} %"
