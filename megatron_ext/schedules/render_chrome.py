"""Timelines as a Chrome trace, for chrome://tracing and ui.perfetto.dev: a process per rank, a thread per
lane."""

import json
from collections.abc import Sequence

from megatron_ext.schedules.render_panel import Panel, Units
from megatron_ext.schedules.simulate import Span

# Of one direction, a rank sends and receives at the same time; slices of one thread must not overlap.
LANES = ("compute", "wait", "comm", "p2p-f send", "p2p-f receive", "p2p-b send", "p2p-b receive")
LANES_OF_A_V = (*LANES, *(f"{lane}, chunk 1" for lane in LANES[3:]))  # which move the other way
COUNTER = "in-flight microbatches"


def lanes_of(panel: Panel) -> tuple[str, ...]:
    """The threads of a rank."""
    return LANES_OF_A_V if panel.timeline.program.schedule.place.vee else LANES


def lane_of(span: Span, lanes: Sequence[str] = LANES) -> str:
    """The thread that shows a span."""
    if not span.lane.startswith("p2p"):
        return span.lane
    lane = f"{span.lane} {'send' if span.action.kind.startswith('S') else 'receive'}"
    other = f"{lane}, chunk {span.action.chunk}"
    return other if other in lanes else lane


def chrome_trace(panels: Sequence[Panel], units: Units) -> str:
    """The JSON text. The last panel's ranks are processes 0 to p-1; those of panels before it come from p on.

    Times are microseconds; of timelines in units of a forward pass, a unit is shown as a millisecond.
    """
    events = []
    for place, panel in enumerate(reversed(panels)):
        for rank in range(panel.p):
            pid = place * panel.p + rank
            name = f"rank {rank}" if len(panels) == 1 else f"rank {rank}, {panel.name}"
            # Planned and measured of one rank next to each other.
            order = rank * len(panels) + len(panels) - 1 - place
            events += _process(pid, name, order, lanes_of(panel))
            events += _slices(panel, rank, pid, units)
            events += _counter(panel, rank, pid, units)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"


def _process(pid: int, name: str, order: int, lanes: Sequence[str]) -> list[dict]:
    about = [("process_name", 0, {"name": name}), ("process_sort_index", 0, {"sort_index": order})]
    for tid, lane in enumerate(lanes):
        about += [("thread_name", tid, {"name": lane}), ("thread_sort_index", tid, {"sort_index": tid})]
    return [{"ph": "M", "pid": pid, "tid": tid, "name": key, "args": args} for key, tid, args in about]


def _slices(panel: Panel, rank: int, pid: int, units: Units) -> list[dict]:
    lanes = lanes_of(panel)
    spans = [span for span in (*panel.timeline.spans, *panel.waits) if span.rank == rank]
    return [
        {
            "ph": "X",
            "pid": pid,
            "tid": lanes.index(lane_of(span, lanes)),
            "name": str(span.action),
            "cat": span.action.kind,
            "ts": _microseconds(span.start, units),
            "dur": _microseconds(span.end - span.start, units),
            "args": {"microbatch": span.action.microbatch},
        }
        for span in sorted(spans, key=lambda span: span.start)
    ]


def _counter(panel: Panel, rank: int, pid: int, units: Units) -> list[dict]:
    return [
        {
            "ph": "C",
            "pid": pid,
            "tid": 0,
            "name": COUNTER,
            "ts": _microseconds(time, units),
            "args": {"microbatches": count},
        }
        for time, count in [(0.0, 0), *panel.timeline.in_flight(rank)]
    ]


def _microseconds(time: float, units: Units) -> float:
    return round(time / units.microsecond, 3)
