"""Saving mode none: vocabulary rows in chunks, so that nothing of size tokens x rows of the shard ever exists.

S treats every chunk like a shard: its statistics and its softmax-weighted sum of weight rows are merged into the
running ones by the formulas that merge shards. T computes logits again; M and Z are known by then.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_ext.vocab import functional_rows as block
from megatron_ext.vocab.functional_state import NOT_OWNED, GlobalStats, LossTerms, OutputState, Saving

Accumulate = Callable[[Tensor, Tensor, slice], None]
ALL = slice(None)


def chunks(saving: Saving, rows: int) -> Iterator[slice]:
    """Row ranges of the chunks of a shard with `rows` rows."""
    size = saving.rows_at_a_time(rows)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def local_pass(
    x: Tensor, weight: Tensor, labels: Tensor, lo: int, saving: Saving, with_input_gradient: bool, terms: LossTerms
) -> tuple[Tensor, Tensor | None]:
    """S: (statistics [3 or 4, n], A_r [n, h] or None)."""
    stats: Tensor | None = None
    softmax_x: Tensor | None = None
    for rows in chunks(saving, weight.shape[0]):
        logits = block.logits_of(x, weight[rows]).to(block.statistics_dtype(x))
        part = logits.new_empty(terms.num_statistics, x.shape[0])
        block.exponentiate(logits, logits.amax(dim=-1), labels, lo + rows.start, part)
        part_x = None
        if with_input_gradient:
            block.normalise(logits, part[1])
            part_x = block.softmax_times_weight(logits, weight[rows])
        del logits
        if stats is None:
            stats, softmax_x = part, part_x
        else:
            old, new = _merge(stats, part)
            if softmax_x is not None and part_x is not None:
                softmax_x.mul_(old.unsqueeze(1)).addcmul_(part_x, new.unsqueeze(1))
    assert stats is not None, "a shard has at least one row"
    return stats, softmax_x


def _merge(stats: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Merge statistics of a chunk into the running ones, in place; returns the weights [n] of both."""
    maximum = torch.maximum(stats[0], part[0])
    shift = block.finite(maximum)
    old_below, new_below = stats[0] - shift, part[0] - shift
    old, new = stats[1] * torch.exp(old_below), part[1] * torch.exp(new_below)
    total = old + new
    target = torch.where(stats[2] == NOT_OWNED, NOT_OWNED, stats[2] + old_below)
    stats[2] = torch.where(part[2] == NOT_OWNED, target, part[2] + new_below)
    stats[0] = maximum
    stats[1] = total
    if stats.shape[0] == 4:
        stats[3] += part[3]
    return old / block.divisor(total), new / block.divisor(total)


def local_maximum(x: Tensor, weight: Tensor, saving: Saving) -> Tensor:
    """naive S: m_r [n]. The maximum of rounded logits is exact in any type."""
    maxima = [block.logits_of(x, weight[rows]).amax(dim=-1) for rows in chunks(saving, weight.shape[0])]
    return torch.stack(maxima).amax(dim=0).to(block.statistics_dtype(x))


def sums(state: OutputState, weight: Tensor, maximum: Tensor, terms: LossTerms) -> Tensor:
    """naive U: statistics [3 or 4, n] relative to the global `maximum` [n]."""
    stats: Tensor | None = None
    for rows in chunks(state.saving, weight.shape[0]):
        logits = block.logits_of(state.x, weight[rows]).to(maximum.dtype)
        part = logits.new_empty(terms.num_statistics, state.x.shape[0])
        block.exponentiate(logits, maximum, state.labels, state.lo + rows.start, part)
        del logits
        if stats is None:
            stats = part
        else:
            stats[2] = torch.where(part[2] == NOT_OWNED, stats[2], part[2])
            stats[1] += part[1]
            if stats.shape[0] == 4:
                stats[3] += part[3]
    assert stats is not None, "a shard has at least one row"
    return stats


def gradients(
    state: OutputState,
    weight: Tensor,
    stats: GlobalStats,
    g: Tensor,
    terms: LossTerms,
    accumulate: Accumulate | None,
    with_input_gradient: bool,
) -> Tensor | None:
    """T: hands dY [n, chunk] of every chunk to `accumulate`; returns this shard's part of dX, or None."""
    total_x: Tensor | None = None
    factor = stats.z_factor(terms)
    for rows in chunks(state.saving, weight.shape[0]):
        logits = block.logits_of(state.x, weight[rows])
        softmax = block.probabilities(logits, stats, ALL)
        if factor is not None:
            softmax.mul_(factor.unsqueeze(1))
        block.logit_gradient(softmax, state.labels, state.lo + rows.start, g, stats.vocab_size, terms)
        # The logits' own memory takes the gradient in the model's type; fp32 logits are that memory already.
        gradient = logits if logits.dtype == softmax.dtype else logits.copy_(softmax)
        del logits, softmax
        if accumulate is not None:
            accumulate(gradient, state.x, rows)
        if with_input_gradient:
            part_x = torch.matmul(gradient, weight[rows]).to(g.dtype)
            total_x = part_x if total_x is None else total_x.add_(part_x)
        del gradient
    return total_x
