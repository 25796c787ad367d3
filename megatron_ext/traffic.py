"""Communication of our features: torch's collectives and point-to-point calls that count the bytes they send.

Each function takes the group and the name of the feature by keyword, does what the function of that name in
`torch.distributed` does, and adds to `ledger()`. Bytes are those of an ideal algorithm (`ideal_bytes`), so
that they can be compared with formulas and with stock Megatron, which `count_stock` counts by the same rules.
Peers and roots are group ranks. The world group is `torch.distributed.group.WORLD`; None means that this rank
is not in the group, which is an error.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, ReduceOp, Work

from megatron_ext.group_names import name_of
from megatron_ext.ledger import UNSIZED, Ledger, ideal_bytes, label, ledger
from megatron_ext.stock_traffic import count_stock, kept_of, size_of

__all__ = [
    "UNSIZED",
    "Ledger",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "coalescing",
    "count_stock",
    "gather",
    "ideal_bytes",
    "irecv",
    "isend",
    "label",
    "ledger",
    "posted_all_gather",
    "posted_all_to_all",
    "recv",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]


def all_reduce(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    *,
    group: ProcessGroup,
    feature: str,
    async_op: bool = False,
) -> Work | None:
    """Reduce `tensor` in place on every rank."""
    work = _uncounted(dist.all_reduce, tensor, op=op, group=group, async_op=async_op)
    _count(feature, "all_reduce", group, input_bytes=size_of(tensor))
    return work


def all_gather_into_tensor(
    output: Tensor, input: Tensor, *, group: ProcessGroup, feature: str, async_op: bool = False
) -> Work | None:
    """Concatenate (or stack) every rank's `input` in `output`."""
    work = _uncounted(dist.all_gather_into_tensor, output, input, group=group, async_op=async_op)
    _count(feature, "all_gather", group, input_bytes=size_of(input))
    return work


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    *,
    group: ProcessGroup,
    feature: str,
    async_op: bool = False,
) -> Work | None:
    """Reduce `input` over the ranks; each gets its part in `output`."""
    work = _uncounted(dist.reduce_scatter_tensor, output, input, op=op, group=group, async_op=async_op)
    _count(feature, "reduce_scatter", group, input_bytes=size_of(input), output_bytes=size_of(output))
    return work


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    group: ProcessGroup,
    feature: str,
    async_op: bool = False,
) -> Work | None:
    """Send one part of `input` (rows, equal or by `input_split_sizes`) to every rank."""
    work = _uncounted(
        dist.all_to_all_single,
        output,
        input,
        output_split_sizes,
        input_split_sizes,
        group=group,
        async_op=async_op,
    )
    kept = kept_of(input, input_split_sizes, group.rank(), group.size())
    _count(feature, "all_to_all", group, input_bytes=size_of(input), kept_bytes=kept)
    return work


class Together:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]):
        self._works = works

    def wait(self) -> None:
        """Until all have ended."""
        for work in self._works:
            work.wait()


def posted_all_gather(
    output: Tensor, input: Tensor, *, group: ProcessGroup, feature: str, async_op: bool = False
) -> Together | None:
    """`all_gather_into_tensor` by direct sends, whose receives all ranks post before they send; for gloo.

    gloo starts to send once the receiver has asked for it. A receiver that asks behind its own data lets the
    sender wait until that has gone, and a slow link carries one direction after the other.
    """
    parts = output.view(group.size(), -1)
    work = _exchange(parts, [input.view(-1)] * group.size(), group, async_op)
    if parts[group.rank()].data_ptr() != input.data_ptr():
        parts[group.rank()].copy_(input.view(-1))
    _count(feature, "all_gather", group, input_bytes=size_of(input))
    return work


def posted_all_to_all(
    output: Tensor, input: Tensor, *, group: ProcessGroup, feature: str, async_op: bool = False
) -> Together | None:
    """`all_to_all_single` of equal parts, by posted receives as above."""
    received, sent = output.view(group.size(), -1), input.view(group.size(), -1)
    work = _exchange(received, sent, group, async_op)
    received[group.rank()].copy_(sent[group.rank()])
    kept = kept_of(input, None, group.rank(), group.size())
    _count(feature, "all_to_all", group, input_bytes=size_of(input), kept_bytes=kept)
    return work


def _exchange(
    received: Sequence[Tensor], sent: Sequence[Tensor], group: ProcessGroup, async_op: bool
) -> Together | None:
    """Every rank's part for this one, and this one's for every other; the nearest behind and ahead first.

    Where the caller waits anyway, ranks go round: in every turn each sends to one and receives from one, so
    that no receiver is overrun.
    """
    rank, size = group.rank(), group.size()
    with label(None):
        works = [
            dist.irecv(received[source], group_src=source, group=group)
            for source in ((rank - step) % size for step in range(1, size))
        ]
        for step in range(1, size):
            target = (rank + step) % size
            works.append(dist.isend(sent[target], group_dst=target, group=group))
            if not async_op:
                works[step - 1].wait()
                works[-1].wait()
    return Together(works) if async_op else None


def broadcast(
    tensor: Tensor, *, group_src: int, group: ProcessGroup, feature: str, async_op: bool = False
) -> Work | None:
    """Copy `tensor` of group rank `group_src` to every rank."""
    work = _uncounted(dist.broadcast, tensor, group_src=group_src, group=group, async_op=async_op)
    _count(feature, "broadcast", group, input_bytes=size_of(tensor), root=group_src)
    return work


def reduce(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    *,
    group_dst: int,
    group: ProcessGroup,
    feature: str,
    async_op: bool = False,
) -> Work | None:
    """Reduce `tensor` on group rank `group_dst`; on the others it may be overwritten."""
    work = _uncounted(dist.reduce, tensor, op=op, group_dst=group_dst, group=group, async_op=async_op)
    _count(feature, "reduce", group, input_bytes=size_of(tensor), root=group_dst)
    return work


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    *,
    group_dst: int,
    group: ProcessGroup,
    feature: str,
    async_op: bool = False,
) -> Work | None:
    """Collect every rank's `tensor` in `gather_list` of group rank `group_dst`."""
    work = _uncounted(dist.gather, tensor, gather_list, group_dst=group_dst, group=group, async_op=async_op)
    _count(feature, "gather", group, input_bytes=size_of(tensor), root=group_dst)
    return work


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    *,
    group_src: int,
    group: ProcessGroup,
    feature: str,
    async_op: bool = False,
) -> Work | None:
    """Give every rank its part of `scatter_list` of group rank `group_src` in `tensor`."""
    work = _uncounted(dist.scatter, tensor, scatter_list, group_src=group_src, group=group, async_op=async_op)
    sizes = {"input_bytes": size_of(scatter_list or []), "output_bytes": size_of(tensor)}
    _count(feature, "scatter", group, **sizes, root=group_src)
    return work


def barrier(*, group: ProcessGroup, feature: str, async_op: bool = False) -> Work | None:
    """Wait for every rank."""
    work = _uncounted(dist.barrier, group=group, async_op=async_op)
    _count(feature, "barrier", group)
    return work


def send(tensor: Tensor, *, group_dst: int, group: ProcessGroup, feature: str, tag: int = 0) -> None:
    """Send to group rank `group_dst`, and wait."""
    _uncounted(dist.send, tensor, group_dst=group_dst, group=group, tag=tag)
    _count(feature, "send", group, input_bytes=size_of(tensor))


def recv(tensor: Tensor, *, group_src: int, group: ProcessGroup, feature: str, tag: int = 0) -> None:
    """Receive from group rank `group_src`, and wait."""
    _uncounted(dist.recv, tensor, group_src=group_src, group=group, tag=tag)
    _count(feature, "recv", group)


def isend(tensor: Tensor, *, group_dst: int, group: ProcessGroup, feature: str, tag: int = 0) -> Work | None:
    """Send to group rank `group_dst`."""
    work = _uncounted(dist.isend, tensor, group_dst=group_dst, group=group, tag=tag)
    _count(feature, "send", group, input_bytes=size_of(tensor))
    return work


def irecv(tensor: Tensor, *, group_src: int, group: ProcessGroup, feature: str, tag: int = 0) -> Work | None:
    """Receive from group rank `group_src`."""
    work = _uncounted(dist.irecv, tensor, group_src=group_src, group=group, tag=tag)
    _count(feature, "recv", group)
    return work


def batch_isend_irecv(ops: list[P2POp], *, feature: str) -> list[Work]:
    """Start all operations at once, each counted as a send or recv of its own group."""
    works = _uncounted(dist.batch_isend_irecv, ops)
    for op in ops:
        group = dist.group.WORLD if op.group is None else op.group
        if op.op is dist.isend:
            _count(feature, "send", group, input_bytes=size_of(op.tensor))
        else:
            _count(feature, "recv", group)
    return works


@contextmanager
def coalescing(
    *, group: ProcessGroup, device: torch.device | None = None, async_ops: bool = False
) -> Iterator:
    """Collectives of this module that start together when the block ends; yields torch's handle to wait on.

    The arguments are those of torch's coalescing manager. Nothing else may communicate inside the block.
    """
    with label(None), dist.distributed_c10d._coalescing_manager(group, device, async_ops) as handle:
        yield handle


def _uncounted(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # An active `count_stock` must not count again what is counted here.
    assert "group" not in kwargs or kwargs["group"] is not None, "this rank is not in the group"
    with label(None):
        return call(*args, **kwargs)


def _count(feature: str, kind: str, group: ProcessGroup, **sizes: int | None) -> None:
    if None in sizes.values():
        ledger().add(feature, kind + UNSIZED, name_of(group), 0)
        return
    count = ideal_bytes(kind, group_size=group.size(), group_rank=group.rank(), **sizes)
    ledger().add(feature, kind, name_of(group), count)
