"""Plain ring attention and the gather of all keys, written on their own: nothing of ours is imported.

Both take own rows `[n, b, h, d]` of q, k, v and of the output's gradient, split in zigzag (half-chunks r and
2P-1-r of a causal sequence), or contiguously for attention in both directions, and return the output and the
gradients of q, k and v. Partial results are put together in fp32 or wider.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Links:
    """Groups of all ranks for keys and for gradients; `silent` leaves transfers out, to time the rest."""

    keys: dist.ProcessGroup
    grads: dist.ProcessGroup
    silent: bool = False


@dataclass(frozen=True)
class Tile:
    """Rows `q` against keys `k`; `causal` is for squares, `fresh` for rows that are computed first."""

    q: slice
    k: slice
    causal: bool = False
    fresh: bool = False


EVERY = slice(None)


# --- a ring ------------------------------------------------------------------------------------------------


def plain_ring(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, causal: bool, links: Links
) -> tuple[Tensor, ...]:
    """Keys go round a ring, each hop beside a step's computation; their gradients follow them home."""
    rank, size = dist.get_rank(links.keys), dist.get_world_size(links.keys)
    own = torch.stack((k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for home, (keys, values) in _travelling(own, rank, size, links):
        for tile in _ring_tiles(rank, home, len(q), causal):
            _take_in(out, lse, tile, *_forward(q, keys, values, tile))
    dq, total = torch.zeros_like(q), torch.zeros_like(own)
    coming, pending = torch.empty_like(own), ()
    for step, (home, (keys, values)) in enumerate(_travelling(own, rank, size, links)):
        part = torch.zeros_like(own)
        for tile in _ring_tiles(rank, home, len(q), causal):
            _add_gradients(grad, q, keys, values, out, lse, tile, dq, part)
        _wait(pending)
        total = part if step == 0 else part.add_(coming)
        pending = _pass_on(total, coming, rank, size, links, links.grads)
    _wait(pending)
    return out, dq, *(coming if size > 1 and not links.silent else total)


def _travelling(own: Tensor, rank: int, size: int, links: Links):
    """(owner, keys and values) of every step; the next are on their way meanwhile."""
    here = own
    for step in range(size):
        coming, pending = torch.empty_like(own), ()
        if step + 1 < size:
            pending = _pass_on(here, coming, rank, size, links, links.keys)
        yield (rank - step) % size, here
        _wait(pending)
        here = own if links.silent else coming


def _pass_on(sent: Tensor, coming: Tensor, rank: int, size: int, links: Links, group) -> Sequence:
    if links.silent or size == 1:
        return ()
    to, since = ((rank + distance) % size for distance in (1, -1))
    ops = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=to),
        dist.P2POp(dist.irecv, coming, group=group, group_peer=since),
    ]
    return dist.batch_isend_irecv(ops)


def _wait(works: Sequence) -> None:
    for work in works:
        work.wait()


def _ring_tiles(rank: int, home: int, rows: int, causal: bool) -> list[Tile]:
    """What own rows see of the keys of `home`."""
    if not causal or home == rank:
        return [Tile(EVERY, EVERY, causal=causal, fresh=home == rank)]
    half = rows // 2
    if home < rank:
        return [Tile(EVERY, slice(None, half))]
    return [Tile(slice(half, None), EVERY)]


# --- a gather ----------------------------------------------------------------------------------------------


def key_gather(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, causal: bool, links: Links
) -> tuple[Tensor, ...]:
    """All keys are gathered, in the backward pass again; their gradients are sent to the owners and summed
    there (gloo's own reduce-scatter would send twice the bytes)."""
    rank, size = dist.get_rank(links.keys), dist.get_world_size(links.keys)
    own = torch.stack((k, v), dim=1)
    tiles = _gather_tiles(rank, size, len(q), causal)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    every = _gathered(own, size, causal, links)
    for tile in tiles:
        _take_in(out, lse, tile, *_forward(q, every[:, 0], every[:, 1], tile))
    every = _gathered(own, size, causal, links)
    dq, total = torch.zeros_like(q), torch.zeros_like(every).movedim(1, 0)
    for tile in tiles:
        _add_gradients(grad, q, every[:, 0], every[:, 1], out, lse, tile, dq, total)
    parts = _by_rank(total.movedim(0, 1), size, causal)
    received = torch.empty_like(parts)
    if links.silent:
        received = parts
    else:
        dist.all_to_all_single(received, parts, group=links.grads)
    summed = received.unflatten(0, (size, -1)).sum(0)
    return out, dq, summed[:, 0], summed[:, 1]


def _gathered(own: Tensor, size: int, causal: bool, links: Links) -> Tensor:
    """Keys and values of all ranks `[N, 2, b, h, d]`, in the order of the sequence."""
    every = torch.empty((size * len(own), *own.shape[1:]), dtype=own.dtype)
    if links.silent:
        every.copy_(own.repeat(size, 1, 1, 1, 1))
    else:
        dist.all_gather_into_tensor(every, own, group=links.keys)
    return every[_order(size, len(own), causal)]


def _by_rank(every: Tensor, size: int, causal: bool) -> Tensor:
    """Rows in the order of the ranks that own them."""
    return every[_order(size, len(every) // size, causal).argsort()].contiguous()


def _order(size: int, rows: int, causal: bool) -> Tensor:
    """For each token of the sequence, its row in what is gathered."""
    index = torch.arange(size * rows)
    if not causal:
        return index
    halves = index.view(size, 2, rows // 2)
    return torch.cat((halves[:, 0].flatten(), halves[:, 1].flip(0).flatten()))


def _gather_tiles(rank: int, size: int, rows: int, causal: bool) -> list[Tile]:
    """What own rows see of the whole sequence."""
    if not causal:
        return [Tile(EVERY, EVERY, fresh=True)]
    half, found = rows // 2, []
    for index, number in enumerate((rank, 2 * size - 1 - rank)):
        mine = slice(index * half, (index + 1) * half)
        found.append(Tile(mine, slice(number * half, (number + 1) * half), causal=True, fresh=True))
        if number:
            found.append(Tile(mine, slice(0, number * half)))
    return found


# --- tiles -------------------------------------------------------------------------------------------------


def _forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    heads = [x.permute(1, 2, 0, 3) for x in (q[tile.q], k[tile.k], v[tile.k])]
    out, lse = flash(*heads, 0.0, tile.causal)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _take_in(out: Tensor, lse: Tensor, tile: Tile, part: Tensor, part_lse: Tensor) -> None:
    """Put a tile's output and log-sum-exp together with those of its rows so far."""
    if tile.fresh:
        out[tile.q], lse[tile.q] = part, part_lse
    else:
        out[tile.q].lerp_(part, torch.sigmoid(part_lse - lse[tile.q]).unsqueeze(-1))
        lse[tile.q] = torch.logaddexp(lse[tile.q], part_lse)


def _add_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tile: Tile,
    dq: Tensor,
    dkv: Tensor,
) -> None:
    rows = [x[tile.q].permute(1, 2, 0, 3) for x in (grad, q, out)]
    keys = [x[tile.k].permute(1, 2, 0, 3) for x in (k, v)]
    given = lse[tile.q].permute(1, 2, 0).contiguous()
    found = flash_backward(rows[0], rows[1], *keys, rows[2], given, 0.0, tile.causal)
    for total, part in zip((dq[tile.q], dkv[0][tile.k], dkv[1][tile.k]), found, strict=True):
        total.add_(part.permute(2, 0, 1, 3))
