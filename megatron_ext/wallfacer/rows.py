"""Rows of gathered buffers: into the order of positions and back."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.wallfacer import comm
from megatron_ext.wallfacer.scratch import Lease
from megatron_ext.wallfacer.sequence import Rows

FEW = 32
"""Slices that are copied one by one; more go through an index."""


@lru_cache(maxsize=64)
def _index(slices: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    parts = [torch.arange(row, row + length) for row, length in slices]
    return torch.cat(parts).to(device)


def sort_rows(gathered: Tensor, rows: Rows, out: Tensor) -> Tensor:
    """Fill `out` with the rows of `gathered` in the order of positions."""
    if len(rows.slices) > FEW:
        return torch.index_select(gathered, 0, _index(rows.slices, gathered.device), out=out)
    at = 0
    for row, length in rows.slices:
        out[at : at + length].copy_(gathered[row : row + length])
        at += length
    return out


def unsort_rows(by_position: Tensor, rows: Rows, out: Tensor, share: Tensor | None = None) -> Tensor:
    """The inverse, into `out` of any type; rows times `share` `[s, b, h]` on the way, if that is given."""
    if len(rows.slices) > FEW:
        if share is not None:
            by_position = by_position * share.unsqueeze(-1)
        return out.index_copy_(0, _index(rows.slices, out.device), by_position.to(out.dtype))
    at = 0
    for row, length in rows.slices:
        part, target = by_position[at : at + length], out[row : row + length]
        if share is None:
            target.copy_(part)
        else:
            torch.mul(part, share[at : at + length].unsqueeze(-1), out=target)
        at += length
    return out


class Gathering:
    """The rows of several ranks, on their way from the moment this is made.

    With no `group` this rank's own rows are all there is, and `wait` returns them as they are.
    """

    def __init__(self, lease: Lease, own: Tensor, rows: Rows, group: ProcessGroup | None):
        self._lease, self._rows = lease, rows
        self._buffer, self._pending = own, comm.Pending()
        if group is not None:
            self._own = own.contiguous()
            shape = (group.size() * own.shape[0], *own.shape[1:])
            self._buffer = lease.take(shape, own.dtype)
            self._pending = comm.gather(self._buffer, self._own, group)

    def wait(self) -> Tensor:
        """All rows in the order of positions."""
        self._pending.wait()
        if self._rows.sorted_already:
            return self._buffer
        out = sort_rows(self._buffer, self._rows, self._lease.take(self._buffer.shape, self._buffer.dtype))
        self._lease.drop(self._buffer)
        return out
