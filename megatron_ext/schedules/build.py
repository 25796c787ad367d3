"""Builds schedules: unrolls a building block, squeezes it, and places the input passes.

    schedule = build(4, 8, vocab="vocab-2")
    schedule.ranks[0]       # (IF0, IF1, F0, IF2, F1, ...), the passes of rank 0 in order
    schedule.collectives    # (e(0), e(1), ..., C0(0), C1(0), ...), the same order on all ranks

The block says in which order passes should run; squeezing runs every pass as early as its inputs and the cap
on activations that are held allow, and takes the pass that is first in the block where several are ready. One
method makes all schedules, for any number of ranks and microbatches; families.py lists the blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

from megatron_ext.schedules.action import COLLECTIVES, MODES, Action
from megatron_ext.schedules.blocks import Block
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.families import FAMILIES, family, make_block
from megatron_ext.schedules.inputs import place_inputs
from megatron_ext.schedules.placement import Placement
from megatron_ext.schedules.sequence import canonical, place_losses, slot_passes
from megatron_ext.schedules.squeeze import Priority, Slot, by_block, by_kind, squeeze

PIPELINES = tuple(FAMILIES)
LIST_ORDERS = (("B", "slot", "F", "W"), ("slot", "B", "F", "W"), ("B", "F", "slot", "W"))


@dataclass(frozen=True)
class Schedule:
    """Passes of every rank in order, and the one order of the collectives."""

    p: int
    m: int
    pipeline: str
    vocab: str
    forward_only: bool
    ranks: tuple[tuple[Action, ...], ...]
    collectives: tuple[Action, ...]
    costs: Costs = field(default_factory=Costs)
    """What the order was made for."""

    chunks: int = 1
    """Chunks of layers per rank."""
    extra: tuple[int, ...] = ()
    """Activations of each chunk that may be held beyond what the pipeline holds; () for none."""

    @cached_property
    def place(self) -> Placement:
        """Where the stages live."""
        return family(self.pipeline).placement(self.p, self.chunks)

    @property
    def split(self) -> bool:
        """Whether backward passes are split into B and W."""
        return family(self.pipeline).split

    def time(self, kind: str, rank: int, costs: Costs | None = None) -> float:
        """Time of a pass on a rank: a chunk's for F, B and W."""
        return (costs or self.costs).of(kind, rank, self.chunks, self.split)

    def cap(self, rank: int) -> int:
        """Chunk activations that are held at most; in 1F1B min(p - rank + k, m), k of the vocabulary mode."""
        if self.forward_only:
            return self.m * self.chunks
        block = make_block(self.pipeline, self.p, self.chunks, self.vocab, self.costs, self.extra)
        return block.cap(rank, self.m)

    @property
    def releases(self) -> str:
        """The pass after whose end a chunk's activations are let go of: B, or W where it is split."""
        return "W" if self.split else "B"

    def in_flight(self, rank: int) -> int:
        """The largest number of chunk activations held: forward passes without what releases them."""
        now = most = 0
        for action in self.ranks[rank]:
            now += (action.kind == "F") - (action.kind == self.releases)
            most = max(most, now)
        return most

    @cached_property
    def text(self) -> str:
        """One line per rank."""
        return "\n".join(
            f"rank {rank}: " + " ".join(str(action) for action in row) for rank, row in enumerate(self.ranks)
        )


def build(
    p: int,
    m: int,
    *,
    pipeline: str = "1f1b",
    vocab: str = "off",
    costs: Costs | None = None,
    forward_only: bool = False,
    priority: Callable[[Block], Priority] = by_block,
    chunks: int | None = None,
    extra: tuple[int, ...] = (),
) -> Schedule:
    """The schedule of `m` microbatches on `p` ranks with `chunks` chunks of layers each.

    Without `costs` the order is static, made for backward passes that take twice as long as forward passes.
    `chunks` is only to be given where the pipeline leaves it open (interleaved: 2 if not given). `extra`
    activations of each chunk may be held beyond what the pipeline holds by itself.

    Raises:
        ValueError: an unknown pipeline or vocabulary mode, sizes below 1, or a number of chunks that the
            pipeline cannot have.
    """
    if pipeline not in FAMILIES or vocab not in MODES:
        raise ValueError(
            f"pipeline {pipeline!r} with vocabulary {vocab!r}: there are {', '.join(FAMILIES)} and "
            f"{', '.join(MODES)}"
        )
    if p < 1 or m < 1:
        raise ValueError(f"{p} ranks and {m} microbatches: both must be at least 1")
    if vocab not in family(pipeline).modes:
        raise ValueError(f"vocabulary {vocab!r} runs only with a 1f1b pipeline, not with {pipeline}")
    costs = costs or Costs()
    costs.check(p)
    block = make_block(pipeline, p, chunks_of(pipeline, chunks), vocab, costs, extra)
    rows = squeeze(block, m, costs, priority(block), forward_only)
    return _assemble(block, m, pipeline, vocab, costs, forward_only, rows)


def chunks_of(pipeline: str, chunks: int | None = None) -> int:
    """Chunks per rank of a pipeline. Raises ValueError for a number that it cannot have."""
    fixed = family(pipeline).chunks
    if fixed is None:
        if chunks is not None and chunks < 2:
            raise ValueError(f"{chunks} chunks per rank: {pipeline} has at least 2")
        return chunks or 2
    if chunks not in (None, fixed):
        raise ValueError(f"{chunks} chunks per rank: {pipeline} has {fixed}")
    return fixed


ORDERS = ("static", "block", "ratio", *(f"list-{number}" for number in range(len(LIST_ORDERS))))


def build_order(order: str, p: int, m: int, costs: Costs, **options: Any) -> Schedule:
    """The schedule in one of `ORDERS`: the static one, one made from `costs`, or a list-scheduled one.

    Two come from the block, once of all costs and once of the mean passes of the layers alone, in whole
    thousandths so that what falls together in the block does so exactly; lists prefer one kind of pass over
    another wherever both are ready. `options` are those of `build`.
    """
    if order == "static":
        return build(p, m, **options)
    if order == "ratio":
        backward, weight = (max(1, round(1000 * costs.mean(kind) / costs.mean("F"))) for kind in "BW")
        return build(
            p, m, costs=Costs(forward=1000, backward=backward, weight=min(weight, backward)), **options
        )
    priority = by_kind(LIST_ORDERS[int(order[-1])]) if order.startswith("list") else by_block
    return build(p, m, costs=costs, priority=priority, **options)


def build_listed(p: int, m: int, *, costs: Costs, **options: Any) -> Schedule:
    """The best of the static order and the others for measured costs, under the same caps; ties keep the
    first. `options` are those of `build`."""
    from megatron_ext.schedules.lower import Stuck, lower
    from megatron_ext.schedules.simulate import simulate

    def makespan(schedule: Schedule) -> float:
        try:
            return simulate(lower(schedule), costs).makespan
        except Stuck:  # an order of the lists may not be executable; the static one is
            return inf

    return min((build_order(order, p, m, costs, **options) for order in ORDERS), key=makespan)


def _assemble(
    block: Block,
    m: int,
    pipeline: str,
    vocab: str,
    costs: Costs,
    forward_only: bool,
    rows: Sequence[Sequence[Action | Slot]],
) -> Schedule:
    placed = place_inputs(block, m, rows, forward_only) if vocab != "off" else [list(row) for row in rows]
    ranks = [
        [action for entry in row for action in slot_passes(entry, block, m, forward_only)] for row in placed
    ]
    if vocab != "off":
        last = block.place.last.rank
        ranks[last] = place_losses(ranks[last], block, m, vocab, forward_only)
    sequence = canonical(placed[0], block, m, vocab, forward_only) if vocab != "off" else ()
    assert all(action.kind in COLLECTIVES for action in sequence)
    return Schedule(
        block.p,
        m,
        pipeline,
        vocab,
        forward_only,
        tuple(map(tuple, ranks)),
        tuple(sequence),
        costs,
        block.place.chunks,
        block.extra,
    )
