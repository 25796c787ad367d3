"""Multi-ring attention as a function that autograd knows.

    rings = Rings(geometry, groups, Options(), rank)
    out = rings.attend(q, k, v, layout=whole(tokens), mask=CAUSAL, scale=d**-0.5)

Recomputation of activations need not repeat attention: `run` computes a `Result` without a graph, and
`attach` makes it part of one later, from recomputed q, k and v, with neither attention nor communication.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.wallfacer import backward as backward_pass
from megatron_ext.wallfacer.chunk import Call, Stages, run
from megatron_ext.wallfacer.forward import Kept, forward
from megatron_ext.wallfacer.geometry import Geometry
from megatron_ext.wallfacer.groups import TrafficGroups
from megatron_ext.wallfacer.kernels import Kernel, select
from megatron_ext.wallfacer.merge import dot_rows, sink_gradient
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.plan import Plan, make_plan
from megatron_ext.wallfacer.rows import unsort_rows
from megatron_ext.wallfacer.scratch import Scratch
from megatron_ext.wallfacer.sequence import Layout, whole
from megatron_ext.wallfacer.tiles import Mask
from megatron_ext.wallfacer.volume import Cost, Shape

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """What the forward pass leaves for the backward pass, besides its inputs."""

    out: Tensor
    """Own output `[n, b, hq, d]`."""
    lse: Tensor
    """Log-sum-exp `[C n, b, hq]` of the scores of the team's rows, in fp32, over all keys and the sink."""
    kept: tuple[Kept, ...] = ()
    """By head chunk; empty where nothing more is kept."""


class Rings:
    """Multi-ring attention of one rank. All ranks make the same calls in the same order.

    Args:
        geometry: team size, bundle size and placement.
        groups: process groups of this rank.
        options: the same on all ranks.
        rank: among the context-parallel ranks.

    Tensors are `[n, b, h, d]`: own rows in the layout's order (for packed documents b is 1), batch, heads of
    this tensor-parallel rank, head dimension.
    """

    def __init__(self, geometry: Geometry, groups: TrafficGroups, options: Options, rank: int):
        self.geometry, self.groups, self.options, self.rank = geometry, groups, options, rank
        self.scratch = Scratch()
        self.ran: dict[str, set[str]] = {"kernels": set(), "backward": set()}
        """What was used since `take_ran`: kernels by name, and what went round in backward passes ("none" in
        rings of one rank)."""
        self._kernels: dict[tuple[torch.device, torch.dtype, int], Kernel] = {}
        self._judged: set[tuple[str, Mask]] = set()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layout: Layout,
        mask: Mask,
        scale: float,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Attention output of own rows, differentiable in q, k, v and sink.

        Args:
            layout: how the sequence lies on the ranks.
            mask: which keys a query sees, inside its document.
            scale: factor of the scores.
            sink: `[hq]`, score of a key without a value that every row sees (zeros: off-by-one softmax); its
                gradient is from own rows only, so it must be summed over the context-parallel ranks.

        Raises:
            ValueError: shapes do not fit each other, the layout or the options.
        """
        return _Attention.apply(q, k, v, sink, self, self._call(q, k, v, layout, mask, scale), None)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layout: Layout,
        mask: Mask,
        scale: float,
        sink: Tensor | None = None,
    ) -> Result:
        """`attend` without a graph."""
        with torch.no_grad():
            return self._forward(self._call(q, k, v, layout, mask, scale), q, k, v, sink, keep=False)

    def attach(
        self,
        result: Result,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layout: Layout,
        mask: Mask,
        scale: float,
        sink: Tensor | None = None,
    ) -> Tensor:
        """`attend` of inputs whose `result` is known; the other arguments must be those of `run`."""
        call = self._call(q, k, v, layout, mask, scale)
        if result.out.shape != q.shape:
            raise ValueError(f"a result of shape {tuple(result.out.shape)} is not one of {tuple(q.shape)}")
        return _Attention.apply(q, k, v, sink, self, call, result)

    def kernel_for(self, q: Tensor) -> Kernel:
        """The kernel that computes inputs like `q`; said in the log when first asked."""
        key = (q.device, q.dtype, q.shape[-1])
        if key not in self._kernels:
            self._kernels[key] = select(self.options.kernel, *key)
            LOG.info("attention kernel %s for %s on %s", self._kernels[key].name, q.dtype, q.device)
        return self._kernels[key]

    def take_ran(self) -> dict[str, list[str]]:
        """`ran`, sorted, which is emptied; nothing if nothing ran."""
        found = {name: sorted(used) for name, used in self.ran.items() if used}
        for used in self.ran.values():
            used.clear()
        return found

    # --- inside --------------------------------------------------------------------------------------------

    def _call(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, mask: Mask, scale: float) -> Call:
        plan = make_plan(self.geometry, layout, mask)
        _check_shapes(q, k, v, plan)
        self.options.check_heads(q.shape[2], k.shape[2])
        self._judge(plan)
        kernel = self.kernel_for(q)
        return Call(plan, self.groups, self.options, kernel, self.rank, scale, q.dtype, q.device)

    def _judge(self, plan: Plan) -> None:
        """Warn once about a split that keeps ranks waiting. Documents, which differ from call to call, are
        left out."""
        key = (plan.layout.split, plan.mask)
        if self.rank or key in self._judged:
            return
        self._judged.add(key)
        plain = make_plan(self.geometry, whole(plan.layout.length, plan.layout.split), plan.mask)
        warning = plain.warning()
        if warning:
            LOG.warning("%s", warning)

    def _chunks(self, *tensors: Tensor) -> Sequence[tuple[Tensor, ...]]:
        """Views of the heads of each chunk; heads are in dimension 2."""
        return list(zip(*(x.chunk(self.options.head_chunks, dim=2) for x in tensors), strict=True))

    def _run(self, call: Call, q: Tensor, k: Tensor, stages: list[Stages]) -> None:
        self.scratch.expect((q.shape, k.shape, call.dtype, call.device))
        run(stages)

    def _forward(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *, keep: bool
    ) -> Result:
        self.ran["kernels"].add(call.kernel.name)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        rows = self.geometry.team_size * q.shape[0]
        lse = torch.empty((rows, *q.shape[1:3]), dtype=call.wide, device=q.device)
        chunks = self._chunks(q, k, v, out, lse)
        sinks = [None] * len(chunks) if sink is None else sink.chunk(len(chunks))
        kept = tuple(Kept() if keep else None for _ in chunks)
        stages = [
            forward(call, self.scratch, *given[:3], own_sink, *given[3:], own_kept)
            for given, own_sink, own_kept in zip(chunks, sinks, kept, strict=True)
        ]
        self._run(call, q, k, stages)
        return Result(out, lse, kept if keep else ())

    def _backward(
        self,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        result: Result,
        grad: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        cost = Cost(call.plan, Shape.of(q, k), self.options)
        travels = cost.travels()
        self.ran["backward"].add(travels if self.geometry.ring_length > 1 else "none")
        dots = dot_rows(grad, result.out) if cost.sends_dots() or sink is not None else None
        statistics = dots if cost.sends_dots() else result.out
        chunks = self._chunks(q, k, v, grad, statistics, result.lse, *grads)
        kept = result.kept or [Kept()] * len(chunks)
        stages = [
            backward_pass.backward(
                call, self.scratch, travels, backward_pass.Inputs(*given[:6], own_kept), given[6:]
            )
            for given, own_kept in zip(chunks, kept, strict=True)
        ]
        self._run(call, q, k, stages)
        sink_grad = None if sink is None else sink_gradient(sink, _own_rows(call, result.lse), dots)
        return *grads, sink_grad


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{shapes}: q must be [n, b, hq, d], and k and v [n, b, hk, d] with the same n, b and d"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: use one type")
    if q.shape[0] != plan.rows:
        size = plan.geometry.size
        raise ValueError(
            f"{shapes}: the layout of {plan.layout.length} tokens on {size} context-parallel ranks has "
            f"{plan.rows} rows on each: pass each rank its own part, or a layout of {q.shape[0] * size} "
            "tokens"
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        rings: Rings,
        call: Call,
        result: Result | None,
    ) -> Tensor:
        if result is None:
            keep = rings.options.keep == "team" and any(ctx.needs_input_grad)
            result = rings._forward(call, q, k, v, sink, keep=keep)
        out = result.out.detach()  # an own tensor: autograd must not touch that of the result
        kept = [tensor for part in result.kept for tensor in (part.query, part.bundle)]
        ctx.save_for_backward(q, k, v, sink, out, result.lse, *kept)
        ctx.rings, ctx.call = rings, call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse, *kept = ctx.saved_tensors
        parts = tuple(Kept(*pair) for pair in zip(kept[::2], kept[1::2], strict=True))
        sink = sink if ctx.needs_input_grad[3] else None
        grads = ctx.rings._backward(ctx.call, q, k, v, sink, Result(out, lse, parts), grad)
        return *grads, None, None, None


def _own_rows(call: Call, lse: Tensor) -> Tensor:
    """This rank's rows of the team's."""
    by_rank = unsort_rows(lse, call.team_rows, torch.empty_like(lse))
    team = call.geometry.team(call.geometry.team_of(call.rank))
    return by_rank.unflatten(0, (len(team), -1))[team.index(call.rank)]
