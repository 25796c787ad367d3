"""Timelines as one SVG: rows of ranks, time to the right, several timelines below each other on one scale.

Each rank has a row of passes, thin lanes of transfers below it, and a step line of the microbatches whose
activations it holds. Exact times are shown on hover by <title>, without a script. Colours follow the light or
dark theme of the page.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from megatron_ext.schedules.render_panel import Panel, Units, Window, ticks, whole
from megatron_ext.schedules.render_style import COMM_LANES, STYLE, legend
from megatron_ext.schedules.render_text import percent
from megatron_ext.schedules.simulate import Span
from megatron_ext.schedules.transfers import moving_since

LEFT, RIGHT = 74, 112
ROW, LANE, FLYING, GAP = 22, 6, 15, 10
NARROWEST, WIDEST = 860.0, 2000.0  # of the time axis, in pixels
PER_FORWARD = 22.0  # pixels of a forward pass, if that fits into WIDEST
MOST_BLOCKS = 6000  # beyond that, blocks of a kind are one shape without text, so that browsers stay quick
LETTER = 6.2  # about the width of a digit in a block


@dataclass(frozen=True)
class Axis:
    """Maps times onto x; everything outside of `window` is cut."""

    window: Window
    width: float

    def x(self, time: float) -> float:
        return LEFT + (time - self.window.start) / self.window.length * self.width

    def box(self, start: float, end: float) -> tuple[float, float] | None:
        """(x, width) of the visible part of a span; None where there is none."""
        visible = self.window.cut(start, end)
        return visible and (self.x(visible[0]), self.x(visible[1]) - self.x(visible[0]))


def picture(
    panels: Sequence[Panel], units: Units, title: str, window: Window | None = None, *, titled: bool = True
) -> str:
    """The SVG element, with its style: a file of its own, or, not `titled`, a part of a page."""
    window = window or whole(panels)
    axis = Axis(window, _axis_width(panels, window))
    right = LEFT + axis.width + RIGHT
    body = [_text(LEFT, 26, title, "title")] if titled else []
    samples, y = legend(panels, LEFT, right - 8, 44 if titled else 18)
    body += samples
    if window != whole(panels):
        part = f"shown: {units.number(window.start)} to {units.text(window.end)}"
        part += " (bubbles and peaks are those of the whole step)"
        body.append(_text(LEFT, y + 9, part, "soft"))
        y += 16
    detailed = _blocks(panels, window) <= MOST_BLOCKS
    scale = max(1, max(panel.in_flight_peak() for panel in panels))
    for panel in panels:
        drawn = _Drawing(panel, units, axis, scale, detailed)
        rows, y = drawn.draw(y + 6, heading=len(panels) > 1)
        body += rows
    body.append(_text(LEFT + axis.width / 2, y + 12, units.axis, "soft", "middle"))
    height = y + 22
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sched" role="img" width="{right:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {right:.0f} {height:.0f}">\n<style>\n{STYLE}</style>\n'
        '<defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path class="hatch" d="M0 0V6"/></pattern></defs>\n'
        f'<desc>{escape(title)}</desc>\n<rect class="card" width="100%" height="100%"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _axis_width(panels: Sequence[Panel], window: Window) -> float:
    passes = [
        s.end - s.start for s in panels[0].timeline.spans if s.action.kind == "F" and s.lane == "compute"
    ]
    mean = sum(passes) / len(passes)
    return min(max(window.length / mean * PER_FORWARD, NARROWEST), WIDEST)


def _blocks(panels: Sequence[Panel], window: Window) -> int:
    return sum(
        window.cut(span.start, span.end) is not None for panel in panels for span in panel.timeline.spans
    )


def _text(x: float, y: float, text: str, css: str, anchor: str = "start") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(css: str, x: float, y: float, width: float, height: float, hover: str = "", more: str = "") -> str:
    box = f'<rect class="{css}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"{more}'
    return f"{box}><title>{escape(hover)}</title></rect>" if hover else f"{box}/>"


class _Drawing:
    """One panel."""

    def __init__(self, panel: Panel, units: Units, axis: Axis, scale: int, detailed: bool):
        self.panel, self.units, self.axis, self.scale, self.detailed = panel, units, axis, scale, detailed
        spans = panel.timeline.spans
        self.lanes = [lane for lane in COMM_LANES if any(s.lane == lane and s.end > s.start for s in spans)]
        self.by_rank: dict[int, list[Span]] = defaultdict(list)
        for span in (*spans, *panel.waits):
            if axis.window.cut(span.start, span.end):
                self.by_rank[span.rank].append(span)
        self.moving = moving_since(panel.timeline)

    def draw(self, y: float, heading: bool) -> tuple[list[str], float]:
        """The panel's elements from `y` down, and the y below them."""
        timeline, body = self.panel.timeline, []
        if heading:
            text = (
                f"{self.panel.name}: makespan {self.units.text(timeline.makespan)}, "
                f"bubble {percent(self.panel.mean_bubble())}"
            )
            body.append(_text(LEFT, y + 12, text, "head"))
            y += 20
        top = y + 16
        pitch = ROW + len(self.lanes) * (LANE + 1) + 3 + FLYING + GAP
        bottom = top + pitch * self.panel.p
        body += self._time_marks(y + 11, top, bottom)
        for rank in range(self.panel.p):
            body += self._rank(rank, top + rank * pitch)
        if self.axis.window.start < timeline.makespan <= self.axis.window.end:
            at = self.axis.x(timeline.makespan)
            body.append(f'<path class="end" d="M{at:.1f} {top - 4:.1f}V{bottom - GAP:.1f}"/>')
        return body, bottom

    def _time_marks(self, text_y: float, top: float, bottom: float) -> list[str]:
        body = []
        for time, label in ticks(self.axis.window, self.units, int(self.axis.width // 80)):
            x = self.axis.x(time)
            body.append(f'<path class="rule" d="M{x:.1f} {top - 3:.1f}V{bottom - GAP:.1f}"/>')
            body.append(_text(x, text_y, label, "soft", "middle"))
        return body

    def _rank(self, rank: int, y: float) -> list[str]:
        timeline = self.panel.timeline
        body = [
            _text(LEFT - 8, y + 15, f"rank {rank}", "", "end"),
            _text(LEFT + self.axis.width + 8, y + 15, f"bubble {percent(timeline.bubble(rank))}", ""),
        ]
        box = self.axis.box(0.0, timeline.makespan)
        if box:
            body += [
                _rect("idle", box[0], y, box[1], ROW),
                _rect("", box[0], y, box[1], ROW, "", ' fill="url(#bubble)"'),
            ]
        body += self._blocks(rank, y)
        at = y + ROW + 1
        for lane in self.lanes:
            if box:
                body.append(_rect("lane", box[0], at, box[1], LANE))
            body += self._transfers(rank, lane, at)
            at += LANE + 1
        return body + self._flying(rank, at + 2)

    def _blocks(self, rank: int, y: float) -> list[str]:
        body = self._boxes([s for s in self.by_rank[rank] if s.lane == "wait"], y, ROW, "wait")
        passes = [span for span in self.by_rank[rank] if span.lane == "compute"]
        body += self._boxes(passes, y, ROW, "block")
        for span in passes if self.detailed else ():
            x, width = self.axis.box(span.start, span.end) or (0.0, 0.0)
            for label in (str(span.action), str(span.action)[len(span.action.kind) :]):
                if len(label) * LETTER + 1 <= width:
                    body.append(f'<text class="on" x="{x + width / 2:.1f}" y="{y + 15:.1f}">{label}</text>')
                    break
        return body

    def _transfers(self, rank: int, lane: str, y: float) -> list[str]:
        body = []
        for span in (span for span in self.by_rank[rank] if span.lane == lane):
            # A rank sends and receives in one direction at the same time: half of the lane each.
            half = {"R": (0.0, LANE / 2), "S": (LANE / 2, LANE / 2)}.get(span.action.kind[0], (0.0, LANE))
            since = self.moving[rank, span.action]
            early = Span(rank, lane, span.action, span.start, since)
            late = Span(rank, lane, span.action, since, span.end)
            for part, css in ((early, "thin pale"), (late, "thin")):
                body += self._boxes([part], y + half[0], half[1], css, span)
        return body

    def _boxes(
        self, spans: Iterable[Span], y: float, height: float, css: str, of: Span | None = None
    ) -> list[str]:
        shapes: dict[str, list[str]] = defaultdict(list)
        for span in spans:
            box = self.axis.box(span.start, span.end)
            if box is None:
                continue
            kind = css if css == "wait" else f"{css} k-{span.action.kind}"
            if self.detailed:
                shapes[kind].append(_rect(kind, box[0], y, box[1], height, self._hover(of or span)))
            else:
                shapes[kind].append(f"M{box[0]:.2f} {y:.1f}h{box[1]:.2f}v{height:.1f}h-{box[1]:.2f}z")
        if self.detailed:
            return [shape for of_kind in shapes.values() for shape in of_kind]
        return [f'<path class="{kind}" d="{"".join(paths)}"/>' for kind, paths in shapes.items()]

    def _hover(self, span: Span) -> str:
        words = " waits" if span.lane == "wait" else ""
        number, text = self.units.number, self.units.text
        hover = f"{span.action}{words} on rank {span.rank}: {number(span.start)} to {text(span.end)}"
        hover += f", {text(span.end - span.start)}"
        since = self.moving.get((span.rank, span.action), span.start)
        if span.lane in COMM_LANES and since > span.start:
            hover += f", of it {text(since - span.start)} until the other side is there"
        return hover

    def _flying(self, rank: int, y: float) -> list[str]:
        timeline, window = self.panel.timeline, self.axis.window
        base, count, path = y + FLYING, 0, ""
        for time, after in timeline.in_flight(rank):
            if time <= window.start:
                count = after
            elif time <= window.end:
                path += f"H{self.axis.x(time):.1f}V{base - after / self.scale * FLYING:.1f}"
        start = f"M{LEFT} {base - count / self.scale * FLYING:.1f}"
        end = self.axis.x(min(window.end, max(timeline.makespan, window.start)))
        peak = timeline.in_flight_peak(rank)
        return [
            f'<path class="under" d="M{LEFT} {base:.1f}V{start.split()[1]}{path}H{end:.1f}V{base:.1f}z"/>',
            f'<path class="flying" d="{start}{path}H{end:.1f}"/>',
            _text(LEFT - 8, base - 2, "in flight", "soft", "end"),
            _text(LEFT + self.axis.width + 8, base - 2, f"at most {peak}", "soft"),
        ]
