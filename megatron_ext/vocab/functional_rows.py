"""Steps on one block of logits, [tokens, vocabulary rows], in place: what all saving modes are made of."""

import torch
from torch import Tensor

from megatron_ext.vocab.functional_state import NOT_OWNED, GlobalStats, LossTerms

FP16_SCALE = 4096.0
"""What a token's exponentials sum up to about when they become fp16. Digits are lost below 6e-5, and 1 / V is
that small; a product with the weight stays finite for weights up to 15."""


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Of losses, statistics and sums over shards: fp32, and fp64 in fp64 models."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def owned(labels: Tensor, lo: int, hi: int) -> tuple[Tensor, Tensor]:
    """(which entries lie in [lo, hi), their index from lo; 0 where not), shaped as `labels`."""
    own = (labels >= lo) & (labels < hi)
    return own, torch.where(own, labels - lo, 0)


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """Y = X W^T [n, rows], in the model's type as in stock."""
    return torch.matmul(x, weight.t())


def finite(maximum: Tensor) -> Tensor:
    """What to subtract from logits: the maximum, or 0 where all are -inf: -inf - -inf is NaN."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def divisor(total: Tensor) -> Tensor:
    """A sum of exponentials as divisor: 1 for the sum 0 of a row of zeros, which then stay zeros."""
    return torch.where(total == 0.0, 1.0, total)


def exponentiate(logits: Tensor, maximum: Tensor, labels: Tensor, lo: int, stats: Tensor) -> None:
    """Turn fp32 `logits` [n, rows] into exp(logits - maximum), and fill in `stats` [3 or 4, n].

    The rows start at `lo`. No exponent is above 0, so nothing overflows.
    """
    rows = logits.shape[1]
    shift = finite(maximum)
    logits.sub_(shift.unsqueeze(1))
    own, index = owned(labels, lo, lo + rows)
    target = logits.gather(1, index.unsqueeze(1)).squeeze(1)
    stats[0] = maximum
    stats[2] = torch.where(own, target, NOT_OWNED)
    if stats.shape[0] == 4:
        stats[3] = logits.sum(dim=-1) + rows * shift
    logits.exp_()
    stats[1] = logits.sum(dim=-1)


def softmax_times_weight(exponentials: Tensor, total: Tensor, weight: Tensor) -> Tensor:
    """E W / z [n, h] in fp32, out of a GEMM in the weight's type; E [n, rows] is the same afterwards."""
    if weight.dtype != torch.float16:
        product = torch.matmul(exponentials.to(weight.dtype), weight).to(exponentials.dtype)
        return product.div_(divisor(total).unsqueeze(1))
    # Powers of two, close to FP16_SCALE / z, change no digit and can be taken back.
    _, exponent = torch.frexp(total)
    scale = torch.ldexp(torch.full_like(total, FP16_SCALE), -exponent)
    exponentials.mul_(scale.unsqueeze(1))
    half = exponentials.to(weight.dtype)
    exponentials.div_(scale.unsqueeze(1))
    product = torch.matmul(half, weight).to(exponentials.dtype)
    return product.div_((scale * divisor(total)).unsqueeze(1))


def probabilities(logits: Tensor, stats: GlobalStats, tokens: slice) -> Tensor:
    """exp(Y - M) / Z of the block `logits` for `tokens` of the microbatch; in place if it is fp32."""
    block = logits.to(stats.total.dtype)
    block.sub_(finite(stats.maximum[tokens]).unsqueeze(1)).exp_()
    return block.div_(stats.total[tokens].unsqueeze(1))


def logit_gradient(
    softmax: Tensor, labels: Tensor, lo: int, g: Tensor, vocab_size: int, terms: LossTerms
) -> None:
    """Turn a block of probabilities, with the z-loss's factor, into the gradient of its logits, in place.

        dY = ((1 + 2 c L) P - (1 - s) onehot(label) - s / V) g            in stock's order of operations

    Args:
        softmax: [n, rows], fp32; the rows start at `lo`.
        g: [n], gradient of the per-token losses.
    """
    smoothing = terms.smoothing(vocab_size)
    own, index = owned(labels, lo, lo + softmax.shape[1])
    tokens = torch.arange(softmax.shape[0], device=softmax.device)
    softmax[tokens, index] -= (1.0 - smoothing) * own.to(softmax.dtype)
    if smoothing:
        softmax.sub_(smoothing * (1.0 / vocab_size))
    softmax.mul_(g.unsqueeze(1))
