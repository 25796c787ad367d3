"""Building blocks: the passes of one microbatch on all ranks, from which whole schedules are unrolled.

A block repeats with a uniform period, the time of one forward and one backward pass. Vocabulary passes come
in slots: slot j of a rank holds the passes that all ranks run between the same two barriers, `S(j)` and what
is due for earlier microbatches. A barrier needs every rank, and the ranks run their slots at different times
within a period, so each barrier makes the last stage's backward pass start one period later: with k barriers
each rank has k more microbatches in flight (Yeung et al., arXiv 2411.05288, section 4).
"""

from dataclasses import dataclass
from math import ceil

from megatron_ext.schedules.costs import Costs


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


@dataclass(frozen=True)
class Block:
    """The 1F1B building block of `p` ranks with the vocabulary passes of one algorithm."""

    p: int
    vocab: VocabBlock
    forward: float
    backward: float

    @classmethod
    def of(cls, p: int, vocab: str, costs: Costs) -> "Block":
        """The block for given pass times (averages over ranks)."""
        return cls(p, VOCAB_BLOCKS[vocab], costs.mean("F"), costs.mean("B"))

    @property
    def period(self) -> float:
        """Time after which the block repeats."""
        return self.forward + self.backward

    def delay(self) -> int:
        """Periods between the last stage's forward and backward pass of a microbatch."""
        return self.p // 2 if self.vocab.synchronous else self.vocab.barriers

    def cap(self, rank: int, m: int) -> int:
        """Microbatches that are in flight at most on a rank: the lifespan of an activation in periods."""
        return max(1, min(self.p - rank + self.delay(), m))

    def start(self, kind: str, rank: int, index: int) -> float:
        """When pass "F" or "B" of microbatch `index`, or "slot" number `index`, starts in the repeated
        block."""
        at = index * self.period
        if self.vocab.synchronous:
            return at + self._synchronous_start(kind, rank)
        if kind == "F":
            return at + rank * self.forward
        if kind == "B":
            later = self.delay() * self.period + (self.p - 1 - rank) * self.backward
            return at + self.p * self.forward + later
        return at + self._first_boundary(rank)

    def _synchronous_start(self, kind: str, rank: int) -> float:
        """All ranks meet in a slot at the end of every period, one forward and one backward pass apart.

        The last rank and every second one before it run the backward pass first. So an activation passes two
        ranks in a period, and a gradient one.
        """
        before_last = self.p - 1 - rank
        forward_first = before_last % 2 == 1
        output = self.p * self.period  # any start that is early enough for all ranks
        if kind == "F":
            early = before_last // 2 * self.period
            return output - early + (0.0 if forward_first else self.backward)
        if kind == "B":
            late = (1 + before_last) * self.period
            return output + late + (self.forward if forward_first else 0.0)
        return output + self.period - self.forward / 1e3

    def _first_boundary(self, rank: int) -> float:
        """The first moment between two passes of this rank at which the last stage's output exists.

        On the last rank that is the end of its own forward pass; there the backward pass goes first, so that
        the broadcast to the others has something to hide behind.
        """
        output = self.p * self.forward
        if rank == self.p - 1:
            return output + self.backward
        boundaries = (rank * self.forward, (rank + 1) * self.forward)
        later = (start + ceil((output - start) / self.period - 1e-9) * self.period for start in boundaries)
        return min(later)
