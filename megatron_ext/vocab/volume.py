"""Bytes that a rank sends in one step, as formulas; docs/vocabulary-parallelism.md states them in words.

n tokens a microbatch, m microbatches, p stages, t tensor-parallel ranks, h hidden size; e bytes per number of
the model's type. S = ceil(n / t) rows are one tensor-parallel rank's slice.

    spread    broadcast (p-1) S h e at the root, all-gather (t-1) S h e on every rank
    collect   of numbers of x bytes: reduce-scatter (t-1) S h x on every rank, reduce S h x on all but the
              root, all-gather (t-1) S h x at the root's stage where each of its ranks needs all rows
"""

from collections import Counter
from dataclasses import dataclass

from megatron_ext.pipeline.volume import transfer_counts
from megatron_ext.schedules.placement import Placement


@dataclass(frozen=True)
class Sizes:
    """What the bytes of one rank depend on."""

    mode: str
    p: int
    t: int
    stage: int
    m: int
    n: int
    hidden: int
    itemsize: int
    """Bytes per number of weights and activations."""
    sum_itemsize: int
    """Bytes per number of the summed dX."""
    sequence_parallel: bool
    scatters: bool
    """Embeddings leave stock's embedding layer split along the sequence."""
    statistics: int = 3
    """Rows of statistics per token: 3, with label smoothing 4."""
    forward_only: bool = False
    place: Placement | None = None
    """Where the stages of the pipeline live; None: as in 1F1B."""

    @property
    def placement(self) -> Placement:
        """Where the stages live."""
        return self.place or Placement(self.p)


def step_bytes(sizes: Sizes) -> dict[tuple[str, str], int]:
    """Bytes by (kind, group) that this rank sends in a step; groups of one rank and zeros are left out."""
    volume = _Volume(sizes)
    last, training = sizes.placement.last.rank, not sizes.forward_only
    volume.broadcast(root=0, amount=4 * sizes.m * sizes.n)  # tokens
    volume.broadcast(root=last, amount=4 * sizes.m * sizes.n)  # labels
    for _ in range(sizes.m):
        volume.collect(root=0, itemsize=sizes.itemsize, whole=not sizes.scatters)  # e
        volume.spread(root=last)  # C0
        if sizes.mode == "naive":
            volume.gather(rows=1)  # C1
        volume.gather(rows=sizes.statistics)  # C1, naive C2
        volume.transfers(training)
        if training:
            volume.collect(root=last, itemsize=sizes.sum_itemsize, whole=not sizes.sequence_parallel)
            volume.broadcast(root=last, amount=4 * sizes.n)  # G
            volume.spread(root=0)  # g
    return {key: amount for key, amount in volume.total.items() if amount}


class _Volume:
    def __init__(self, sizes: Sizes):
        self.s = sizes
        self.total: Counter[tuple[str, str]] = Counter()
        self.slice_ = -(-sizes.n // sizes.t) * sizes.hidden

    def broadcast(self, root: int, amount: int) -> None:
        if self.s.stage == root:
            self.total["broadcast", "vocab-pipe"] += (self.s.p - 1) * amount

    def spread(self, root: int) -> None:
        amount = self.slice_ * self.s.itemsize
        self.broadcast(root, amount)
        self.total["all_gather", "vocab-tensor"] += (self.s.t - 1) * amount

    def collect(self, root: int, itemsize: int, whole: bool) -> None:
        amount = self.slice_ * itemsize
        self.total["reduce_scatter", "vocab-tensor"] += (self.s.t - 1) * amount
        if self.s.stage != root:
            self.total["reduce", "vocab-pipe"] += amount
        elif whole:
            self.total["all_gather", "vocab-tensor"] += (self.s.t - 1) * amount

    def gather(self, rows: int) -> None:
        self.total["all_gather", "vocab-shards"] += (self.s.p * self.s.t - 1) * rows * self.s.n * 4

    def transfers(self, training: bool) -> None:
        rows = self.s.n // self.s.t if self.s.sequence_parallel else self.s.n
        amount = rows * self.s.hidden * self.s.itemsize
        for name, count in transfer_counts(self.s.placement, self.s.stage, training).items():
            self.total["send", name] += count * amount
