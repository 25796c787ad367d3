"""Actions: the vocabulary of schedules, and what each of them waits for.

A schedule is lists of actions, one list per pipeline rank. Passes compute, one after another on a rank:

    F B     forward and backward of the transformer layers of a stage (a chunk of the rank, see placement.py)
    W       weight gradients of a stage, where a schedule splits the backward pass: B is then without them
    IF IB   forward and backward of a rank's shard of the input embedding
    S       output pass: logits and local statistics
            (vocab-2: also the softmax part of dX; naive: local maximum only)
    U       naive only: exponentials and sums under the global maximum
    T       weight gradient of the output shard (but for vocab-2 also its part of dX)
    L       on the rank of the last stage: the loss function, which gives g, the gradient of the
    per-token losses

All others are communication; the action stands where it is launched, and passes wait for its end:

    SF RF SB RB   send and receive of activations (to the next stage) and gradients (to the one before)
    e    sum of the embeddings to rank 0          C0   hidden states from the last stage to all ranks
    g    gradient of the embeddings from rank 0   G    g from the last stage to all ranks
    C1 C2 C3   barriers of the output layer, see vocab/output.py

Source of the passes and barriers: Yeung et al., arXiv 2411.05288, sections 3 and 4.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from megatron_ext.schedules.placement import Placement

PASSES = ("F", "B", "W", "IF", "IB", "S", "U", "T", "L")
TRANSFORMER = ("F", "B", "W")
COLLECTIVES = ("e", "g", "C0", "C1", "C2", "C3", "G")
P2P = ("SF", "RF", "SB", "RB")
MODES = ("off", "naive", "vocab-1", "vocab-2", "interlaced")


class Action(NamedTuple):
    """One pass or launch for a microbatch; `F3`, `C1(3)`, and with a chunk other than 0 `F3.1`."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        if self.kind in PASSES:
            return f"{self.kind}{self.microbatch}{chunk}"
        return f"{self.kind}({self.microbatch}{chunk})"


_TEXT = re.compile(r"(?:(F|B|W|IF|IB|S|U|T|L)(\d+)(?:\.(\d+))?|(e|g|C[0-3]|G|[SR][FB])\((\d+)(?:\.(\d+))?\))")


def parse(text: str) -> Action:
    """The action that prints as `text`. Raises ValueError for any other text."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no action: use forms like F3, S0, C1(3) or SF(2)")
    kind, microbatch, chunk = (match[1], match[2], match[3]) if match[1] else (match[4], match[5], match[6])
    return Action(kind, int(microbatch), int(chunk or 0))


def parse_row(text: str) -> tuple[Action, ...]:
    """Actions of one rank, separated by blanks."""
    return tuple(parse(word) for word in text.split())


@lru_cache(maxsize=1 << 18)
def needs(action: Action, rank: int, place: Placement, vocab: str) -> tuple[Action, ...]:
    """What must have ended on this rank before `action` may start there (a pass) or be launched.

    Communication that others take part in as well starts when all of them have launched it.
    """
    kind, i, chunk = action
    if kind == "F":
        return _before_forward(i, place, rank, chunk, vocab)
    if kind == "B":
        return (*_before_backward(i, place, rank, chunk, vocab), Action("F", i, chunk))
    if kind in _OWN_PASS:
        return (Action(_OWN_PASS[kind], i, chunk),)
    if kind in ("C0", "G", "g"):
        root = roots(kind, place)[0]
        if rank != root:
            return ()
        chunk = place.last.chunk if kind == "C0" else 0
    return tuple(Action(need, i, chunk) for need in _VOCABULARY_NEEDS.get(vocab, {}).get(kind, ()))


def roots(kind: str, place: Placement) -> tuple[int, ...] | None:
    """Ranks whose data a collective needs before it can start: None for all of them."""
    return {"C0": (place.last.rank,), "G": (place.last.rank,), "g": (place.first.rank,)}.get(kind)


def feeds(kind: str, vocab: str) -> str:
    """The pass that must have ended, on the ranks of `roots`, before a collective can start."""
    if kind in ("C2", "C3"):
        return {"C2": "U" if vocab == "naive" else "T", "C3": "T"}[kind]
    return {"e": "IF", "g": "B", "C0": "F", "C1": "S", "G": "L"}[kind]


_OWN_PASS = {"W": "B", "SF": "F", "SB": "B"}


def _before_forward(i: int, place: Placement, rank: int, chunk: int, vocab: str) -> tuple[Action, ...]:
    before = place.before(rank, chunk)
    if before is None:
        return (Action("e", i),) if vocab != "off" else ()
    return (Action("F", i, before.chunk) if before.rank == rank else Action("RF", i, chunk),)


_BARRIER = {"off": (), "naive": ("C3",), "vocab-2": ("C1", "L")}


def _before_backward(i: int, place: Placement, rank: int, chunk: int, vocab: str) -> tuple[Action, ...]:
    after = place.after(rank, chunk)
    if after is None:
        return tuple(Action(kind, i) for kind in _BARRIER.get(vocab, ("C2",)))
    return (Action("B", i, after.chunk) if after.rank == rank else Action("RB", i, chunk),)


def _table(vocab: str) -> dict[str, tuple[str, ...]]:
    statistics = "C2" if vocab == "naive" else "C1"
    table = {"S": ("C0",), "L": (statistics,), "T": (statistics, "G"), "IB": ("g",)}
    if vocab == "naive":
        table["U"] = ("C1",)
    kinds = [kind for kind in COLLECTIVES if kind != "C3" or vocab == "naive"]
    if vocab == "vocab-2":
        kinds.remove("C2")
    return table | {kind: (feeds(kind, vocab),) for kind in kinds}


_VOCABULARY_NEEDS = {vocab: _table(vocab) for vocab in MODES if vocab != "off"}
