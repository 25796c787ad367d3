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
over a communicator of its own: then every rank sends all the time, which no order of broadcasts can beat.
"""

from collections.abc import Callable, Iterable
from functools import partial
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
        self.rows = [_own(rows, f"row-{k}") for k in range(q)]
        """Communicators along this rank's row, one for each panel."""
        self.columns = [_own(columns, f"column-{k}") for k in range(q)]
        self.along_depth = _own(depths, "depth")

    @property
    def along_row(self) -> Any:
        return self.rows[0]

    def panels(self, x: Tensor, groups: list[Any]) -> list[Callable[[], Tensor]]:
        """For every rank along a row or column: how to get its block. Blocks have one shape."""
        x = x.contiguous()
        buffers = [x if group.rank() == k else torch.empty_like(x) for k, group in enumerate(groups)]
        pairs = enumerate(zip(buffers, groups, strict=True))
        return [self._broadcast(buffer, k, group) for k, (buffer, group) in pairs]

    def _broadcast(self, buffer: Tensor, root: int, group: Any) -> Callable[[], Tensor]:
        send = partial(
            traffic.broadcast, buffer, group_src=root, group=group, feature=FEATURE, async_op=self.at_once
        )
        work = send() if self.at_once else None

        def wait() -> Tensor:
            if work is None:
                send()
            else:
                work.wait()
            return buffer

        return wait

    def reduce(self, parts: Iterable[Tensor], groups: list[Any]) -> Tensor:
        """The sum of the k-th parts, on the k-th rank along a row or column: this rank's."""
        parts = (part.contiguous() for part in parts)
        if not self.at_once:
            for k, (part, group) in enumerate(zip(parts, groups, strict=True)):
                traffic.reduce(part, group_dst=k, group=group, feature=FEATURE)
                if group.rank() == k:
                    own = part
            return own
        found, works, sent = [], [], []
        for k, (part, group) in enumerate(zip(parts, groups, strict=True)):
            if group.rank() == k:
                found = [torch.empty_like(part) for _ in groups]
            into = found if group.rank() == k else None
            works.append(traffic.gather(part, into, group_dst=k, group=group, feature=FEATURE, async_op=True))
            sent.append(part)
        for work in works:
            work.wait()
        return sum(found[1:], found[0])


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
        panels = square.panels(flat, square.rows), square.panels(b, square.columns)
        for left, right in zip(*panels, strict=True):
            c += left() @ right()
        return c.view(*a.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        square: Square = ctx.square
        flat, rows = a.flatten(0, -2), dc.flatten(0, -2)
        lower = square.panels(b, square.columns)
        da = square.reduce((rows @ panel().t() for panel in lower), square.rows)
        left = square.panels(flat, square.rows)
        db = square.reduce((panel().t() @ rows for panel in left), square.columns)
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
