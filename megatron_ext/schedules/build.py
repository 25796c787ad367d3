"""Builds schedules: unrolls a building block, squeezes it, and places the input passes.

    schedule = build(4, 8, vocab="vocab-2")
    schedule.ranks[0]       # (IF0, IF1, F0, IF2, F1, ...), the passes of rank 0 in order
    schedule.collectives    # (e(0), e(1), ..., C0(0), C1(0), ...), the same order on all ranks

The block says in which order passes should run; squeezing runs every pass as early as its inputs and the cap
on microbatches in flight allow, and takes the pass that is first in the block where several are ready. One
method makes all schedules, for any number of ranks and microbatches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_ext.schedules.action import COLLECTIVES, MODES, Action
from megatron_ext.schedules.blocks import Block
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.inputs import place_inputs
from megatron_ext.schedules.sequence import canonical, place_losses, slot_passes
from megatron_ext.schedules.squeeze import Priority, Slot, by_block, by_kind, squeeze

PIPELINES = ("1f1b",)
LIST_ORDERS = (("B", "slot", "F"), ("slot", "B", "F"), ("B", "F", "slot"))


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

    def cap(self, rank: int) -> int:
        """Microbatches in flight at most: min(p - rank + k, m) with k of the vocabulary mode."""
        if self.forward_only:
            return self.m
        return Block.of(self.p, self.vocab, self.costs).cap(rank, self.m)

    def in_flight(self, rank: int) -> int:
        """The largest number of forward passes without their backward pass."""
        now = most = 0
        for action in self.ranks[rank]:
            now += (action.kind == "F") - (action.kind == "B")
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
) -> Schedule:
    """The schedule of `m` microbatches on `p` ranks.

    Without `costs` the order is static, made for backward passes that take twice as long as forward passes.

    Raises:
        ValueError: an unknown pipeline or vocabulary mode, or sizes below 1.
    """
    if pipeline not in PIPELINES or vocab not in MODES:
        raise ValueError(
            f"pipeline {pipeline!r} with vocabulary {vocab!r}: there are {', '.join(PIPELINES)} and "
            f"{', '.join(MODES)}"
        )
    if p < 1 or m < 1:
        raise ValueError(f"{p} ranks and {m} microbatches: both must be at least 1")
    costs = costs or Costs()
    costs.check(p)
    block = Block.of(p, vocab, costs)
    rows = squeeze(block, m, costs, priority(block), forward_only)
    return _assemble(block, m, pipeline, vocab, costs, forward_only, rows)


def build_listed(
    p: int,
    m: int,
    *,
    pipeline: str = "1f1b",
    vocab: str = "off",
    costs: Costs,
    forward_only: bool = False,
) -> Schedule:
    """The best of the static order and the list-scheduled ones for measured costs, under the same caps.

    Some orders come from the costs: two by the block, once of all costs and once of the mean forward and
    backward pass alone, in whole thousandths so that what falls together in the block does so exactly; and
    lists that prefer one kind of pass over another wherever both are ready. Ties keep the first.
    """
    from megatron_ext.schedules.lower import lower
    from megatron_ext.schedules.simulate import simulate

    options = {"pipeline": pipeline, "vocab": vocab, "forward_only": forward_only}
    ratio = Costs(forward=1000, backward=max(1, round(1000 * costs.mean("B") / costs.mean("F"))))
    found = [build(p, m, costs=given, **options) for given in (None, costs, ratio)]
    for order in LIST_ORDERS:
        found.append(build(p, m, costs=costs, priority=by_kind(order), **options))
    return min(found, key=lambda schedule: simulate(lower(schedule), costs).makespan)


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
        [action for entry in row for action in slot_passes(entry, block.vocab, m, forward_only)]
        for row in placed
    ]
    if vocab != "off":
        ranks[-1] = place_losses(ranks[-1], m, block.vocab, vocab, forward_only)
    sequence = canonical(placed[0], block, m, vocab, forward_only) if vocab != "off" else ()
    assert all(action.kind in COLLECTIVES for action in sequence)
    return Schedule(
        block.p, m, pipeline, vocab, forward_only, tuple(map(tuple, ranks)), tuple(sequence), costs
    )
