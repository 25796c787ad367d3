"""Weights on their way: gathered one linear ahead, and their gradients summed one linear behind.

A `Use` is one use of one weight in one forward pass. Its `leaf` is an autograd node that stands between the
parameter and the linear. The node of the next linear is made before the linear of this one runs; the gather
of its weight starts when this one has its input. Autograd runs nodes that are ready in the reverse order of
their making, so the node comes up only when the backward pass of *this* linear is over: until then, the sum
of the next linear's weight gradient over axis i runs beside it. The gradient reaches the parameter through
autograd as any other does, so hooks of data-parallel wrappers fire when it is complete.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_ext.linear3d.comm import GridComm, Pending
from megatron_ext.linear3d.layouts import Move

WEIGHT = Move("i", 0)


@dataclass(frozen=True)
class Overlap:
    """What may run beside what; each changes no bit of any result."""

    grads: bool = True
    """Input gradients are scattered while weight gradients are computed."""
    prefetch: bool = True
    """Weights are gathered one linear ahead: in forward, backward and recomputation."""
    defer: bool = True
    """Weight gradients are summed while the linear before runs its backward pass."""
    after_hooks: bool = False
    """Parameters are updated while the next step starts (--overlap-param-gather), so that a weight may only
    be gathered ahead once its own module has been called in this step."""


class Linear(Protocol):
    """What the chain needs of a linear layer."""

    weight: Tensor
    site: Any
    layer: int
    gathers_in_backward: bool


class Use:
    """One use of a weight: what is under way."""

    def __init__(self, weight: Tensor):
        self.gathered: Pending | None = None
        self.grad: Pending | None = None
        self.leaf = weight
        self.attached = False
        self.fetch_next: Callable[[], None] | None = None
        """Starts the gather of the next linear's weight."""
        self._weight = weight

    def attach(self) -> None:
        """Make the autograd node, if gradients are recorded and it is not there yet."""
        if not self.attached and torch.is_grad_enabled() and self._weight.requires_grad:
            self.leaf = _Leaf.apply(self._weight, self)
            self.attached = True


class _Leaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, use: Use) -> Tensor:
        ctx.use = use
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, placeholder: Tensor) -> tuple[Tensor, None]:
        use, ctx.use = ctx.use, None
        assert use.grad is not None, "the linear's backward pass leaves its gradient here"
        return use.grad.wait(), None


class Chain:
    """The linears of a stage in the order of their forward passes; one for each model chunk."""

    def __init__(self, comm: GridComm, overlap: Overlap, units: Mapping[int, int] | None = None):
        """`units`: layer -> number of the unit in which it is recomputed, for layers that are."""
        self.comm, self.overlap = comm, overlap
        self._units = dict(units or {})
        self._ahead: dict[int, Use] = {}
        self._back: dict[int, Pending] = {}
        self._next: dict[int, Linear] = {}
        self._previous: dict[int, Linear] = {}
        self._first: dict[int, Linear] = {}
        self._current: set[int] = set()

    def link(self, linears: Iterable[Linear]) -> None:
        """Say in which order they run."""
        linears = list(linears)
        for one, two in pairwise(linears):
            self._next[id(one)] = two
            self._previous[id(two)] = one
        for linear in reversed(linears):
            if (unit := self._unit(linear)) is not None:
                self._first[unit] = linear

    def _unit(self, linear: Linear) -> int | None:
        return self._units.get(linear.layer)

    @property
    def gathers(self) -> bool:
        """Whether weights are spread over axis i at all."""
        return self.comm.grid.gi > 1

    def use(self, linear: Linear, weight: Tensor) -> Use:
        """The use of `weight` in the forward pass that starts now, and the next one ready.

        The next gather starts when this linear has its input (`Use.fetch_next`): on the same link, what is
        sent first arrives first, and the product would wait for both.
        """
        use = self._ahead.pop(id(linear), None)
        if use is None or use._weight is not weight:
            use = Use(weight)
        use.attach()
        if use.gathered is None:
            use.gathered = self._gather(weight, linear.site.name, overlap=False)
        self._current.add(id(linear))
        following = self._next.get(id(linear))
        if following is not None and self._may_run_ahead(linear, following):
            ahead = Use(following.weight)
            if self.overlap.defer:
                ahead.attach()
            if self.overlap.prefetch:
                use.fetch_next = partial(self._fetch, ahead, following)
            self._ahead[id(following)] = ahead
        return use

    def _fetch(self, ahead: Use, linear: Linear) -> None:
        ahead.gathered = self._gather(linear.weight, linear.site.name, overlap=True)

    def _may_run_ahead(self, linear: Linear, following: Linear) -> bool:
        if not self.gathers or not (self.overlap.prefetch or self.overlap.defer):
            return False
        if id(following) in self._ahead:
            return False
        if self.overlap.after_hooks and id(following) not in self._current:
            return False
        # Layers that are recomputed together are a graph of their own: nothing may reach across its border.
        return not torch.is_grad_enabled() or self._unit(linear) == self._unit(following)

    def backward_weight(self, linear: Linear, weight: Tensor) -> Tensor:
        """The gathered weight in the backward pass, where it was not saved."""
        pending = self._back.pop(id(linear), None)
        if pending is None:
            pending = self._gather(weight, linear.site.name, overlap=False)
        return pending.wait()

    def before_backward(self, linear: Linear) -> None:
        """The backward pass of `linear` has all that its products take: fetch what comes after it."""
        previous = self._previous.get(id(linear))
        if previous is None or not (self.gathers and self.overlap.prefetch):
            return
        unit = self._unit(previous)
        if unit is not None and unit != self._unit(linear):
            # What comes next is the forward pass of the unit before, from its beginning.
            first = self._first[unit]
            if id(first) not in self._ahead:
                ahead = Use(first.weight)
                self._fetch(ahead, first)
                self._ahead[id(first)] = ahead
        elif previous.gathers_in_backward and id(previous) not in self._back:
            self._back[id(previous)] = self._gather(previous.weight, previous.site.name, overlap=True)

    def step_ends(self) -> None:
        """Weights are about to change."""
        assert not self._ahead, "a weight was gathered that nobody has used"
        assert not self._back, "a weight was gathered that nobody has used"
        self._current.clear()

    def _gather(self, weight: Tensor, site: str, *, overlap: bool) -> Pending:
        return self.comm.gather(weight.detach(), WEIGHT, site, overlap=overlap)
