"""From slots to passes and collectives: what a slot consists of, when the loss runs, in which order data
travels."""

from collections.abc import Sequence

from megatron_ext.schedules.action import TRANSFORMER, Action
from megatron_ext.schedules.blocks import Block
from megatron_ext.schedules.squeeze import Slot

BARRIERS = {
    "naive": {"S": "C1", "U": "C2", "T": "C3"},
    "vocab-1": {"S": "C1", "T": "C2"},
    "vocab-2": {"S": "C1"},
    "interlaced": {"S": "C1", "T": "C2"},
}
"""The collective that follows a vocabulary pass."""


def slot_passes(entry: Action | Slot, block: Block, m: int, forward_only: bool) -> list[Action]:
    """The passes behind one entry of a row; L is placed by `place_losses`."""
    if isinstance(entry, Action):
        return [entry]
    if not block.vocab.slots:
        return []
    return [Action(kind, i) for kind, i in block.slots(m, forward_only)[entry.index] if kind != "L"]


def place_losses(row: list[Action], block: Block, m: int, vocab: str, forward_only: bool) -> list[Action]:
    """The row of the last stage's rank with L of every microbatch.

    The statistics that L needs travel while another pass runs, and so does g, which L gives: L(i) stands
    before the last transformer pass that precedes the pass that needs it. Where only one pass lies between
    the statistics' last pass and that one, L comes after it.
    """
    for i in range(m):
        at = _place_of_loss(row, i, block, vocab, forward_only)
        row = [*row[:at], Action("L", i), *row[at:]]
    return row


def _place_of_loss(row: list[Action], i: int, block: Block, vocab: str, forward_only: bool) -> int:
    statistics = row.index(Action("U" if vocab == "naive" else "S", i))
    transformer = [at for at, action in enumerate(row) if action.kind in TRANSFORMER]
    if block.vocab.synchronous:
        return statistics + 1
    if forward_only:
        # Nobody waits for losses: let the statistics travel under the next forward pass.
        later = [at for at in transformer if at > statistics]
        return later[0] + 1 if later else len(row)
    needed = row.index(Action("T", i))
    last = Action("B", i, block.place.last.chunk)
    if vocab == "vocab-2":
        needed = min(needed, row.index(last))
    between = [at for at in transformer if statistics < at < needed]
    if block.place.vee:
        place = _before_data_of_others(row, between, statistics, block)
    elif not between or (vocab == "vocab-2" and row[needed] == last):
        return needed
    else:
        place = between[-1] if len(between) > 1 else between[-1] + 1
    # Losses come in order, and a slot's passes stay together.
    return max(place, row.index(Action("L", i - 1)) + 1) if i else place


def _before_data_of_others(row: list[Action], between: list[int], statistics: int, block: Block) -> int:
    """After one pass, if that waits for no other rank. In a V other ranks' data come back to the rank of the
    loss, and what they send may be behind their T(i), which waits for this L."""
    own = (("F", 0), ("B", block.place.last.chunk), ("W", 0), ("W", block.place.last.chunk))
    if between and (row[between[0]].kind, row[between[0]].chunk) in own:
        return between[0] + 1
    return between[0] if between else _slot_end(row, statistics)


def _slot_end(row: list[Action], at: int) -> int:
    """Behind the last pass of the slot and the input passes that hang on it: barriers may follow their
    sums."""
    while at < len(row) and row[at].kind in ("S", "U", "IF", "IB"):
        at += 1
    return at


def canonical(
    row: Sequence[Action | Slot], block: Block, m: int, vocab: str, forward_only: bool
) -> list[Action]:
    """The collectives in the order in which every rank launches them, from a row with slots and input passes.

    Around a slot: what it waits for (g of the IBs behind it, G, C0), then what follows it (e of the IFs
    behind it, then its barriers). Embeddings that fill the pipeline come after the barriers instead.
    """
    out: list[Action] = []
    filling = block.cap(0, m, 0)
    for entry, inputs in _grouped(row):
        forward = [a.microbatch for a in inputs if a.kind == "IF"]
        backward = [Action("g", a.microbatch) for a in inputs if a.kind == "IB"]
        if entry is None:
            out += [Action("e", i) for i in forward] + backward
            continue
        passes = slot_passes(entry, block, m, forward_only)
        barriers = [(BARRIERS[vocab].get(a.kind), a.microbatch) for a in reversed(passes)]
        followed = [Action(kind, i) for kind, i in barriers if kind]
        ready = [Action("G", a.microbatch) for a in passes if a.kind == "T"]
        hidden = [Action("C0", a.microbatch) for a in passes if a.kind == "S"]
        if block.vocab.synchronous:
            inside = [followed[-1]] if forward_only else [followed[-1], *ready, followed[0]]
            out += [*backward, *hidden, *inside, *(Action("e", i) for i in forward)]
            continue
        early = [Action("e", i) for i in forward if i < filling]
        late = [Action("e", i) for i in forward if i >= filling]
        out += [*backward, *ready, *hidden, *late, *followed, *early]
    return out


def _grouped(row: Sequence[Action | Slot]) -> list[tuple[Slot | None, list[Action]]]:
    """Slots with the input passes behind them; input passes at the beginning and the end stand alone."""
    groups: list[tuple[Slot | None, list[Action]]] = [(None, [])]
    transformer_between = False
    for entry in row:
        if isinstance(entry, Slot):
            groups.append((entry, []))
            transformer_between = False
        elif entry.kind in ("IF", "IB"):
            if transformer_between and groups[-1][0] is not None:
                groups.append((None, []))
            groups[-1][1].append(entry)
        else:
            transformer_between = True
    return groups
