"""One level after the other: collectives over the members of a group, and over groups.

Both levels cut a contiguous buffer into as many equal parts as their process group has ranks, in the order of
the group's ranks (that is what the nested layout is for), so one pair of functions serves both.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext import traffic
from megatron_ext.paro.collectives import Collectives, Quantised
from megatron_ext.paro.quantise import decode, encode, wire_bytes
from megatron_ext.paro.strategy import Level
from megatron_ext.paro.wires import put


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """Type in which values of `dtype` are summed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def sums_natively(tensor: Tensor) -> bool:
    """Whether NCCL may do the sum: on CUDA, and in a type that needs no wider one."""
    return tensor.is_cuda and accumulator_of(tensor.dtype) == tensor.dtype


def ordered_sum(rows: Tensor) -> Tensor:
    """Sum `[n]` of `[p, n]`, row after row, in the accumulator's type."""
    total = rows[0].to(accumulator_of(rows.dtype), copy=True)
    for row in rows[1:]:
        total += row
    return total


def all_gather(output: Tensor, input: Tensor, group: ProcessGroup, feature: str) -> None:
    """Every rank's `input` in `output`."""
    gather = traffic.all_gather_into_tensor if input.is_cuda else traffic.posted_all_gather
    gather(output, input, group=group, feature=feature)


def all_to_all(output: Tensor, input: Tensor, group: ProcessGroup, feature: str) -> None:
    """One part of `input` to every rank."""
    exchange = traffic.all_to_all_single if input.is_cuda else traffic.posted_all_to_all
    exchange(output, input, group=group, feature=feature)


def gather_parts(flat: Tensor, group: ProcessGroup, feature: str) -> None:
    """Fill `flat` from every rank's part of it."""
    if group.size() > 1:
        all_gather(flat, flat.view(group.size(), -1)[group.rank()], group, feature)


def sum_parts(flat: Tensor, group: ProcessGroup, feature: str) -> None:
    """Sum over the ranks into this rank's part of `flat`.

    gloo's reduce-scatter would move twice the bytes and add in the type of the buffer.
    """
    if group.size() == 1:
        return
    own = flat.view(group.size(), -1)[group.rank()]
    if sums_natively(flat):
        traffic.reduce_scatter_tensor(own, flat, group=group, feature=feature)
        return
    received = torch.empty_like(flat)
    all_to_all(received, flat, group, feature)
    own.copy_(ordered_sum(received.view(group.size(), -1)))


def gather_parts_int8(part: Tensor, coded: Quantised, group: ProcessGroup, feature: str) -> None:
    """`gather_parts` of quantised values, the own ones included."""
    rows = part.view(group.size(), -1)
    wires = torch.empty((group.size(), wire_bytes(rows.shape[1])), dtype=torch.uint8, device=part.device)
    encode(coded.values, out=wires[group.rank()])
    all_gather(wires.view(-1), wires[group.rank()], group, feature)
    for row, wire in zip(rows, wires, strict=True):
        put(row, wire, coded.add)


def sum_parts_int8(part: Tensor, group: ProcessGroup, feature: str) -> None:
    """`sum_parts` of quantised values, but for the own ones, which do not travel."""
    size, rank = group.size(), group.rank()
    rows = part.view(size, -1)
    numel = rows.shape[1]
    wires = torch.empty((size, wire_bytes(numel)), dtype=torch.uint8, device=part.device)
    for other in range(size):
        if other != rank:
            encode(rows[other], out=wires[other])
        else:
            wires[other].zero_()
    received = torch.empty_like(wires)
    all_to_all(received.view(-1), wires.view(-1), group, feature)
    total = torch.zeros(numel, dtype=torch.float32, device=part.device)
    for other in range(size):
        total += rows[rank] if other == rank else decode(received[other], numel)
    rows[rank].copy_(total)


class TwoPhaseCollectives(Collectives):
    """Collectives of one level at a time."""

    def _gather_members(self, flat: Tensor) -> None:
        gather_parts(flat, self.groups.members, self.feature)

    def _gather_groups(self, part: Tensor, coded: Quantised | None) -> None:
        if coded is None:
            gather_parts(part, self.groups.groups, self.feature)
        else:
            gather_parts_int8(part, coded, self.groups.groups, self.feature)

    def _gather_all(self, flat: Tensor, coded: Quantised | None) -> None:
        self._gather_groups(self._slice(flat), coded)
        self._gather_members(flat)

    def _sum_members(self, flat: Tensor) -> None:
        sum_parts(flat, self.groups.members, self.feature)

    def _sum_groups(self, part: Tensor) -> None:
        if self._int8:
            sum_parts_int8(part, self.groups.groups, self.feature)
        else:
            sum_parts(part, self.groups.groups, self.feature)

    def _sum_all(self, flat: Tensor) -> None:
        self._sum_members(flat)
        self._sum_groups(self._slice(flat))

    def _slice(self, flat: Tensor) -> Tensor:
        """This rank's I part of a whole buffer."""
        return flat[self.grid.within(Level.I, Level.N, flat.numel())]
