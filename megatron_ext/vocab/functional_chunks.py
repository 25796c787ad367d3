"""Saving mode none: vocabulary rows in chunks, so that nothing of size [n, V_r] ever exists.

S treats every chunk like a shard: its statistics and its softmax-weighted sum of weight rows are merged into
the running ones by the formulas that merge shards. T computes logits again; M and Z are known by then.
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
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    lo: int,
    saving: Saving,
    stats: Tensor,
    with_input_gradient: bool,
) -> Tensor | None:
    """S: fills in `stats` [3 or 4, n] and returns A_r [n, h] or None."""
    softmax_x: Tensor | None = None
    for rows in chunks(saving, weight.shape[0]):
        part = stats if rows.start == 0 else torch.empty_like(stats)
        part_x = _chunk_pass(x, weight[rows], labels, lo + rows.start, part, with_input_gradient)
        if rows.start == 0:
            softmax_x = part_x
            continue
        old, new = _merge(stats, part)
        if softmax_x is not None and part_x is not None:
            softmax_x.mul_(old.unsqueeze(1)).addcmul_(part_x, new.unsqueeze(1))
        del part_x  # else it would live through the next chunk
    return softmax_x


def _chunk_pass(
    x: Tensor, weight: Tensor, labels: Tensor, lo: int, stats: Tensor, with_input_gradient: bool
) -> Tensor | None:
    logits = block.logits_of(x, weight).to(stats.dtype)
    block.exponentiate(logits, logits.amax(dim=-1), labels, lo, stats)
    if not with_input_gradient:
        return None
    return block.softmax_times_weight(logits, stats[1], weight)


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
    stats[3:] += part[3:]
    return old / block.divisor(total), new / block.divisor(total)


def local_maximum(x: Tensor, weight: Tensor, saving: Saving) -> Tensor:
    """naive S: m_r [n]. The maximum of rounded logits is exact in any type."""
    maxima = [block.logits_of(x, weight[rows]).amax(dim=-1) for rows in chunks(saving, weight.shape[0])]
    return torch.stack(maxima).amax(dim=0).to(block.statistics_dtype(x))


def sums(state: OutputState, weight: Tensor, maximum: Tensor) -> Tensor:
    """naive U: statistics [3 or 4, n] relative to the global `maximum` [n]."""
    stats = torch.empty_like(state.stats)
    for rows in chunks(state.saving, weight.shape[0]):
        part = stats if rows.start == 0 else torch.empty_like(stats)
        logits = block.logits_of(state.x, weight[rows]).to(stats.dtype)
        block.exponentiate(logits, maximum, state.labels, state.lo + rows.start, part)
        del logits
        if rows.start > 0:
            stats[2] = torch.where(part[2] == NOT_OWNED, stats[2], part[2])
            stats[1] += part[1]
            stats[3:] += part[3:]
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
        gradient = _chunk_gradient(state, weight[rows], rows, stats, g, terms, factor)
        if accumulate is not None:
            accumulate(gradient, state.x, rows)
        if with_input_gradient:
            part_x = torch.matmul(gradient, weight[rows]).to(g.dtype)
            total_x = part_x if total_x is None else total_x.add_(part_x)
            del part_x  # these would live through the next chunk
        del gradient
    return total_x


def _chunk_gradient(
    state: OutputState,
    weight: Tensor,
    rows: slice,
    stats: GlobalStats,
    g: Tensor,
    terms: LossTerms,
    factor: Tensor | None,
) -> Tensor:
    logits = block.logits_of(state.x, weight)
    softmax = block.probabilities(logits, stats, ALL)
    if factor is not None:
        softmax.mul_(factor.unsqueeze(1))
    block.logit_gradient(softmax, state.labels, state.lo + rows.start, g, stats.vocab_size, terms)
    # The logits' own memory takes the gradient in the model's type; fp32 logits are that memory already.
    return logits if logits.dtype == softmax.dtype else logits.copy_(softmax)
