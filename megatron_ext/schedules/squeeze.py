"""Squeezing: passes run as early as they can, in the order of the block where there is a choice.

An event simulation without communication time. It decides the order of forward and backward passes and of
vocabulary slots on every rank.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_ext.schedules.action import Action
from megatron_ext.schedules.blocks import Block
from megatron_ext.schedules.costs import Costs


class Slot(NamedTuple):
    """Vocabulary slot number `index` of a rank."""

    index: int


Priority = Callable[[str, int, int], tuple]
"""(kind "F", "B" or "slot", rank, index) -> sort key; the smallest of the ready ones runs."""

_TIE = {"slot": 0, "B": 1, "F": 2}


def by_block(block: Block) -> Priority:
    """What starts first in the block; at the same moment a slot before a pass."""
    return lambda kind, rank, index: (round(block.start(kind, rank, index), 9), _TIE[kind])


def by_kind(order: Sequence[str]) -> Callable[[Block], Priority]:
    """One kind before another, whatever the block says."""
    place = {kind: at for at, kind in enumerate(order)}
    return lambda block: lambda kind, rank, index: (place[kind],)


def squeeze(
    block: Block, m: int, costs: Costs, priority: Priority, forward_only: bool
) -> list[list[Action | Slot]]:
    """Forward passes, backward passes and slots of every rank, in the order in which they run.

    With a block whose last slot nobody waits for, that slot is not among them. Slots in which all ranks wait
    for each other are not squeezed: to run something else first holds all others up.
    """
    if block.vocab.synchronous:
        return [_in_block_order(block, m, rank, forward_only) for rank in range(block.p)]
    return _Squeeze(block, m, costs, priority, forward_only).run()


def _in_block_order(block: Block, m: int, rank: int, forward_only: bool) -> list[Action | Slot]:
    """A rank's row as the block has it, after as many forward passes as may be in flight."""
    kinds = ("F", "slot") if forward_only else ("F", "B", "slot")
    filling = 1 if forward_only else block.cap(rank, m)

    def key(entry: tuple[str, int]) -> tuple[bool, float]:
        kind, index = entry
        return kind != "F" or index >= filling, block.start(kind, rank, index)

    entries = sorted(((kind, index) for kind in kinds for index in range(m)), key=key)
    return [Slot(index) if kind == "slot" else Action(kind, index) for kind, index in entries]


class _Squeeze:
    def __init__(self, block: Block, m: int, costs: Costs, priority: Priority, forward_only: bool):
        self.block, self.m, self.costs, self.priority = block, m, costs, priority
        self.forward_only = forward_only
        self.p = block.p
        kinds = block.vocab.slots
        if forward_only:
            kinds = tuple((kind, lag) for kind, lag in kinds if kind in ("S", "U"))
        self.kinds = kinds
        lag = max((lag for _, lag in kinds), default=0)
        self.slots = 0 if not kinds else m + lag - (block.vocab.flushed_last and not forward_only)
        self.rows: list[list[Action | Slot]] = [[] for _ in range(self.p)]
        self.free = [0.0] * self.p
        self.next = [dict.fromkeys(("F", "B", "slot"), 0) for _ in range(self.p)]
        self.ended: dict[tuple[str, int], int] = {}  # (pass, microbatch) -> ranks on which it has ended
        self.done: set[tuple[str, int, int]] = set()  # (pass, rank, microbatch)
        # What a rank's slot still holds.
        self.queue: list[list[tuple[str, int]]] = [[] for _ in range(self.p)]
        self.events: list[tuple[float, int, list[tuple[str, int, int]]]] = []
        self.count = 0

    def run(self) -> list[list[Action | Slot]]:
        now = 0.0
        while True:
            while self._round(now, instant=True) or self._round(now, instant=False):
                pass
            if not self.events:
                break
            now = self.events[0][0]
            while self.events and self.events[0][0] <= now:
                self._end(heapq.heappop(self.events)[2])
        total = self.m * (1 if self.forward_only else 2) + self.slots
        assert all(len(row) == total for row in self.rows), "a pass could never run"
        return self.rows

    def _round(self, now: float, instant: bool) -> bool:
        """Start what the free ranks can start; passes without duration first, since they end at once."""
        started = False
        for rank in range(self.p):
            if self.free[rank] > now:
                continue
            if self.queue[rank]:
                started |= self._continue(rank, now)
                continue
            kind = self._choice(rank)
            if kind is None or (self._duration(kind, rank) == 0) != instant:
                continue
            self._start(kind, rank, now)
            started = True
        return started

    def _choice(self, rank: int) -> str | None:
        ready = [kind for kind in ("F", "B", "slot") if self._ready(kind, rank)]
        return min(ready, key=lambda kind: self.priority(kind, rank, self.next[rank][kind]), default=None)

    def _duration(self, kind: str, rank: int) -> float:
        if kind != "slot":
            return self.costs.of(kind, rank)
        return sum(self.costs.of(k, rank) for k, _ in self._passes(self.next[rank]["slot"]))

    def _passes(self, index: int) -> list[tuple[str, int]]:
        return [(kind, index - lag) for kind, lag in self.kinds if 0 <= index - lag < self.m]

    def _ready(self, kind: str, rank: int) -> bool:
        index = self.next[rank][kind]
        if kind == "slot":
            if index >= self.slots:
                return False
            return all(self._has_inputs(*entry) for entry in self._passes(index))
        if index >= self.m or (kind == "B" and self.forward_only):
            return False
        if kind == "F":
            flying = self.next[rank]["F"] - self.next[rank]["B"]
            capped = not self.forward_only and flying >= self.block.cap(rank, self.m)
            return not capped and (rank == 0 or ("F", rank - 1, index) in self.done)
        if rank < self.p - 1:
            return ("B", rank + 1, index) in self.done
        return ("F", rank, index) in self.done and self._loss_known(index)

    def _has_inputs(self, kind: str, i: int) -> bool:
        if kind == "S":
            # X of a microbatch travels behind the statistics of the one before.
            return ("F", self.p - 1, i) in self.done and (i == 0 or self._everywhere("S", i - 1))
        if kind == "U":
            return self._everywhere("S", i)
        return self._statistics(i)  # T: the loss is known as soon as the statistics are

    def _statistics(self, i: int) -> bool:
        return self._everywhere("U" if any(kind == "U" for kind, _ in self.kinds) else "S", i)

    def _loss_known(self, i: int) -> bool:
        """Whether the last stage's backward pass has its gradient."""
        if not self.kinds:
            return True
        return self._everywhere("S" if self.block.vocab.flushed_last else "T", i)

    def _everywhere(self, kind: str, i: int) -> bool:
        return self.ended.get((kind, i), 0) == self.p

    def _start(self, kind: str, rank: int, now: float) -> None:
        index = self.next[rank][kind]
        self.next[rank][kind] += 1
        if kind == "slot":
            self.rows[rank].append(Slot(index))
            self.queue[rank] = self._passes(index)
            self._continue(rank, now)
            return
        self.rows[rank].append(Action(kind, index))
        self._occupy(rank, now, self.costs.of(kind, rank), [(kind, rank, index)])

    def _continue(self, rank: int, now: float) -> bool:
        kind, i = self.queue[rank][0]
        if not self._has_inputs(kind, i):
            return False
        self.queue[rank].pop(0)
        self._occupy(rank, now, self.costs.of(kind, rank), [(kind, rank, i)])
        return True

    def _occupy(self, rank: int, now: float, duration: float, ended: list[tuple[str, int, int]]) -> None:
        if duration == 0:
            self._end(ended)
            return
        self.free[rank] = now + duration
        heapq.heappush(self.events, (now + duration, self.count, ended))
        self.count += 1

    def _end(self, ended: list[tuple[str, int, int]]) -> None:
        for kind, rank, i in ended:
            self.done.add((kind, rank, i))
            self.ended[kind, i] = self.ended.get((kind, i), 0) + 1
