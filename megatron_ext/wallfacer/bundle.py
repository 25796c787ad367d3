"""Bundles of keys and values: from their owners to the rings, and their gradients back to the owners.

    relocate   the K owners of a bundle gather it, and each sends it to the holder in one group of teams;
               gradients come back the same way, and the owners sum them
    direct     each owner sends its share to the K holders; gradients come back share by share

A bundle is `[rows, 2, b, h, d]`, keys at 0 and values at 1, its rows in the order of positions. Both
functions are stages of a chunk: they yield where they have started a transfer.
"""

from collections.abc import Generator

import torch
from torch import Tensor

from megatron_ext.wallfacer import comm
from megatron_ext.wallfacer.chunk import Chunk
from megatron_ext.wallfacer.rows import Gathering, sort_rows, unsort_rows
from megatron_ext.wallfacer.scratch import Take


def place(chunk: Chunk, k: Tensor, v: Tensor, keep: Take | None = None) -> Generator[None, None, Tensor]:
    """Two stages; returns this rank's first bundle.

    Args:
        k, v: own `[n, b, h, d]`.
        keep: makes the bundle's buffer, if it is to outlive the chunk.
    """
    own = chunk.lease.take((k.shape[0], 2, *k.shape[1:]), k.dtype)
    torch.stack((k, v), dim=1, out=own)
    if chunk.call.geometry.bundle_size == 1:
        assert keep is None, "a bundle of one share is made of k and v again"
        yield
        yield
        return own
    direct = chunk.call.options.movement == "direct"
    return (yield from (_place_directly if direct else _relocate)(chunk, own, keep))


def _relocate(chunk: Chunk, own: Tensor, keep: Take | None) -> Generator[None, None, Tensor]:
    call, geometry, rank = chunk.call, chunk.call.geometry, chunk.call.rank
    gathering = Gathering(chunk.lease, own, call.plan.keys(call.own_bundle), call.groups.bundle)
    yield
    bundle = gathering.wait()
    chunk.lease.drop(own)
    if keep is None and geometry.destination(rank) == rank:
        yield
        return bundle
    moved = (keep or chunk.lease.take)(bundle.shape, bundle.dtype)
    parcels = [(bundle, geometry.destination(rank))], [(moved, geometry.source(rank))]
    moving = comm.exchange(*parcels, call.groups.move)
    yield
    moving.wait()
    chunk.lease.drop(bundle)
    return moved


def _place_directly(chunk: Chunk, own: Tensor, keep: Take | None) -> Generator[None, None, Tensor]:
    take = keep or chunk.lease.take
    call, geometry = chunk.call, chunk.call.geometry
    holders = [geometry.holder(call.own_bundle, group) for group in range(geometry.bundle_size)]
    owners = geometry.bundle(call.first_bundle)
    shares = chunk.lease.take((len(owners), *own.shape), own.dtype)
    sends, receives = [(own, rank) for rank in holders], list(zip(shares, owners, strict=True))
    moving = comm.exchange(sends, receives, call.groups.move)
    yield
    yield
    moving.wait()
    chunk.lease.drop(own)
    gathered = shares.flatten(0, 1)
    bundle = sort_rows(gathered, call.plan.keys(call.first_bundle), take(gathered.shape, own.dtype))
    chunk.lease.drop(shares)
    return bundle


def bring_home(chunk: Chunk, total: Tensor, travelled: bool) -> Generator[None, None, Tensor]:
    """Two stages; returns the gradient `[n, 2, b, h, d]` of own keys and values, in the type of sums.

    Args:
        total: gradient of the bundle that is here from the queries of this rank's group of teams, in the type
            that travels.
        travelled: whether bundles have gone round their rings, so that they are not where they were first.
    """
    call, geometry = chunk.call, chunk.call.geometry
    place = geometry.place(call.rank)
    bundle = geometry.bundle_at(call.rank, call.plan.last_hop(place.group, place.member) if travelled else 0)

    def holder(group: int) -> int:
        hops = call.plan.last_hop(group, call.own_bundle % geometry.team_size) if travelled else 0
        return geometry.holder(call.own_bundle, group, hops)

    output = chunk.lease.take((call.plan.rows, *total.shape[1:]), call.wide)
    if geometry.bundle_size > 1 and call.options.movement == "direct":
        holders = [holder(group) for group in range(geometry.bundle_size)]
        return (yield from _bring_shares_home(chunk, total, bundle, holders, output))
    group = geometry.number_of(call.rank) % geometry.bundle_size
    home, owner = total, geometry.owner(bundle, place.group)
    if owner == call.rank:
        yield
    else:
        home = chunk.lease.take(total.shape, total.dtype)
        returning = comm.exchange([(total, owner)], [(home, holder(group))], call.groups.move_grads)
        yield
        returning.wait()
        chunk.lease.drop(total)
    if geometry.bundle_size == 1:
        yield
        return output.copy_(home)
    parts = unsort_rows(home, call.plan.keys(call.own_bundle), chunk.lease.take(home.shape, home.dtype))
    chunk.lease.drop(home)
    summing = chunk.sum_parts(output, parts, call.groups.bundle_sums)
    yield
    summing.wait()
    return output


def _bring_shares_home(
    chunk: Chunk, total: Tensor, bundle: int, holders: list[int], output: Tensor
) -> Generator[None, None, Tensor]:
    call, owners = chunk.call, chunk.call.geometry.bundle(bundle)
    shape = (len(owners), *output.shape)
    sent, received = (chunk.lease.take(shape, total.dtype) for _ in range(2))
    unsort_rows(total, call.plan.keys(bundle), sent.flatten(0, 1))
    chunk.lease.drop(total)
    parcels = list(zip(sent, owners, strict=True)), list(zip(received, holders, strict=True))
    returning = comm.exchange(*parcels, call.groups.move_grads)
    yield
    returning.wait()
    comm.add_up(output, received)
    yield
    return output
