"""Places the passes of the input embedding, which every rank runs for every microbatch.

They are short and off the critical path, but their collectives share an order with those of the output layer.
So they hang on vocabulary slots, which come in one order on all ranks: rank 0 decides after which slot, as
far as the others allow it.
"""

from collections.abc import Sequence

from megatron_ext.schedules.action import Action
from megatron_ext.schedules.blocks import Block
from megatron_ext.schedules.placement import Placement
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
    early, after_slot_if = _forward_anchors(rows, m)
    after_slot_ib, late = ({}, []) if forward_only else _backward_anchors(rows, m)
    free = _before_slots(block, rows)
    placed = []
    for rank, row in enumerate(rows):
        out = _with_first_inputs(row, early, rank, free[rank])
        out = _with_anchored(out, after_slot_if, after_slot_ib)
        out = _with_late(out, late, rank, m)
        if block.vocab.flushed_last and not forward_only:
            out.append(Slot(m))
        placed.append(out)
    return placed


def _forward_anchors(rows: Sequence[Sequence[Action | Slot]], m: int) -> tuple[int, dict[int, list[int]]]:
    """How many IFs come first, and slot -> IFs that come after it.

    No rank may have that slot behind its F(i): F(i) on rank 0 waits for IF(i) everywhere.
    """
    anchors = [_slots_before(row, "F", behind_pass=rank == 0) for rank, row in enumerate(rows)]
    early, anchored = 0, {}
    for i in range(m):
        slot = min(slots[i] for slots in anchors)
        if slot < 0:
            early = i + 1
        else:
            anchored.setdefault(slot, []).append(i)
    return early, anchored


def _slots_before(row: Sequence[Action | Slot], kind: str, behind_pass: bool) -> list[int]:
    """By microbatch, the last slot before its pass, -1 for none; with `behind_pass`, the last one before the
    pass in front of that."""
    found: list[int] = []
    latest = before = -1
    for entry in row:
        if isinstance(entry, Slot):
            latest = entry.index
            continue
        if (entry.kind, entry.chunk) == (kind, 0):
            found.append(before if behind_pass else latest)
        before = latest
    return found


def _backward_anchors(
    rows: Sequence[Sequence[Action | Slot]], m: int
) -> tuple[dict[int, list[int]], list[int]]:
    """Slot -> IBs that come after it, and the IBs without a slot.

    No rank may have that slot in front of its B(i): the slot's collectives come after g(i), which B(i) on
    rank 0 gives.
    """
    behind = [_slots_behind(row, "B") for row in rows]
    anchored: dict[int, list[int]] = {}
    late: list[int] = []
    for i in range(m):
        slots = [behind[0][i + 1] if i + 1 < m else None, *(slots[i] for slots in behind[1:])]
        if None in slots:
            late.append(i)
        else:
            anchored.setdefault(max(slots), []).append(i)
    return anchored, late


def _slots_behind(row: Sequence[Action | Slot], kind: str) -> list[int | None]:
    """By microbatch, the first slot after its pass, None for none."""
    found: list[int | None] = []
    latest: int | None = None
    for entry in reversed(row):
        if isinstance(entry, Slot):
            latest = entry.index
        elif (entry.kind, entry.chunk) == (kind, 0):
            found.append(latest)
    return found[::-1]


def _before_slots(block: Block, rows: Sequence[Sequence[Action | Slot]]) -> list[int]:
    """By rank, how many of its passes no slot of any rank comes before: neither in its row nor by what the
    passes need."""
    place, at, done = block.place, [0] * block.p, set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and _can_run(place, row[at[rank]], rank, done):
                kind, i, chunk = row[at[rank]]
                done.add((kind, i, place.stage(rank, chunk)))
                at[rank] += 1
                moved = True
    return at


def _can_run(place: Placement, entry: Action | Slot, rank: int, done: set[tuple[str, int, int]]) -> bool:
    """Whether a pass needs nothing but passes that are done; backward passes follow a slot."""
    if isinstance(entry, Slot) or entry.kind != "F":
        return False
    stage = place.stage(rank, entry.chunk)
    return stage == 0 or ("F", entry.microbatch, stage - 1) in done


def _with_first_inputs(row: Sequence[Action | Slot], early: int, rank: int, limit: int) -> Row:
    """IF(0) to IF(rank) first, then one before each forward pass of chunk 0, and all `early` ones before
    pass number `limit`, which follows a slot of this or another rank: slots wait for them."""
    out: Row = [Action("IF", i) for i in range(min(early, rank + 1))]
    given = len(out)
    for at, entry in enumerate(row):
        takes = isinstance(entry, Action) and (entry.kind, entry.chunk) == ("F", 0)
        due = early if at >= limit else min(early, given + takes)
        out += [Action("IF", i) for i in range(given, due)]
        given = max(given, due)
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
        if slots or not behind or not isinstance(entry, Action) or (entry.kind, entry.chunk) != ("B", 0):
            continue
        while left and left[0] + 1 + rank <= entry.microbatch:
            out.append(Action("IB", left.pop(0)))
    return out + [Action("IB", i) for i in left]
