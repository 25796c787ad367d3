"""Which rows of the vocabulary each rank holds; pure.

Stock's tensor-parallel slice of the padded vocabulary is cut once more, over the pipeline ranks. So a rank's
rows are a part of the slice that stock gives to its tensor-parallel rank, and the shards lie in the order
(tensor-parallel rank, pipeline rank).
"""

import itertools

LARGEST_BLOCK = 64
"""Rows. Matrix products are fastest where their sizes are multiples of this."""


def shard_rows(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut `rows` into contiguous ranges [lo, hi), one a part, whose sizes differ by at most one block.

    A block is the largest power of two, up to 64, that divides `rows` and leaves at least one block for each
    part. The first parts get the blocks that are left over.

    Raises:
        ValueError: there are fewer rows than parts.
    """
    if parts < 1:
        raise ValueError(f"The vocabulary cannot be cut into {parts} parts: at least 1 is needed.")
    if rows < parts:
        raise ValueError(
            f"{rows} rows of the vocabulary cannot be shared out to {parts} pipeline ranks: each needs at "
            f"least one. Use at most {rows} pipeline ranks, or pad the vocabulary further with "
            "--make-vocab-size-divisible-by."
        )
    block = LARGEST_BLOCK
    while rows % block or rows // block < parts:
        block //= 2
    each, left = divmod(rows // block, parts)
    ends = [block * (each * part + min(part, left)) for part in range(parts + 1)]
    return list(itertools.pairwise(ends))


def vocab_range(padded_rows: int, tp: int, tp_rank: int, pp: int, pp_rank: int) -> tuple[int, int]:
    """The rows [lo, hi) of the padded vocabulary that one rank of a tp x pp grid holds.

    Raises:
        ValueError: the vocabulary is not padded to a multiple of `tp`, or a slice has fewer rows than `pp`.
    """
    slice_rows, rest = divmod(padded_rows, tp)
    if rest:
        raise ValueError(
            f"{padded_rows} rows of the vocabulary cannot be cut into {tp} equal tensor-parallel slices. "
            f"Pad it to a multiple of {tp}."
        )
    lo, hi = shard_rows(slice_rows, pp)[pp_rank]
    return tp_rank * slice_rows + lo, tp_rank * slice_rows + hi
