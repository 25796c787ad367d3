"""What the stages of one head chunk work with, and how chunks take turns."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.wallfacer import comm
from megatron_ext.wallfacer.comm import Pending
from megatron_ext.wallfacer.geometry import Geometry
from megatron_ext.wallfacer.groups import TrafficGroups
from megatron_ext.wallfacer.kernels import Kernel
from megatron_ext.wallfacer.merge import accumulator_of
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.plan import Plan
from megatron_ext.wallfacer.rows import Gathering
from megatron_ext.wallfacer.scratch import Lease
from megatron_ext.wallfacer.sequence import Rows

Stages = Generator[None, None, None]
"""A computation that yields where it has started a transfer that others may hide."""


@dataclass(frozen=True)
class Call:
    """One attention call on one rank."""

    plan: Plan
    groups: TrafficGroups
    options: Options
    kernel: Kernel
    rank: int
    """Among the context-parallel ranks."""
    scale: float
    """Of the scores."""
    dtype: torch.dtype
    device: torch.device

    @property
    def geometry(self) -> Geometry:
        """Who meets whom."""
        return self.plan.geometry

    @property
    def wide(self) -> torch.dtype:
        """Type in which outputs and gradients are accumulated."""
        return accumulator_of(self.dtype)

    @property
    def sum_type(self) -> torch.dtype:
        """Type in which partial outputs travel."""
        return self.wide if self.options.sum_type == "fp32" else self.dtype

    @property
    def grad_type(self) -> torch.dtype:
        """Type in which partial gradients travel."""
        return self.wide if self.options.grad_type == "fp32" else self.dtype

    @property
    def own_bundle(self) -> int:
        """The bundle that this rank's keys are part of."""
        return self.geometry.number_of(self.rank) // self.geometry.bundle_size

    @property
    def first_bundle(self) -> int:
        """The bundle that this rank holds first."""
        return self.geometry.bundle_at(self.rank, 0)

    @property
    def team_rows(self) -> Rows:
        """Rows of the team's queries."""
        return self.plan.queries(self.geometry.team_of(self.rank))


@dataclass(frozen=True)
class Chunk:
    """A call, and the buffers of one of its head chunks."""

    call: Call
    lease: Lease

    def gather_team(self, own: Tensor) -> Gathering:
        """Start to gather rows of the team."""
        return Gathering(self.lease, own, self.call.team_rows, self.call.groups.team)

    def sum_parts(self, output: Tensor, parts: Tensor, group: ProcessGroup) -> Pending:
        """Start to sum the rows that are for each rank of `group`: `parts` `[ranks * n, ...]`."""
        parts = parts.view(group.size(), -1, *parts.shape[1:])
        received = None if comm.sums_natively(parts) else self.lease.take(parts.shape, parts.dtype)
        return comm.sum_parts(output, parts, received, group)

    def spares(self, own: Sequence[Tensor], hops: Sequence[int]) -> list[list[Tensor]]:
        """Two sets of buffers like `own` for `circulate`, as far as `hops` need them."""
        transfers = len(hops) - 1 + bool(hops and hops[0])
        first = [self.lease.take(x.shape, x.dtype) for x in own if transfers > 0]
        second = [
            x if self.lease.owns(x) else self.lease.take(x.shape, x.dtype) for x in own if transfers > 1
        ]
        return [first, second]

    def mailboxes(self, shape: Sequence[int], hops: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """(outbox, inbox, part of a step) for a `FollowingSum`; one buffer if a single step needs no more."""
        outbox = self.lease.take(shape, self.call.grad_type)
        alone = len(hops) <= 1
        inbox = outbox if alone else self.lease.take(shape, self.call.grad_type)
        same = alone and self.call.grad_type == self.call.wide
        return outbox, inbox, outbox if same else self.lease.take(shape, self.call.wide)

    def hop(self, sends: Sequence[Tensor], receives: Sequence[Tensor], distance: int) -> Pending:
        """Pass tensors on along the ring."""
        peers = self.call.geometry.ring_peers(self.call.rank, distance)
        return comm.hop(sends, receives, peers, self.call.groups.ring)

    def hop_grads(self, sends: Sequence[Tensor], receives: Sequence[Tensor], distance: int) -> Pending:
        """Pass gradients on along the ring."""
        peers = self.call.geometry.ring_peers(self.call.rank, distance)
        return comm.hop(sends, receives, peers, self.call.groups.ring_grads)


def run(chunks: Iterable[Stages]) -> None:
    """Run the stages of chunks, each chunk one stage behind the one before it.

    In each round the latest chunk goes first: what it starts to send is on its way while those before it
    compute. Every rank takes the same turns, so transfers of a communicator are started in one order.
    """
    waiting = iter(chunks)
    active: list[Stages] = []
    while True:
        latest = next(waiting, None)
        if latest is not None:
            active.append(latest)
        if not active:
            return
        for stages in reversed(active.copy()):
            if next(stages, active) is active:
                active.remove(stages)
