"""Rings over one process group, in pieces, on a lane beside the caller: the outer hops of HO-Ring.

Group rank i sends to i + 1 and receives from i - 1. A block travels in pieces, so that what a hop brings can
be passed on, or spread inside the group, while the rest of the block is still on its way. `Hops` is all that
depends on the backend; what a piece looks like while it travels is the wire's business (wires.py).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from megatron_ext import traffic
from megatron_ext.paro.wires import Wire
from megatron_ext.schedules.lane import Lane, Ticket


class Hops:
    """Transfers to the next and from the previous rank, numbered in the order in which they are sent.

    On gloo all receives are posted at once, so that no sender has to ask for one and wait. With `paired`, for
    NCCL, a send and the receive of the same number start together, since a communicator runs one operation
    after another there, and waiting is a matter of streams.
    """

    def __init__(self, group: ProcessGroup, feature: str, *, paired: bool):
        self.rank, self.size = group.rank(), group.size()
        self._group, self._feature, self.paired = group, feature, paired
        self._next, self._previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self._buffers: Sequence[Tensor] = ()
        self._received: list[list[Work]] = []
        self._sent: list[Work] = []

    def expect(self, buffers: Sequence[Tensor]) -> None:
        """Where transfer number i is to be received."""
        self._buffers = buffers
        if not self.paired:
            self._received = [[self._receive(number)] for number in range(len(buffers))]

    def send(self, number: int, tensor: Tensor) -> None:
        """Start to send, in the order of the numbers; the tensor must stay as it is until `finish`."""
        if not self.paired:
            to = {"group_dst": self._next, "group": self._group, "feature": self._feature}
            self._sent.append(traffic.isend(tensor, tag=number, **to))
            return
        assert number == len(self._received), (number, len(self._received))
        ops = [
            P2POp(dist.isend, tensor, group=self._group, group_peer=self._next),
            P2POp(dist.irecv, self._buffers[number], group=self._group, group_peer=self._previous),
        ]
        self._received.append(traffic.batch_isend_irecv(ops, feature=self._feature))

    def wait(self, number: int) -> None:
        """Until transfer `number` has been received."""
        for work in self._received[number]:
            work.wait()

    def finish(self) -> None:
        """Until everything has been sent."""
        for work in self._sent:
            work.wait()

    def _receive(self, number: int) -> Work:
        source = {"group_src": self._previous, "group": self._group, "feature": self._feature}
        return traffic.irecv(self._buffers[number], tag=number, **source)


def ring_all_gather(hops: Hops, lane: Lane, wire: Wire, spread: Callable[[int, int], None]) -> None:
    """Pass every rank's block around the ring.

    `spread(block, piece)` is called by the caller's thread when that piece is in place, own ones first; it
    runs beside the hops.
    """
    p, i, pieces = hops.size, hops.rank, wire.pieces

    def start(c: int) -> None:
        if c == 0:
            hops.expect(
                [wire.incoming((i - 1 - turn) % p, c) for turn in range(p - 1) for c in range(pieces)]
            )
        outgoing = wire.outgoing(c)
        if p > 1:
            hops.send(c, outgoing)

    def arrive(turn: int, c: int) -> None:
        number, block = turn * pieces + c, (i - 1 - turn) % p
        hops.wait(number)
        if turn + 2 < p:
            hops.send(number + pieces, wire.incoming(block, c))
        wire.land(block, c)

    tasks = [partial(start, c) for c in range(pieces)]
    tasks += [partial(arrive, turn, c) for turn in range(p - 1) for c in range(pieces)]
    # CUDA starts kernels in the order of submission where a process has one hardware queue
    # (CUDA_DEVICE_MAX_CONNECTIONS=1), so hops that wait for one another must not stand before what runs
    # beside them: one hop ahead of what is spread, submitted before it since a stream lane starts behind the
    # caller's work so far. A thread is given everything at once and never waits for the caller.
    ahead = 2 if hops.paired else len(tasks)
    tickets: list[Ticket] = []
    for number in range(len(tasks)):
        tickets += [lane.submit(task) for task in tasks[len(tickets) : number + ahead]]
        turn, c = divmod(number, pieces)
        tickets[number].wait()
        spread((i - turn) % p, c)
    lane.submit(hops.finish)
    lane.drain()


def ring_sum(hops: Hops, lane: Lane, wire: Wire, summand: Callable[[int, int], Tensor]) -> None:
    """Sum every block over the ring; each rank ends with its own.

    `summand(block, piece)` is this rank's share in the accumulator's type, in a tensor that may be
    overwritten; it is called by the caller's thread and runs beside the hops. The order of addition of block
    t is that of the ranks t + 1, t + 2, ..., t.
    """
    p, i, pieces = hops.size, hops.rank, wire.pieces

    def begin() -> None:
        hops.expect([wire.summand(turn, c) for turn in range(p - 1) for c in range(pieces)])

    def hop(turn: int, block: int, c: int, total: Tensor) -> None:
        number = turn * pieces + c
        if turn:
            hops.wait(number - pieces)
            total += wire.decoded(turn - 1, c)
        if turn + 1 < p:
            hops.send(number, wire.encoded(block, c, total))
        else:
            wire.store(block, c, total)

    lane.submit(begin)
    tickets: list[Ticket] = []
    for turn in range(p):
        block = (i - 1 - turn) % p
        for c in range(pieces):
            if turn >= 2:
                tickets[(turn - 2) * pieces + c].wait()  # no more than two blocks of sums are waiting
            total = summand(block, c)
            tickets.append(lane.submit(partial(hop, turn, block, c, total), [total]))
    lane.submit(hops.finish)
    lane.drain()
