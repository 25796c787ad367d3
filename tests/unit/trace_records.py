"""Folders as `--ext-trace DIR` fills them, made from simulated steps."""

import json
from pathlib import Path

from megatron_ext.schedules.build import Schedule, build
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lower import lower
from megatron_ext.schedules.simulate import Span, simulate
from megatron_ext.schedules.transfers import gaps

COSTS = Costs(
    forward=(0.010, 0.012),
    backward=0.020,
    output_s=0.004,
    output_t=0.002,
    loss=0.001,
    comm={"p2p": 0.001, "C0": 0.002, "C1": 0.003, "G": 0.001, "e": 0.002, "g": 0.002},
)
EPOCH = 1.7e9


def write_trace(
    folder: Path,
    p: int = 2,
    m: int = 4,
    *,
    vocab: str = "vocab-2",
    costs: Costs = COSTS,
    overlap: bool = True,
    schedule: Schedule | None = None,
    replicas: int = 1,
    early: float = 0.0,
    **head,
) -> Path:
    """A step as the simulation of `costs` says. Rank r of the job is of stage r // replicas.

    With `early`, rank 0 comes to every collective so many seconds before the others, where its lane is free.
    """
    folder.mkdir(parents=True, exist_ok=True)
    timeline = simulate(lower(schedule or build(p, m, vocab=vocab), overlap=overlap), costs)
    for rank in range(p * replicas):
        stage = rank // replicas
        lines = [
            {"event": "trace", "schema": 1, "rank": rank, "stage": stage, "p": p, "m": m, "pipeline": "1f1b",
             "vocab": vocab, "overlap": overlap, "step": 3} | head
        ]  # fmt: skip
        spans = sorted((*timeline.spans, *gaps(timeline)), key=lambda span: span.start)
        free = 0.0
        for span in (span for span in spans if span.rank == stage):
            start, free = _start(span, early, free)
            lines.append(
                {
                    "action": str(span.action),
                    "lane": span.lane,
                    "start": EPOCH + start,
                    "end": EPOCH + span.end,
                }
            )
        write_lines(folder, rank, lines)
    return folder


def _start(span: Span, early: float, free: float) -> tuple[float, float]:
    """The span's start, and until when the rank's lane of collectives is taken."""
    if span.lane != "comm":
        return span.start, free
    return (max(free, span.start - early) if span.rank == 0 else span.start), span.end


def write_lines(folder: Path, rank: int, lines: list[dict]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"trace-rank-{rank:04d}.jsonl").write_text(text)


def read_lines(folder: Path, rank: int) -> list[dict]:
    return [json.loads(line) for line in (folder / f"trace-rank-{rank:04d}.jsonl").read_text().splitlines()]
