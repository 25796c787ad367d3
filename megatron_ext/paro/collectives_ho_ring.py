"""HO-Ring: all-gather, reduce-scatter and all-reduce over k groups of m members, both levels at once.

In an all-gather, m outer rings pass blocks from group to group, and what has arrived is spread among the
members while the next pieces are on their way. A reduce-scatter is the mirror image: the members sum the
blocks of one group while the sums of another travel. Outer hops run on a lane of their own, over the
communicator of `groups`; the caller's thread or stream works on `members`.

Method: the hierarchical overlapping ring of "Rethinking Memory and Communication Costs for Efficient Data
Parallel Training of LLMs".
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext import traffic
from megatron_ext.paro.collectives import Collectives, HybridGroups, Quantised
from megatron_ext.paro.collectives_two_phase import (
    accumulator_of,
    gather_parts,
    ordered_sum,
    sum_parts,
    sums_natively,
)
from megatron_ext.paro.ring import Hops, ring_all_gather, ring_sum
from megatron_ext.paro.strategy import Level
from megatron_ext.paro.wires import ExactWire, Int8Wire, Wire, cuts
from megatron_ext.schedules.lane import InlineLane, Lane, make_lane

# One lane for each communicator of outer hops, which nothing else may use at the same time.
_LANES: "weakref.WeakKeyDictionary[ProcessGroup, Lane]" = weakref.WeakKeyDictionary()


def ho_ring_all_gather(flat: Tensor, groups: HybridGroups, *, feature: str = "paro") -> None:
    """Fill `flat` from every rank's block of it, in place.

    Args:
        flat: `[n * block]`, contiguous, in the nested layout of blocks.py: member j of group i owns block
            j*k + i.
        groups: this rank's process groups.
        feature: under which bytes are counted.
    """
    HoRingCollectives(groups, feature=feature).gather(flat, Level.G, Level.N)


def ho_ring_reduce_scatter(flat: Tensor, groups: HybridGroups, *, feature: str = "paro") -> None:
    """Sum `flat` over all ranks into each one's block, in place; the rest is scratch. Else as above."""
    HoRingCollectives(groups, feature=feature).sync(flat, Level.N, Level.G)


def ho_ring_all_reduce(flat: Tensor, groups: HybridGroups, *, feature: str = "paro") -> None:
    """Sum `flat`, in any order of elements, over all ranks, in place: a reduce-scatter and an all-gather."""
    HoRingCollectives(groups, feature=feature).sync(flat, Level.N, Level.N)


class HoRingCollectives(Collectives):
    """Collectives whose hops between groups overlap with the spreading inside."""

    def _gather_members(self, flat: Tensor) -> None:
        gather_parts(flat, self.groups.members, self.feature)

    def _gather_groups(self, part: Tensor, coded: Quantised | None) -> None:
        if self.grid.k > 1:
            rows = part.view(self.grid.k, -1)
            self._ring_gather(rows, coded, lambda block, piece: None, InlineLane("paro-hops"))

    def _gather_all(self, flat: Tensor, coded: Quantised | None) -> None:
        k, m, j = self.grid.k, self.grid.m, self.grid.member
        if k == 1:
            self._gather_members(flat)
            return
        if m == 1:
            self._gather_groups(flat, coded)
            return
        grid = flat.view(m, k, -1)
        pieces = cuts(grid[0, 0])
        scratch = flat.new_empty(m * (pieces[0].stop - pieces[0].start))

        def spread(block: int, c: int) -> None:
            column = grid[:, block, pieces[c]]
            whole = scratch[: column.numel()]
            traffic.all_gather_into_tensor(whole, column[j], group=self.groups.members, feature=self.feature)
            column.copy_(whole.view_as(column))

        self._ring_gather(grid[j], coded, spread, _lane(self.groups.groups, flat.is_cuda))

    def _sum_members(self, flat: Tensor) -> None:
        sum_parts(flat, self.groups.members, self.feature)

    def _sum_groups(self, part: Tensor) -> None:
        if self.grid.k == 1:
            return
        rows = part.view(self.grid.k, -1)
        pieces = cuts(rows[0])

        def summand(block: int, c: int) -> Tensor:
            return rows[block, pieces[c]].to(accumulator_of(part.dtype))

        self._ring_sum(rows, summand, InlineLane("paro-hops"))

    def _sum_all(self, flat: Tensor) -> None:
        k, m, j = self.grid.k, self.grid.m, self.grid.member
        if k == 1:
            self._sum_members(flat)
            return
        if m == 1:
            self._sum_groups(flat)
            return
        grid = flat.view(m, k, -1)
        pieces = cuts(grid[0, 0])
        scratch = flat.new_empty((2, m * (pieces[0].stop - pieces[0].start)))

        def summand(block: int, c: int) -> Tensor:
            column = grid[:, block, pieces[c]]
            sent = scratch[0, : column.numel()]
            sent.view_as(column).copy_(column)
            if sums_natively(flat):
                total = torch.empty_like(column[0])
                traffic.reduce_scatter_tensor(total, sent, group=self.groups.members, feature=self.feature)
                return total
            received = scratch[1, : column.numel()]
            traffic.all_to_all_single(received, sent, group=self.groups.members, feature=self.feature)
            return ordered_sum(received.view_as(column))

        self._ring_sum(grid[j], summand, _lane(self.groups.groups, flat.is_cuda))

    # --------------------------------------------------------------------------------------------------------

    def _ring_gather(
        self, rows: Tensor, coded: Quantised | None, spread: Callable[[int, int], None], lane: Lane
    ) -> None:
        wire: Wire = ExactWire(rows, self.grid.group)
        if coded is not None:
            wire = Int8Wire(rows, self.grid.group, coded.values, coded.add)
        ring_all_gather(Hops(self.groups.groups, self.feature, paired=rows.is_cuda), lane, wire, spread)

    def _ring_sum(self, rows: Tensor, summand: Callable[[int, int], Tensor], lane: Lane) -> None:
        wire: Wire = (Int8Wire if self._int8 else ExactWire)(rows, self.grid.group)
        ring_sum(Hops(self.groups.groups, self.feature, paired=rows.is_cuda), lane, wire, summand)


def _lane(group: ProcessGroup, on_gpu: bool) -> Lane:
    if group not in _LANES:
        _LANES[group] = make_lane("paro-hops", overlap=True, on_gpu=on_gpu)
    return _LANES[group]
