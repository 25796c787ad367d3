"""What the pictures of schedules show: timelines, the unit of their times, and the stretch to be shown."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_ext.schedules.action import PASSES
from megatron_ext.schedules.simulate import Span, Timeline

WORDS = {
    "F": "forward pass",
    "B": "backward pass",
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

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


@dataclass(frozen=True)
class Panel:
    """A timeline to be drawn. `waits` are spans of lane "wait": what a pass waited for, where that was measured."""

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
        """The most microbatches that any rank holds at once."""
        return max(self.timeline.in_flight_peak(rank) for rank in range(self.p))


@dataclass(frozen=True)
class Units:
    """How times are shown: `size` is what one shown unit is in the timeline, `name` the unit's name."""

    size: float
    name: str
    axis: str
    microsecond: float
    """A microsecond of a Chrome trace, in times of the timeline."""

    def number(self, time: float) -> str:
        """Four significant digits, or all digits of a longer whole part."""
        value = time / self.size
        return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.4g}"

    def text(self, time: float) -> str:
        return f"{self.number(time)} {self.name}"


def units_of(panels: Sequence[Panel], seconds: bool) -> Units:
    """Seconds as s, ms or us; otherwise units of one forward pass, which Chrome traces show as a millisecond."""
    if not seconds:
        return Units(1.0, "F", "time, in forward passes (F = 1)", 1e-3)
    longest = max(panel.timeline.makespan for panel in panels)
    size, name = next((pair for pair in _SECONDS if longest >= pair[0]), _SECONDS[-1])
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
    """ "10:25" is a time, as the axis counts it; "m3:m5" is from the first to the last pass of microbatches 3 to 5.

    Raises:
        ValueError: another form, or nothing in it.
    """
    start, colon, end = text.partition(":")
    most = whole(panels)
    wrong = f"--window {text}: "
    try:
        if not colon:
            raise ValueError
        if start.startswith("m") and end.startswith("m"):
            return _of_microbatches(int(start[1:]), int(end[1:]), panels, wrong)
        window = Window(float(start or 0) * units.size, float(end) * units.size if end else most.end)
    except ValueError as error:
        raise ValueError(
            str(error) if str(error).startswith(wrong) else f"{wrong}give START:END, times as the axis shows them "
            f"(0:{units.number(most.end)} is everything), or microbatches, m0:m3."
        ) from None
    if not (0 <= window.start < window.end and window.start < most.end and math.isfinite(window.length)):
        raise ValueError(
            f"{wrong}there is nothing between these times. Give times of 0 to {units.text(most.end)}, the "
            "first one smaller."
        )
    return Window(window.start, min(window.end, most.end))


def _of_microbatches(first: int, last: int, panels: Sequence[Panel], wrong: str) -> Window:
    m = panels[0].timeline.program.schedule.m
    if not 0 <= first <= last < m:
        raise ValueError(f"{wrong}the microbatches are m0 to m{m - 1}; give the smaller one first.")
    inside = [
        span
        for panel in panels
        for span in panel.timeline.spans
        if span.lane == "compute" and first <= span.action.microbatch <= last
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
