"""What multi-ring attention sends: gathers, sums, hops and moves, all counted and all asynchronous.

Every call starts a transfer and returns a `Pending`; nothing may touch the buffers until its `wait`. On gloo
transfers progress in threads of their own, on NCCL on the streams of their communicators, where `wait` makes
the current stream wait and not the host. All ranks make the same calls in the same order.
"""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from megatron_ext import traffic
from megatron_ext.wallfacer.merge import accumulator_of

FEATURE = "wallfacer"
Parcel = tuple[Tensor, int]
"""A contiguous tensor, and the group rank that it goes to or comes from."""


class Pending:
    """Transfers on their way, and what is left to do when they have arrived."""

    def __init__(self, works: Sequence[Work | None] = (), finish: Callable[[], None] | None = None):
        self._works = [work for work in works if work is not None]
        self._finish = finish

    def wait(self) -> None:
        """Until the results are there and the sent tensors may be overwritten. Again is nothing."""
        works, finish = self._works, self._finish
        self._works, self._finish = [], None
        for work in works:
            work.wait()
        if finish is not None:
            finish()


def gather(output: Tensor, own: Tensor, group: ProcessGroup) -> Pending:
    """Every rank's `own` behind each other, in the order of group ranks."""
    work = traffic.all_gather_into_tensor(output, own, group=group, feature=FEATURE, async_op=True)
    return Pending([work])


def sums_natively(tensor: Tensor) -> bool:
    """Whether NCCL may do the sum: on CUDA, and in a type that needs no wider one."""
    return tensor.is_cuda and accumulator_of(tensor.dtype) == tensor.dtype


def sum_parts(output: Tensor, parts: Tensor, received: Tensor | None, group: ProcessGroup) -> Pending:
    """Sum over the ranks of the part that is for each.

    Args:
        output: the sum for this rank, in the type of sums. parts: `[ranks, ...]`, one part for each rank.
        received: a buffer like `parts`; None where `sums_natively`. Sums are taken in the order of ranks, so
        they
            repeat bit for bit. gloo's own reduce-scatter would send twice the bytes.
    """
    if received is None:
        work = traffic.reduce_scatter_tensor(output, parts, group=group, feature=FEATURE, async_op=True)
        return Pending([work])
    work = traffic.all_to_all_single(received, parts, group=group, feature=FEATURE, async_op=True)
    return Pending([work], lambda: add_up(output, received))


def add_up(output: Tensor, parts: Sequence[Tensor] | Tensor) -> None:
    """The sum of `parts`, one after the other."""
    output.copy_(parts[0])
    for part in parts[1:]:
        output.add_(part)


def exchange(sends: Sequence[Parcel], receives: Sequence[Parcel], group: ProcessGroup | None) -> Pending:
    """Send to some ranks and receive from some; what goes to this rank itself is copied.

    There may be one parcel of each direction that stays here, and the two belong together. `group` may be
    None if nothing leaves the rank.
    """
    own = 0 if group is None else group.rank()
    kept = [[tensor for tensor, peer in parcels if peer == own] for parcels in (sends, receives)]
    assert len(kept[0]) == len(kept[1]) <= 1, "a parcel to itself has no counterpart"
    for sent, received in zip(*kept, strict=True):
        if sent.data_ptr() != received.data_ptr():
            received.copy_(sent)
    ops = [
        P2POp(way, tensor, group=group, group_peer=peer)
        for way, parcels in ((dist.isend, sends), (dist.irecv, receives))
        for tensor, peer in parcels
        if peer != own
    ]
    return Pending(traffic.batch_isend_irecv(ops, feature=FEATURE) if ops else ())


def hop(
    sends: Sequence[Tensor], receives: Sequence[Tensor], peers: tuple[int, int], ring: ProcessGroup
) -> Pending:
    """Pass tensors on along a ring; `peers` are the positions to send to and to receive from."""
    to, since = peers
    return exchange([(x, to) for x in sends], [(x, since) for x in receives], ring)
