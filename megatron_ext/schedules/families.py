"""Pipelines: one builder function each, which gives a building block; everything else follows from it.

    1f1b          one forward, one backward: p - r microbatches in flight on rank r
    interleaved   1F1B over several chunks per rank: a smaller bubble, more memory
    zb-h1         1F1B with split backward passes: weight gradients fill the bubble (Qi et al., arXiv
    2401.10241)
    v-half        two chunks in a V, split: half of 1F1B's memory, the same on all ranks
    v-min         the same with a third of the memory
    v-zb          the same with 1F1B's memory and next to no bubble

The last three are one builder with other offsets between neighbouring ranks (Qi et al., arXiv 2405.15362).
docs/adding-a-schedule.md adds another one.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from megatron_ext.schedules.blocks import VOCAB_BLOCKS, Block
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.placement import Placement


@dataclass(frozen=True)
class Family:
    """A pipeline, as users name it."""

    name: str
    builder: Callable[[int, int, Costs], Block]
    """(p, chunks, costs) -> the block without vocabulary passes."""
    split: bool = False
    """Backward passes are split into B and W."""
    chunks: int | None = 1
    """Per rank; None: as many as the user asks for, at least 2."""
    vee: bool = False
    modes: tuple[str, ...] = ("off", "naive", "vocab-1", "vocab-2")
    """Vocabulary modes that it can have."""

    def placement(self, p: int, chunks: int) -> Placement:
        """Where its stages live."""
        return Placement(p, chunks, self.vee)


def family(name: str) -> Family:
    """The pipeline of this name. Raises ValueError for others."""
    if name not in FAMILIES:
        raise ValueError(f"there is no pipeline {name!r}: there are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def make_block(
    name: str, p: int, chunks: int, vocab: str, costs: Costs, extra: tuple[int, ...] = ()
) -> Block:
    """The block of a pipeline with the vocabulary passes of a mode, and `extra` memory."""
    block = family(name).builder(p, chunks, costs)
    if VOCAB_BLOCKS[vocab].synchronous:
        return Interlaced.of(block)
    return replace(block, vocab=VOCAB_BLOCKS[vocab], extra=extra)


# --- 1F1B --------------------------------------------------------------------------------------------------


class OneForwardOneBackward(Block):
    """Slots stand where the published 1F1B generator has them: with the data of a rank that is not the last
    in front of the next pass, whichever that is."""

    def slot_start(self, rank: int, index: int) -> float:
        """The first moment between two passes of this rank at which the last stage's output exists.

        On the last rank that is the end of its own forward pass; there the backward pass goes first, so that
        the broadcast to the others has something to hide behind.
        """
        forward, backward, _ = self.lengths
        output = self.p * forward
        at = index * self.period
        if rank == self.p - 1:
            return at + output + backward
        boundaries = (rank * forward, (rank + 1) * forward)
        later = (start + ceil((output - start) / self.period - 1e-9) * self.period for start in boundaries)
        return at + min(later)

    def cap(self, rank: int, m: int, chunk: int | None = None) -> int:
        """min(p - rank + barriers, m): F is shorter than B, so the last activation comes before it must."""
        return max(1, min(self.p - rank + self.delay() + self.extra_of(0), m))


def one_forward_one_backward(p: int, chunks: int, costs: Costs) -> Block:
    """1F1B: forward passes run down the ranks, backward passes up, in the proportion of their costs."""
    forward, backward = costs.mean("F"), costs.mean("B")
    period = forward + backward

    def start(kind: str, rank: int, chunk: int, i: int) -> float:
        if kind == "F":
            return i * period + rank * forward
        return i * period + p * forward + (p - 1 - rank) * backward

    return OneForwardOneBackward(Placement(p), VOCAB_BLOCKS["off"], (forward, backward, 0.0), period, start)


class Interlaced(OneForwardOneBackward):
    """1F1B whose vocabulary passes run on all ranks at once.

    All ranks meet in a slot at the end of every period, one forward and one backward pass apart. The last
    rank and every second one before it run the backward pass first. So an activation passes two ranks in a
    period, and a gradient one.
    """

    @classmethod
    def of(cls, block: Block) -> "Interlaced":
        """1F1B's block with meetings."""
        assert isinstance(block, OneForwardOneBackward)
        return cls(block.place, VOCAB_BLOCKS["interlaced"], block.lengths, block.period, block.pass_start)

    def delay(self) -> int:
        """Periods between the last stage's forward and backward pass of a microbatch."""
        return self.p // 2

    def start(self, kind: str, rank: int, chunk: int, index: int) -> float:
        """When a pass or slot starts."""
        forward, backward, _ = self.lengths
        before_last = self.p - 1 - rank
        forward_first = before_last % 2 == 1
        output = (self.p + index) * self.period  # any start that is early enough for all ranks
        if kind == "F":
            return output - before_last // 2 * self.period + (0.0 if forward_first else backward)
        if kind == "B":
            return output + (1 + before_last) * self.period + (forward if forward_first else 0.0)
        return output + self.period - forward / 1e3


def interleaved(p: int, chunks: int, costs: Costs) -> Block:
    """1F1B over the chunks: p microbatches through chunk 0, the same through chunk 1, and so on."""
    forward, backward = costs.mean("F") / chunks, costs.mean("B") / chunks
    period = forward + backward
    group = p * chunks

    def start(kind: str, rank: int, chunk: int, i: int) -> float:
        turn = i // p * group + i % p
        if kind == "F":
            return (turn + chunk * p) * period + rank * forward
        first = (chunks - 1) * p * period + p * forward
        return first + (turn + (chunks - 1 - chunk) * p) * period + (p - 1 - rank) * backward

    return Block(
        Placement(p, chunks),
        VOCAB_BLOCKS["off"],
        (forward, backward, 0.0),
        period,
        start,
        group=p,
        in_order=True,
    )


# --- split backward passes ---------------------------------------------------------------------------------


def zb_h1(p: int, chunks: int, costs: Costs) -> Block:
    """1F1B with passes of one unit: weight gradients of rank r come r periods later, so all ranks hold p."""

    def start(kind: str, rank: int, chunk: int, i: int) -> float:
        at = 3 * i + rank
        if kind == "F":
            return at
        backward = 3 * i + p + 2 * (p - 1 - rank)
        return backward if kind == "B" else backward + 1 + 3 * rank

    return Block(Placement(p), VOCAB_BLOCKS["off"], (1.0, 1.0, 1.0), 3.0, start)


def vee(offsets: tuple[int, int, int, int]) -> Callable[[int, int, Costs], Block]:
    """The builder of a V-shaped pipeline.

    `offsets` are the units between neighbouring ranks' passes of one microbatch: forward through chunk 0 and
    chunk 1, backward through chunk 1 and chunk 0. A period has 6 units, one for each pass of a rank. A third
    of the offsets' sum over p is the memory in microbatches of a rank.
    """

    def build(p: int, chunks: int, costs: Costs) -> Block:
        at = vee_starts(p, offsets)

        def start(kind: str, rank: int, chunk: int, i: int) -> float:
            return 6 * i + at[kind, rank, chunk]

        return Block(Placement(p, 2, vee=True), VOCAB_BLOCKS["off"], (1.0, 1.0, 1.0), 6.0, start)

    return build


@cache
def vee_starts(p: int, offsets: tuple[int, int, int, int]) -> dict[tuple[str, int, int], int]:
    """(kind, rank, chunk) -> start of microbatch 0's pass, in units.

    Passes of a rank must not collide when the block repeats. So gaps of up to 5 units are tried where data
    turns round, and those that hold the least memory are taken, the shortest ones of these.
    """
    found = (_with_gaps(p, offsets, gaps) for gaps in itertools.product(range(6), repeat=3))
    return min((item for item in found if item), key=lambda item: item[0])[1]


def _with_gaps(p: int, offsets: tuple[int, ...], gaps: tuple[int, ...]) -> tuple | None:
    (down, up, back_down, back_up), (turn, loss, back_turn) = offsets, gaps
    at: dict[tuple[str, int, int], int] = {}
    bottom = down * (p - 1) + 1 + turn  # F of chunk 1 on the last rank
    top = bottom + up * (p - 1) + 1 + loss  # B of chunk 1 on rank 0
    back_bottom = top + back_down * (p - 1) + 1 + back_turn  # B of chunk 0 on the last rank
    most = 0
    for rank in range(p):
        at["F", rank, 0] = down * rank
        at["F", rank, 1] = bottom + up * (p - 1 - rank)
        at["B", rank, 1] = top + back_down * rank
        at["B", rank, 0] = back_bottom + back_up * (p - 1 - rank)
        taken = {at[kind, rank, chunk] % 6 for kind in "FB" for chunk in range(2)}
        if len(taken) < 4:
            return None
        free = [slot for slot in range(6) if slot not in taken]
        held, at["W", rank, 0], at["W", rank, 1] = min(
            _weights(at, rank, order) for order in (free, free[::-1])
        )
        most = max(most, held)
    return (most, sum(gaps), gaps), at


def _weights(at: dict, rank: int, slots: list[int]) -> tuple[int, int, int]:
    """Activations held when the weight gradients of chunks 0 and 1 run in these slots, and their starts."""
    starts = []
    for chunk, slot in enumerate(slots):
        after = at["B", rank, chunk] + 1
        starts.append(after + (slot - after) % 6)
    return sum(ceil((starts[c] + 1 - at["F", rank, c]) / 6) for c in range(2)), *starts


FAMILIES = {
    item.name: item
    for item in (
        Family("1f1b", one_forward_one_backward, modes=tuple(VOCAB_BLOCKS)),
        Family("interleaved", interleaved, chunks=None),
        Family("zb-h1", zb_h1, split=True),
        Family("v-half", vee((2, 1, 2, 1)), split=True, chunks=2, vee=True),
        Family("v-min", vee((1, 1, 1, 1)), split=True, chunks=2, vee=True),
        Family("v-zb", vee((4, 2, 4, 2)), split=True, chunks=2, vee=True),
    )
}
