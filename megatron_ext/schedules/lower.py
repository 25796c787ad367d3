"""Lowers a schedule to programs: every rank's list with communication launches inserted.

The schedule is executed once in thought, with its costs and free communication, which gives one global order
of all passes and all communication events: an event comes as soon as its inputs exist. Each rank's list is
its part of that order. So the lists complete even when every event blocks all its ranks until it is over.

With `overlap` launches are asynchronous, and each moves up in its rank's list: one that sends data of the
rank stands right after the pass that makes the data; one that only receives moves above the transformer
pass in front of it, so that the transfer runs beside that pass. Collectives keep their order.
"""

import heapq
from dataclasses import dataclass

from megatron_ext.schedules.action import COLLECTIVES, P2P, PASSES, TRANSFORMER, Action, needs
from megatron_ext.schedules.build import Schedule

PARTNER = {"SF": "RF", "SB": "RB"}


@dataclass(frozen=True)
class Program:
    """Lists of passes and launches by rank."""

    schedule: Schedule
    overlap: bool
    """Launches return at once; without it each blocks its rank until the transfer is over."""
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def text(self) -> str:
        """One line per rank."""
        return "\n".join(
            f"rank {rank}: " + " ".join(str(action) for action in row) for rank, row in enumerate(self.ranks)
        )


class Stuck(ValueError):
    """A schedule that cannot go on. `places` are the positions at which the ranks stand."""

    def __init__(self, schedule: Schedule, places: tuple[int, ...]):
        waits = [
            f"rank {rank} at {row[at]}" if at < len(row) else f"rank {rank} at its end"
            for rank, (at, row) in enumerate(zip(places, schedule.ranks, strict=True))
        ]
        super().__init__("the schedule cannot be executed: " + ", ".join(waits))
        self.schedule = schedule
        self.places = places


def lower(schedule: Schedule, *, overlap: bool = True) -> Program:
    """The program of a schedule.

    Raises:
        Stuck: the schedule cannot be executed; `check.checked` turns it into a ScheduleError with the grid.
    """
    rows = _Execution(schedule).run()
    if overlap:
        rows = [_moved_up(row, rank, schedule) for rank, row in enumerate(rows)]
    return Program(schedule, overlap, tuple(map(tuple, rows)))


class _Execution:
    """Runs the passes of all ranks in order, and emits communication as soon as its inputs exist."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.p, self.place = schedule.p, schedule.place
        self.rows: list[list[Action]] = [[] for _ in range(self.p)]
        self.next = [0] * self.p
        self.free = [True] * self.p
        self.ended: list[set[Action]] = [set() for _ in range(self.p)]
        self.at = 0  # the next collective
        self.events: list[tuple[float, int, int, Action]] = []
        self.outputs: list[
            tuple[int, Action]
        ] = []  # passes that have ended, whose output goes to a neighbour
        self.count = 0

    def run(self) -> list[list[Action]]:
        now = 0.0
        while True:
            while self._collect() or self._pass_on() or self._start(now):
                pass
            if not self.events:
                break
            now = self.events[0][0]
            while self.events and self.events[0][0] <= now:
                _, _, rank, action = heapq.heappop(self.events)
                self._end(rank, action)
        rows = self.schedule.ranks
        if self.at < len(self.schedule.collectives) or any(
            at < len(row) for at, row in zip(self.next, rows, strict=True)
        ):
            raise Stuck(self.schedule, tuple(self.next))
        return self.rows

    def _collect(self) -> bool:
        """Emit the next collective if all its inputs exist."""
        if self.at == len(self.schedule.collectives):
            return False
        action = self.schedule.collectives[self.at]
        ranks = range(self.p)
        if not all(need in self.ended[r] for r in ranks for need in self._needs(action, r)):
            return False
        for rank in ranks:
            self.rows[rank].append(action)
            self.ended[rank].add(action)
        self.at += 1
        return True

    def _pass_on(self) -> bool:
        """Emit transfers between neighbours."""
        emitted = False
        for rank, action in self.outputs:
            send = action._replace(kind="SF" if action.kind == "F" else "SB")
            edge = self.place.edge(send.kind, rank, action.chunk)
            if edge is None:
                continue
            peer, chunk = self.place.where(edge.stage + (action.kind == "F"))
            receive = Action(PARTNER[send.kind], action.microbatch, chunk)
            self.rows[rank].append(send)
            self.rows[peer].append(receive)
            self.ended[peer].add(receive)
            emitted = True
        self.outputs.clear()
        return emitted

    def _start(self, now: float) -> bool:
        started = False
        for rank, row in enumerate(self.schedule.ranks):
            if not self.free[rank] or self.next[rank] == len(row):
                continue
            action = row[self.next[rank]]
            if not all(need in self.ended[rank] for need in self._needs(action, rank)):
                continue
            self.next[rank] += 1
            self.rows[rank].append(action)
            duration = self.schedule.time(action.kind, rank)
            if duration == 0:
                self._end(rank, action)
            else:
                self.free[rank] = False
                heapq.heappush(self.events, (now + duration, self.count, rank, action))
                self.count += 1
            started = True
        return started

    def _end(self, rank: int, action: Action) -> None:
        self.free[rank] = True
        self.ended[rank].add(action)
        if action.kind in ("F", "B"):
            self.outputs.append((rank, action))

    def _needs(self, action: Action, rank: int) -> tuple[Action, ...]:
        return needs(action, rank, self.place, self.schedule.vocab)


def _moved_up(row: list[Action], rank: int, schedule: Schedule) -> list[Action]:
    out: list[Action] = []
    for action in row:
        at = len(out)
        if action.kind not in PASSES:
            at = _place(out, action, needs(action, rank, schedule.place, schedule.vocab))
        out.insert(at, action)
    return out


def _place(before: list[Action], action: Action, inputs: tuple[Action, ...]) -> int:
    """Where a launch goes in the list of what comes before it."""
    at, crossed = len(before), 0
    while at > 0:
        previous = before[at - 1]
        if previous in inputs or not _may_swap(previous, action):
            break
        if previous.kind in TRANSFORMER:
            # A receiver is one pass early, not more: what is received too early only takes memory.
            if not inputs and crossed == 1:
                break
            crossed += 1
        at -= 1
    return at


def _may_swap(previous: Action, action: Action) -> bool:
    """Collectives keep their order, and so do transfers of one kind."""
    if action.kind in COLLECTIVES:
        return previous.kind not in COLLECTIVES
    return not (action.kind in P2P and previous.kind == action.kind)
