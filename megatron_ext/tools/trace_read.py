"""Reads what `--ext-trace DIR` recorded: the schedule and measured spans of one step, and its mean costs."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.problems import UserError
from megatron_ext.schedules.action import COLLECTIVES, MODES, P2P, PASSES, Action, parse
from megatron_ext.schedules.build import PIPELINES, Schedule, build
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lower import Program, lower
from megatron_ext.schedules.render_panel import Panel
from megatron_ext.schedules.simulate import Span, Timeline
from megatron_ext.schedules.transfers import transfer

SCHEMA = 1
MEASURED = "measured"
"""The name of a measured timeline."""
LANES = ("compute", "wait", "comm", "p2p-f", "p2p-b")
SAME = ("p", "m", "pipeline", "chunks", "vocab", "overlap", "step")
"""What the files of one step must agree on."""
AGAIN = "Record the step again, into an empty folder, and let the run finish it."
_NAME = re.compile(r"trace-rank-(\d+)\.jsonl")
MOST_NAMED = 5  # ranks or actions that a message lists


@dataclass(frozen=True)
class RankTrace:
    """One file. `rank` is the rank in the job, `stage` in the pipeline; times are of the wall clock."""

    path: Path
    rank: int
    stage: int
    head: dict[str, Any]
    spans: tuple[tuple[str, Action, float, float], ...]


@dataclass(frozen=True)
class Measured:
    """A measured step; its timeline starts at 0. `replicas` is how many ranks each stage has."""

    panel: Panel
    step: int
    replica: int
    replicas: int
    static: bool
    """Whether the run had the static order."""

    @property
    def program(self) -> Program:
        return self.panel.timeline.program


def read_measured(folder: Path, replica: int = 0) -> Measured:
    """The step in `folder`; of stages with several ranks (TP, DP), the rank number `replica` of each.

    Raises:
        UserError: names every file that is missing, broken or does not belong to the others.
    """
    traces = _read_all(folder)
    _check_heads(folder, traces)
    chosen, replicas = _of_replica(folder, traces, replica)
    head = chosen[0].head
    plan = build(head["p"], head["m"], pipeline=head["pipeline"], vocab=head["vocab"], chunks=head["chunks"])
    _check_actions(chosen, lower(plan, overlap=head["overlap"]))
    schedule = _as_run(plan, chosen)
    zero = min(start for trace in chosen for _, _, start, _ in trace.spans)
    spans = [
        Span(trace.stage, lane, action, start - zero, end - zero)
        for trace in chosen
        for lane, action, start, end in trace.spans
    ]
    timeline = Timeline(
        lower(schedule, overlap=head["overlap"]), tuple(span for span in spans if span.lane != "wait")
    )
    waits = tuple(span for span in spans if span.lane == "wait")
    return Measured(
        Panel(MEASURED, timeline, waits), head["step"], replica, replicas, schedule.ranks == plan.ranks
    )


def _read_all(folder: Path) -> list[RankTrace]:
    if not folder.is_dir():
        raise UserError(
            f"--measured {folder}: there is no such folder. Give the folder that --ext-trace named."
        )
    paths = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    if not paths:
        raise UserError(
            f"--measured {folder}: the folder holds no trace-rank-*.jsonl. Run with --ext-trace {folder}, "
            "and enough steps to reach the one that is traced."
        )
    found, problems = [], []
    for path in paths:
        try:
            found.append(_read(path))
        except OSError as error:
            problems.append(f"{path}: cannot be read ({error.strerror}). Make it readable.")
        except ValueError as error:
            problems.append(f"{path}{error} {AGAIN}")
    if problems:
        raise UserError(*problems)
    return found


def _read(path: Path) -> RankTrace:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines:
        raise ValueError(" is empty: the rank was stopped before it wrote.")
    head = _head(_json(lines[0], ": its first line"))
    rank = int(_NAME.fullmatch(path.name)[1])
    if head["rank"] != rank:
        raise ValueError(f": its first line is of rank {head['rank']}, not of rank {rank}.")
    spans = []
    for number, line in enumerate(lines[1:], start=2):
        last = number == len(lines)
        what = f": line {number}" + (" (the last: the rank was stopped while it wrote)" if last else "")
        spans.append(_span(_json(line, what), what))
    return RankTrace(path, rank, head.get("stage", rank), head, tuple(spans))


def _json(line: str, what: str) -> dict:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no JSON object.")
    return value


def _head(head: dict) -> dict:
    head.setdefault("chunks", 1)
    if head.get("event") != "trace" or head.get("schema") != SCHEMA:
        raise ValueError(
            f": its first line is of event {head.get('event')!r}, schema {head.get('schema')!r}; expected "
            f"'trace', schema {SCHEMA}."
        )
    least = {"rank": 0, "stage": 0, "p": 1, "m": 1, "step": 0, "chunks": 1}
    wrong = [
        name
        for name, low in least.items()
        if not (name == "stage" and name not in head)
        and not (type(head.get(name)) is int and head[name] >= low)
    ]
    wrong += [
        name for name, known in (("pipeline", PIPELINES), ("vocab", MODES)) if head.get(name) not in known
    ]
    wrong += [] if isinstance(head.get("overlap"), bool) else ["overlap"]
    if wrong:
        values = ", ".join(f"{name} {head.get(name)!r}" for name in wrong)
        raise ValueError(f": its first line has {values}, which is no value for it.")
    return head


def _span(line: dict, what: str) -> tuple[str, Action, float, float]:
    start, end = line.get("start"), line.get("end")
    times = all(type(t) in (int, float) and math.isfinite(t) for t in (start, end)) and end >= start
    try:
        action = parse(line.get("action", ""))
    except (ValueError, TypeError):
        action = None
    if action is None or not times or line.get("lane") not in LANES:
        raise ValueError(f"{what} is no span with an action, a lane, a start and a later end.")
    return line["lane"], action, float(start), float(end)


def _check_heads(folder: Path, traces: Sequence[RankTrace]) -> None:
    problems = []
    for name in SAME:
        ranks = defaultdict(list)
        for trace in traces:
            ranks[trace.head[name]].append(trace.rank)
        if len(ranks) > 1:
            values = "; ".join(f"{value} on rank {_some(of)}" for value, of in ranks.items())
            problems.append(
                f"{folder}: the files are not of one step of one run: {name} is {values}. {AGAIN}"
            )
    if problems:
        raise UserError(*problems)
    stages = Counter(trace.stage for trace in traces)
    p, missing_ranks = traces[0].head["p"], sorted(set(range(traces[-1].rank + 1)) - {t.rank for t in traces})
    missing_stages = [stage for stage in range(p) if stages[stage] < max(stages.values())]
    wrong = [f"there are no files of stage {_some(missing_stages)}, or too few"] if missing_stages else []
    wrong += [f"there are none of rank {_some(missing_ranks)}"] if missing_ranks else []
    wrong += [f"there are files of stage {max(stages)}"] if max(stages) >= p else []
    if wrong:
        raise UserError(
            f"{folder}: the run has {p} pipeline stages, and {', and '.join(wrong)}. Copy the files of "
            "all nodes into one folder; if a rank was stopped before it wrote, record the step again."
        )


def _of_replica(folder: Path, traces: Sequence[RankTrace], replica: int) -> tuple[list[RankTrace], int]:
    """One rank of each stage, in order of stages. The n-th ranks of all stages are one pipeline."""
    by_stage = defaultdict(list)
    for trace in sorted(traces, key=lambda trace: trace.rank):
        by_stage[trace.stage].append(trace)
    replicas = len(by_stage[0])
    if replica >= replicas:
        raise UserError(
            f"--replica {replica}: in {folder} each stage has {replicas} ranks. Give 0 to {replicas - 1}."
        )
    return [by_stage[stage][replica] for stage in sorted(by_stage)], replicas


def _check_actions(traces: Sequence[RankTrace], program: Program) -> None:
    problems = []
    for trace, expected in zip(traces, program.ranks, strict=True):
        recorded = Counter(action for lane, action, _, _ in trace.spans if lane != "wait")
        missing = list((Counter(expected) - recorded).elements())
        extra = list((recorded - Counter(expected)).elements())
        for words, actions in (("lacks", missing), ("has too many of", extra)):
            if actions:
                problems.append(
                    f"{trace.path}: {words} {len(actions)} of the step's actions: {_some(actions)}. {AGAIN}"
                )
    if problems:
        raise UserError(*problems)


def _as_run(plan: Schedule, traces: Sequence[RankTrace]) -> Schedule:
    """The plan with the order in which the passes ran: a run may have a list-scheduled order."""
    ranks = tuple(
        tuple(action for _, action, _, _ in _in_order(trace) if action.kind in PASSES) for trace in traces
    )
    if ranks == plan.ranks:
        return plan
    collectives = tuple(action for _, action, _, _ in _in_order(traces[0]) if action.kind in COLLECTIVES)
    return replace(plan, ranks=ranks, collectives=collectives)


def _in_order(trace: RankTrace) -> list[tuple[str, Action, float, float]]:
    return sorted((span for span in trace.spans if span[0] != "wait"), key=lambda span: (span[2], span[3]))


def _some(values: Sequence[Any]) -> str:
    more = len(values) - MOST_NAMED
    return ", ".join(str(v) for v in values[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def measured_costs(timeline: Timeline) -> Costs:
    """Mean seconds of each pass by stage, and of each kind of transfer from when all its ranks were there."""
    schedule = timeline.program.schedule
    p, chunks = schedule.p, schedule.chunks
    passes: dict[tuple[str, int], list[float]] = defaultdict(list)
    transfers: dict[tuple[str, Any], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.lane == "compute":
            passes[span.action.kind, span.rank].append(span.end - span.start)
        else:
            kind = "p2p" if span.action.kind in P2P else span.action.kind
            transfers[kind, transfer(span, schedule.place)].append(span)
    comm = defaultdict(list)
    for (kind, _), spans in transfers.items():
        # The rank that comes last does not wait for others. Its span is the shortest, by any rank's clock.
        comm[kind].append(min(span.end - span.start for span in spans))

    def per_rank(kind: str) -> tuple[float, ...]:
        return tuple(_mean(passes[kind, rank]) for rank in range(p))

    forward, backward, weight = (tuple(chunks * time for time in per_rank(kind)) for kind in ("F", "B", "W"))
    return Costs(
        forward=forward,
        backward=tuple(b + w for b, w in zip(backward, weight, strict=True)),
        weight=weight if schedule.split else None,
        output_s=per_rank("S"),
        output_u=per_rank("U"),
        output_t=per_rank("T"),
        loss=per_rank("L"),
        input_forward=per_rank("IF"),
        input_backward=per_rank("IB"),
        comm={kind: _mean(times) for kind, times in sorted(comm.items())},
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
