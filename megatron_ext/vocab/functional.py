"""The split output layer as functions: no communication, no autograd, nothing global.

A shard owns the vocabulary rows [lo, hi), V_r of them, with weight W_r [V_r, h]. X [n, h] is the output of
the last stage, y [n] the labels, g [n] the gradient of the total loss with respect to the per-token losses.
All but the GEMMs is fp32 (fp64 in fp64 models). Sums over r run over all shards.

    Y_r = X W_r^T     m_r = max Y_r     E_r = exp(Y_r - m_r)     z_r = sum E_r     q_r = Y_r[y] - m_r if owned
    M = max_r m_r     Z = sum_r z_r exp(m_r - M)     loss = ln Z - (Y[y] - M)        merge_statistics
    a_r = z_r exp(m_r - M) / Z                       P_r = E_r exp(m_r - M) / Z   softmax of all of V
    dY_r = (P_r - onehot_r(y)) g     dX = sum_r dY_r W_r     dW_r = dY_r^T X

    naive     S output_max    barrier: M     U output_sums    barrier: Z    T output_gradients    barrier: dX
    vocab-1   S output_pass   barrier: M, Z                   T output_gradients    barrier: dX  (Algorithm 1)
    vocab-2   S output_pass, also A_r = E_r W_r / z_r         barrier: M, Z, dX
              T output_gradients, dW only                                                        (Algorithm 2)

In vocab-2 dX = g sum_r (a_r A_r - W_r[y] if owned), which is known before g is: `input_gradient_part`. Label
smoothing and z-loss (`LossTerms`) change dY to ((1 + 2 c L) P - (1 - s) onehot - s / V) g; all of it is known
after the same barrier.

Memory of size [n, V_r], with i bytes per number in the model's type and s = 4 (fp64: 8) in statistics, C
vocabulary rows of a chunk and B tokens of a block (functional_memory.py has the whole formulas, tested):

    saving     kept S to T       peak in S and T                 GEMMs
    softmax    s n V_r           (s + i) n V_r, fp32 s n V_r     3
    logits     i n V_r           i n V_r + (s + i) B V_r         3      B V_r <= n C
    none       0                 (s + i) n C                     4      naive 5

With one shard vocab-1 gives stock's loss, dX and dW bit by bit, vocab-2 loss and dW (not saving none).

Source: Yeung et al., arXiv 2411.05288, Algorithms 1 and 2. Chunks are merged as in online softmax (Milakov
and Gimelshein, arXiv 1805.02867).
"""

import torch
from torch import Tensor

from megatron_ext.vocab import functional_chunks
from megatron_ext.vocab import functional_rows as block
from megatron_ext.vocab.functional_chunks import Accumulate
from megatron_ext.vocab.functional_input import lookup, lookup_gradient
from megatron_ext.vocab.functional_memory import kept_bytes, peak_bytes
from megatron_ext.vocab.functional_state import (
    NOT_OWNED,
    GlobalStats,
    LossTerms,
    OutputState,
    Saving,
    merge_statistics,
)
from megatron_ext.vocab.functional_weight import accumulate_weight_gradient

__all__ = [
    "NOT_OWNED",
    "GlobalStats",
    "LossTerms",
    "OutputState",
    "Saving",
    "accumulate_weight_gradient",
    "input_gradient_part",
    "kept_bytes",
    "lookup",
    "lookup_gradient",
    "merge_statistics",
    "output_gradients",
    "output_max",
    "output_pass",
    "output_sums",
    "peak_bytes",
]


@torch.no_grad()
def output_pass(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    lo: int,
    hi: int,
    *,
    saving: Saving,
    with_input_gradient: bool,
    terms: LossTerms,
) -> OutputState:
    """S: m_r, z_r, q_r and what T needs; with the input gradient (vocab-2) also A_r = E_r W_r / z_r.

    Args:
        x: [n, h], model dtype.
        weight: W_r [hi - lo, h], model dtype.
        labels: [n], int64, global row numbers; others than [0, V) belong to nobody.
    """
    assert weight.shape[0] == hi - lo, f"{weight.shape[0]} rows of weight for the range [{lo}, {hi})"
    if saving.mode == "none":
        stats = _new_stats(x, terms)
        softmax_x = functional_chunks.local_pass(x, weight, labels, lo, saving, stats, with_input_gradient)
        return OutputState(x, labels, lo, hi, saving, stats, None, softmax_x)
    logits = block.logits_of(x, weight)
    if saving.mode == "softmax":
        logits = logits.to(block.statistics_dtype(x))
    state = OutputState(x, labels, lo, hi, saving, _new_stats(x, terms), logits)
    if with_input_gradient:
        state.softmax_x = torch.empty_like(x, dtype=state.stats.dtype)
    _statistics(state, weight, logits.amax(dim=-1).to(state.stats.dtype))
    return state


@torch.no_grad()
def output_max(
    x: Tensor, weight: Tensor, labels: Tensor, lo: int, hi: int, *, saving: Saving, terms: LossTerms
) -> OutputState:
    """S of the naive grouping: logits, kept in the model's type but in mode none, and m_r in `stats[0]`."""
    assert weight.shape[0] == hi - lo, f"{weight.shape[0]} rows of weight for the range [{lo}, {hi})"
    stats = _new_stats(x, terms)
    if saving.mode == "none":
        stats[0] = functional_chunks.local_maximum(x, weight, saving)
        return OutputState(x, labels, lo, hi, saving, stats, None)
    logits = block.logits_of(x, weight)
    stats[0] = logits.amax(dim=-1)
    return OutputState(x, labels, lo, hi, saving, stats, logits)


@torch.no_grad()
def output_sums(state: OutputState, weight: Tensor, maximum: Tensor) -> None:
    """U of the naive grouping: statistics relative to the global `maximum` [n], in a new tensor.

    From here on the state is one of `output_pass` with m_r = M on every shard.
    """
    if state.saving.mode == "none":
        state.stats = functional_chunks.sums(state, weight, maximum)
        return
    state.stats = torch.empty_like(state.stats)
    if state.saving.mode == "softmax":
        assert state.saved is not None
        state.saved = state.saved.to(state.stats.dtype)
    _statistics(state, weight, maximum)


@torch.no_grad()
def input_gradient_part(state: OutputState, weight: Tensor, stats: GlobalStats, terms: LossTerms) -> Tensor:
    """vocab-2: D_r [n, h], fp32; g times its sum over shards is dX.

        D_r = a_r (1 + 2 c L) A_r - (1 - s) W_r[y] if owned - s / V sum of the rows of W_r

    Takes A_r out of the state and returns its memory.
    """
    part, state.softmax_x = state.softmax_x, None
    assert part is not None, "the pass ran without the input gradient, or it was taken before"
    share, factor = stats.share(state.stats), stats.z_factor(terms)
    part.mul_((share if factor is None else share * factor).unsqueeze(1))
    smoothing = terms.smoothing(stats.vocab_size)
    own, index = block.owned(state.labels, state.lo, state.hi)
    targets = weight.index_select(0, index).to(part.dtype)
    part.addcmul_(targets, own.unsqueeze(1).to(part.dtype), value=-(1.0 - smoothing))
    if smoothing:
        part.sub_(weight.sum(dim=0, dtype=part.dtype).mul_(smoothing / stats.vocab_size))
    return part


@torch.no_grad()
def output_gradients(
    state: OutputState,
    weight: Tensor,
    stats: GlobalStats,
    g: Tensor,
    terms: LossTerms,
    accumulate: Accumulate | None,
    *,
    with_input_gradient: bool,
) -> Tensor | None:
    """T: weight gradient, and but for vocab-2 this shard's part of dX [n, h] in fp32. Uses up `state.saved`.

    Args:
        g: [n], fp32.
        accumulate: Called with dY [n, rows] in the weight's type, x, and the slice of the shard's rows that
            dY is for; once, in mode none once per chunk. None for a frozen weight.
    """
    if state.saving.mode == "none":
        return functional_chunks.gradients(state, weight, stats, g, terms, accumulate, with_input_gradient)
    gradient = _logit_gradient(state, stats, g, terms).to(weight.dtype)
    if accumulate is not None:
        accumulate(gradient, state.x, slice(0, weight.shape[0]))
    return torch.matmul(gradient, weight).to(g.dtype) if with_input_gradient else None


def _new_stats(x: Tensor, terms: LossTerms) -> Tensor:
    return x.new_empty(terms.num_statistics, x.shape[0], dtype=block.statistics_dtype(x))


def _statistics(state: OutputState, weight: Tensor, maximum: Tensor) -> None:
    """Fill in statistics and A_r out of the saved logits. In mode softmax these become exponentials."""
    logits = state.saved
    assert logits is not None
    n, rows = logits.shape
    in_place = state.saving.mode == "softmax"
    size = n if in_place else state.saving.tokens_at_a_time(n, rows)
    for start in range(0, n, size):
        tokens = slice(start, start + size)
        part = logits if in_place else logits[tokens].to(maximum.dtype, copy=True)
        stats = state.stats[:, tokens]
        block.exponentiate(part, maximum[tokens], state.labels[tokens], state.lo, stats)
        if state.softmax_x is not None:
            state.softmax_x[tokens] = block.softmax_times_weight(part, stats[1], weight)
        del part


def _logit_gradient(state: OutputState, stats: GlobalStats, g: Tensor, terms: LossTerms) -> Tensor:
    """dY [n, V_r] in the memory of what was saved."""
    saved, state.saved = state.saved, None
    assert saved is not None, "gradients were computed before, or what they need was dropped"
    if state.saving.mode == "softmax":
        # E exp(m_r - M) / Z as one division: by infinity where the shard's share is 0.
        scale = torch.exp(state.stats[0] - stats.maximum)
        factor = stats.z_factor(terms)
        saved.div_((stats.total / (scale if factor is None else scale * factor)).unsqueeze(1))
        block.logit_gradient(saved, state.labels, state.lo, g, stats.vocab_size, terms)
        return saved
    size = state.saving.tokens_at_a_time(*saved.shape)
    factor = stats.z_factor(terms)
    for start in range(0, saved.shape[0], size):
        tokens = slice(start, start + size)
        softmax = block.probabilities(saved[tokens], stats, tokens)
        if factor is not None:
            softmax.mul_(factor[tokens].unsqueeze(1))
        block.logit_gradient(softmax, state.labels[tokens], state.lo, g[tokens], stats.vocab_size, terms)
        if saved.dtype != softmax.dtype:
            saved[tokens] = softmax
        del softmax
    return saved
