"""One linear layer on the grid, as one autograd function over three process groups; and its small relatives.

    forward     x gathered, W gathered over i, y = x W^T, y scattered
    backward    dy gathered, (W, x gathered again), dx = dy W scattered, dW = dy^T x scattered over i

Which axes and dimensions: layouts.LinearPlan. What is kept for the backward pass is the save policy: both
operands gathered, the weight as its shard, or both as shards (only then activations are 1/P).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.linear3d.chain import WEIGHT, Chain, Use
from megatron_ext.linear3d.comm import GRADS, GridComm, Pending, done
from megatron_ext.linear3d.layouts import Move
from megatron_ext.linear3d.sizes import Save


@dataclass(frozen=True)
class Call:
    """What a linear's function needs besides tensors."""

    comm: GridComm
    chain: Chain
    linear: Any
    """The module: its site, and whether it is gated."""
    use: Use
    save: Save


def glu_rows_together(weight: Tensor, parts: int) -> Tensor:
    """Gathered rows `g0 u0 g1 u1 ..` `[n, k]` of `parts` ranks as `g0 g1 .. u0 u1 ..`."""
    return weight.unflatten(0, (parts, 2, -1)).transpose(0, 1).flatten(0, 2)


def glu_rows_apart(weight: Tensor, parts: int) -> Tensor:
    """The inverse of `glu_rows_together`."""
    return weight.unflatten(0, (2, parts, -1)).transpose(0, 1).flatten(0, 2)


class _GridLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: Call) -> Tensor:
        comm, linear = call.comm, call.linear
        site = linear.site
        whole = x
        for move in site.plan.gathers:
            whole = comm.gather(whole, move, site.name).wait()
        gathered = _usable(call, call.use.gathered.wait())
        call.use.gathered = None
        if call.use.fetch_next is not None:
            call.use.fetch_next()
            call.use.fetch_next = None
        y = torch.matmul(whole, gathered.t())
        for move in site.plan.reduces:
            y = comm.reduce(y, move, site.name).wait()
        keep_weight = call.save == "gathered" or linear.keeps_gathered
        ctx.save_for_backward(x if call.save == "shard_all" else whole, gathered if keep_weight else weight)
        ctx.call, ctx.keep_weight = call, keep_weight
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        call, (x, weight) = ctx.call, ctx.saved_tensors
        comm, chain, linear, overlap = call.comm, call.chain, call.linear, call.chain.overlap
        site = linear.site
        if not ctx.keep_weight:
            weight = _usable(call, chain.backward_weight(linear, weight))
        whole = _Gathers(
            comm, x, site.plan.gathers if call.save == "shard_all" else (), site.name, overlap.grads
        )
        for move in reversed(site.plan.reduces):
            dy = comm.gather(dy, move, site.name).wait()
        chain.before_backward(linear)
        dx: Pending | None = None
        moves = tuple(reversed(site.plan.gathers))
        if ctx.needs_input_grad[0]:
            dx = done(torch.matmul(dy, weight))
            if moves:
                dx = comm.reduce(dx.wait(), moves[0], site.name, overlap=overlap.grads)
        if ctx.needs_input_grad[1]:
            _weight_gradient(call, dy, whole.wait())
        if dx is None:
            return None, _placeholder(ctx, call), None
        result = dx.wait()
        for move in moves[1:]:
            result = comm.reduce(result, move, site.name).wait()
        return result, _placeholder(ctx, call), None


class _Gathers:
    """Several gathers after one another, the first of them on its way at once."""

    def __init__(self, comm: GridComm, x: Tensor, moves: tuple[Move, ...], site: str, overlap: bool):
        self._comm, self._rest, self._site = comm, moves[1:], site
        self._first = comm.gather(x, moves[0], site, overlap=overlap) if moves else done(x)

    def wait(self) -> Tensor:
        x = self._first.wait()
        for move in self._rest:
            x = self._comm.gather(x, move, self._site).wait()
        return x


def _usable(call: Call, gathered: Tensor) -> Tensor:
    return glu_rows_together(gathered, call.comm.grid.gi) if call.linear.gated else gathered


def _weight_gradient(call: Call, dy: Tensor, x: Tensor) -> None:
    """Leave the gradient of the weight's shard with its use, maybe still under way."""
    linear, overlap = call.linear, call.chain.overlap
    dw = dy.flatten(0, -2).t().matmul(x.flatten(0, -2))
    if linear.gated:
        dw = glu_rows_apart(dw, call.comm.grid.gi)
    call.use.grad = call.comm.reduce(dw, WEIGHT, linear.site.name, overlap=overlap.defer, communicator=GRADS)
    if not overlap.defer:
        call.use.grad.wait()


def _placeholder(ctx: Any, call: Call) -> Tensor | None:
    """Stands for the weight's gradient until the use's own node delivers it; takes no memory."""
    if not ctx.needs_input_grad[1]:
        return None
    leaf = call.use.leaf
    return leaf.new_empty(()).expand(leaf.shape)


def grid_linear(x: Tensor, weight: Tensor, linear: Any, chain: Chain, save: Save) -> Tensor:
    """y = x W^T of the linear layer `linear`, from its input's layout to its result's; no bias.

    Args:
        x: this rank's part in `linear.site.given`.
        weight: this rank's part in `linear.site.weight`; of a gated weight, its gate rows and its up rows.
        linear: has `site`, `gated`, `keeps_gathered` and `layer`.
        chain: of the stage that the linear is in.
        save: what is kept for the backward pass.
    """
    use = chain.use(linear, weight)
    return _GridLinear.apply(x, use.leaf, Call(chain.comm, chain, linear, use, save))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: GridComm, move: Move, site: str, back: str) -> Tensor:
        ctx.info = comm, move, site, back
        return comm.gather(x, move, site).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        comm, move, site, back = ctx.info
        if back == "slice":
            parts = dy.chunk(comm.grid.size(move.axis), dim=move.dim)
            return parts[comm.coords[move.axis]].contiguous(), None, None, None, None
        communicator = GRADS if move.axis == "i" else None
        return comm.reduce(dy, move, site, communicator=communicator).wait(), None, None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: GridComm, move: Move, site: str) -> Tensor:
        ctx.info = comm, move, site
        return comm.reduce(x, move, site).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        comm, move, site = ctx.info
        return comm.gather(dy, move, site).wait(), None, None, None


def gather(x: Tensor, comm: GridComm, move: Move, site: str) -> Tensor:
    """Parts put together; gradients of all ranks are summed."""
    return _Gather.apply(x, comm, move, site, "sum")


def gather_replicated(x: Tensor, comm: GridComm, move: Move, site: str) -> Tensor:
    """Parts put together for computations that all ranks repeat: a part's gradient is this rank's own."""
    return _Gather.apply(x, comm, move, site, "slice")


def reduce(x: Tensor, comm: GridComm, move: Move, site: str) -> Tensor:
    """Sums scattered; gradients are put together."""
    return _Reduce.apply(x, comm, move, site)


def own_part(x: Tensor, comm: GridComm, move: Move) -> Tensor:
    """This rank's part of something that all ranks along the axis have."""
    size = comm.grid.size(move.axis)
    return x if size == 1 else x.chunk(size, dim=move.dim)[comm.coords[move.axis]]
