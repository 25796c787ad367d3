"""Int8 in blocks: what crosses the links between groups when gradients and updates are sent quantised.

A block of 256 values travels as one fp32 scale and 256 signed bytes: 1 + 4/256 bytes per element. A value is
off by at most half a step, which is 1/254 of the largest magnitude in its block. A block that holds a NaN or
an infinity becomes NaN as a whole, so that nothing is hidden.
"""

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale."""
LEVELS = 127
"""Largest magnitude of a quantised value."""
_SCALE_BYTES = 4


def wire_bytes(numel: int) -> int:
    """Bytes of `numel` elements: one each, and a scale for every block, the last of which may be short."""
    return numel + _SCALE_BYTES * _blocks(numel)


def encode(values: Tensor, out: Tensor | None = None) -> Tensor:
    """Scales and bytes `[wire_bytes(n)]` (uint8) of values `[n]` of any float type; into `out` if given."""
    assert values.dim() == 1, values.shape
    assert values.is_floating_point(), values.dtype
    numel = values.numel()
    if out is None:
        out = torch.empty(wire_bytes(numel), dtype=torch.uint8, device=values.device)
    rows = _rows(values.float())
    scale = rows.abs().amax(dim=1) / LEVELS
    # A magnitude below fp32's normal range may have no scale: such a block is sent as zeros.
    steps = rows / torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    steps.round_().clamp_(-LEVELS, LEVELS).nan_to_num_(nan=0.0)
    scale.masked_fill_(~scale.isfinite(), torch.nan)
    cut = _SCALE_BYTES * scale.numel()
    out[:cut].copy_(scale.view(torch.uint8))
    out[cut:].view(torch.int8).copy_(steps.reshape(-1)[:numel])
    return out


def decode(wire: Tensor, numel: int) -> Tensor:
    """The fp32 values `[numel]` that `encode` put into `wire`: the same on every rank, bit for bit."""
    assert wire.numel() == wire_bytes(numel), (wire.numel(), numel)
    cut = _SCALE_BYTES * _blocks(numel)
    # A copy, since a row of a larger buffer need not lie where an fp32 value may.
    scale = wire[:cut].clone().view(torch.float32)
    rows = _rows(wire[cut:].view(torch.int8).float())
    return (rows * scale.unsqueeze(1)).reshape(-1)[:numel]


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _rows(values: Tensor) -> Tensor:
    """`[blocks, 256]`, filled up with zeros."""
    missing = -values.numel() % BLOCK
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, BLOCK)
