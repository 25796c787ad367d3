"""Squeezing: passes run as early as they can, in the order of the block where there is a choice.

An event simulation without communication time. It decides the order of forward and backward passes and of
vocabulary slots on every rank.
"""

import heapq
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from megatron_ext.schedules.action import TRANSFORMER, Action
from megatron_ext.schedules.blocks import Block
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.placement import Place


class Slot(NamedTuple):
    """Vocabulary slot number `index` of a rank."""

    index: int


Priority = Callable[[str, int, int, int], tuple]
"""(kind "F", "B", "W" or "slot", rank, chunk, index) -> sort key; the smallest of the ready ones runs."""
Stream = tuple[str, int]
"""(kind, chunk): its passes run in the order of the microbatches."""

_TIE = {"slot": 0, "B": 1, "F": 2, "W": 3}


def by_block(block: Block) -> Priority:
    """What starts first in the block; at the same moment a slot before a pass."""
    return lambda kind, rank, chunk, index: (
        round(block.start(kind, rank, chunk, index), 9),
        _TIE[kind],
        -chunk,
    )


def by_kind(order: Sequence[str]) -> Callable[[Block], Priority]:
    """One kind before another, whatever the block says."""
    place = {kind: at for at, kind in enumerate(order)}
    return lambda block: (
        lambda kind, rank, chunk, index: (
            place[kind],
            block.start(kind, rank, chunk, index),
            -chunk,
        )
    )


def squeeze(
    block: Block, m: int, costs: Costs, priority: Priority, forward_only: bool
) -> list[list[Action | Slot]]:
    """Passes of the transformer layers and slots of every rank, in the order in which they run.

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
        return kind != "F" or index >= filling, block.start(kind, rank, 0, index)

    entries = sorted(((kind, index) for kind in kinds for index in range(m)), key=key)
    return [Slot(index) if kind == "slot" else Action(kind, index) for kind, index in entries]


class _Squeeze:
    def __init__(self, block: Block, m: int, costs: Costs, priority: Priority, forward_only: bool):
        self.block, self.m, self.costs, self.priority = block, m, costs, cache(priority)
        self.forward_only = forward_only
        self.p, self.place = block.p, block.place
        places = [self.place.where(stage) for stage in range(self.place.stages)]
        self.before = dict(zip(places, [None, *places], strict=False))
        self.after = dict(zip(places, [*places[1:], None], strict=True))
        self._time = cache(lambda kind, rank: costs.of(kind, rank, block.place.chunks, block.split))
        self.kinds = {kind for kind, _ in block.vocab.slots}
        self.table = block.slots(m, forward_only)
        self.slots = len(self.table) - (block.vocab.flushed_last and not forward_only)
        passes = ("F",) if forward_only else block.kinds
        chunks = range(block.place.chunks)
        self.streams: tuple[Stream, ...] = tuple((kind, chunk) for kind in passes for chunk in chunks)
        self.rows: list[list[Action | Slot]] = [[] for _ in range(self.p)]
        self.free = [0.0] * self.p
        self.next = [dict.fromkeys((*self.streams, ("slot", 0)), 0) for _ in range(self.p)]
        self.caps = [self._caps(rank) for rank in range(self.p)]
        self.ordered = self._ordered(passes) if block.in_order else {}
        self.ended: dict[tuple[str, int], int] = {}  # (vocabulary pass, microbatch) -> ranks that ended it
        self.done: set[tuple[str, int, int, int]] = set()  # (pass, rank, chunk, microbatch)
        # What a rank's slot still holds.
        self.queue: list[list[tuple[str, int]]] = [[] for _ in range(self.p)]
        self.events: list[tuple[float, int, tuple[str, int, int, int]]] = []
        self.count = 0

    def _caps(self, rank: int) -> list[int]:
        """Activations that may be held: of each chunk, or in a list of one, of all together."""
        if self.block.in_order:
            return [self.block.cap(rank, self.m)]
        return [self.block.cap(rank, self.m, chunk) for chunk in range(self.place.chunks)]

    def _ordered(self, passes: Sequence[str]) -> dict[str, list[list[tuple[int, int]]]]:
        """kind -> rank -> (chunk, microbatch) in the order of the block, from the last one back."""
        found = {}
        for kind in passes:
            every = [(c, i) for c in range(self.place.chunks) for i in range(self.m)]
            found[kind] = [
                sorted(every, key=lambda entry: self.block.start(kind, rank, *entry), reverse=True)
                for rank in range(self.p)
            ]
        return found

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
        total = self.m * len(self.streams) + self.slots
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
            stream = self._choice(rank)
            if stream is None or (self._duration(stream, rank) == 0) != instant:
                continue
            self._start(stream, rank, now)
            started = True
        return started

    def _choice(self, rank: int) -> Stream | None:
        ready = [stream for stream in (*self.streams, ("slot", 0)) if self._ready(stream, rank)]
        return min(ready, key=lambda s: self.priority(s[0], rank, s[1], self.next[rank][s]), default=None)

    def _duration(self, stream: Stream, rank: int) -> float:
        if stream[0] != "slot":
            return self._time(stream[0], rank)
        return sum(self._time(k, rank) for k, _ in self.table[self.next[rank][stream]])

    def _ready(self, stream: Stream, rank: int) -> bool:
        (kind, chunk), i = stream, self.next[rank][stream]
        if kind == "slot":
            return i < self.slots and all(self._has_inputs(*entry) for entry in self.table[i])
        if i >= self.m:
            return False
        if kind in self.ordered and self.ordered[kind][rank][-1] != (chunk, i):
            return False
        if kind == "F":
            return not self._full(rank, chunk) and self._ended("F", self.before[rank, chunk], i)
        if kind == "W":
            return ("B", rank, chunk, i) in self.done
        after = self.after[rank, chunk]
        known = self._loss_known(i) if after is None else self._ended("B", after, i)
        return known and ("F", rank, chunk, i) in self.done

    def _full(self, rank: int, chunk: int) -> bool:
        """Whether no other activation may be held; backward-only chunks release theirs."""
        if self.forward_only:
            return False
        together = self.block.in_order
        chunks = range(self.place.chunks) if together else (chunk,)
        releases = self.block.releases
        held = sum(self.next[rank]["F", c] - self.next[rank][releases, c] for c in chunks)
        return held >= self.caps[rank][0 if together else chunk]

    def _ended(self, kind: str, where: Place | None, i: int) -> bool:
        return where is None or (kind, *where, i) in self.done

    def _has_inputs(self, kind: str, i: int) -> bool:
        if kind == "S":
            # X of a microbatch travels behind the statistics of the one before.
            return self._ended("F", self.place.last, i) and (i == 0 or self._everywhere("S", i - 1))
        if kind == "U":
            return self._everywhere("S", i)
        return self._statistics(i)  # T: the loss is known as soon as the statistics are

    def _statistics(self, i: int) -> bool:
        return self._everywhere("U" if "U" in self.kinds else "S", i)

    def _loss_known(self, i: int) -> bool:
        """Whether the last stage's backward pass has its gradient."""
        if not self.kinds:
            return True
        return self._everywhere("S" if self.block.vocab.flushed_last else "T", i)

    def _everywhere(self, kind: str, i: int) -> bool:
        return self.ended.get((kind, i), 0) == self.p

    def _start(self, stream: Stream, rank: int, now: float) -> None:
        (kind, chunk), index = stream, self.next[rank][stream]
        self.next[rank][stream] += 1
        if kind == "slot":
            self.rows[rank].append(Slot(index))
            self.queue[rank] = list(self.table[index])
            self._continue(rank, now)
            return
        if kind in self.ordered:
            self.ordered[kind][rank].pop()
        self.rows[rank].append(Action(kind, index, chunk))
        self._occupy(rank, now, self._time(kind, rank), (kind, rank, chunk, index))

    def _continue(self, rank: int, now: float) -> bool:
        kind, i = self.queue[rank][0]
        if not self._has_inputs(kind, i):
            return False
        self.queue[rank].pop(0)
        self._occupy(rank, now, self._time(kind, rank), (kind, rank, 0, i))
        return True

    def _occupy(self, rank: int, now: float, duration: float, ended: tuple[str, int, int, int]) -> None:
        if duration == 0:
            self._end(ended)
            return
        self.free[rank] = now + duration
        heapq.heappush(self.events, (now + duration, self.count, ended))
        self.count += 1

    def _end(self, ended: tuple[str, int, int, int]) -> None:
        kind, _, _, i = ended
        if kind in TRANSFORMER:
            self.done.add(ended)
        else:
            self.ended[kind, i] = self.ended.get((kind, i), 0) + 1
