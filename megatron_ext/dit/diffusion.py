"""The way from a picture to noise and back: x_t = alpha(t) * picture + sigma(t) * noise, t from 0 to 1.

Training draws t and regresses on the noise or on the velocity dx/dt; sampling goes back in deterministic
steps (DDIM; on the linear path these are Euler steps of the velocity).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LAST_TIME = 0.99
"""Where sampling starts: at t = 1 nothing of the picture is left, and the noise alone does not tell it."""


@dataclass(frozen=True)
class Diffusion:
    """A path and what the model predicts on it. Times are `[b]`, pictures `[b, ...]`."""

    path: Literal["linear", "cosine"]
    prediction: Literal["velocity", "noise"]

    def noisy(self, picture: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The point of the path at `time`."""
        alpha, sigma, _, _ = self._coefficients(time, picture)
        return alpha * picture + sigma * noise

    def target(self, picture: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """What the model should predict at `time`."""
        if self.prediction == "noise":
            return noise
        _, _, alpha_rate, sigma_rate = self._coefficients(time, picture)
        return alpha_rate * picture + sigma_rate * noise

    def parts(self, noisy: Tensor, predicted: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Picture and noise that a prediction at `time` stands for; `time` is below 1."""
        alpha, sigma, alpha_rate, sigma_rate = self._coefficients(time, noisy)
        if self.prediction == "noise":
            return (noisy - sigma * predicted) / alpha, predicted
        determinant = alpha * sigma_rate - sigma * alpha_rate
        picture = (sigma_rate * noisy - sigma * predicted) / determinant
        noise = (alpha * predicted - alpha_rate * noisy) / determinant
        return picture, noise

    def step(self, noisy: Tensor, predicted: Tensor, time: Tensor, earlier: Tensor) -> Tensor:
        """From `time` to `earlier` along the prediction; pictures are kept within [-1, 1]."""
        picture, _ = self.parts(noisy, predicted, time)
        picture = picture.clamp(-1, 1)
        alpha, sigma, _, _ = self._coefficients(time, noisy)
        noise = (noisy - alpha * picture) / sigma
        return self.noisy(picture, noise, earlier)

    def _coefficients(self, time: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """alpha, sigma and their derivatives at `time`, ready to multiply `like`."""
        t = time.double().view(-1, *[1] * (like.dim() - 1))
        if self.path == "linear":
            values = (1 - t, t, -torch.ones_like(t), torch.ones_like(t))
        else:
            quarter = math.pi / 2
            cosine, sine = torch.cos(quarter * t), torch.sin(quarter * t)
            values = (cosine, sine, -quarter * sine, quarter * cosine)
        return tuple(value.to(like.dtype) for value in values)


def sample_times(steps: int) -> Tensor:
    """The times that sampling visits, `[steps + 1]`, from the noisiest to 0."""
    return torch.linspace(LAST_TIME, 0.0, steps + 1, dtype=torch.float64)
