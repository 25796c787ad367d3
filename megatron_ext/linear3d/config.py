"""Flags of 3-D linear layers."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class Linear3dConfig:
    """3-D linear layers: the tensor-parallel group as a grid of three axes."""

    linear_3d: list[str] | None = field(
        default=None, metadata={"argparse_meta": {"type": str, "nargs": "+", "metavar": "X Y Z | auto"}}
    )
    """Lengths of the axes i, j, l, whose product is the tensor-parallel size: i cuts the batch and the
    storage of weights, j the sequence and out-features, l features. 1 T 1 is tensor and sequence parallelism
    as stock has it. auto takes the grid that `megatron-ext plan linear3d` ranks first."""

    linear_3d_order: Literal["ijl", "ilj", "jil", "jli", "lij", "lji"] = "ijl"
    """Which axis has neighbouring ranks: the last one named, then the one before it."""

    linear_3d_save: Literal["gathered", "shard_weight", "shard_all"] = "shard_weight"
    """What a linear layer keeps for its backward pass: gathered input and gathered weight, gathered input and
    the weight's shard, or both as shards (the least memory, and gathers them again)."""

    linear_3d_keep_layers: int = 0
    """The last N layers of a stage keep their gathered weights from forward to backward."""

    linear_3d_overlap: Literal["all", "none", "grads", "prefetch", "defer"] = "all"
    """What runs beside compute: sums of input gradients (grads), gathers of weights one layer ahead
    (prefetch), sums of weight gradients one layer behind (defer). None of it changes a bit of any result."""

    linear_3d_sum: Literal["auto", "ordered", "native"] = "auto"
    """How sums are scattered: by an all-to-all and a sum in one fixed order, in fp32 for 16-bit values
    (ordered), or by the backend's reduce-scatter (native). auto: native on NCCL in fp32, else ordered."""

    linear_3d_vocab: Literal["plane", "grid"] = "plane"
    """Where the vocabulary is cut: over all axes (plane: logits need no communication), or over i and j with
    features over l (grid, as in the paper)."""

    linear_3d_bandwidths: str | None = None
    """File of `megatron-ext probe`, which --linear-3d auto plans with."""
