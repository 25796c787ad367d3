"""Int8 blocks: sizes, errors, and what cannot be represented."""

import pytest
import torch

from megatron_ext.paro.quantise import BLOCK, decode, encode, wire_bytes


def there_and_back(values):
    wire = encode(values)
    assert wire.dtype == torch.uint8
    assert wire.numel() == wire_bytes(values.numel())
    return decode(wire, values.numel())


@pytest.mark.parametrize(("numel", "size"), [(1, 5), (255, 259), (256, 260), (257, 265), (1024, 1040)])
def test_bytes(numel, size):
    assert wire_bytes(numel) == size
    assert encode(torch.ones(numel)).numel() == size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("numel", [1, 3, 256, 1000])
def test_error_is_half_a_step_of_its_own_block(numel, dtype):
    values = (torch.randn(numel) * 10.0 ** (torch.arange(numel) // BLOCK - 2)).to(dtype)
    found = there_and_back(values)
    assert found.dtype == torch.float32
    for begin in range(0, numel, BLOCK):
        block = values[begin : begin + BLOCK].float()
        error = (found[begin : begin + BLOCK] - block).abs().max()
        assert error <= block.abs().max() / 254 * 1.0001


def test_whole_steps_and_signs_are_exact():
    values = torch.arange(-127, 128).float()
    assert torch.equal(there_and_back(values), values)
    assert torch.equal(there_and_back(-4 * values), -4 * values)


def test_zeros_and_magnitudes_at_the_ends_of_the_range():
    assert torch.equal(there_and_back(torch.zeros(300)), torch.zeros(300))
    huge = torch.full((256,), torch.finfo(torch.float32).max / 2)
    assert torch.allclose(there_and_back(huge), huge)
    tiny = torch.full((256,), 1e-45)
    assert (there_and_back(tiny) - tiny).abs().max() <= 1e-45
    small = torch.full((256,), 1e-42)  # below the normal range: the scale has few bits
    assert (there_and_back(small) - small).abs().max() <= 2e-43


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_a_bad_value_is_nan_and_others_are_not(bad):
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 7] = bad
    found = there_and_back(values)
    assert found[BLOCK : 2 * BLOCK].isnan().all()
    assert torch.equal(found[:BLOCK], values[:BLOCK])
    assert torch.equal(found[2 * BLOCK :], values[2 * BLOCK :])


def test_into_a_row_that_is_not_aligned():
    rows = torch.zeros(
        (2, wire_bytes(301)), dtype=torch.uint8
    )  # 309 bytes: the second row starts at an odd one
    values = torch.randn(301)
    encode(values, out=rows[1])
    assert torch.equal(decode(rows[1], 301), there_and_back(values))
    assert not rows[0].any()
