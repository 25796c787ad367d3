"""The backward pass of one head chunk, in both variants.

    keys travel      the team's queries stay; bundles go round their rings as in the forward pass, and behind
                     each of them the sum of its gradients
    queries travel   bundles stay where they were first; queries, output gradients and statistics of the teams
                     go round, and behind them the sums of query gradients

Kernels get outputs and log-sum-exps over all keys, so that gradients of tiles add up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatron_ext.wallfacer.bundle import bring_home, place
from megatron_ext.wallfacer.chunk import Call, Chunk, Stages
from megatron_ext.wallfacer.comm import Pending
from megatron_ext.wallfacer.forward import Kept
from megatron_ext.wallfacer.kernels import tile_backward
from megatron_ext.wallfacer.merge import stand_in
from megatron_ext.wallfacer.ring import FollowingSum, circulate
from megatron_ext.wallfacer.rows import unsort_rows
from megatron_ext.wallfacer.scratch import Scratch
from megatron_ext.wallfacer.tiles import Tile

Travels = Literal["keys", "queries"]


@dataclass(frozen=True)
class Inputs:
    """Of one head chunk: own rows `[n, b, h, d]`, and of the team's rows the log-sum-exp `[C n, b, hq]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    """Of the output."""
    statistics: Tensor
    """The output, or its dot products `[n, b, hq]` with its gradient."""
    lse: Tensor
    kept: Kept


@dataclass(frozen=True)
class Side:
    """What is needed of a team's rows, in the order of positions."""

    query: Tensor
    grad: Tensor
    statistics: Tensor
    lse: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of it, which travels where queries do."""
        return self.query, self.grad, self.statistics, self.lse


def backward(
    call: Call, scratch: Scratch, travels: Travels, given: Inputs, grads: tuple[Tensor, Tensor, Tensor]
) -> Stages:
    """Stages of the backward pass; `grads` `[n, b, h, d]` is where those of own q, k and v go."""
    with scratch.lease(call.device) as lease:
        chunk = Chunk(call, lease)
        gathering = [chunk.gather_team(x) for x in (given.grad, given.statistics)]
        if given.kept.query is None:
            gathering.append(chunk.gather_team(given.q))
        bundle = given.kept.bundle
        if bundle is None:
            bundle = yield from place(chunk, given.k, given.v)
        grad, statistics, *query = (part.wait() for part in gathering)
        side = Side(query[0] if query else given.kept.query, grad, statistics, given.lse)
        if travels == "keys":
            dq, dkv = _keys_travel(chunk, side, bundle)
        else:
            dq, dkv = _queries_travel(chunk, side, bundle)
        lease.keep_only(dq, dkv)
        summing, own = _start_query_sum(chunk, dq)
        own_keys = yield from bring_home(chunk, dkv, travelled=travels == "keys")
        summing.wait()
        for target, found in zip(grads, (own, own_keys[:, 0], own_keys[:, 1]), strict=True):
            target.copy_(found)


def _keys_travel(chunk: Chunk, side: Side, bundle: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the team's queries from the bundles that came by, and of the bundle that came last."""
    call, lease = chunk.call, chunk.lease
    steps = call.plan.key_steps(call.rank)
    hops = [step.hop for step in steps]
    query_grad = lease.zeros(side.query.shape, call.wide)
    outbox, inbox, part = chunk.mailboxes(bundle.shape, hops)
    following = FollowingSum(chunk.hop_grads, outbox, inbox, hops)
    out = _outputs(chunk, side)
    arriving = circulate(chunk.hop, [bundle], chunk.spares([bundle], hops), hops)
    for step, (keys,) in zip(steps, arriving, strict=True):
        part.zero_()
        _add_gradients(call, step.tiles, side, out, keys, query_grad, part)
        following.add(part)
    return query_grad, following.result()


def _queries_travel(chunk: Chunk, side: Side, bundle: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the team's queries, and of the first bundle from the queries that came by."""
    call, lease = chunk.call, chunk.lease
    steps = call.plan.query_steps(call.rank)
    hops = [step.hop for step in steps]
    bundle_grad = lease.zeros(bundle.shape, call.wide)
    outbox, inbox, part = chunk.mailboxes(side.query.shape, hops)
    following = FollowingSum(chunk.hop_grads, outbox, inbox, hops)
    own = [x.contiguous() for x in side.tensors()]
    for step, here in zip(steps, circulate(chunk.hop, own, chunk.spares(own, hops), hops), strict=True):
        present = Side(*here)
        part.zero_()
        out = _outputs(chunk, present)
        _add_gradients(call, step.tiles, present, out, bundle, part, bundle_grad)
        if out is not present.statistics:
            lease.drop(out)
        following.add(part)
    query_grad = following.result()
    left = -(0, *hops)[-1] % call.geometry.ring_length
    if left:
        home = lease.take(query_grad.shape, query_grad.dtype)
        chunk.hop_grads([query_grad], [home], left).wait()
        query_grad = home
    total = bundle_grad
    if call.grad_type != call.wide:
        total = lease.take(bundle.shape, call.grad_type).copy_(bundle_grad)
    return query_grad, total


def _outputs(chunk: Chunk, side: Side) -> Tensor:
    """The outputs, or what stands in for them."""
    if side.statistics.dim() == side.grad.dim():
        return side.statistics
    return stand_in(side.grad, side.statistics, chunk.lease.take(side.grad.shape, side.grad.dtype))


def _add_gradients(
    call: Call, tiles: Sequence[Tile], side: Side, out: Tensor, keys: Tensor, dq: Tensor, dkv: Tensor
) -> None:
    """Add gradients of one step's tiles to those of its rows and keys."""
    for tile in tiles:
        rows, seen = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        query_grad, key_grad, value_grad = tile_backward(
            call.kernel,
            side.grad[rows],
            side.query[rows],
            keys[seen, 0],
            keys[seen, 1],
            out[rows],
            side.lse[rows],
            tile.mode,
            call.scale,
        )
        dq[rows].add_(query_grad)
        dkv[seen, 0].add_(key_grad)
        dkv[seen, 1].add_(value_grad)


def _start_query_sum(chunk: Chunk, query_grad: Tensor) -> tuple[Pending, Tensor]:
    """Start to sum the members' gradients of the team's queries; returns own rows once that has ended."""
    call, lease = chunk.call, chunk.lease
    if call.groups.team is None:
        return Pending(), query_grad
    parts = lease.take(query_grad.shape, call.grad_type)
    unsort_rows(query_grad, call.team_rows, parts)
    lease.drop(query_grad)
    own = lease.take((call.plan.rows, *query_grad.shape[1:]), call.wide)
    return chunk.sum_parts(own, parts, call.groups.team_sums), own
