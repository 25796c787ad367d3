"""2-D and 2.5-D tensor parallelism, written for the benchmark alone: SUMMA as in Optimus, and Tesseract.

On q x q ranks every matrix is cut into q x q blocks. A product is a sum over k of outer products of panels:
in step k the k-th block of a row (column) is broadcast along it, or partial products are reduced to it.

    C = A B      A along rows, B along columns
    dA = dC B^T  B along columns, partial products reduced along rows
    dB = A^T dC  A along rows, partial products reduced along columns

With depth d (Tesseract) the batch is cut over d layers of such squares, which hold copies of the weights, so
that gradients of weights are summed over the depth. Sources: Xu et al., arXiv 2104.05343; Wang et al., arXiv
2105.14500.

Panels travel either in turn, as in Optimus: then only one rank of a row sends at a time. Or all at once, each
from its rank to every other, and partial products back: then every rank sends all the time, which no order of
broadcasts can beat, and needs memory for all panels.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import traffic

FEATURE = "summa"


class Square:
    """One rank's place on q x q x d ranks: rank = (depth * q + row) * q + column."""

    def __init__(self, q: int, d: int, *, at_once: bool):
        self.q, self.d, self.at_once = q, d, at_once
        rank = dist.get_rank()
        self.column, self.row, self.depth = rank % q, rank // q % q, rank // (q * q)
        starts = [layer * q * q for layer in range(d)]
        rows = [[start + r * q + c for c in range(q)] for start in starts for r in range(q)]
        columns = [[start + r * q + c for r in range(q)] for start in starts for c in range(q)]
        depths = [[place + start for start in starts] for place in range(q * q)]
        self.along_row, self.along_column = _own(rows, "row"), _own(columns, "column")
        self.along_depth = _own(depths, "depth")

    def panels(self, x: Tensor, group: Any) -> Iterator[Tensor]:
        """The block of every rank along a row or column, in turn. Blocks have one shape."""
        x = x.contiguous()
        if self.at_once:
            every = x.new_empty((self.q, *x.shape))
            traffic.posted_all_gather(every.view(-1), x.view(-1), group=group, feature=FEATURE)
            yield from every
            return
        for k in range(self.q):
            block = x if group.rank() == k else torch.empty_like(x)
            traffic.broadcast(block, group_src=k, group=group, feature=FEATURE)
            yield block

    def reduce(self, parts: Iterable[Tensor], group: Any) -> Tensor:
        """The sum of the k-th parts, on the k-th rank along a row or column: this rank's."""
        if self.at_once:
            sent = torch.stack(list(parts))
            received = torch.empty_like(sent)
            traffic.posted_all_to_all(received.view(-1), sent.view(-1), group=group, feature=FEATURE)
            return received.sum(dim=0)
        for k, part in enumerate(parts):
            part = part.contiguous()
            traffic.reduce(part, group_dst=k, group=group, feature=FEATURE)
            if group.rank() == k:
                own = part
        return own


def _own(lists: list[list[int]], name: str) -> Any:
    made = [(ranks, dist.new_group(ranks, group_desc=f"summa-{name}")) for ranks in lists]
    return next(group for ranks, group in made if dist.get_rank() in ranks)


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, square: Square) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.square = square
        flat = a.flatten(0, -2)
        c = flat.new_zeros((flat.shape[0], b.shape[1]))
        panels = square.panels(flat, square.along_row), square.panels(b, square.along_column)
        for left, right in zip(*panels, strict=True):
            c += left @ right
        return c.view(*a.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        square: Square = ctx.square
        flat, rows = a.flatten(0, -2), dc.flatten(0, -2)
        lower = square.panels(b, square.along_column)
        da = square.reduce((rows @ panel.t() for panel in lower), square.along_row)
        left = square.panels(flat, square.along_row)
        db = square.reduce((panel.t() @ rows for panel in left), square.along_column)
        if square.d > 1:
            traffic.all_reduce(db, group=square.along_depth, feature=FEATURE)
        return da.view_as(a), db, None


class _SumAlongRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, square: Square) -> Tensor:
        ctx.square = square
        x = x.clone()
        traffic.all_reduce(x, group=square.along_row, feature=FEATURE)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dy = dy.clone()
        traffic.all_reduce(dy, group=ctx.square.along_row, feature=FEATURE)
        return dy, None


def linear(x: Tensor, weight: Tensor, square: Square) -> Tensor:
    """x W for blocks `[.., b/(q d), K/q]` and `[K/q, N/q]`."""
    return _Summa.apply(x, weight, square)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, square: Square) -> Tensor:
    """LayerNorm over features that are cut along rows."""
    features = x.shape[-1] * square.q
    mean = _SumAlongRow.apply(x.sum(dim=-1, keepdim=True), square) / features
    centred = x - mean
    variance = _SumAlongRow.apply(centred.square().sum(dim=-1, keepdim=True), square) / features
    return centred * torch.rsqrt(variance + 1e-5) * weight + bias
