"""Collectives along the axes of the grid, counted by (site, kind, axis) and able to run beside compute.

Every call returns a `Pending`, which is asked for its result where that is needed. Groups are those of
`install.linear3d_groups`; an axis of one rank does nothing. Sums are either `native` (the backend's
reduce-scatter) or `ordered`: every rank sends every other one its part, and adds up what it gets in one fixed
order, in fp32 where the tensor is bf16 or fp16. gloo's own reduce-scatter moves twice the bytes that it must,
and its all-to-all lets links idle; with ordered sums all parts travel by `traffic.posted_all_to_all`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from megatron_ext import traffic
from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.layouts import Move
from megatron_ext.linear3d.sizes import Sum
from megatron_ext.linear3d.volume import FEATURE
from megatron_ext.paro.collectives_two_phase import ordered_sum

GRADS = "i-grads"
"""Name of a second communicator over axis i, so that sums of weight gradients do not wait for gathers."""


class Pending:
    """The result of a collective that may still run; `sent` lives until it has ended."""

    def __init__(
        self, work: Work | traffic.Together | None, finish: Callable[[], Tensor], sent: Tensor | None = None
    ):
        self._work, self._finish, self._sent = work, finish, sent
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result; the first call waits for the collective and puts the parts together."""
        if self._result is None:
            if self._work is not None:
                self._work.wait()
            self._result = self._finish()
            del self._work, self._finish, self._sent
        return self._result


def done(tensor: Tensor) -> Pending:
    """A result that is there."""
    return Pending(None, lambda: tensor)


class GridComm:
    """The collectives of one rank."""

    def __init__(self, grid: Grid3D, groups: Mapping[str, ProcessGroup], rank: int, how: Sum = "ordered"):
        """`groups` by axes ("i", "jl", ...) with at least those used; `rank` in the tensor-parallel group."""
        self.grid, self.groups, self.rank, self.how = grid, groups, rank, how
        self.coords = grid.coords(rank)
        self.tags: Any = None
        """A `tags.Tags`, when layouts of activations are checked."""
        for axes, group in groups.items():
            size = grid.size(axes.removesuffix("-grads"))
            assert group.size() == size, f"the group over {axes} has {group.size()} ranks on a grid of {grid}"

    def _posted(self, group: ProcessGroup) -> bool:
        """Whether parts go to their ranks by sends of our own."""
        return self.how == "ordered" and dist.get_backend(group) == "gloo"

    def index(self, axes: str) -> int:
        """Which of the parts over `axes` is this rank's."""
        return self.grid.index(axes, self.coords)

    def gather(self, x: Tensor, move: Move, site: str, *, overlap: bool = False) -> Pending:
        """The parts of `x` along an axis, put together along a dimension."""
        size = self.grid.size(move.axis)
        if size == 1:
            return done(x)
        out, source = x.new_empty((size, *x.shape)), x.contiguous()
        group = self.groups[move.axis]
        spread = traffic.posted_all_gather if self._posted(group) else traffic.all_gather_into_tensor
        work = spread(
            out.view(-1),
            source.view(-1),
            group=group,
            feature=f"{FEATURE}:{site}",
            async_op=overlap,
        )

        def join() -> Tensor:
            if move.dim == 0:
                return out.flatten(0, 1)
            return out.movedim(0, move.dim).flatten(move.dim, move.dim + 1)

        return Pending(work, join, source)

    def reduce(
        self, x: Tensor, move: Move, site: str, *, overlap: bool = False, communicator: str | None = None
    ) -> Pending:
        """The sum over an axis, of which every rank gets its part along a dimension."""
        size = self.grid.size(move.axis)
        if size == 1:
            return done(x)
        parts = x.unflatten(move.dim, (size, -1)).movedim(move.dim, 0).contiguous()
        shape, rows = parts.shape[1:], parts.view(size, -1)
        call = {"group": self.groups[communicator or move.axis], "feature": f"{FEATURE}:{site}"}
        if self.how == "native":
            own = rows.new_empty(rows.shape[1])
            work = traffic.reduce_scatter_tensor(own, rows.view(-1), **call, async_op=overlap)
            return Pending(work, lambda: own.view(shape), rows)
        received = torch.empty_like(rows)
        swap = traffic.posted_all_to_all if self._posted(call["group"]) else traffic.all_to_all_single
        work = swap(received.view(-1), rows.view(-1), **call, async_op=overlap)
        return Pending(work, lambda: ordered_sum(received).to(rows.dtype).view(shape), rows)

    def all_reduce(
        self, x: Tensor, axes: str, site: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """`x` reduced in place over one or several axes."""
        if self.grid.size(axes) > 1:
            traffic.all_reduce(x, op, group=self.groups[axes], feature=f"{FEATURE}:{site}")
        return x
