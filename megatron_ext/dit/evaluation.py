"""Do samples look like their class? A classifier that was fitted on the real digits answers."""

from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_ext.dit.data import load_digits

INK = 16  # the darkest value of scikit-learn's digits


@dataclass(frozen=True)
class Verdict:
    """Share of the samples that the classifier takes for their class (all, and by class), and how good it is.

    `on_real_digits` is the share of held-out real digits that it gets right: the most that one can ask for.
    """

    on_samples: float
    by_class: list[float]
    num_samples: int
    on_real_digits: float

    def as_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"a classifier takes {self.on_samples:.1%} of {self.num_samples} samples for their class "
            f"(worst class {min(self.by_class):.1%}; it gets {self.on_real_digits:.1%} of held-out real "
            "digits right)"
        )


def judge(samples: Tensor, labels: Tensor) -> Verdict:
    """Fit a classifier on the real digits and judge `samples` `[n, 1, frames, height, width]` in [-1, 1].

    Of a video the first frame is judged; enlarged digits are brought back to 8 x 8.
    """
    from sklearn.svm import SVC

    train, held_out = load_digits()
    classifier = SVC(gamma=0.001)  # scikit-learn's own example for this data set
    classifier.fit(train.pictures.reshape(-1, 64), train.classes)
    right = classifier.predict(as_digits(samples)) == labels.numpy()
    return Verdict(
        on_samples=float(right.mean()),
        by_class=[float(right[labels.numpy() == c].mean()) for c in np.unique(labels.numpy())],
        num_samples=len(labels),
        on_real_digits=float(classifier.score(held_out.pictures.reshape(-1, 64), held_out.classes)),
    )


def as_digits(samples: Tensor) -> np.ndarray:
    """Samples in the classifier's form: `[n, 64]`, ink from 0 to 16."""
    small = torch.nn.functional.adaptive_avg_pool2d(samples[:, 0, 0], 8)
    return ((small.clamp(-1, 1) + 1) * (INK / 2)).flatten(1).numpy()
