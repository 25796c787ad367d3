"""What the split output layer's passes take and leave, and how all shards' statistics become the loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.vocab.saving import Saving

NOT_OWNED = torch.inf
"""Stands for the target logit in the statistics of a shard that does not own the label. Target logits are
relative to a maximum, so an owner never sends it."""


@dataclass(frozen=True)
class LossTerms:
    """The per-token loss: cross entropy, smoothed, plus z-loss.

        loss = (1 - s) (L - y[label]) + s (L - mean(y)) + z_loss L^2     L = log sum exp(y), s = smoothing(V)

    Raises ValueError when label smoothing is not in [0, 1) or the z-loss is negative.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label smoothing is {self.label_smoothing}, but must be at least 0 and below 1")
        if self.z_loss < 0.0:
            raise ValueError(f"the z-loss coefficient is {self.z_loss}, but must not be negative")

    @property
    def num_statistics(self) -> int:
        """Rows of a shard's statistics: 3, or with label smoothing 4."""
        return 4 if self.label_smoothing else 3

    def smoothing(self, vocab_size: int) -> float:
        """s of the formula. As in stock, label_smoothing is spread over the V - 1 wrong classes."""
        return self.label_smoothing * vocab_size / (vocab_size - 1) if self.label_smoothing else 0.0


@dataclass
class OutputState:
    """One microbatch on one shard, from S to T."""

    x: Tensor
    """[n, h], model dtype: output of the last stage."""
    labels: Tensor
    """[n], int64, global row numbers."""
    lo: int
    hi: int
    """The shard owns rows [lo, hi) of the vocabulary."""
    saving: Saving
    stats: Tensor
    """[3 or 4, n], fp32 (fp64 in fp64 models): maximum m_r, sum of exponentials z_r and target logit q_r,
    both relative to m_r (q_r: NOT_OWNED on other shards), with label smoothing the sum of logits."""
    saved: Tensor | None
    """[n, V_r]: see `Saving`."""
    softmax_x: Tensor | None = None
    """A_r [n, h], fp32: the softmax part of dX, normalised within the shard (vocab-2)."""

    def nbytes(self) -> int:
        """Bytes of all tensors that the state keeps alive, x included."""
        kept = (self.x, self.labels, self.stats, self.saved, self.softmax_x)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)


@dataclass(frozen=True)
class GlobalStats:
    """Statistics of the whole vocabulary, equal on all ranks. Tensors are [n], fp32."""

    loss: Tensor
    """Per-token loss, with all of its terms."""
    maximum: Tensor
    """M."""
    total: Tensor
    """Z, the sum of exponentials relative to M."""
    log_sum_exp: Tensor
    """L = ln Z + M."""
    vocab_size: int
    """V, padding included, as stock includes it."""

    def share(self, stats: Tensor) -> Tensor:
        """a_r [n] = z_r exp(m_r - M) / Z, the probability of a shard's rows together, from its statistics."""
        return stats[1] * torch.exp(stats[0] - self.maximum) / self.total

    def z_factor(self, terms: LossTerms) -> Tensor | None:
        """1 + 2 c L [n], by which the z-loss multiplies the softmax part of the gradient; None without it."""
        return 1.0 + 2.0 * terms.z_loss * self.log_sum_exp if terms.z_loss else None


@torch.no_grad()
def merge_statistics(gathered: Tensor, vocab_size: int, terms: LossTerms) -> GlobalStats:
    """The loss, out of the statistics `gathered` [P, 3 or 4, n] of all P shards.

        M = max m_r    d_r = m_r - M <= 0    Z = sum z_r exp(d_r)    T = sum over owners (q_r + d_r)
        cross entropy = ln Z - T             L = ln Z + M

    A label that no shard owns (such as -100) has T = 0, as in stock: its loss is finite, and masked by the
    user's loss function. All ranks compute the same from the same input, so they agree bit by bit.
    """
    maximum = gathered[:, 0].amax(dim=0)
    below = gathered[:, 0] - maximum
    total = (gathered[:, 1] * torch.exp(below)).sum(dim=0)
    target = gathered[:, 2]
    # Masked after d_r is added: a shard that does not own the label must not contribute d_r.
    target = torch.where(target == NOT_OWNED, 0.0, target + below).sum(dim=0)
    log_total = torch.log(total)
    log_sum_exp = log_total + maximum
    loss = log_total - target
    smoothing = terms.smoothing(vocab_size)
    if smoothing:
        mean_log_probability = gathered[:, 3].sum(dim=0) / vocab_size - maximum - log_total
        loss = (1.0 - smoothing) * loss - smoothing * mean_log_probability
    if terms.z_loss:
        loss = loss + terms.z_loss * log_sum_exp.square()
    return GlobalStats(loss, maximum, total, log_sum_exp, vocab_size)
