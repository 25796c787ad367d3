"""The forward pass of one head chunk."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.wallfacer import comm
from megatron_ext.wallfacer.bundle import place
from megatron_ext.wallfacer.chunk import Call, Chunk, Stages
from megatron_ext.wallfacer.kernels import tile_forward
from megatron_ext.wallfacer.merge import combine, merge_
from megatron_ext.wallfacer.ring import circulate
from megatron_ext.wallfacer.rows import unsort_rows
from megatron_ext.wallfacer.scratch import Scratch, Take


@dataclass
class Kept:
    """What one head chunk keeps for the backward pass, so that it need not be gathered again."""

    query: Tensor | None = None
    """The team's, `[C n, b, h, d]`; None for a team of one rank."""
    bundle: Tensor | None = None
    """The first, `[K n, 2, b, h, d]`; None if it is this rank's own share."""


def forward(
    call: Call,
    scratch: Scratch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    kept: Kept | None,
) -> Stages:
    """Stages of the forward pass.

    Args:
        q, k, v: own heads of the chunk `[n, b, h, d]`.
        sink: `[hq]` or None.
        out, lse: where results go: own output `[n, b, hq, d]`, log-sum-exp of the team's rows `[C n, b, hq]`.
        kept: where to leave what is kept, if anything is.
    """
    with scratch.lease(call.device) as lease:
        chunk = Chunk(call, lease)
        gathering = chunk.gather_team(q)
        keep: Take | None = None
        if kept is not None and call.geometry.bundle_size > 1:
            keep = _fresh_on(call.device)
        bundle = yield from place(chunk, k, v, keep)
        query = gathering.wait()
        if kept is not None:
            kept.query = query.clone() if call.groups.team is not None else None
            kept.bundle = bundle if keep is not None else None
        total, own_lse = _attend(chunk, query, bundle)
        share = _final_shares(chunk, own_lse, sink, lse)
        if call.groups.team is None:
            out.copy_(total if share is None else total.mul_(share.unsqueeze(-1)))
            return
        lease.keep_only(total)
        parts = lease.take(total.shape, call.sum_type)
        unsort_rows(total, call.team_rows, parts, share)
        lease.drop(total)
        own = lease.take(q.shape, call.wide)
        summing = chunk.sum_parts(own, parts, call.groups.team_sums)
        yield
        summing.wait()
        out.copy_(own)


def _fresh_on(device: torch.device) -> Take:
    return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)


def _attend(chunk: Chunk, query: Tensor, bundle: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the team's rows over the bundles that come by, in the type of sums."""
    call, lease = chunk.call, chunk.lease
    total = lease.zeros(query.shape, call.wide)
    lse = lease.take(query.shape[:3], call.wide).fill_(-torch.inf)
    steps = call.plan.key_steps(call.rank)
    hops = [step.hop for step in steps]
    arriving = circulate(chunk.hop, [bundle], chunk.spares([bundle], hops), hops)
    for step, (keys,) in zip(steps, arriving, strict=True):
        for tile in step.tiles:
            rows, seen = slice(tile.q0, tile.q1), keys[tile.k0 : tile.k1]
            part = tile_forward(call.kernel, query[rows], seen[:, 0], seen[:, 1], tile.mode, call.scale)
            if tile.fresh:
                total[rows].copy_(part[0])
                lse[rows].copy_(part[1])
            else:
                merge_(total[rows], lse[rows], *part)
    return total, lse


def _final_shares(chunk: Chunk, own: Tensor, sink: Tensor | None, lse: Tensor) -> Tensor | None:
    """Fill `lse` with that of all keys; returns this rank's share of each row's output, or None for all."""
    group = chunk.call.groups.team_sums
    if group is None and sink is None:
        lse.copy_(own)
        return None
    lses = own.unsqueeze(0)
    if group is not None:
        lses = chunk.lease.take((group.size(), *own.shape), own.dtype)
        comm.gather(lses.flatten(0, 1), own, group).wait()
    total, share = combine(lses, own, sink)
    lse.copy_(total)
    return share
