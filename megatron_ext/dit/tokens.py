"""Pictures and videos as tokens: patches, positions, and the share of a context-parallel rank.

A picture is a video of one frame. Tokens are in the order (frame, row, column) of their patches.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Geometry:
    """Size of a video `[channels, frames, height, width]` and of a patch `[frame_patch, patch, patch]`."""

    channels: int
    frames: int
    height: int
    width: int
    patch: int
    frame_patch: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.channels, self.frames, self.height, self.width

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches along frames, rows and columns."""
        return self.frames // self.frame_patch, self.height // self.patch, self.width // self.patch

    @property
    def num_tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def patch_dim(self) -> int:
        """Values of one token."""
        return self.channels * self.frame_patch * self.patch**2


def patchify(video: "Tensor", geometry: Geometry) -> "Tensor":
    """`[b, c, frames, height, width]` to tokens `[b, s, patch_dim]`."""
    from einops import rearrange

    p, t = geometry.patch, geometry.frame_patch
    return rearrange(video, "b c (f t) (h p) (w q) -> b (f h w) (c t p q)", t=t, p=p, q=p)


def unpatchify(tokens: "Tensor", geometry: Geometry) -> "Tensor":
    """Tokens `[b, s, patch_dim]` back to `[b, c, frames, height, width]`."""
    from einops import rearrange

    p, t = geometry.patch, geometry.frame_patch
    frames, rows, _ = geometry.grid
    pattern = "b (f h w) (c t p q) -> b c (f t) (h p) (w q)"
    return rearrange(tokens, pattern, f=frames, h=rows, t=t, p=p, q=p)


def share_of_rank(tokens: "Tensor", dim: int, group: "ProcessGroup") -> "Tensor":
    """What this context-parallel rank holds of all tokens along `dim`: chunk r of P.

    Attention sees all tokens from each, so the chunks are contiguous; the zigzag of causal models would
    balance nothing. The number of tokens is a multiple of P (`dit/rules.py`).
    """
    return tokens.chunk(group.size(), dim)[group.rank()]


def position_embedding(index: "Tensor", geometry: Geometry, hidden_size: int) -> "Tensor":
    """Fixed embedding of tokens by their place in the whole video: global numbers `[n]` to `[n, hidden]`.

    Each axis (row and column, and frame when there are several) has sines and cosines of falling frequency
    in its share of the hidden size; what does not divide stays zero.
    """
    import torch

    frames, rows, columns = geometry.grid
    places = [index // columns % rows, index % columns]
    if frames > 1:
        places.insert(0, index // (rows * columns))
    waves = hidden_size // (2 * len(places))
    parts = [sinusoids(place, waves) for place in places]
    out = torch.zeros(len(index), hidden_size, device=index.device)
    out[:, : 2 * waves * len(places)] = torch.cat(parts, dim=-1)
    return out


def sinusoids(value: "Tensor", waves: int, longest: float = 10000.0) -> "Tensor":
    """Sines and cosines of `value` `[n]` at `waves` frequencies from 1 to 1/longest: fp32 `[n, 2*waves]`."""
    import torch

    exponent = torch.arange(waves, dtype=torch.float64, device=value.device) / waves
    angle = value.double()[:, None] * longest**-exponent
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()
