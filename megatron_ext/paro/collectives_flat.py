"""Collectives over all n ranks at once, as if all links were equal: what sharding without groups does.

Ranks are ordered group by group, so a ring enters and leaves each group once; it still carries (n-1)/n of the
buffer over every link between groups, where (k-1)/k would do.
"""

import torch
from torch import Tensor

from megatron_ext import traffic
from megatron_ext.paro.blocks import Grid
from megatron_ext.paro.collectives import HybridGroups, Quantised
from megatron_ext.paro.collectives_two_phase import TwoPhaseCollectives, accumulator_of, sums_natively
from megatron_ext.paro.ring import Hops, ring_all_gather, ring_sum
from megatron_ext.paro.strategy import Level
from megatron_ext.paro.wires import ExactWire, cuts
from megatron_ext.schedules.lane import InlineLane


class FlatCollectives(TwoPhaseCollectives):
    """Whole buffers go over all ranks at once; what is split over the members of a group goes by level."""

    def _gather_all(self, flat: Tensor, coded: Quantised | None) -> None:
        assert coded is None, "flat collectives have no quantised hop"
        if self.grid.n == 1:
            return
        by_rank = torch.empty_like(flat)
        own = flat[self.grid.within(Level.G, Level.N, flat.numel())]
        traffic.all_gather_into_tensor(by_rank, own, group=self.groups.flat, feature=self.feature)
        ranked = _ranked(flat, self.grid)
        ranked.copy_(by_rank.view_as(ranked))

    def _sum_all(self, flat: Tensor) -> None:
        if sums_natively(flat) and self.grid.n > 1:
            own = flat[self.grid.within(Level.G, Level.N, flat.numel())]
            by_rank = _ranked(flat, self.grid).reshape(-1)
            traffic.reduce_scatter_tensor(own, by_rank, group=self.groups.flat, feature=self.feature)
        else:
            flat_ring_reduce_scatter(flat, self.groups, feature=self.feature)


def flat_ring_all_gather(flat: Tensor, groups: HybridGroups, *, feature: str = "paro") -> None:
    """Fill `flat`, in the nested layout, from every rank's block: one ring over all ranks, group by group."""
    grid = groups.grid()
    if grid.n > 1:
        wire = ExactWire(_blocks(flat, grid), grid.rank)
        hops = Hops(groups.flat, feature, paired=flat.is_cuda)
        ring_all_gather(hops, InlineLane("flat-hops"), wire, lambda block, piece: None)


def flat_ring_reduce_scatter(flat: Tensor, groups: HybridGroups, *, feature: str = "paro") -> None:
    """Sum `flat` over all ranks into each one's block, over the same ring. The rest is scratch.

    gloo's reduce-scatter moves twice the bytes, and an all-to-all m times those that must leave a group.
    """
    grid = groups.grid()
    if grid.n == 1:
        return
    blocks = _blocks(flat, grid)
    pieces = cuts(blocks[0])

    def summand(block: int, c: int) -> Tensor:
        return blocks[block][pieces[c]].to(accumulator_of(flat.dtype))

    hops = Hops(groups.flat, feature, paired=flat.is_cuda)
    ring_sum(hops, InlineLane("flat-hops"), ExactWire(blocks, grid.rank), summand)


def _ranked(flat: Tensor, grid: Grid) -> Tensor:
    """The blocks `[k, m, block]` by the rank that owns them, a view."""
    return flat.view(grid.m, grid.k, -1).transpose(0, 1)


def _blocks(flat: Tensor, grid: Grid) -> list[Tensor]:
    return [block for group in _ranked(flat, grid) for block in group]
