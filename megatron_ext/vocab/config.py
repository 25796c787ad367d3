"""Flags of vocabulary parallelism."""

from dataclasses import dataclass
from typing import Literal

MODES = ("off", "naive", "vocab-1", "vocab-2", "interlaced")


@dataclass(kw_only=True)
class VocabConfig:
    """Vocabulary parallelism: embedding and output layer shared out to all pipeline stages."""

    vocab_parallel: Literal["off", "naive", "vocab-1", "vocab-2", "interlaced"] = "off"
    """How the vocabulary layers are split over pipeline ranks and placed in 1F1B: vocab-2 (one barrier
    between the last stage's forward and backward, one more microbatch in flight; the usual choice), vocab-1
    (two), naive (three, for comparison), interlaced (synchronous, as tensor parallelism does it; for
    comparison)."""

    vocab_save: Literal["softmax", "logits", "none"] = "softmax"
    """What the output passes keep between their two halves: the softmax in fp32, the logits in the model's
    type, or nothing of size tokens x vocabulary (logits are computed twice, a third more work in these
    passes)."""

    vocab_chunk_size: int = 8192
    """Vocabulary rows at a time under --vocab-save none."""

    vocab_sum_dtype: Literal["fp32", "model"] = "fp32"
    """Type in which the output layer's input gradient is summed over ranks; model halves the bytes in 16
    bits."""

    vocab_overlap: Literal["on", "off"] = "on"
    """Whether communication of the vocabulary passes runs beside compute, on streams of its own."""

    vocab_costs: str | None = None
    """File with measured pass times (costs.json of `megatron-ext trace --measured`): order the passes for
    these instead of backward = twice forward, under the same memory cap."""

    vocab_label_smoothing: float = 0.0
    """Label smoothing of the cross entropy, as stock's vocab_parallel_cross_entropy defines it."""

    vocab_z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the logits, added to each token's loss."""
