"""The Chrome trace: processes, threads, microseconds, and the counter of microbatches in flight."""

import json

import pytest

from megatron_ext.schedules.action import Action
from megatron_ext.schedules.build import build
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lower import lower
from megatron_ext.schedules.render_chrome import chrome_trace
from megatron_ext.schedules.render_panel import Panel, units_of
from megatron_ext.schedules.simulate import Span, simulate


def _panel(vocab: str = "off", costs: Costs | None = None, name: str = "planned", waits=()) -> Panel:
    return Panel(name, simulate(lower(build(2, 3, vocab=vocab)), costs or Costs()), waits)


def _events(*panels: Panel, seconds: bool = False) -> list[dict]:
    return json.loads(chrome_trace(panels, units_of(panels, seconds)))["traceEvents"]


def _named(events: list[dict], name: str) -> list[dict]:
    return [event for event in events if event["name"] == name]


def _threads(events: list[dict]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in _named(events, "thread_name")}


def test_ranks_are_processes_and_lanes_are_threads():
    events = _events(_panel("vocab-2"))
    names = {e["pid"]: e["args"]["name"] for e in _named(events, "process_name")}
    assert names == {0: "rank 0", 1: "rank 1"}
    threads = _threads(events)
    lane = {e["name"]: threads[e["pid"], e["tid"]] for e in events if e["ph"] == "X"}
    assert lane["F0"] == lane["T2"] == lane["L1"] == "compute"
    assert lane["C1(0)"] == lane["g(2)"] == "comm"
    assert lane["SF(0)"] == "p2p-f send"
    assert lane["RB(1)"] == "p2p-b receive"


@pytest.mark.parametrize(("seconds", "unit"), [(False, 1e3), (True, 1e6)])
def test_times_are_microseconds(seconds, unit):
    events = _events(_panel(), seconds=seconds)
    second = next(e for e in _named(events, "B1") if e["pid"] == 0)
    assert (second["ts"], second["dur"]) == (7 * unit, 2 * unit)
    assert second["args"]["microbatch"] == 1


def test_every_action_is_there_once_and_slices_of_a_thread_do_not_overlap():
    costs = Costs(output_s=0.4, output_t=0.2, comm={"C0": 0.3, "C1": 0.4, "e": 0.2, "g": 0.2, "p2p": 0.3})
    panel = _panel("vocab-2", costs)
    slices = [e for e in _events(panel) if e["ph"] == "X"]
    assert sorted((e["pid"], e["name"]) for e in slices) == sorted(
        (span.rank, str(span.action)) for span in panel.timeline.spans
    )
    threads: dict[tuple[int, int], list[dict]] = {}
    for event in slices:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for of_thread in threads.values():
        ends = [event["ts"] + event["dur"] for event in of_thread]
        starts = [event["ts"] for event in of_thread[1:]]
        assert all(end <= start + 1e-6 for end, start in zip(ends[:-1], starts, strict=True))


def test_counter_of_microbatches_in_flight():
    counts = [e for e in _events(_panel()) if e["ph"] == "C" and e["pid"] == 1]
    values = [(e["ts"], e["args"]["microbatches"]) for e in counts]
    assert values[:3] == [(0, 0), (1000, 1), (4000, 0)]
    assert values[-1] == (10000, 0)
    of_first = [e["args"]["microbatches"] for e in _events(_panel()) if e["ph"] == "C" and e["pid"] == 0]
    assert max(of_first) == 2


def test_planned_and_measured_of_a_rank_are_next_to_each_other():
    wait = Span(1, "wait", Action("F", 0), 0.0, 1.0)
    events = _events(_panel(), _panel(name="measured", waits=(wait,)))
    names = {e["pid"]: e["args"]["name"] for e in _named(events, "process_name")}
    order = {e["pid"]: e["args"]["sort_index"] for e in _named(events, "process_sort_index")}
    assert [names[pid] for pid in sorted(names, key=order.__getitem__)] == [
        "rank 0, planned",
        "rank 0, measured",
        "rank 1, planned",
        "rank 1, measured",
    ]
    # The measured run's processes have its ranks' numbers.
    assert (names[0], names[1]) == ("rank 0, measured", "rank 1, measured")
    waits = [e for e in events if e["ph"] == "X" and _threads(events)[e["pid"], e["tid"]] == "wait"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in waits] == [(1, 0, 1000)]
