"""Charts as inline SVG: lines over steps, columns, and grouped horizontal bars.

Colours come from the page's style sheet (classes s0..s7 set the colour of a run), so that charts follow
the light or dark theme. Values are shown on hover by <title>, without a script.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 42
COLOURS = 8
# Runs are also told apart by dashes: for colour-blind readers, and where curves lie on each other.
DASHES = ("", "7 4", "2 3", "10 3 2 3", "4 2", "12 4", "1 4", "6 2 1 2")
MOST_POINTS = 600  # per line; a longer one is thinned, keeping each stretch's lowest and highest point
Kind = Literal["line", "thin line", "bar"]
MOST_DOTS = 120  # of a line's points that can be hovered over


@dataclass(frozen=True)
class Line:
    """A run's curve: `points` are (step, value); a value may be NaN or infinite (shown as a mark on top)."""

    name: str
    colour: int
    points: list[tuple[int, float]]


@dataclass(frozen=True)
class Bar:
    """One bar: the value, its text, and what hovering over it says."""

    colour: int
    value: float
    text: str
    hover: str
    tick: str = ""


def colour_class(index: int) -> str:
    return f"s{index % COLOURS}"


def swatch(index: int, kind: Kind) -> str:
    """A legend's sample of a run's line or bar. Of lines, the reference (index 0) is wide and pale."""
    colour = colour_class(index)
    if kind == "bar":
        return f'<svg class="swatch {colour}" viewBox="0 0 12 12"><rect width="12" height="12"/></svg>'
    if kind == "line" and index == 0:
        path = '<path class="line under" d="M3 6H27"/>'
    else:
        path = f'<path class="line" d="M0 6H30"{_dash(index)}/>'
    return f'<svg class="swatch wide {colour}" viewBox="0 0 30 12">{path}</svg>'


def _dash(index: int) -> str:
    dashes = DASHES[index % len(DASHES)]
    return f' stroke-dasharray="{dashes}"' if dashes else ""


def nice_step(span: float, most: int) -> float:
    """The smallest 1, 2 or 5 times a power of ten that divides `span` into at most `most` parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * m for m in (1, 2, 5, 10, 20) if span / (power * m) <= most)


def ticks(low: float, high: float, most: int = 5, whole: bool = False) -> list[float]:
    """Round values from at or below `low` to at or above `high` (within them if `whole`: whole numbers)."""
    step = nice_step(high - low, most)
    if whole:
        step = max(1.0, step)
        return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [i * step for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def tick_text(value: float, step: float) -> str:
    """A tick's label with the digits that its step needs."""
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def thin(points: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most about `most` points: of each stretch the first lowest and the first highest, in order."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most / 2))
    kept = []
    for at in range(0, len(points), size):
        stretch = points[at : at + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


@dataclass(frozen=True)
class Scale:
    """Linear or logarithmic map of a data range onto pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low)
        return round(self.start + part * (self.end - self.start), 2)


def _frame(label: str, body: list[str], height: int = HEIGHT) -> str:
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {height}">'
        f"<desc>{escape(label)}</desc>{''.join(body)}</svg>"
    )


def _text(x: float, y: float, text: str, css: str, anchor: str = "middle") -> str:
    return f'<text class="{css}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _vertical_axis(scale: Scale, marks: list[tuple[float, str]], label: str) -> list[str]:
    body = []
    for value, text in marks:
        y = scale(value)
        body.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        body.append(_text(LEFT - 7, y + 4, text, "tick", "end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="translate(13 {middle}) rotate(-90)" text-anchor="middle"'
    body.append(f'<text class="label" {turned}>{escape(label)}</text>')
    return body


def _step_axis(scale: Scale) -> list[str]:
    bottom = HEIGHT - BOTTOM
    body = [f'<path class="axis" d="M{LEFT} {bottom}H{WIDTH - RIGHT}"/>']
    for step in ticks(scale.low, scale.high, 8, whole=True):
        x = scale(step)
        body.append(f'<path class="axis" d="M{x} {bottom}v4"/>')
        body.append(_text(x, bottom + 17, f"{step:,.0f}", "tick"))
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "step", "label"))
    return body


def _mark(x: float, symbol: str, colour: int, hover: str) -> str:
    """A symbol at the upper edge (each run at its own height), for a value that the chart cannot place."""
    y = TOP + 9 + 9 * (colour % COLOURS)
    return (
        f'<text class="mark {colour_class(colour)}" x="{x}" y="{y}" text-anchor="middle">{symbol}'
        f"<title>{escape(hover)}</title></text>"
    )


def _curve(line: Line, x: Scale, y: Scale, human: Callable[[float], str], under: bool) -> list[str]:
    """One line: its path (broken where a value is missing from the chart), its dots, and edge marks."""
    highest = max(y.low, y.high)
    path, dots, pen_up = [], [], True
    shown = thin(line.points, MOST_POINTS)
    every = math.ceil(len(shown) / MOST_DOTS)
    small = " tiny" if len(shown) > 60 else ""
    for i, (step, value) in enumerate(shown):
        hover = f"{line.name}, step {step:,}: {human(value)}"
        if not math.isfinite(value) or value > highest:
            dots.append(_mark(x(step), "▲" if value > highest else "✕", line.colour, hover))
            pen_up = True
            continue
        at = f"{x(step)} {y(value)}"
        path.append(f"{'M' if pen_up else 'L'}{at}")
        pen_up = False
        if i % every == 0:
            cx, cy = at.split()
            dots.append(
                f'<circle class="dot{small}" cx="{cx}" cy="{cy}"><title>{escape(hover)}</title></circle>'
            )
    css = "line under" if under else "line"
    dash = "" if under else _dash(line.colour)
    return [
        f'<g class="{colour_class(line.colour)}"><path class="{css}" d="{"".join(path)}"{dash}/>',
        *dots,
        "</g>",
    ]


def _step_scale(lines: list[Line]) -> Scale:
    steps = [step for line in lines for step, _ in line.points]
    low, high = min(steps), max(steps)
    pad = 0.5 if low == high else (high - low) * 0.02
    return Scale(low - pad, high + pad, LEFT, WIDTH - RIGHT)


def line_chart(
    label: str,
    unit: str,
    lines: list[Line],
    human: Callable[[float], str],
    *,
    from_zero: bool = False,
    clip: float | None = None,
    shade: tuple[float, float, str] | None = None,
) -> str:
    """Curves over steps. Values above `clip` become marks on the upper edge; `shade`: steps to grey out."""
    values = [v for line in lines for _, v in line.points if math.isfinite(v) and (clip is None or v <= clip)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if from_zero:
        low = min(0.0, low)
    if low == high:
        pad = abs(low) * 0.01 or 1.0
        low, high = low - pad, high + pad
    marks = ticks(low, high)
    x = _step_scale(lines)
    y = Scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP + 12)
    body = []
    if shade:
        x0, x1 = (min(max(x(at), LEFT), WIDTH - RIGHT) for at in shade[:2])
        body.append(
            f'<rect class="shade" x="{x0}" y="{TOP}" width="{x1 - x0}" height="{HEIGHT - BOTTOM - TOP}"/>'
        )
        if x1 - x0 > 4:
            body.append(_text(x0 + 5, HEIGHT - BOTTOM - 7, shade[2], "tick", "start"))
    body += _vertical_axis(y, [(m, tick_text(m, marks[1] - marks[0])) for m in marks], unit)
    body += _step_axis(x)
    for line in lines:
        body += _curve(line, x, y, human, under=line.colour == 0 and len(lines) > 1)
    return _frame(label, body)


def log_chart(label: str, unit: str, lines: list[Line], human: Callable[[float], str], limit: float) -> str:
    """Curves of values >= 0 on a logarithmic axis whose lowest tick is 0, with a dashed line at `limit`."""
    finite = [v for line in lines for _, v in line.points if math.isfinite(v) and v > 0]
    finite += [limit] if limit > 0 else []
    finite = finite or [1.0]
    low = math.floor(math.log10(min(finite))) - 1
    high = max(math.ceil(math.log10(max(finite))), low + 2)
    if any(math.isinf(value) for line in lines for _, value in line.points):
        high += 1  # keeps the marks of infinite values clear of the limit
    decades = [(float(d), f"1e{d:+03d}") for d in range(low + 1, high + 1, math.ceil((high - low) / 6))]
    x = _step_scale(lines)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP + 12)

    def exponent(value: float) -> float:
        return math.log10(value) if value > 0 and math.isfinite(value) else (low if value == 0 else value)

    body = [*_vertical_axis(y, [(float(low), "0"), *decades], unit), *_step_axis(x)]
    if limit > 0:
        at = y(math.log10(limit))
        body.append(f'<path class="limit" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        body.append(_text(WIDTH - RIGHT - 4, at - 5, f"tolerance {limit:g}", "tick", "end"))
    for line in lines:
        placed = Line(line.name, line.colour, [(step, exponent(value)) for step, value in line.points])
        body += _curve(
            placed, x, y, lambda v: human(0.0 if v == low else 10.0**v if math.isfinite(v) else v), False
        )
    return _frame(label, body)


def _bar(x: float, y: float, width: float, height: float, bar: Bar) -> str:
    return (
        f'<rect class="bar {colour_class(bar.colour)}" x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.5):.2f}" '
        f'height="{max(height, 0.5):.2f}"><title>{escape(bar.hover)}</title></rect>'
    )


def columns(label: str, unit: str, blocks: list[list[Bar]], axis: str) -> str:
    """Vertical bars from zero, in blocks (one per run), with the bars' ticks under them where they fit.

    The first of a block always has its tick."""
    marks = ticks(0.0, max((bar.value for block in blocks for bar in block), default=0.0) or 1.0)
    y = Scale(0.0, marks[-1], HEIGHT - BOTTOM, TOP + 12)
    count = sum(len(block) for block in blocks)
    pitch = min(64.0, (WIDTH - LEFT - RIGHT) / (count + 0.8 * len(blocks)))
    at = LEFT + pitch * 0.4 + (WIDTH - LEFT - RIGHT - pitch * (count + 0.8 * len(blocks))) / 2
    body = _vertical_axis(y, [(m, tick_text(m, marks[1])) for m in marks], unit)
    for block in blocks:
        for i, bar in enumerate(block):
            top = y(bar.value)
            body.append(_bar(at + pitch * 0.08, top, pitch * 0.84, HEIGHT - BOTTOM - top, bar))
            if pitch >= 44:
                body.append(_text(at + pitch / 2, top - 5, bar.text, "tick"))
            if pitch >= 9 * max(2, len(bar.tick)) or i == 0:
                body.append(_text(at + pitch / 2, HEIGHT - BOTTOM + 17, bar.tick, "tick"))
            at += pitch
        at += pitch * 0.8
    body.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, axis, "label"))
    return _frame(label, body)


def rows(label: str, groups: list[tuple[str, list[Bar]]]) -> str:
    """Horizontal bars from zero, grouped: a heading, then one bar per run with its value at the end."""
    thick, gap, heading = 13, 3, 19
    most = max((bar.value for _, group in groups for bar in group), default=0.0) or 1.0
    x = Scale(0.0, most, 4, WIDTH - 84)
    body, at = [], 4.0
    for name, group in groups:
        body.append(_text(4, at + 12, name, "label", "start"))
        at += heading
        for bar in group:
            body.append(_bar(4, at, x(bar.value) - 4, thick, bar))
            body.append(_text(x(bar.value) + 6, at + thick - 2.5, bar.text, "tick", "start"))
            at += thick + gap
        at += 9
    return _frame(label, body, math.ceil(at))
