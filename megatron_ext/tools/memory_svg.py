"""Stacked bars of memory per rank, as SVG: for the page, or standing alone."""

import math
from dataclasses import dataclass
from html import escape

from megatron_ext.tools import compare_svg as svg
from megatron_ext.tools.compare_units import byte_unit, human_bytes
from megatron_ext.tools.memory_read import RankMemory, RunMemory
from megatron_ext.tools.memory_text import planned_total

MOST_BARS = 48  # neighbouring ranks beyond that share a bar
STYLE = ".planned { opacity: 0.5; } section > h3 { margin: 18px 0 8px; }"


@dataclass(frozen=True)
class Column:
    """One bar: `parts` from the bottom up as (category's index, bytes, what hovering says)."""

    tick: str
    parts: list[tuple[int, int, str]]
    planned: bool = False

    @property
    def total(self) -> int:
        return sum(size for _, size, _ in self.parts)


def _column(memory: RunMemory, of: RankMemory, which: str, planned: bool) -> Column:
    sizes = (of.planned or {}) if planned else of.at_peak
    word = "planned" if planned else "measured"
    parts = [
        (i, sizes[name], f"{which}, {name}, {word}: {human_bytes(sizes[name])} of {human_bytes(total)}")
        for total in [planned_total(of) if planned else of.peak]
        for i, name in enumerate(memory.categories)
        if sizes.get(name)
    ]
    return Column("" if planned else str(of.rank), parts, planned)


def columns(memory: RunMemory) -> list[list[Column]]:
    """The bars of each rank: measured, and planned where there is a plan.

    Of too many ranks, each stretch of neighbours is shown by the one with the highest peak.
    """
    stretch = math.ceil(len(memory.ranks) / MOST_BARS)
    out = []
    for at in range(0, len(memory.ranks), stretch):
        group = memory.ranks[at : at + stretch]
        of = max(group, key=lambda of: of.peak)
        which = f"rank {of.rank}"
        if len(group) > 1:
            which += f" (highest of ranks {group[0].rank}-{group[-1].rank})"
        bars = [_column(memory, of, which, planned=False)]
        out.append([*bars, _column(memory, of, which, planned=True)] if memory.planned else bars)
    return out


def highest(memories: list[RunMemory]) -> int:
    """The highest bar of several runs, in bytes: the common scale."""
    return max(column.total for memory in memories for bars in columns(memory) for column in bars)


def _text(x: float, y: float, text: str, css: str, more: str = 'text-anchor="middle"') -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _axis(y: svg.Scale, marks: list[float], unit: str) -> list[str]:
    body = []
    for mark in marks:
        at = y(mark)
        body.append(f'<path class="grid" d="M{svg.LEFT} {at}H{svg.WIDTH - svg.RIGHT}"/>')
        body.append(_text(svg.LEFT - 7, at + 4, svg.tick_text(mark, marks[1]), "tick", 'text-anchor="end"'))
    middle = (svg.TOP + svg.HEIGHT - svg.BOTTOM) / 2
    turn = f'text-anchor="middle" transform="rotate(-90 13 {middle})"'
    return [*body, _text(13, middle, unit, "label", turn)]


def _bar(x: float, width: float, column: Column, y: svg.Scale, size: float) -> list[str]:
    body, below = [], 0
    css = "bar planned" if column.planned else "bar"
    for index, part, hover in column.parts:
        top, bottom = y((below + part) / size), y(below / size)
        below += part
        body.append(
            f'<rect class="{css} {svg.colour_class(index)}" x="{x:.1f}" y="{top}" width="{width:.1f}" '
            f'height="{bottom - top:.2f}"><title>{escape(hover)}</title></rect>'
        )
    return body


def chart(memory: RunMemory, most: int) -> str:
    """The bars of one run on a scale that reaches `most` bytes."""
    size, unit = byte_unit(most)
    marks = svg.ticks(0.0, (most or 1) / size)
    y = svg.Scale(0.0, marks[-1], svg.HEIGHT - svg.BOTTOM, svg.TOP + 12)
    groups = columns(memory)
    room = svg.WIDTH - svg.LEFT - svg.RIGHT
    pitch = min(96.0, room / len(groups))
    at = svg.LEFT + (room - pitch * len(groups)) / 2
    body = _axis(y, marks, unit)
    for bars in groups:
        width = pitch * 0.76 / len(bars)
        for i, column in enumerate(bars):
            x = at + pitch * 0.12 + i * width
            body += _bar(x, width * 0.94, column, y, size)
            if width >= 34:
                top = y(column.total / size) - 5
                body.append(_text(x + width / 2, top, f"{column.total / size:.3g}", "tick"))
        if pitch >= 9 * max(2, len(bars[0].tick)):
            body.append(_text(at + pitch / 2, svg.HEIGHT - svg.BOTTOM + 17, bars[0].tick, "tick"))
        at += pitch
    body.append(f'<path class="axis" d="M{svg.LEFT} {y(0.0)}H{svg.WIDTH - svg.RIGHT}"/>')
    body.append(_text((svg.LEFT + svg.WIDTH - svg.RIGHT) / 2, svg.HEIGHT - 6, "rank", "label"))
    label = f"{memory.run.name}: memory by category and rank, step {memory.step}"
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {svg.WIDTH} {svg.HEIGHT}">'
        f"<desc>{escape(label)}</desc>{''.join(body)}</svg>"
    )


def picture(memories: list[RunMemory], style: str) -> str:
    """All runs below each other with a legend, as a file of its own."""
    names = memories[0].categories
    most, head = highest(memories), 24
    height = head + len(memories) * (svg.HEIGHT + head)
    body, x = [], 8.0
    for i, name in enumerate(names):
        body.append(f'<rect class="bar {svg.colour_class(i)}" x="{x:.1f}" y="8" width="9" height="9"/>')
        body.append(_text(x + 12, 16, name, "tick", 'style="font-size: 10px"'))
        x += 26 + 5.5 * len(name)  # about the width of a letter
    for i, memory in enumerate(memories):
        top = head + i * (svg.HEIGHT + head)
        title = f"{memory.run.name}, step {memory.step}" + (" (pale: planned)" if memory.planned else "")
        body.append(_text(svg.WIDTH / 2, top + 18, title, "label"))
        placed = f'y="{top + head}" width="{svg.WIDTH}" height="{svg.HEIGHT}" '
        body.append(chart(memory, most).replace("<svg ", f"<svg {placed}", 1))
    font = "svg { font-family: system-ui, sans-serif; }"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {svg.WIDTH} {height}" '
        f'width="{svg.WIDTH}" height="{height}"><style>{style}{STYLE}{font}</style>'
        f'<rect width="100%" height="100%" style="fill: var(--card)"/>{"".join(body)}</svg>\n'
    )
