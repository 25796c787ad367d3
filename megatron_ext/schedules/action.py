"""Actions: the vocabulary of schedules, and what each of them waits for.

A schedule is lists of actions, one list per pipeline rank. Passes compute, one after another on a rank:

    F B     forward and backward of the transformer layers of a stage
    IF IB   forward and backward of a rank's shard of the input embedding
    S       output pass: logits and local statistics
            (vocab-2: also the softmax part of dX; naive: local maximum only)
    U       naive only: exponentials and sums under the global maximum
    T       weight gradient of the output shard (but for vocab-2 also its part of dX)
    L       last rank only: the loss function, which gives g, the gradient of the per-token losses

All others are communication; the action stands where it is launched, and passes wait for its end:

    SF RF SB RB   send and receive of activations (rank r to r + 1) and gradients (r to r - 1)
    e    sum of the embeddings to rank 0          C0   hidden states from the last rank to all
    g    gradient of the embeddings from rank 0   G    g from the last rank to all
    C1 C2 C3   barriers of the output layer, see vocab/output.py

Source of the passes and barriers: Yeung et al., arXiv 2411.05288, sections 3 and 4.
"""

import re
from typing import NamedTuple

PASSES = ("F", "B", "IF", "IB", "S", "U", "T", "L")
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


_TEXT = re.compile(r"(?:(F|B|IF|IB|S|U|T|L)(\d+)(?:\.(\d+))?|(e|g|C[0-3]|G|[SR][FB])\((\d+)(?:\.(\d+))?\))")


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


def is_last(rank: int, p: int) -> bool:
    """Whether this is the rank with the last transformer layers and the loss."""
    return rank == p - 1


def needs(action: Action, rank: int, p: int, vocab: str) -> tuple[Action, ...]:
    """What must have ended on this rank before `action` may start there (a pass) or be launched.

    Communication that others take part in as well starts when all of them have launched it.
    """
    kinds = _NEEDS_WITH_VOCAB[vocab] if vocab != "off" else _NEEDS_WITHOUT
    found = kinds.get(action.kind, ())
    if callable(found):
        found = found(rank, p)
    return tuple(Action(kind, action.microbatch, action.chunk) for kind in found)


def roots(kind: str, p: int) -> tuple[int, ...] | None:
    """Ranks whose data a collective needs before it can start: None for all of them."""
    return {"C0": (p - 1,), "G": (p - 1,), "g": (0,)}.get(kind)


def feeds(kind: str, vocab: str) -> str:
    """The pass that must have ended, on the ranks of `roots`, before a collective can start."""
    if kind in ("C2", "C3"):
        return {"C2": "U" if vocab == "naive" else "T", "C3": "T"}[kind]
    return {"e": "IF", "g": "B", "C0": "F", "C1": "S", "G": "L"}[kind]


def _forward(vocab: str):
    def kinds(rank: int, p: int) -> tuple[str, ...]:
        if rank > 0:
            return ("RF",)
        return ("e",) if vocab != "off" else ()

    return kinds


def _backward(vocab: str):
    barrier = {"off": (), "naive": ("C3",), "vocab-2": ("C1", "L")}.get(vocab, ("C2",))
    own = (*barrier, "F")

    def kinds(rank: int, p: int) -> tuple[str, ...]:
        return own if is_last(rank, p) else ("RB", "F")

    return kinds


def _launch(kind: str, vocab: str):
    source = feeds(kind, vocab)

    def kinds(rank: int, p: int) -> tuple[str, ...]:
        owners = roots(kind, p)
        return (source,) if owners is None or rank in owners else ()

    return kinds


_NEEDS_WITHOUT = {"F": _forward("off"), "B": _backward("off"), "SF": ("F",), "SB": ("B",)}


def _table(vocab: str) -> dict:
    statistics = "C2" if vocab == "naive" else "C1"
    table = {
        "F": _forward(vocab),
        "B": _backward(vocab),
        "S": ("C0",),
        "L": (statistics,),
        "T": (statistics, "G"),
        "IB": ("g",),
        "SF": ("F",),
        "SB": ("B",),
    }
    if vocab == "naive":
        table["U"] = ("C1",)
    kinds = [kind for kind in COLLECTIVES if kind != "C3" or vocab == "naive"]
    if vocab == "vocab-2":
        kinds.remove("C2")
    return table | {kind: _launch(kind, vocab) for kind in kinds}


_NEEDS_WITH_VOCAB = {vocab: _table(vocab) for vocab in MODES if vocab != "off"}
