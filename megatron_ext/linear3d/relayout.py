"""Between slices along the sequence `[s/P, b, h]` and the residual layout `[s/Gj, b/Gi, h/Gl]`: one
all-to-all.

Slices along the sequence are what stock's sequence parallelism has, and so what layers give and take that are
not on the grid: the vocabulary layers of --vocab-parallel. A rank's slice goes to the Gi x Gl ranks that have
its part of the sequence, 1 / (Gi Gl) of it to each.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext import traffic
from megatron_ext.linear3d.comm import GridComm
from megatron_ext.linear3d.volume import FEATURE

SITE = "relayout"


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: GridComm, to_grid: bool) -> Tensor:
        ctx.comm, ctx.to_grid = comm, to_grid
        return (_to_grid if to_grid else _to_slices)(x, comm)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return (_to_slices if ctx.to_grid else _to_grid)(dy, ctx.comm), None, None


def to_grid(x: Tensor, comm: GridComm) -> Tensor:
    """`[s/P, b, h]` to `[s/Gj, b/Gi, h/Gl]`."""
    return _Relayout.apply(x, comm, True)


def to_slices(x: Tensor, comm: GridComm) -> Tensor:
    """The inverse of `to_grid`."""
    return _Relayout.apply(x, comm, False)


def _partners(comm: GridComm) -> tuple[list[int], list[int]]:
    """Ranks with this slice's part of the sequence, and ranks whose slices make up this rank's part."""
    grid, slices = comm.grid, comm.grid.gi * comm.grid.gl
    part = comm.rank // slices
    holders = [rank for rank in range(grid.ranks) if grid.coords(rank)["j"] == part]
    first = comm.coords["j"] * slices
    return holders, list(range(first, first + slices))


def _exchange(pieces: list[Tensor], to: list[int], source: list[int], comm: GridComm) -> list[Tensor]:
    """Send equal pieces to the ranks `to` and receive one of each of `source`, both ascending."""
    numel, ranks = pieces[0].numel(), comm.grid.ranks
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    received = torch.empty_like(sent)
    traffic.all_to_all_single(
        received,
        sent,
        [numel if rank in source else 0 for rank in range(ranks)],
        [numel if rank in to else 0 for rank in range(ranks)],
        group=comm.groups["ijl"],
        feature=f"{FEATURE}:{SITE}",
    )
    return [part.view(pieces[0].shape) for part in received.chunk(len(source))]


def _to_grid(x: Tensor, comm: GridComm) -> Tensor:
    if comm.grid.ranks == 1:
        return x
    holders, sources = _partners(comm)
    tiles = [row.chunk(comm.grid.gl, dim=2) for row in x.chunk(comm.grid.gi, dim=1)]
    places = (comm.grid.coords(rank) for rank in holders)
    pieces = [tiles[at["i"]][at["l"]] for at in places]
    return torch.cat(_exchange(pieces, holders, sources, comm))


def _to_slices(x: Tensor, comm: GridComm) -> Tensor:
    if comm.grid.ranks == 1:
        return x
    holders, sources = _partners(comm)
    received = _exchange(list(x.chunk(len(sources))), sources, holders, comm)
    tiles = {}
    for rank, part in zip(holders, received, strict=True):
        at = comm.grid.coords(rank)
        tiles[at["i"], at["l"]] = part
    rows = [[tiles[i, part] for part in range(comm.grid.gl)] for i in range(comm.grid.gi)]
    return torch.cat([torch.cat(row, dim=2) for row in rows], dim=1)
