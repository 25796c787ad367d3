"""Building blocks: the passes of one microbatch on all ranks, from which whole schedules are unrolled.

A block repeats with a uniform period, the time of one forward and one backward pass. Vocabulary passes come
in slots: slot j of a rank holds the passes that all ranks run between the same two barriers, `S(j)` and what
is due for earlier microbatches. A barrier needs every rank, and the ranks run their slots at different times
within a period, so each barrier makes the last stage's backward pass start one period later: with k barriers
each rank has k more microbatches in flight (Yeung et al., arXiv 2411.05288, section 4).

This holds for every pipeline, so a block says only when the passes of the transformer layers start
(`pass_start`); slots, delays and the memory limit follow here. families.py lists the pipelines.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from megatron_ext.schedules.placement import Placement


@dataclass(frozen=True)
class VocabBlock:
    """How an algorithm's vocabulary passes are placed."""

    slots: tuple[tuple[str, int], ...]
    """Passes of slot j in the order they run, with how many microbatches they lag behind: ("T", 1) is
    T(j-1)."""
    barriers: int
    """Periods by which the backward half is later than without vocabulary passes."""
    synchronous: bool = False
    """Passes of one microbatch run together, all ranks at the same time, and each waits for the others."""
    flushed_last: bool = False
    """Nobody waits for the slot after the last microbatch's: it runs when all else is done."""

    @property
    def lag(self) -> int:
        """How many slots there are after that of the last microbatch."""
        return max((lag for _, lag in self.slots), default=0)


VOCAB_BLOCKS = {
    "off": VocabBlock(slots=(), barriers=0),
    "naive": VocabBlock(slots=(("T", 2), ("U", 1), ("S", 0)), barriers=3),
    "vocab-1": VocabBlock(slots=(("T", 1), ("S", 0)), barriers=2),
    "vocab-2": VocabBlock(slots=(("T", 1), ("S", 0)), barriers=1, flushed_last=True),
    "interlaced": VocabBlock(slots=(("S", 0), ("L", 0), ("T", 0)), barriers=0, synchronous=True),
}


PassStart = Callable[[str, int, int, int], float]
"""(kind "F", "B" or "W", rank, chunk, microbatch) -> when the pass starts, without vocabulary passes."""


@dataclass(frozen=True)
class Block:
    """A building block with the vocabulary passes of one algorithm. Times are in units of its own."""

    place: Placement
    vocab: VocabBlock
    lengths: tuple[float, float, float]
    """Of the passes F, B and W of one chunk; W is 0 where the backward pass is whole."""
    period: float
    """Between one microbatch's pass on the last stage and the next one's, at least: a slot fits into it."""
    pass_start: PassStart
    group: int | None = None
    """Microbatches whose passes on the last stage follow each other directly, before a long gap; None: all.
    Where a backward pass waits for T, slots of one group do not wait for those of the next."""
    extra: tuple[int, ...] = ()
    """By chunk: activations that may be held beyond what the repeated block holds; the passes run earlier
    then. () for none."""
    in_order: bool = False
    """Forward passes keep the block's order of chunks, and so do backward passes: then the limit holds for
    all chunks of a rank together. Else each chunk has a limit of its own."""

    @property
    def p(self) -> int:
        """Ranks."""
        return self.place.p

    @property
    def split(self) -> bool:
        """Whether backward passes are split into B and W."""
        return self.lengths[2] > 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """Passes of the transformer layers."""
        return ("F", "B", "W") if self.split else ("F", "B")

    @property
    def releases(self) -> str:
        """The pass after whose end a chunk's activations are let go of."""
        return self.kinds[-1]

    def length(self, kind: str) -> float:
        """Time of a pass of one chunk in the block."""
        return self.lengths["FBW".index(kind)]

    def delay(self) -> int:
        """Periods by which the backward half is later than without vocabulary passes."""
        return self.vocab.barriers

    def cap(self, rank: int, m: int, chunk: int | None = None) -> int:
        """Chunk activations that a rank holds at most, of one chunk or of all together.

        It is what the repeated block holds: an activation's lifespan in periods, for a chunk; and `extra`.
        """
        chunks = range(self.place.chunks) if chunk is None else (chunk,)
        if self.in_order:
            return min(_held(self, rank, tuple(chunks), m) + sum(self.extra), m * len(chunks))
        return sum(min(_held(self, rank, (one,), None) + self.extra_of(one), m) for one in chunks)

    def extra_of(self, chunk: int) -> int:
        """Activations of a chunk that may be held beyond the block's."""
        return self.extra[chunk] if self.extra else 0

    def slots(self, m: int, forward_only: bool) -> tuple[tuple[tuple[str, int], ...], ...]:
        """(pass, microbatch) of every slot of `m` microbatches, in the order they run."""
        group = m if forward_only else self._group(m)
        return _slots(self.vocab, group, m, forward_only)

    def _group(self, m: int) -> int:
        return m if self.group is None or self.vocab.flushed_last else min(self.group, m)

    def slot_base(self, index: int) -> tuple[int, int]:
        """The microbatch whose output slot `index` follows, and by how many periods more."""
        if self.group is None or self.vocab.flushed_last:
            return index, 0
        group, at = divmod(index, self.group + self.vocab.lag)
        inside = min(at, self.group - 1)
        return group * self.group + inside, at - inside

    def start(self, kind: str, rank: int, chunk: int, index: int) -> float:
        """When pass "F", "B" or "W" of microbatch `index`, or "slot" number `index`, starts."""
        if kind == "slot":
            microbatch, later = self.slot_base(index)
            return self.slot_start(rank, microbatch) + later * self.period
        later = 0.0 if kind == "F" else self.delay() * self.period
        return self.pass_start(kind, rank, chunk, index) + later

    def output(self, index: int) -> float:
        """When the last stage's output of a microbatch exists."""
        return self.pass_start("F", *self.place.last, index) + self.length("F")

    def slot_start(self, rank: int, index: int) -> float:
        """When S of a microbatch should start: the first moment between two passes of this rank at which the
        output has travelled, beside a pass."""
        ready = self.output(index) + max(self.length("F"), self.length("B"))
        found = []
        for kind in self.kinds:
            for chunk in range(self.place.chunks):
                found.append(_first_end(self, kind, rank, chunk, index, ready))
        return min(found)


@lru_cache(maxsize=4096)
def _slots(vocab: VocabBlock, group: int, m: int, forward_only: bool) -> tuple:
    kinds = ("S", "U") if forward_only else ("S", "U", "T")
    found = []
    for begin in range(0, m, group):
        size = min(group, m - begin)
        for index in range(size + vocab.lag):
            passes = ((kind, index - lag) for kind, lag in vocab.slots if kind in kinds)
            found.append(tuple((kind, begin + i) for kind, i in passes if 0 <= i < size))
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def _first_end(block: Block, kind: str, rank: int, chunk: int, index: int, ready: float) -> float:
    """The first end of a pass of this kind that is not before `ready`."""
    at = block.start(kind, rank, chunk, index) + block.length(kind)
    step = 1 if at < ready - 1e-9 else -1
    best = at if step < 0 else None
    other = index
    while True:
        other += step
        if other < 0:
            break
        at = block.start(kind, rank, chunk, other) + block.length(kind)
        if at >= ready - 1e-9:
            best = at
            if step > 0:
                break
        elif step < 0:
            break
    assert best is not None
    return best


@lru_cache(maxsize=4096)
def _held(block: Block, rank: int, chunks: tuple[int, ...], m: int | None) -> int:
    """The most activations of these chunks that the block holds on a rank at once."""
    count = m if m is not None else 2 * (block.p + block.delay()) + 6
    steps = []
    for chunk in chunks:
        for i in range(count):
            steps.append((round(block.start("F", rank, chunk, i), 6), 1))
            end = block.start(block.releases, rank, chunk, i) + block.length(block.releases)
            steps.append((round(end, 6), -1))
    now = most = 0
    for _, change in sorted(steps):
        now += change
        most = max(most, now)
    return most
