"""Which rows meet which keys: rectangles and triangles that any attention kernel can compute. No torch.

    full      every row sees every key
    causal    a square: row i sees keys 0 to i
    reverse   a square: row i sees keys i and later (causal, with rows and keys turned round)

A mask is a band: a query at position i sees keys from i - left to i + right. Squares of equal sides are all
that is needed, so kernels that align masks of oblong tiles differently give the same result. Rows and keys
that nothing is computed for are in no tile: kernels disagree on rows without keys, too.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from megatron_ext.wallfacer.sequence import Run

Mode = Literal["full", "causal", "reverse"]


@dataclass(frozen=True)
class Mask:
    """A query sees keys at most `left` before and `right` behind it; None is no limit."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"mask with {name}={value!r}: use a number of tokens, 0 or more, or None")

    def sees(self, query: Run, key: Run) -> bool:
        """Whether any query of a run sees any key of another."""
        if query.document != key.document:
            return False
        reach = query.position + query.length - 1
        far = key.position + key.length - 1
        return (self.right is None or reach + self.right >= key.position) and (
            self.left is None or query.position - self.left <= far
        )


CAUSAL, BIDIRECTIONAL = Mask(right=0), Mask()


@dataclass(frozen=True)
class Tile:
    """Rows [q0, q1) of the sorted queries against keys [k0, k1) of a sorted bundle."""

    q0: int
    q1: int
    k0: int
    k1: int
    mode: Mode
    fresh: bool = False
    """Whether no earlier tile of the rank has written any of these rows."""

    @property
    def area(self) -> float:
        """Pairs of rows and keys; the diagonal of a square counts half, so that parts add up to a whole."""
        pairs = (self.q1 - self.q0) * (self.k1 - self.k0)
        return float(pairs) if self.mode == "full" else pairs / 2


def tiles(queries: Sequence[Run], keys: Sequence[Run], mask: Mask) -> tuple[Tile, ...]:
    """Tiles that cover what the rows of `queries` see of `keys`, in rows of the two buffers."""
    keys_of, found = _by_document(keys), []
    for document, rows in _by_document(queries).items():
        parts = [
            part
            for query in rows
            for key in keys_of.get(document, ())
            if mask.sees(query, key)
            for part in _band(query, key, mask)
        ]
        found += _merged(parts)
    return tuple(found)


def meets(queries: Sequence[Run], keys: Sequence[Run], mask: Mask) -> bool:
    """Whether `tiles` would find any."""
    keys_of = _by_document(keys)
    return any(mask.sees(query, key) for query in queries for key in keys_of.get(query.document, ()))


def _by_document(runs: Sequence[Run]) -> dict[int, list[Run]]:
    found: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.document].append(run)
    return found


def _band(query: Run, key: Run, mask: Mask) -> Iterator[Tile]:
    """Tiles of one run of rows against one run of keys."""
    first, last = key.position, key.position + key.length  # of the keys
    start, stop = query.position, query.position + query.length
    edges = {start, stop}
    if mask.right is not None:
        edges |= {first - mask.right, last - mask.right}
    if mask.left is not None:
        edges |= {first + mask.left, last + mask.left}
    for i0, i1 in pairwise(sorted(edge for edge in edges if start <= edge <= stop)):
        # Within these rows each end of the keys seen either stays or moves with the row.
        if (mask.right is not None and i0 + mask.right < first) or (
            mask.left is not None and i0 - mask.left >= last
        ):
            continue
        grows = mask.right is not None and i0 + mask.right < last
        shrinks = mask.left is not None and i0 - mask.left >= first
        step = max(1, mask.left + mask.right) if grows and shrinks else i1 - i0
        for row in range(i0, i1, step):
            end = min(row + step, i1)
            yield from _segment(query, key, row, end, mask, grows, shrinks)


def _segment(
    query: Run, key: Run, i0: int, i1: int, mask: Mask, grows: bool, shrinks: bool
) -> Iterator[Tile]:
    """Tiles of rows at positions [i0, i1) whose last key moves along (grows), or the first (shrinks)."""

    def tile(j0: int, j1: int, mode: Mode) -> Tile:
        q = query.row - query.position
        k = key.row - key.position
        return Tile(i0 + q, i1 + q, j0 + k, j1 + k, mode)

    low, high = key.position, key.position + key.length  # of keys that all rows see
    if shrinks:
        low = i1 - mask.left
    if grows:
        high = i0 + mask.right
    if grows and shrinks and mask.left + mask.right == 0:
        yield tile(i0 + mask.right, i1 + mask.right, "full")  # one row, one key
        return
    if shrinks:
        yield tile(i0 - mask.left, i1 - mask.left, "reverse")
    if high > low:
        yield tile(low, high, "full")
    if grows:
        yield tile(i0 + mask.right, i1 + mask.right, "causal")


# --- fewer and larger tiles --------------------------------------------------------------------------------


def _merged(parts: list[Tile]) -> list[Tile]:
    """The same pairs in fewer tiles."""
    full = [part for part in parts if part.mode == "full"]
    squares = [part for part in parts if part.mode != "full"]
    count = -1
    while count != len(full):
        count = len(full)
        full = _joined(full, along="k")
        full = _joined(full, along="q")
    squares, full = _grown(squares, full)
    return sorted(squares + full, key=lambda tile: (tile.q0, tile.k0))


def _joined(full: list[Tile], along: Literal["q", "k"]) -> list[Tile]:
    """Join full tiles that touch in one direction and agree in the other."""
    other = "k" if along == "q" else "q"
    first, last = f"{along}0", f"{along}1"

    def key(tile: Tile) -> tuple[int, int, int]:
        return getattr(tile, other + "0"), getattr(tile, other + "1"), getattr(tile, first)

    found: list[Tile] = []
    for tile in sorted(full, key=key):
        before = found[-1] if found else None
        if before and key(before)[:2] == key(tile)[:2] and getattr(before, last) == getattr(tile, first):
            found[-1] = replace(before, **{last: getattr(tile, last)})
        else:
            found.append(tile)
    return found


def _grown(squares: list[Tile], full: list[Tile]) -> tuple[list[Tile], list[Tile]]:
    """Two causal squares and the full one that fills their corner are one causal square."""
    left = set(full)
    found: list[Tile] = []
    for square in sorted(squares, key=lambda tile: tile.q0):
        while found and square.mode == found[-1].mode == "causal":
            before = found[-1]
            corner = Tile(square.q0, square.q1, before.k0, before.k1, "full")
            if (before.q1, before.k1) != (square.q0, square.k0) or corner not in left:
                break
            left.remove(corner)
            found.pop()
            square = Tile(before.q0, square.q1, before.k0, square.k1, "causal")
        found.append(square)
    return found, [tile for tile in full if tile in left]


def marked_fresh(steps: Iterable[Sequence[Tile]]) -> list[tuple[Tile, ...]]:
    """The tiles of a rank, step by step, with `fresh` set."""
    written: list[tuple[int, int]] = []
    found = []
    for step in steps:
        marked = []
        for tile in step:
            fresh = all(tile.q1 <= start or end <= tile.q0 for start, end in written)
            if fresh or not any(start <= tile.q0 and tile.q1 <= end for start, end in written):
                written = _with(written, tile.q0, tile.q1)
            marked.append(replace(tile, fresh=fresh))
        found.append(tuple(marked))
    return found


def _with(spans: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    apart = [span for span in spans if span[1] < start or end < span[0]]
    touching = [span for span in spans if not (span[1] < start or end < span[0])]
    low = min([start, *(span[0] for span in touching)])
    high = max([end, *(span[1] for span in touching)])
    return [*apart, (low, high)]
