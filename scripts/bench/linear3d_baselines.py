"""2-D and 2.5-D tensor parallelism, written for the benchmark alone: SUMMA as in Optimus, and Tesseract.

On q x q ranks every matrix is cut into q x q blocks. A product is a sum over k of outer products of panels:
in step k the k-th block of a row (column) is broadcast along it, or partial products are reduced to it.

    C = A B      A along rows, B along columns
    dA = dC B^T  B along columns, partial products reduced along rows
    dB = A^T dC  A along rows, partial products reduced along columns

With depth d (Tesseract) the batch is cut over d layers of such squares, which hold copies of the weights, so
that gradients of weights are summed over the depth. Sources: Xu et al., arXiv 2104.05343; Wang et al., arXiv
2105.14500; panels travel as whole broadcasts.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import traffic

FEATURE = "summa"


class Square:
    """One rank's place on q x q x d ranks: rank = (depth * q + row) * q + column."""

    def __init__(self, q: int, d: int):
        self.q, self.d = q, d
        rank = dist.get_rank()
        self.column, self.row, self.depth = rank % q, rank // q % q, rank // (q * q)
        starts = [layer * q * q for layer in range(d)]
        rows = [[start + r * q + c for c in range(q)] for start in starts for r in range(q)]
        columns = [[start + r * q + c for r in range(q)] for start in starts for c in range(q)]
        depths = [[place + start for start in starts] for place in range(q * q)]
        self.along_row = _own(rows, "row")
        self.along_column = _own(columns, "column")
        self.along_depth = _own(depths, "depth")

    def broadcast(self, x: Tensor, root: int, group: Any) -> Tensor:
        """The root's block, on all ranks of a row or column; blocks have one shape."""
        if self.q == 1:
            return x
        buffer = x.contiguous() if group.rank() == root else torch.empty_like(x)
        traffic.broadcast(buffer, group_src=root, group=group, feature=FEATURE)
        return buffer

    def reduce(self, x: Tensor, root: int, group: Any) -> Tensor:
        """The sum, on the root."""
        if self.q > 1:
            traffic.reduce(x, group_dst=root, group=group, feature=FEATURE)
        return x


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
        for k in range(square.q):
            panel = square.broadcast(flat, k, square.along_row)
            c += panel @ square.broadcast(b, k, square.along_column)
        return c.view(*a.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        square: Square = ctx.square
        flat, rows = a.flatten(0, -2), dc.flatten(0, -2)
        for k in range(square.q):
            part = rows @ square.broadcast(b, k, square.along_column).t()
            part = square.reduce(part, k, square.along_row)
            if k == square.column:
                da = part
        for k in range(square.q):
            part = square.broadcast(flat, k, square.along_row).t() @ rows
            part = square.reduce(part, k, square.along_column)
            if k == square.row:
                db = part
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
