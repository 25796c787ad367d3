"""Simulates a program with given costs: when every pass and transfer of every rank runs.

Passes run one after another on their rank, in the order of the program, each when what it waits for has
ended. Collectives run one after another on a lane: one starts when every rank has launched it and its lane is
free. Point-to-point transfers have a lane per direction and start when both sides have launched them. Without
overlap a launch holds its rank until its transfer is over.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from megatron_ext.schedules.action import COLLECTIVES, P2P, Action, needs
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lower import Program


@dataclass(frozen=True)
class Span:
    """One action on one rank. Lanes: compute, comm, p2p-f, p2p-b."""

    rank: int
    lane: str
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a program does when; times in the unit of the costs."""

    program: Program
    spans: tuple[Span, ...]

    @cached_property
    def makespan(self) -> float:
        """Time until the last pass or transfer has ended."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def _compute(self) -> dict[int, list[Span]]:
        found: dict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            if span.lane == "compute":
                found[span.rank].append(span)
        return found

    def busy(self, rank: int) -> float:
        """Time in which the rank computes."""
        return sum(span.end - span.start for span in self._compute[rank])

    def bubble(self, rank: int) -> float:
        """Share of the makespan in which the rank does not compute."""
        return 1.0 - self.busy(rank) / self.makespan if self.makespan else 0.0

    def in_flight(self, rank: int) -> list[tuple[float, int]]:
        """(time, chunk activations held): up at the start of F, down at the end of B or, where the backward
        pass is split, of W."""
        releases = self.program.schedule.releases
        steps = [
            (span.start, 1) if span.action.kind == "F" else (span.end, -1)
            for span in self._compute[rank]
            if span.action.kind in ("F", releases)
        ]
        out, now = [], 0
        for time, change in sorted(steps):
            now += change
            out.append((time, now))
        return out

    def in_flight_peak(self, rank: int) -> int:
        """The most chunk activations that the rank holds at once."""
        return max((count for _, count in self.in_flight(rank)), default=0)


class Deadlock(ValueError):
    """A program that cannot go on. `places` are the positions at which the ranks stand."""

    def __init__(self, text: str, places: tuple[int, ...]):
        super().__init__(text)
        self.places = places


def simulate(program: Program, costs: Costs) -> Timeline:
    """The timeline of a program.

    Raises:
        ValueError: costs of another number of ranks.
        Deadlock: ranks wait for each other.
    """
    costs.check(program.schedule.p)
    return _Simulation(program, costs).run()


class _Simulation:
    """Works through the lists; ranks go on as far as they can, in rounds, until all are done.

    Times follow from dependencies alone, so the order in which ranks are visited does not matter.
    """

    def __init__(self, program: Program, costs: Costs):
        self.program, self.costs = program, costs
        self.p, self.place = program.schedule.p, program.schedule.place
        self.at = [0] * self.p
        self.now = [0.0] * self.p  # when the rank's next action can be looked at
        self.ended: list[dict[Action, float]] = [{} for _ in range(self.p)]
        self.launched: dict[tuple, dict[int, float]] = defaultdict(dict)  # event -> rank -> time
        self.queues: list[list[tuple]] = [[] for _ in range(self.p)]  # collectives of a rank, in launch order
        self.lane_free = [0.0] * self.p
        self.pair_free: dict[tuple[str, int, int], float] = defaultdict(float)
        self.pair_queue: dict[tuple[str, int, int, str], list[tuple]] = defaultdict(list)
        self.spans: list[Span] = []

    def run(self) -> Timeline:
        while True:
            moved = False
            for rank in range(self.p):
                while self._step(rank):
                    moved = True
            if not moved:
                break
        rows = self.program.ranks
        if any(at < len(row) for at, row in zip(self.at, rows, strict=True)):
            waits = [
                f"rank {r} at {row[at]}"
                for r, (at, row) in enumerate(zip(self.at, rows, strict=True))
                if at < len(row)
            ]
            raise Deadlock("ranks wait for each other: " + ", ".join(waits), tuple(self.at))
        return Timeline(self.program, tuple(self.spans))

    def _step(self, rank: int) -> bool:
        row = self.program.ranks[rank]
        if self.at[rank] == len(row):
            return False
        action = row[self.at[rank]]
        if action.kind in COLLECTIVES or action.kind in P2P:
            return self._launch(rank, action)
        ready = self._inputs_ready(action, rank)
        if ready is None:
            return False
        start = max(self.now[rank], ready)
        end = start + self.program.schedule.time(action.kind, rank, self.costs)
        self._finish(rank, "compute", action, start, end)
        self.now[rank] = end
        self.at[rank] += 1
        return True

    def _inputs_ready(self, action: Action, rank: int) -> float | None:
        vocab = self.program.schedule.vocab
        times = [self.ended[rank].get(need) for need in needs(action, rank, self.place, vocab)]
        return None if None in times else max(times, default=0.0)

    def _launch(self, rank: int, action: Action) -> bool:
        event = self._event(rank, action)
        if rank not in self.launched[event]:
            if self._inputs_ready(action, rank) is None:
                return False
            self.launched[event][rank] = self.now[rank]
            if action.kind in COLLECTIVES:
                self.queues[rank].append(event)
            else:
                self._queue_of(event, action.kind[0]).append(event)
            self._settle(event)
            if self.program.overlap:
                self.at[rank] += 1
                return True
        if self.program.overlap or action not in self.ended[rank]:
            return False
        self.now[rank] = max(self.now[rank], self.ended[rank][action])
        self.at[rank] += 1
        return True

    def _event(self, rank: int, action: Action) -> tuple:
        if action.kind in COLLECTIVES:
            return ("collective", -1, action)
        edge = self.place.edge(action.kind, rank, action.chunk)
        if edge is None:
            return ("nowhere", rank, action)  # `check` says so
        return (action.kind[1], edge, action.microbatch)

    def _settle(self, event: tuple) -> None:
        """Run everything that can run now that `event` has been launched once more."""
        if event[0] != "collective":
            self._settle_pair(event)
            return
        while all(self.queues) and len({queue[0] for queue in self.queues}) == 1:
            head = self.queues[0][0]
            action = head[2]
            start = max(*(self.launched[head][r] for r in range(self.p)), *self.lane_free)
            end = start + self.costs.transfer(action.kind)
            for rank in range(self.p):
                self.queues[rank].pop(0)
                self.lane_free[rank] = end
                self._finish(rank, "comm", action, start, end)

    def _queue_of(self, event: tuple, side: str) -> list[tuple]:
        """Transfers that one side ("S" or "R") of a link has launched: from a rank to another, one way."""
        return self.pair_queue[event[0], *event[1][1:], side] if event[0] != "nowhere" else []

    def _settle_pair(self, event: tuple) -> None:
        if event[0] == "nowhere":
            return
        sends, receives = self._queue_of(event, "S"), self._queue_of(event, "R")
        while sends and receives and sends[0] == receives[0]:
            head = sends.pop(0)
            receives.pop(0)
            direction, edge, microbatch = head
            link = (direction, edge.source, edge.target)
            start = max(*self.launched[head].values(), self.pair_free[link])
            end = start + self.costs.transfer("p2p")
            self.pair_free[link] = end
            for side in "SR":
                # Activations go to the higher stage, gradients to the lower one.
                rank, chunk = self.place.where(edge.stage + ((direction == "F") == (side == "R")))
                action = Action(side + direction, microbatch, chunk)
                self._finish(rank, f"p2p-{direction.lower()}", action, start, end)

    def _finish(self, rank: int, lane: str, action: Action, start: float, end: float) -> None:
        self.ended[rank][action] = end
        self.spans.append(Span(rank, lane, action, start, end))


def peak_by_rank(timeline: Timeline, ranks: Iterable[int]) -> list[int]:
    """Chunk activations held at most, by rank."""
    return [timeline.in_flight_peak(rank) for rank in ranks]
