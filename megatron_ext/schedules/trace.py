"""Measured actions of one step, `--ext-trace DIR`: one JSON-lines file per rank, `DIR/trace-rank-NNNN.jsonl`.

The first line describes the schedule, every other line is a span {action, lane, start, end} in seconds of the
wall clock: lanes are "compute" and "wait" (what a pass waited for), "comm" (vocabulary collectives), "p2p-f"
and "p2p-b". On a GPU the times are those of the device; on CPU spans of passes have `cpu`, too, the processor
time of the thread that ran them. `megatron-ext trace --measured DIR` reads them.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_ext.schedules.lane import Clock
from megatron_ext.schedules.lower import Program
from megatron_ext.schedules.runtime import Runtime

SCHEMA = 1


class StepTrace:
    """Writes the spans of step number `step` of one rank, counted from where the process starts or resumes.

    `rank` is the rank in the job and names the file; the line inside says the rank in the pipeline, `stage`.
    """

    def __init__(self, folder: str, rank: int, stage: int, step: int, on_gpu: bool):
        self.path = Path(folder) / f"trace-rank-{rank:04d}.jsonl"
        self._rank = rank
        self._stage = stage
        self._step = step
        self._on_gpu = on_gpu
        self._seen = 0

    @contextlib.contextmanager
    def around(self, runtime: Runtime, program: Program) -> Iterator[None]:
        """Trace what `runtime` runs inside, if it is the step to be traced."""
        if program.schedule.forward_only:
            yield
            return
        self._seen += 1
        if self._seen != self._step:
            yield
            return
        clock = Clock(_cuda_mark) if self._on_gpu else Clock(time.time, time.thread_time)
        zero = (_cuda_mark(), _settled_time()) if self._on_gpu else None
        runtime.trace(clock)
        try:
            yield
        finally:
            runtime.trace(None)
        self._write(program, clock, zero)

    def _write(self, program: Program, clock: Clock, zero: tuple[Any, float] | None) -> None:
        schedule = program.schedule
        head = {
            "event": "trace",
            "schema": SCHEMA,
            "rank": self._rank,
            "stage": self._stage,
            "p": schedule.p,
            "m": schedule.m,
            "pipeline": schedule.pipeline,
            "chunks": schedule.chunks,
            "vocab": schedule.vocab,
            "overlap": program.overlap,
            "step": self._step,
        }
        if zero is not None:
            torch.cuda.synchronize()

        def seconds(mark: Any) -> float:
            return mark if zero is None else zero[1] + zero[0].elapsed_time(mark) / 1e3

        spans = [
            {"action": name, "lane": lane, "start": seconds(start), "end": seconds(end)}
            | ({"cpu": clock.cpu[name]} if lane == "compute" and name in clock.cpu else {})
            for lane, name, start, end in clock.spans
        ]
        spans.sort(key=lambda span: span["start"])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w") as out:
            for line in (head, *spans):
                out.write(json.dumps(line, separators=(",", ":")) + "\n")


def _cuda_mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _settled_time() -> float:
    """The wall clock once the device has caught up with the host."""
    torch.cuda.synchronize()
    return time.time()
