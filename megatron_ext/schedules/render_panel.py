"""What the pictures of schedules show: timelines, the unit of their times, and the stretch to be shown."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_ext.schedules.action import PASSES
from megatron_ext.schedules.simulate import Span, Timeline

WORDS = {
    "F": "forward pass",
    "B": "backward pass",
    "W": "weight gradients",
    "S": "output pass S",
    "U": "output pass U",
    "T": "output pass T",
    "L": "loss",
    "IF": "embedding forward",
    "IB": "embedding backward",
    "e": "e: sum of embeddings",
    "g": "g: embedding gradient",
    "C0": "C0: hidden states",
    "C1": "C1: barrier",
    "C2": "C2: barrier",
    "C3": "C3: barrier",
    "G": "G: loss gradient",
    "SF": "send forward",
    "RF": "receive forward",
    "SB": "send backward",
    "RB": "receive backward",
}
"""Every kind of action in words, in the order of legends."""

_MICROBATCHES = re.compile(r"m(\d+):m(\d+)")
_TIMES = re.compile(r"(\d*\.?\d+):(\d*\.?\d+)")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


@dataclass(frozen=True)
class Panel:
    """A timeline to be drawn. A measured one has `waits`: spans of lane "wait", before passes that waited."""

    name: str
    timeline: Timeline
    waits: tuple[Span, ...] = ()

    @property
    def p(self) -> int:
        return self.timeline.program.schedule.p

    def mean_bubble(self) -> float:
        """Share of the makespan in which ranks do not compute, averaged over ranks."""
        return sum(self.timeline.bubble(rank) for rank in range(self.p)) / self.p

    def in_flight_peak(self) -> int:
        """The most chunk activations that any rank holds at once."""
        return max(self.timeline.in_flight_peak(rank) for rank in range(self.p))


@dataclass(frozen=True)
class Units:
    """How times are shown: `size` is what one shown unit is in the timeline, `name` the unit's name."""

    size: float
    name: str
    axis: str
    microsecond: float
    """A microsecond of a Chrome trace, in times of the timeline."""
    zeros: bool = True
    """Measured times keep their last zeros: 285.0."""

    def number(self, time: float) -> str:
        """Four significant digits, or all digits of a longer whole part."""
        value = time / self.size
        if value == 0 or abs(value) >= 999.95:
            return f"{value:.0f}"
        return f"{value:#.4g}".rstrip(".") if self.zeros else f"{value:.4g}"

    def text(self, time: float) -> str:
        return f"{self.number(time)} {self.name}"


def units_of(panels: Sequence[Panel], seconds: bool) -> Units:
    """Seconds as s, ms or us; otherwise units of a forward pass (in Chrome traces, each a millisecond)."""
    if not seconds:
        return Units(1.0, "F", "time, in forward passes (F = 1)", 1e-3, zeros=False)
    longest = max(panel.timeline.makespan for panel in panels)
    size, name = next((pair for pair in _SECONDS if longest >= 10 * pair[0]), _SECONDS[-1])
    return Units(size, name, f"time in {name}", 1e-6)


@dataclass(frozen=True)
class Window:
    """The stretch of time that is shown."""

    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start

    def cut(self, start: float, end: float) -> tuple[float, float] | None:
        """The visible part of a span; None where nothing of it is visible."""
        start, end = max(start, self.start), min(end, self.end)
        return (start, end) if end > start else None


def whole(panels: Sequence[Panel]) -> Window:
    """Everything."""
    return Window(0.0, max(panel.timeline.makespan for panel in panels))


def parse_window(text: str, panels: Sequence[Panel], units: Units) -> Window:
    """The window that a user asks for.

    "10:25" are times as the axis counts them; "m3:m5" is from the first to the last pass of microbatches 3
    to 5, those of the embedding aside.

    Raises:
        ValueError: another form, or nothing in it.
    """
    if match := _MICROBATCHES.fullmatch(text):
        return _of_microbatches(int(match[1]), int(match[2]), panels)
    most = whole(panels)
    match = _TIMES.fullmatch(text)
    if match is None:
        raise ValueError(
            f"--window {text}: give START:END, times as the axis counts them (0:{units.number(most.end)} is "
            "everything), or microbatches, as in m0:m3."
        )
    start, end = float(match[1]) * units.size, float(match[2]) * units.size
    if start >= min(end, most.end):
        raise ValueError(
            f"--window {text}: there is nothing between these times. Give two times from 0 to "
            f"{units.number(most.end)} (in {units.name}), the smaller one first."
        )
    return Window(start, min(end, most.end))


def _of_microbatches(first: int, last: int, panels: Sequence[Panel]) -> Window:
    m = panels[0].timeline.program.schedule.m
    if not first <= last < m:
        raise ValueError(
            f"--window m{first}:m{last}: there are microbatches m0 to m{m - 1}. Give two of them, the "
            "smaller one first."
        )
    inside = [
        span
        for panel in panels
        for span in panel.timeline.spans
        if span.lane == "compute"
        and span.action.kind not in ("IF", "IB")  # may run long before and after the others
        and first <= span.action.microbatch <= last
    ]
    return Window(min(span.start for span in inside), max(span.end for span in inside))


def kinds_of(spans: Iterable[Span], lanes: tuple[str, ...]) -> list[str]:
    """The kinds that take time in these lanes, in the order of legends."""
    found = {span.action.kind for span in spans if span.lane in lanes and span.end > span.start}
    return [kind for kind in WORDS if kind in found]


def timeless(panel: Panel) -> list[str]:
    """Kinds of passes that take no time and so cannot be seen."""
    passes = {span.action.kind for span in panel.timeline.spans if span.lane == "compute"}
    return [kind for kind in WORDS if kind in passes - set(kinds_of(panel.timeline.spans, ("compute",)))]


def nice_step(span: float, most: int) -> float:
    """The smallest 1, 2 or 5 times a power of ten that divides `span` into at most `most` parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most)


def ticks(window: Window, units: Units, most: int) -> list[tuple[float, str]]:
    """(time, label) of round times within the window, about `most` of them."""
    step = nice_step(window.length / units.size, most)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first = math.ceil(window.start / units.size / step - 1e-9)
    last = math.floor(window.end / units.size / step + 1e-9)
    return [(i * step * units.size, f"{i * step:,.{digits}f}") for i in range(first, last + 1)]


assert set(PASSES) <= set(WORDS)
