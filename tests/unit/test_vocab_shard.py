"""Rows of the vocabulary by rank: cover, balance, blocks, messages."""

import itertools
import subprocess
import sys

import pytest

from megatron_ext.vocab.shard import shard_rows, vocab_range


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"),
    [
        (256, 1, [256]),
        (256, 4, [64, 64, 64, 64]),
        (256, 3, [128, 64, 64]),
        (256, 5, [64, 64, 64, 32, 32]),  # four blocks of 64 are too few for five parts
        (256, 8, [32] * 8),
        (50304, 8, [6336, 6336, *[6272] * 6]),
        (255, 4, [64, 64, 64, 63]),  # odd: blocks of one row
        (7, 7, [1] * 7),
        (131072, 16, [8192] * 16),
    ],
)
def test_sizes(rows, parts, sizes):
    assert [hi - lo for lo, hi in shard_rows(rows, parts)] == sizes


@pytest.mark.parametrize("rows", [12, 96, 255, 256, 1000, 32000, 50304, 128256, 151936])
def test_ranges_cover_all_rows_and_differ_by_a_block(rows):
    for parts in range(1, 13):
        ranges = shard_rows(rows, parts)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == rows
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        sizes = [hi - lo for lo, hi in ranges]
        block = next(b for b in (64, 32, 16, 8, 4, 2, 1) if rows % b == 0 and rows // b >= parts)
        assert max(sizes) - min(sizes) in (0, block)
        assert min(sizes) > 0
        assert all(size % block == 0 for size in sizes)


def test_too_few_rows():
    message = r"3 rows .* to 4 pipeline ranks: .* Use at most 3 pipeline ranks, or pad"
    with pytest.raises(ValueError, match=message):
        shard_rows(3, 4)
    with pytest.raises(ValueError, match="into 0 parts: at least 1 is needed"):
        shard_rows(3, 0)


def test_order_is_tensor_parallel_first():
    """A rank's rows lie within stock's tensor-parallel slice."""
    ranges = [vocab_range(512, 2, tp, 3, pp) for tp in range(2) for pp in range(3)]
    assert ranges == [(0, 128), (128, 192), (192, 256), (256, 384), (384, 448), (448, 512)]


def test_slices_of_tensor_parallelism_are_equal():
    message = r"255 rows .* into 2 equal tensor-parallel slices\. Pad it to a multiple of 2"
    with pytest.raises(ValueError, match=message):
        vocab_range(255, 2, 0, 2, 0)


def test_needs_no_torch():
    code = "import sys, megatron_ext.vocab.shard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
