"""Places the passes of the input embedding, which every rank runs for every microbatch.

They are short and off the critical path, but their collectives share an order with those of the output layer.
So they hang on vocabulary slots, which come in one order on all ranks: rank 0 decides after which slot.
"""

from collections.abc import Sequence

from megatron_ext.schedules.action import Action
from megatron_ext.schedules.blocks import Block
from megatron_ext.schedules.squeeze import Slot

Row = list[Action | Slot]


def place_inputs(
    block: Block, m: int, rows: Sequence[Sequence[Action | Slot]], forward_only: bool
) -> list[Row]:
    """The rows with IF and, unless `forward_only`, IB passes; and with the slot that is flushed at the end.

    IF(i) comes after the last slot before the pass that precedes F(i) on rank 0, so that the sum of its
    embeddings has that pass to hide behind; those without such a slot come first. IB(i) comes after the first
    slot behind B(i+1) on rank 0; those without one are spread over the last backward passes.
    """
    early, after_slot_if = _forward_anchors(rows[0], m)
    after_slot_ib, late = ({}, []) if forward_only else _backward_anchors(rows[0], m)
    placed = []
    for rank, row in enumerate(rows):
        out = _with_first_inputs(row, early, rank)
        out = _with_anchored(out, after_slot_if, after_slot_ib)
        out = _with_late(out, late, rank, m)
        if block.vocab.flushed_last and not forward_only:
            out.append(Slot(m))
        placed.append(out)
    return placed


def _forward_anchors(row: Sequence[Action | Slot], m: int) -> tuple[int, dict[int, list[int]]]:
    """How many IFs come first, and slot -> IFs that come after it."""
    early, anchored = 0, {}
    before: int | None = None  # last slot before the latest forward or backward pass
    latest: int | None = None
    for entry in row:
        if isinstance(entry, Slot):
            latest = entry.index
            continue
        if entry.kind == "F":
            if before is None:
                early = entry.microbatch + 1
            else:
                anchored.setdefault(before, []).append(entry.microbatch)
        before = latest
    return early, anchored


def _backward_anchors(row: Sequence[Action | Slot], m: int) -> tuple[dict[int, list[int]], list[int]]:
    """Slot -> IBs that come after it, and the IBs without a slot."""
    anchored: dict[int, list[int]] = {}
    waiting: list[int] = []
    done = -1
    for entry in row:
        if isinstance(entry, Slot):
            for i in waiting[: max(0, done - waiting[0])] if waiting else []:
                anchored.setdefault(entry.index, []).append(i)
            waiting = [i for i in waiting if i >= done]
        elif entry.kind == "B":
            done = entry.microbatch
            waiting.append(done)
    return anchored, waiting


def _with_first_inputs(row: Sequence[Action | Slot], early: int, rank: int) -> Row:
    """IF(0) to IF(rank) first, then one before each forward pass, all `early` ones before the first slot."""
    out: Row = [Action("IF", i) for i in range(min(early, rank + 1))]
    given = len(out)
    for entry in row:
        limit = early if isinstance(entry, Slot) else min(early, given + (entry.kind == "F"))
        out += [Action("IF", i) for i in range(given, limit)]
        given = max(given, limit)
        out.append(entry)
    return out


def _with_anchored(row: Row, forward: dict[int, list[int]], backward: dict[int, list[int]]) -> Row:
    out: Row = []
    for entry in row:
        out.append(entry)
        if isinstance(entry, Slot):
            out += [Action("IF", i) for i in forward.get(entry.index, ())]
            out += [Action("IB", i) for i in backward.get(entry.index, ())]
    return out


def _with_late(row: Row, late: list[int], rank: int, m: int) -> Row:
    """IB(i) after B(i + 1 + rank), when its gradient from rank 0 is about to be there, but after all
    slots."""
    left = list(late)
    slots = sum(isinstance(entry, Slot) for entry in row)
    out: Row = []
    for at, entry in enumerate(row):
        out.append(entry)
        slots -= isinstance(entry, Slot)
        behind = (
            at + 1 == len(row) or not isinstance(row[at + 1], Action) or row[at + 1].kind not in ("IF", "IB")
        )
        if slots or not behind or not isinstance(entry, Action) or entry.kind != "B":
            continue
        while left and left[0] + 1 + rank <= entry.microbatch:
            out.append(Action("IB", left.pop(0)))
    return out + [Action("IB", i) for i in left]
