"""Communication of the vocabulary passes: who sends what over which group.

Vocabulary shards live on tp x pp ranks. Activations that all of them need travel in slices: each
tensor-parallel rank moves 1/t of the rows over its pipeline group, and the rows are put together (or summed
up) over the tensor-parallel group of each stage. With sequence parallelism the slice is what the rank has
anyway.

    spread    rows of one stage    -> all rows on every rank      broadcast (pp), all-gather (tp)
    collect   all rows, partial    -> summed rows on one stage    reduce-scatter (tp), reduce (pp), all-gather
    (tp) gather    statistics of a rank -> those of all tp x pp ranks  all-gather

Everything is blocking: lanes (schedules/lane.py) make it overlap. Bytes are counted under the feature
"vocab"; docs/vocabulary-parallelism.md states them as formulas.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext import traffic

FEATURE = "vocab"


@dataclass(frozen=True)
class VocabGroups:
    """Process groups of the vocabulary passes, with communicators of their own, since lanes overlap."""

    pipe: ProcessGroup
    """Pipeline ranks of one tensor-parallel rank; group rank = pipeline rank."""
    tensor: ProcessGroup
    """Tensor-parallel ranks of one stage."""
    shards: ProcessGroup
    """All tp x pp ranks that hold a shard."""


class VocabComm:
    """The collectives of one rank. Rows are `[n, ...]`; n need not be a multiple of t (slices are padded)."""

    def __init__(self, groups: VocabGroups):
        self.groups = groups
        self.tp = groups.tensor.size()
        self.pp = groups.pipe.size()

    def slice_rows(self, n: int) -> int:
        """Rows that one tensor-parallel rank moves over the pipeline group."""
        return -(-n // self.tp)

    def own_slice(self, rows: Tensor) -> Tensor:
        """This tensor-parallel rank's slice `[ceil(n/t), ...]` of all rows `[n, ...]`, padded with zeros."""
        if self.tp == 1:
            return rows
        padded = self._padded(rows)
        size = self.slice_rows(rows.shape[0])
        return padded[self.groups.tensor.rank() * size :][:size]

    def spread(self, slice_: Tensor, n: int, *, root: int) -> Tensor:
        """All rows `[n, ...]` on every rank, from each tensor-parallel rank's slice on the stage `root`.

        On the root `slice_` holds the rows; on other stages it is a buffer of that shape and is overwritten.
        """
        if self.pp > 1:
            traffic.broadcast(slice_, group_src=root, group=self.groups.pipe, feature=FEATURE)
        return self.join(slice_, n)

    def join(self, slice_: Tensor, n: int) -> Tensor:
        """All rows `[n, ...]` from the slices of this stage's tensor-parallel ranks."""
        if self.tp == 1:
            return slice_
        out = slice_.new_empty((slice_.shape[0] * self.tp, *slice_.shape[1:]))
        traffic.all_gather_into_tensor(out, slice_, group=self.groups.tensor, feature=FEATURE)
        return out[:n]

    def collect(self, partial: Tensor, *, root: int, whole: bool) -> Tensor | None:
        """Sum of `partial` `[n, ...]` over all shards, on the stage `root`; None on other stages.

        With `whole` every tensor-parallel rank of the root gets all rows, else its slice. `partial` may be
        overwritten.
        """
        n = partial.shape[0]
        if self.tp > 1:
            padded = self._padded(partial)
            slice_ = padded.new_empty((self.slice_rows(n), *partial.shape[1:]))
            traffic.reduce_scatter_tensor(slice_, padded, group=self.groups.tensor, feature=FEATURE)
        else:
            slice_ = partial
        if self.pp > 1:
            traffic.reduce(slice_, group_dst=root, group=self.groups.pipe, feature=FEATURE)
        if self.groups.pipe.rank() != root:
            return None
        return self.join(slice_, n) if whole else slice_

    def gather(self, statistics: Tensor) -> Tensor:
        """Statistics of all shards `[P, ...]`, in the order of the ranks, equal on all of them."""
        group = self.groups.shards
        if group.size() == 1:
            return statistics.unsqueeze(0)
        flat = statistics.reshape(-1)
        out = flat.new_empty(group.size() * flat.numel())
        traffic.all_gather_into_tensor(out, flat, group=group, feature=FEATURE)
        return out.view(group.size(), *statistics.shape)

    def broadcast(self, tensor: Tensor, *, root: int) -> Tensor:
        """`tensor` of the stage `root`, in place, on all stages; every tensor-parallel rank sends its own."""
        if self.pp > 1:
            traffic.broadcast(tensor, group_src=root, group=self.groups.pipe, feature=FEATURE)
        return tensor

    def _padded(self, rows: Tensor) -> Tensor:
        missing = self.slice_rows(rows.shape[0]) * self.tp - rows.shape[0]
        if missing == 0:
            return rows.contiguous()
        return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])
