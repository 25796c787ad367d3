"""What the output passes keep between their two halves; needs no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Saving:
    """What lives between S and T. Raises ValueError for another mode or a chunk without rows."""

    mode: Literal["softmax", "logits", "none"] = "softmax"
    """softmax: the shard's exponentials in fp32, [n, V_r]. logits: logits in the model's type, [n, V_r].
    none: nothing of this size; T computes logits once more, one chunk of the vocabulary after the other."""
    chunk_rows: int = 8192
    """Vocabulary rows at a time in mode none; mode logits bounds its fp32 buffers by as many elements."""

    def __post_init__(self) -> None:
        if self.mode not in ("softmax", "logits", "none"):
            raise ValueError(f"cannot save {self.mode!r}: choose softmax, logits or none")
        if self.chunk_rows < 1:
            raise ValueError(f"a chunk of {self.chunk_rows} vocabulary rows is empty")

    def rows_at_a_time(self, rows: int) -> int:
        """Vocabulary rows of a chunk in mode none, out of a shard's `rows`: always less than all of them."""
        return max(1, min(self.chunk_rows, -(-rows // 2)))

    def tokens_at_a_time(self, n: int, rows: int) -> int:
        """Tokens of a block in mode logits: [tokens, rows] has no more elements than [n, chunk_rows]."""
        return max(1, min(n, n * self.chunk_rows // rows))
