"""What a piece of a block looks like while it travels around a ring: as it lies in the buffer, or as int8."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_ext.paro.quantise import BLOCK, decode, encode, wire_bytes

SMALLEST_PIECE = 256 * 1024
"""Bytes below which a block is not cut: a piece costs a hand-over between threads and a collective."""
MOST_PIECES = 16


def cuts(block: Tensor) -> list[slice]:
    """How a block `[n]` is cut into pieces: equal ones but the last, of whole blocks of scales."""
    numel = block.numel()
    pieces = max(1, min(MOST_PIECES, numel * block.element_size() // SMALLEST_PIECE))
    size = -(-numel // (pieces * BLOCK)) * BLOCK
    return [slice(begin, min(begin + size, numel)) for begin in range(0, numel, size)]


class Wire(Protocol):
    """The pieces of one gather or sum. Blocks are numbered by the ring's ranks."""

    pieces: int

    # gather
    def outgoing(self, c: int) -> Tensor:
        """Piece `c` of the own block, ready to be sent."""

    def incoming(self, block: int, c: int) -> Tensor:
        """Where piece `c` of another block is received, and passed on from."""

    def land(self, block: int, c: int) -> None:
        """Put what was received into its place."""

    # sum
    def summand(self, turn: int, c: int) -> Tensor:
        """Where piece `c` of what the previous rank sends in this turn is received."""

    def decoded(self, turn: int, c: int) -> Tensor:
        """What was received there."""

    def encoded(self, block: int, c: int, total: Tensor) -> Tensor:
        """A sum so far, ready to be sent."""

    def store(self, block: int, c: int, total: Tensor) -> None:
        """Put the sum of the own block into its place."""


class ExactWire:
    """Pieces travel as they lie in the buffer, and are received where they belong."""

    def __init__(self, blocks: Sequence[Tensor], rank: int):
        self._blocks, self._rank = blocks, rank
        self._cuts = cuts(blocks[0])
        self.pieces = len(self._cuts)
        self._summands: dict[int, Tensor] = {}

    def outgoing(self, c: int) -> Tensor:
        return self._blocks[self._rank][self._cuts[c]]

    def incoming(self, block: int, c: int) -> Tensor:
        return self._blocks[block][self._cuts[c]]

    def land(self, block: int, c: int) -> None:
        """It is there."""

    def summand(self, turn: int, c: int) -> Tensor:
        if turn not in self._summands:
            self._summands[turn] = torch.empty_like(self._blocks[0])
        return self._summands[turn][self._cuts[c]]

    def decoded(self, turn: int, c: int) -> Tensor:
        return self.summand(turn, c)

    def encoded(self, block: int, c: int, total: Tensor) -> Tensor:
        # This rank's own values there have been used up by the sum.
        self.store(block, c, total)
        return self._blocks[block][self._cuts[c]]

    def store(self, block: int, c: int, total: Tensor) -> None:
        self._blocks[block][self._cuts[c]].copy_(total)


class Int8Wire:
    """Pieces travel quantised. A gathered one is encoded once, by its owner, and decoded by every rank.

    Args:
        values: what this rank gives to a gather; None for a sum.
        add: whether gathered values are differences from what the blocks hold.
    """

    def __init__(self, blocks: Sequence[Tensor], rank: int, values: Tensor | None = None, add: bool = False):
        self._blocks, self._rank, self._values, self._add = blocks, rank, values, add
        self._cuts = cuts(blocks[0])
        self.pieces = len(self._cuts)
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._sent: list[Tensor] = []

    def outgoing(self, c: int) -> Tensor:
        sent = self._keep(encode(self._values[self._cuts[c]]))
        self._put(self._rank, c, sent)
        return sent

    def incoming(self, block: int, c: int) -> Tensor:
        return self._buffer(block, c)

    def land(self, block: int, c: int) -> None:
        self._put(block, c, self._buffer(block, c))

    def summand(self, turn: int, c: int) -> Tensor:
        return self._buffer(turn, c)

    def decoded(self, turn: int, c: int) -> Tensor:
        return decode(self._buffer(turn, c), self._length(c))

    def encoded(self, block: int, c: int, total: Tensor) -> Tensor:
        return self._keep(encode(total))

    def store(self, block: int, c: int, total: Tensor) -> None:
        self._blocks[block][self._cuts[c]].copy_(total)

    def _put(self, block: int, c: int, wire: Tensor) -> None:
        put(self._blocks[block][self._cuts[c]], wire, self._add)

    def _buffer(self, number: int, c: int) -> Tensor:
        if (number, c) not in self._buffers:
            size = wire_bytes(self._length(c))
            self._buffers[number, c] = torch.empty(size, dtype=torch.uint8, device=self._blocks[0].device)
        return self._buffers[number, c]

    def _length(self, c: int) -> int:
        return self._cuts[c].stop - self._cuts[c].start

    def _keep(self, sent: Tensor) -> Tensor:
        self._sent.append(sent)
        return sent


def put(place: Tensor, wire: Tensor, add: bool) -> None:
    """Decode `wire` into `place`, or add it to what is there: the same operations on every rank."""
    values = decode(wire, place.numel())
    place.copy_(place.float() + values if add else values)
