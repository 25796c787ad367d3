"""Training samples: pictures or videos with class, noise and time, the same in every layout.

Whatever is random about a sample follows from the seed and its index in the training stream, so it depends
neither on the layout nor on whether the run was resumed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron_ext.dit.tokens import Geometry

HELD_OUT = 0.1
"""Share of the digits that is never trained on: for validation and to judge the classifier."""


@dataclass(frozen=True)
class Digits:
    """The digits of scikit-learn: pictures `[n, 8, 8]` of ink from 0 to 16, classes `[n]`."""

    pictures: np.ndarray
    classes: np.ndarray

    def videos(self, geometry: Geometry) -> torch.Tensor:
        """`[n, 1, frames, height, width]` in [-1, 1]; in each frame the digit is one pixel further right."""
        frames = [np.roll(self.pictures, frame, axis=2) for frame in range(geometry.frames)]
        small = torch.from_numpy(np.stack(frames, axis=1)).float() / 8 - 1
        size = (geometry.height, geometry.width)
        return torch.nn.functional.interpolate(small, size=size, mode="nearest")[:, None]


def load_digits() -> tuple[Digits, Digits]:
    """The digits for training and those held out, in a fixed order."""
    from sklearn import datasets

    pictures, classes = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(classes))
    pictures, classes = pictures.reshape(-1, 8, 8)[order], classes[order]
    kept = round(len(classes) * (1 - HELD_OUT))
    return Digits(pictures[:kept], classes[:kept]), Digits(pictures[kept:], classes[kept:])


class DiffusionDataset(Dataset):
    """`length` samples: `picture`, `noise` `[c, frames, height, width]`, `time` in [0, 1), `label`.

    `videos` and `classes` are gone through in a new order every epoch; without them the pictures are random.
    The label of a share `label_dropout` of the samples is `num_classes`, which stands for no class.
    """

    def __init__(
        self,
        length: int,
        geometry: Geometry,
        num_classes: int,
        seed: int,
        label_dropout: float,
        videos: torch.Tensor | None = None,
        classes: np.ndarray | None = None,
    ):
        self.length = length
        self.geometry = geometry
        self.num_classes = num_classes
        self.seed = seed
        self.label_dropout = label_dropout
        self.videos = videos
        self.classes = classes
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = keyed_rng(self.seed, index)
        picture, label = self._picture(index, rng)
        noise = rng.standard_normal(self.geometry.shape, dtype=np.float32)
        dropped = rng.random() < self.label_dropout
        return {
            "picture": picture,
            "noise": torch.from_numpy(noise),
            "time": rng.random(),
            "label": self.num_classes if dropped else int(label),
        }

    def _picture(self, index: int, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
        if self.videos is None:
            values = rng.standard_normal(self.geometry.shape, dtype=np.float32)
            return torch.from_numpy(values), rng.integers(self.num_classes)
        epoch, place = divmod(index, len(self.videos))
        if self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.videos))
            self._order = (epoch, order)
        chosen = self._order[1][place]
        return self.videos[chosen], self.classes[chosen]


def keyed_rng(seed: int, index: int) -> np.random.Generator:
    """Random numbers that belong to one sample."""
    return np.random.Generator(np.random.Philox(key=[seed, index]))
