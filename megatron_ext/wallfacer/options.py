"""What a user or a planner chooses about multi-ring attention. No torch."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

Backward = Literal["auto", "keys", "queries"]
Statistics = Literal["delta", "out"]
Keep = Literal["own", "team"]
Movement = Literal["relocate", "direct"]
WireType = Literal["fp32", "model"]
KernelName = Literal["auto", "cpu-flash", "torch-flash", "flash-attn", "reference"]


@dataclass(frozen=True)
class Options:
    """Choices that change bytes, memory or time, and results by rounding at most.

    Raises:
        ValueError: a value that is not among the choices.
    """

    backward: Backward = "auto"
    """What travels in backward rings: keys and values with their gradients, queries with theirs, or (auto)
    whichever sends less."""
    statistics: Statistics = "delta"
    """What the backward pass gathers about outputs: their dot product with their gradients, or themselves."""
    keep: Keep = "own"
    """What is kept for the backward pass: a rank's own queries, keys and values, or those of its team and its
    first bundle, which then need not be gathered again."""
    movement: Movement = "relocate"
    """How keys reach the rings: gathered by a bundle's owners and sent on (relocate, the paper's), or by each
    owner to all holders of its bundle (direct), which sends (K-1)/(2K-1) less."""
    head_chunks: int = 1
    """Parts of the key heads, each gathered while the one before is computed."""
    sum_type: WireType = "fp32"
    """Type in which a team's partial outputs are sent to be summed."""
    grad_type: WireType = "fp32"
    """Type in which partial gradients are sent to be summed."""
    kernel: KernelName = "auto"
    """Attention kernel; auto takes the fastest that can run."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, choices = getattr(self, field.name), get_args(field.type)
            if choices and value not in choices:
                raise ValueError(f"{field.name} {value!r}: choose one of {', '.join(choices)}")
        if not isinstance(self.head_chunks, int) or self.head_chunks < 1:
            raise ValueError(f"head_chunks {self.head_chunks!r}: use a whole number, at least 1")

    def check_heads(self, query_heads: int, key_heads: int) -> None:
        """Raise ValueError for numbers of heads (per tensor-parallel rank) that cannot be computed."""
        if query_heads % key_heads:
            raise ValueError(
                f"{query_heads} query heads on {key_heads} key heads: each key head must serve the same "
                "number of query heads"
            )
        if key_heads % self.head_chunks:
            fitting = [n for n in range(1, key_heads + 1) if key_heads % n == 0]
            raise ValueError(
                f"{key_heads} key heads (per tensor-parallel rank) cannot be split into {self.head_chunks} "
                f"chunks: choose one of {fitting}"
            )
