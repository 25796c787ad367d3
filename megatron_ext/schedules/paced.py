"""Paced runs: a real schedule, runtime and communication, with passes that only sleep for their modelled
time.

More stages than cores can be run this way: ranks that sleep do not take each other's time. A collective is a
real one of a few bytes, after which its lane sleeps for the modelled time of the transfer, as in `simulate`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext import traffic
from megatron_ext.schedules.action import Action
from megatron_ext.schedules.build import Schedule
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lane import Clock, make_lane
from megatron_ext.schedules.links import Boundary, Links, Way
from megatron_ext.schedules.lower import Program
from megatron_ext.schedules.placement import Placement
from megatron_ext.schedules.runtime import Runtime

FEATURE = "paced"
_BOUNDARY = Boundary((16,), torch.float32, torch.device("cpu"))


class PacedPasses:
    """Sleeps instead of computing; implements `runtime.Passes`."""

    def __init__(self, rank: int, schedule: Schedule, costs: Costs, group: ProcessGroup):
        self.slept = 0.0
        """Seconds of modelled compute so far."""
        self._schedule = schedule
        self._rank, self._costs, self._group = rank, costs, group
        self._output = torch.zeros(_BOUNDARY.shape)

    def compute(self, action: Action) -> None:
        """Sleep for the pass."""
        seconds = self._schedule.time(action.kind, self._rank, self._costs)
        if seconds > 0:
            time.sleep(seconds)
            self.slept += seconds

    def collective(self, action: Action) -> tuple[Callable[[], Any], Sequence[Tensor]]:
        """Meet the other ranks, and sleep for the transfer."""
        seconds = self._costs.transfer(action.kind)

        def run() -> None:
            traffic.all_reduce(torch.zeros(1), group=self._group, feature=FEATURE)
            if seconds > 0:
                time.sleep(seconds)

        return run, ()

    def arrived(self, action: Action, result: Any) -> None:
        """Nothing is kept."""

    def outgoing(self, action: Action) -> Tensor:
        """A small tensor."""
        return self._output

    def sent(self, action: Action) -> None:
        """Nothing to let go of."""


@dataclass(frozen=True)
class PacedResult:
    """One paced run on one rank, in seconds."""

    wall: float
    """From a common start until this rank was done."""
    not_slept: float
    """Share of the wall time that was neither modelled compute nor waiting: what the machine took."""
    spans: list[tuple[str, str, float, float]]
    """(lane, action, start, end), wall clock."""


class PacedRun:
    """Runs programs on this rank; collective. The groups are of all pipeline ranks, in their order: "comm"
    for collectives, and one for each direction and way of the placement (1F1B's, if not given)."""

    def __init__(
        self,
        comm: ProcessGroup,
        groups: Mapping[Way, ProcessGroup],
        *,
        overlap: bool,
        placement: Placement | None = None,
    ):
        self._comm = comm
        self._overlap = overlap
        self._rank = self._comm.rank()
        self._placement = placement or Placement(self._comm.size())
        links = Links(groups, self._placement, feature=FEATURE, overlap=overlap, on_gpu=False)
        self._runtime = Runtime(self._rank, links, make_lane("comm", overlap=overlap, on_gpu=False))

    def run(self, program: Program, costs: Costs) -> PacedResult:
        """One step. `costs` are in seconds."""
        assert program.schedule.place == self._placement, "links of another placement"
        passes = PacedPasses(self._rank, program.schedule, costs, self._comm)
        clock = Clock(time.time)
        self._runtime.trace(clock)
        torch.distributed.barrier(self._comm)
        start = time.time()
        self._runtime.run(program, passes, _BOUNDARY)
        wall = time.time() - start
        self._runtime.trace(None)
        # Without overlap a transfer holds its rank; with it, only what a pass waits for does.
        waiting = lambda lane: lane == "wait" if self._overlap else lane != "compute"  # noqa: E731
        waited = sum(end - begin for lane, _, begin, end in clock.spans if waiting(lane))
        # The last lanes drain after the last pass; that is waiting, too.
        last = max(end for lane, _, _, end in clock.spans if lane in ("compute", "wait"))
        waited += start + wall - last
        return PacedResult(wall, max(0.0, wall - passes.slept - waited) / wall, clock.spans)
