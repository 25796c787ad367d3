"""How a sequence lies on the ranks: which tokens each has, in which order, and in which documents. No torch.

zigzag      2P half-chunks; rank r has numbers r and 2P-1-r, as stock Megatron deals them out: balanced under
a
            causal mask
contiguous  P chunks; rank r has number r: for bidirectional models

Packed documents are split each by itself, and padded to a length that splits. Whole sequences with documents
in them (`cuts`) are split as one. Positions are those of the whole packed sequence, padding included.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Split = Literal["zigzag", "contiguous"]


@dataclass(frozen=True)
class Document:
    """Tokens that see each other: [start, end), of which [start, filled) are not padding."""

    start: int
    end: int
    filled: int


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one document that lie in consecutive rows of a buffer."""

    position: int
    length: int
    row: int
    document: int


@dataclass(frozen=True)
class Layout:
    """A sequence and its split. Made by `whole` or `packed`, which check it."""

    length: int
    """Tokens of all ranks, padding included."""
    split: Split
    documents: tuple[Document, ...]
    apart: bool
    """Whether documents are split each by itself."""

    def rows(self, size: int) -> int:
        """Tokens of each of `size` ranks.

        Raises:
            ValueError: the sequence, or a document that is split by itself, does not divide; names the next
                length that does.
        """
        parts = self._parts(size)
        spans = ((d.start, d.end) for d in self.documents) if self.apart else ((0, self.length),)
        for number, (start, end) in enumerate(spans):
            if (end - start) % parts:
                what = f"document {number}" if self.apart else "the sequence"
                better = -(-(end - start) // parts) * parts
                raise ValueError(
                    f"{what} has {end - start} tokens, which {size} context-parallel ranks cannot split into "
                    f"{parts} equal parts ({self.split}): pad it to {better}"
                )
        return self.length // size

    def spans(self, rank: int, size: int) -> list[tuple[int, int]]:
        """(start, length) of the tokens of a rank, row after row. That all divides is for `rows` to check."""
        parts = self._parts(size)
        own = (rank, parts - 1 - rank) if self.split == "zigzag" else (rank,)
        found = []
        for start, end in ((d.start, d.end) for d in self.documents) if self.apart else ((0, self.length),):
            part = (end - start) // parts
            found += [(start + number * part, part) for number in own]
        return found

    def _parts(self, size: int) -> int:
        return 2 * size if self.split == "zigzag" else size


def whole(length: int, split: Split = "zigzag", cuts: Sequence[int] = ()) -> Layout:
    """One sequence of `length` tokens, split as one; documents in it end at `cuts`."""
    _check_split(split)
    borders = (0, *cuts, length)
    if length < 1 or any(a >= b for a, b in pairwise(borders)):
        raise ValueError(
            f"documents end at {list(cuts)} in {length} tokens: list ends that ascend inside of the sequence"
        )
    return Layout(length, split, tuple(Document(a, b, b) for a, b in pairwise(borders)), apart=False)


def packed(
    cu_seqlens_padded: Sequence[int], cu_seqlens: Sequence[int] | None = None, split: Split = "zigzag"
) -> Layout:
    """Documents packed behind each other, as `cu_seqlens` of Megatron's packed sequences list them.

    Args:
        cu_seqlens_padded: 0 and the end of each document, padding included.
        cu_seqlens: the same without any padding; by default there is none. A document may be all padding.

    Raises:
        ValueError: they do not describe documents. That a length cannot be split shows in `Layout.rows`.
    """
    _check_split(split)
    filled = cu_seqlens_padded if cu_seqlens is None else cu_seqlens
    if len(filled) != len(cu_seqlens_padded) or len(filled) < 2 or filled[0] or cu_seqlens_padded[0]:
        raise ValueError(
            f"cu_seqlens of {len(filled)} and cu_seqlens_padded of {len(cu_seqlens_padded)} entries: both "
            "must start with 0 and have one entry for each document"
        )
    documents = []
    for (start, end), (first, last) in zip(pairwise(cu_seqlens_padded), pairwise(filled), strict=True):
        if end < start or not 0 <= last - first <= end - start:
            raise ValueError(
                f"document {len(documents)} has {last - first} tokens in a space of {end - start}: "
                "cu_seqlens must ascend and fit into cu_seqlens_padded"
            )
        if end > start:
            documents.append(Document(start, end, start + last - first))
    return Layout(cu_seqlens_padded[-1], split, tuple(documents), apart=True)


def _check_split(split: str) -> None:
    if split not in ("zigzag", "contiguous"):
        raise ValueError(f"split {split!r}: choose zigzag or contiguous")


@dataclass(frozen=True)
class Rows:
    """Rows of a buffer that holds the tokens of several ranks, sorted by position.

    Gathered shares lie rank after rank; `slices` says which of those rows follow each other once sorted.
    """

    slices: tuple[tuple[int, int], ...]
    """(first gathered row, number of rows) in sorted order."""
    runs: tuple[Run, ...]
    """What the sorted rows hold; padding is left out."""

    @property
    def sorted_already(self) -> bool:
        """Whether gathering alone gives the sorted order."""
        return len(self.slices) == 1


def gathered(layout: Layout, ranks: tuple[int, ...], size: int) -> Rows:
    """Rows of the shares of `ranks`, gathered in that order."""
    sources, row = [], 0
    for rank in ranks:
        for start, length in layout.spans(rank, size):
            sources.append((start, length, row))
            row += length
    sources.sort()
    slices = _joined((row, length) for _, length, row in sources)
    return Rows(tuple(slices), tuple(_runs(layout, [(start, length) for start, length, _ in sources])))


def _joined(slices: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for row, length in slices:
        if found and sum(found[-1]) == row:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((row, length))
    return found


def _runs(layout: Layout, spans: Iterable[tuple[int, int]]) -> list[Run]:
    """Cut sorted spans at the borders of documents, leave padding out, and join neighbours."""
    found: list[Run] = []
    row = number = 0
    for start, length in spans:
        at = start
        while at < start + length:
            while layout.documents[number].end <= at:
                number += 1
            document = layout.documents[number]
            end = min(start + length, document.end)
            stop = min(end, document.filled)
            if stop > at:
                _add(found, Run(at, stop - at, row, number))
            row += end - at
            at = end
    return found


def _add(runs: list[Run], run: Run) -> None:
    last = runs[-1] if runs else None
    adjacent = (
        last is not None
        and last.document == run.document
        and last.position + last.length == run.position
        and last.row + last.length == run.row
    )
    if adjacent:
        runs[-1] = Run(last.position, last.length + run.length, last.row, last.document)
    else:
        runs.append(run)
