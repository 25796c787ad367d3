"""How many bytes communication moves: the formulas, and counters by (feature, kind, group). No torch."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
)

UNSIZED = ":unsized"
"""Ending of a kind whose bytes cannot be known (a sparse tensor, an unknown call): counted as calls only."""


def ideal_bytes(
    kind: str,
    group_size: int,
    group_rank: int,
    input_bytes: int = 0,
    output_bytes: int = 0,
    kept_bytes: int = 0,
    root: int | None = None,
) -> int:
    """Bytes that this rank sends under an algorithm that moves no byte more than needed.

    With p = `group_size`, r = `group_rank`, `root` a group rank, and sizes of this rank's tensors in bytes:

        all_reduce      2 (n - share), n = input, share = n // p, plus 1 for r < n % p
        all_gather      (p - 1) input
        reduce_scatter  input - output
        all_to_all      input - kept, `kept_bytes` being what this rank sends to itself
        broadcast       (p - 1) input on the root, else 0
        reduce, gather  input, 0 on the root
        scatter         input - output on the root, else 0
        send            input
        recv, barrier   0

    Summed over the ranks of a group this is what the whole collective must put on the wire: 2 (p - 1) n for
    an all-reduce, (p - 1) n for n bytes gathered, reduce-scattered, broadcast or reduced. A group of one rank
    moves nothing. Backends may move more (gloo's reduce-scatter moves twice that).
    """
    p, r, n = group_size, group_rank, input_bytes
    assert kind in KINDS, kind
    assert 0 <= r < p, (r, p)
    assert root is not None or kind not in ("broadcast", "reduce", "gather", "scatter"), kind
    match kind:
        case "all_reduce":
            return 2 * (n - n // p - (r < n % p))
        case "all_gather":
            return (p - 1) * n
        case "reduce_scatter":
            return n - output_bytes
        case "all_to_all":
            return n - kept_bytes
        case "broadcast":
            return (p - 1) * n if r == root else 0
        case "reduce" | "gather":
            return n if r != root else 0
        case "scatter":
            return n - output_bytes if r == root else 0
        case "send":
            return n
    return 0


class Ledger:
    """Thread-safe counters of bytes and calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str, str], list[int]] = {}

    def add(self, feature: str, kind: str, group: str, num_bytes: int, calls: int = 1) -> None:
        """Count `calls` calls that send `num_bytes` bytes together."""
        with self._lock:
            counts = self._counts.get((feature, kind, group))
            if counts is None:
                counts = self._counts[feature, kind, group] = [0, 0]
            counts[0] += num_bytes
            counts[1] += calls

    def totals(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        """(bytes, calls) by (feature, kind, group) since the last `drain`."""
        with self._lock:
            return {key: (counts[0], counts[1]) for key, counts in sorted(self._counts.items())}

    def drain(self) -> list[dict[str, Any]]:
        """Rows {feature, kind, group, bytes, calls}, sorted, for the run record; counting starts anew."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return [
            {"feature": feature, "kind": kind, "group": group, "bytes": num_bytes, "calls": calls}
            for (feature, kind, group), (num_bytes, calls) in sorted(counts.items())
        ]


_LEDGER = Ledger()


def ledger() -> Ledger:
    """The ledger of this process, which the run record drains after every step."""
    return _LEDGER


class _Label(threading.local):
    feature: str | None = "stock"


_LABEL = _Label()


def current_feature() -> str | None:
    """Whose communication this thread runs now; None while a counted helper runs, which counts by itself."""
    return _LABEL.feature


@contextmanager
def label(feature: str | None) -> Iterator[None]:
    """Count stock communication of this thread under `feature`: a feature that calls Megatron's functions.

    Backward passes on CUDA run in threads of their own and do not inherit the label.
    """
    before = _LABEL.feature
    _LABEL.feature = feature
    try:
        yield
    finally:
        _LABEL.feature = before
