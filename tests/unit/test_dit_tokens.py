"""Patches, positions and shares of ranks: pure functions of the diffusion transformer."""

import pytest
import torch

from megatron_ext.dit.tokens import (
    Geometry,
    patchify,
    position_embedding,
    share_of_rank,
    sinusoids,
    unpatchify,
)

PICTURE = Geometry(channels=3, frames=1, height=8, width=12, patch=4)
VIDEO = Geometry(channels=2, frames=6, height=4, width=8, patch=2, frame_patch=3)


class Group:
    """As much of a process group as slicing asks for."""

    def __init__(self, size: int, rank: int):
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize(("geometry", "tokens", "values"), [(PICTURE, 6, 48), (VIDEO, 16, 24)])
def test_patchify_round_trip(geometry, tokens, values):
    videos = torch.randn(3, *geometry.shape)
    patches = patchify(videos, geometry)
    assert patches.shape == (3, tokens, values) == (3, geometry.num_tokens, geometry.patch_dim)
    assert torch.equal(unpatchify(patches, geometry), videos)


def test_a_token_is_a_patch_in_the_order_frame_row_column():
    video = torch.arange(2 * 6 * 4 * 8).view(1, *VIDEO.shape)
    tokens = patchify(video, VIDEO)
    # Token 13 of the grid 2 x 2 x 4: second frame patch, second row, second column.
    expected = video[0, :, 3:6, 2:4, 2:4]
    assert torch.equal(tokens[0, 13], expected.flatten())


def test_shares_are_contiguous_and_cover_the_tokens():
    tokens = torch.arange(24).view(2, 12)
    shares = [share_of_rank(tokens, 1, Group(4, rank)) for rank in range(4)]
    assert [share[0].tolist() for share in shares] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert torch.equal(torch.cat(shares, dim=1), tokens)


@pytest.mark.parametrize("geometry", [PICTURE, VIDEO], ids=["picture", "video"])
def test_positions_are_global_and_distinct(geometry):
    every = torch.arange(geometry.num_tokens)
    whole = position_embedding(every, geometry, 48)
    assert whole.shape == (geometry.num_tokens, 48)
    assert torch.cdist(whole, whole).fill_diagonal_(1.0).min() > 0.1
    parts = [position_embedding(share_of_rank(every, 0, Group(2, rank)), geometry, 48) for rank in (0, 1)]
    assert torch.equal(torch.cat(parts), whole)


def test_each_axis_has_its_share_of_the_embedding():
    """Tokens of one row agree in the row's half and differ in the column's; likewise for frames."""
    flat = position_embedding(torch.arange(6), PICTURE, 48)
    assert torch.equal(flat[0, :24], flat[1, :24])
    assert not torch.equal(flat[0, 24:], flat[1, 24:])
    assert torch.equal(flat[1, 24:], flat[4, 24:])
    solid = position_embedding(torch.arange(16), VIDEO, 48)
    assert torch.equal(solid[5, 16:], solid[13, 16:])
    assert not torch.equal(solid[5, :16], solid[13, :16])


def test_hidden_size_that_no_axis_divides():
    embedded = position_embedding(torch.arange(16), VIDEO, 50)
    assert embedded.shape == (16, 50)
    assert (embedded[:, 48:] == 0).all()


def test_sinusoids():
    waves = sinusoids(torch.tensor([0.0, 2.0]), 4, longest=16.0)
    assert waves[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    angles = 2.0 * torch.tensor([1.0, 0.5, 0.25, 0.125])
    assert torch.allclose(waves[1], torch.cat([angles.sin(), angles.cos()]))
    assert sinusoids(torch.tensor([3], dtype=torch.int64), 4).dtype == torch.float32
