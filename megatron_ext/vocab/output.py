"""The output layer's passes and barriers of one rank, for each of the algorithms.

    naive               S: logits, local max          C1: global max
                        U: exponentials, sums         C2: statistics
                        T: dW and this shard's dX     C3: sum of dX
    vocab-1, interlaced S: logits, local softmax      C1: statistics
                        T: dW and this shard's dX     C2: sum of dX
    vocab-2             S: also softmax part of dX    C1: statistics, then sum of dX / g
                        T: dW

Sources: Yeung et al., arXiv 2411.05288, Algorithms 1 and 2; the formulas are in vocab/functional.py. Passes
run where the schedule puts them; barriers are functions for the lane, and what they return comes back through
`after_1` to `after_3`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.vocab import functional as ops
from megatron_ext.vocab.comm import VocabComm
from megatron_ext.vocab.shards import EmbeddingShard, OutputShard

Operation = tuple[Callable[[], Any], Sequence[Tensor]]


@dataclass(frozen=True)
class OutputOptions:
    """How the passes work."""

    mode: str
    """naive, vocab-1, vocab-2 or interlaced."""
    saving: ops.Saving
    terms: ops.LossTerms
    sum_dtype: torch.dtype | None
    """Type in which dX is summed over ranks; None: that of the activations."""
    fused: bool
    """Weight gradients by Apex's fused kernel, as --gradient-accumulation-fusion asks for."""


class OutputPasses:
    """Passes by microbatch; state of a microbatch lives from its S to its last use."""

    def __init__(self, shard: OutputShard, comm: VocabComm, options: OutputOptions, last: int):
        self.shard = shard
        self._comm = comm
        self.options = options
        self._last = last  # the pipeline rank with the last stage
        self._forward_only = False
        self._states: dict[int, ops.OutputState] = {}
        self._stats: dict[int, ops.GlobalStats] = {}
        self._maxima: dict[int, Tensor] = {}
        self._parts: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}  # g, [n]
        self._sums: dict[int, Tensor] = {}  # dX on the last stage

    # --- passes --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def first(self, i: int, x: Tensor, labels: Tensor, forward_only: bool) -> None:
        """S of microbatch `i`: `x` `[n, h]`, `labels` `[n]`."""
        options, lo, hi = self.options, self.shard.lo, self.shard.hi
        self._forward_only = forward_only
        if options.mode == "naive":
            make = lambda w: ops.output_max(x, w, labels, lo, hi, saving=options.saving, terms=options.terms)  # noqa: E731
        else:
            in_s = options.mode == "vocab-2" and not forward_only
            make = lambda w: ops.output_pass(  # noqa: E731
                x, w, labels, lo, hi, saving=options.saving, with_input_gradient=in_s, terms=options.terms
            )
        self._states[i] = self.shard(None, run=make)
        if forward_only and options.mode != "naive":
            self._states[i].saved = None

    @torch.no_grad()
    def second(self, i: int) -> None:
        """U of microbatch `i` (naive only)."""
        maximum = self._maxima.pop(i)
        self.shard(None, run=lambda w: ops.output_sums(self._states[i], w, maximum))

    @torch.no_grad()
    def third(self, i: int) -> None:
        """T of microbatch `i`: weight gradient, and but for vocab-2 this shard's part of dX."""
        state, stats, gradient = self._states.pop(i), self._stats.pop(i), self._gradients.pop(i)
        with_input_gradient = self.options.mode != "vocab-2"
        weight = self.shard.used_weight
        part = ops.output_gradients(
            state,
            weight,
            stats,
            gradient,
            self.options.terms,
            self._accumulate(weight),
            with_input_gradient=with_input_gradient,
        )
        if with_input_gradient:
            self._parts[i] = part

    def losses(self, i: int) -> Tensor:
        """Per-token losses `[n]`, fp32, of microbatch `i`."""
        stats = self._stats.pop(i) if self._forward_only else self._stats[i]
        return stats.loss

    def set_gradient(self, i: int, gradient: Tensor) -> None:
        """g `[n]`, fp32: the gradient of the total loss with respect to the per-token losses."""
        self._gradients[i] = gradient

    @torch.no_grad()
    def scale_sum(self, i: int, gradient: Tensor) -> None:
        """Last stage, once the loss is known: vocab-2's sum still lacks the factor g `[n]`."""
        if self.options.mode == "vocab-2":
            rows = self._comm.own_slice(gradient) if self.shard.config.sequence_parallel else gradient
            self._sums[i] = self._sums[i].to(gradient.dtype).mul_(rows.unsqueeze(-1))

    def input_gradient(self, i: int) -> Tensor:
        """dX on the last stage: `[n, h]`, or with sequence parallelism this tensor-parallel rank's rows."""
        return self._sums.pop(i)

    # --- barriers ------------------------------------------------------------------------------------------

    def barrier_1(self, i: int) -> Operation:
        """C1 of microbatch `i`."""
        state = self._states[i]
        if self._forward_only and self.options.mode != "naive":
            del self._states[i]
        reads = [state.stats]
        if self.options.mode == "naive":
            return lambda: self._comm.gather(state.stats[0]).amax(dim=0), reads
        if self.options.mode == "vocab-2" and not self._forward_only:
            weight = self.shard.used_weight
            return lambda: self._statistics_and_sum(state, weight), [*reads, state.softmax_x, state.labels]
        if self._forward_only and self._comm.groups.pipe.rank() != self._last:
            return lambda: self._only_send(state), reads
        return lambda: self._merge(state), reads

    def barrier_2(self, i: int) -> Operation:
        """C2 of microbatch `i`."""
        if self.options.mode == "naive":
            state = self._states.pop(i) if self._forward_only else self._states[i]
            if self._forward_only and self._comm.groups.pipe.rank() != self._last:
                return lambda: self._only_send(state), [state.stats]
            return lambda: self._merge(state), [state.stats]
        return self._sum_of_parts(i)

    def barrier_3(self, i: int) -> Operation:
        """C3 of microbatch `i` (naive only)."""
        return self._sum_of_parts(i)

    def after_1(self, i: int, result: Any) -> None:
        """Keep what C1 gave."""
        if self.options.mode == "naive":
            self._maxima[i] = result
        elif isinstance(result, tuple):
            self._stats[i], total = result
            self._keep_sum(i, total)
        else:
            self._stats[i] = result

    def after_2(self, i: int, result: Any) -> None:
        """Keep what C2 gave."""
        if self.options.mode == "naive":
            self._stats[i] = result
        else:
            self._keep_sum(i, result)

    def after_3(self, i: int, result: Any) -> None:
        """Keep what C3 gave."""
        self._keep_sum(i, result)

    def _keep_sum(self, i: int, total: Tensor | None) -> None:
        if total is not None:
            self._sums[i] = total

    def _merge(self, state: ops.OutputState) -> ops.GlobalStats:
        gathered = self._comm.gather(state.stats)
        return ops.merge_statistics(gathered, self.shard.padded_rows, self.options.terms)

    def _only_send(self, state: ops.OutputState) -> None:
        """Take part in the gathering; nobody needs losses on this stage."""
        self._comm.gather(state.stats)

    def _statistics_and_sum(
        self, state: ops.OutputState, weight: Parameter
    ) -> tuple[ops.GlobalStats, Tensor | None]:
        stats = self._merge(state)
        part = ops.input_gradient_part(state, weight, stats, self.options.terms)
        state.softmax_x = None
        return stats, self._collect(part, state.x.dtype)

    def _sum_of_parts(self, i: int) -> Operation:
        part = self._parts.pop(i)
        return lambda: self._collect(part, self.shard.used_weight.dtype), [part]

    def _collect(self, part: Tensor, dtype: torch.dtype) -> Tensor | None:
        part = part.to(self.options.sum_dtype or dtype)
        return self._comm.collect(part, root=self._last, whole=not self.shard.config.sequence_parallel)

    # --- weight gradients and the input layer --------------------------------------------------------------

    def _accumulate(self, weight: Parameter) -> Callable[..., None] | None:
        if not weight.requires_grad:
            return None
        main_grad, fused = main_gradient(weight), self.options.fused

        def add(gradient: Tensor, x: Tensor, rows: slice) -> None:
            ops.accumulate_weight_gradient(main_grad, gradient, x, rows, fused=fused)

        return add

    @torch.no_grad()
    def lookup(self, embedding: EmbeddingShard, tokens: Tensor) -> Tensor:
        """IF: embeddings `[n, h]` of the tokens `[n]` that this rank owns, zeros elsewhere."""
        return embedding(None, run=lambda w: ops.lookup(tokens, w, embedding.lo, embedding.hi))

    @torch.no_grad()
    def lookup_gradient(self, embedding: EmbeddingShard, gradient: Tensor, tokens: Tensor) -> None:
        """IB: add the gradients `[n, h]` of the tokens that this rank owns to its rows."""
        if embedding.weight.requires_grad:
            ops.lookup_gradient(gradient, tokens, main_gradient(embedding.weight), embedding.lo, embedding.hi)


def main_gradient(weight: Parameter) -> Tensor:
    """Where gradients of `weight` are added up: Megatron's buffer, or without one `weight.grad`."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        return main_grad
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad
