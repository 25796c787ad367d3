"""Time and class as one vector a sample, and what layers make of it (AdaLN-Zero).

These layers are whole on every tensor-parallel rank. With sequence parallelism a rank sees only its tokens,
so what reaches their weights there is a part of the gradient: the mark `sequence_parallel` makes Megatron sum
the parts.
"""

import torch
from torch import Tensor
from torch.nn import functional

from megatron_ext.dit.tokens import sinusoids

WAVES = 128  # frequencies of the time embedding
TIME_SCALE = 1000.0  # the fastest of them turns this many radians from t = 0 to 1
WEIGHT_STD = 0.02


def whole_linear(inputs: int, outputs: int, seed: int | None) -> torch.nn.Linear:
    """A linear layer with zero bias and weights of `fill`."""
    linear = torch.nn.Linear(inputs, outputs)
    torch.nn.init.zeros_(linear.bias)
    fill(linear.weight, seed)
    return linear


def fill(weight: Tensor, seed: int | None) -> None:
    """Zeros (`seed` None), or normal numbers that only depend on the seed.

    Megatron gives every pipeline stage another seed, but what the stages share must start equal.
    """
    with torch.no_grad():
        if seed is None:
            weight.zero_()
        else:
            generator = torch.Generator(weight.device).manual_seed(seed)
            weight.normal_(0.0, WEIGHT_STD, generator=generator)


def mark_partial(module: torch.nn.Module, sequence_parallel: bool) -> None:
    """With sequence parallelism, have the gradients of these weights summed over tensor-parallel ranks."""
    for param in module.parameters():
        param.sequence_parallel = sequence_parallel


class Conditioner(torch.nn.Module):
    """Time `[b]` and class `[b]` (`num_classes`: none) to the conditioning vector `[b, hidden]`.

    All weights are rows of one table, `[2 * WAVES + hidden + num_classes + 1, hidden]`: the two layers of the
    time embedding and the classes. Every pipeline stage has a copy, and the gradients of the copies are
    summed after the distributed optimizer has split them over data-parallel ranks; one parameter, in a bucket
    of its own, is split in the same way on all stages.
    """

    def __init__(self, hidden_size: int, num_classes: int, seed: int):
        super().__init__()
        self.rows = (2 * WAVES, hidden_size, num_classes + 1)
        self.table = torch.nn.Parameter(torch.empty(sum(self.rows), hidden_size))
        fill(self.table, seed)

    def forward(self, time: Tensor, label: Tensor) -> Tensor:
        first, second, classes = self.table.split(self.rows)
        waves = sinusoids(time * TIME_SCALE, WAVES).to(self.table.dtype)
        return functional.silu(waves @ first) @ second + functional.embedding(label, classes)


class Modulation(torch.nn.Module):
    """Conditioning vector to `parts` vectors of the hidden size, all zero at the start of training."""

    def __init__(self, hidden_size: int, parts: int):
        super().__init__()
        self.parts = parts
        self.linear = whole_linear(hidden_size, parts * hidden_size, None)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        return self.linear(functional.silu(condition)).chunk(self.parts, dim=-1)


class PlainNorm(torch.nn.Module):
    """LayerNorm or RMSNorm without weights: shift and scale come from the modulation.

    The arguments are those that layer specs pass to a norm.
    """

    def __init__(self, config, hidden_size: int, eps: float):
        super().__init__()
        self.shape = (hidden_size,)
        self.eps = eps
        rms = config.normalization == "RMSNorm"
        self.norm = functional.rms_norm if rms else functional.layer_norm

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden, self.shape, eps=self.eps)


def modulate(hidden: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """`hidden` `[s, b, h]` scaled and shifted by sample `[b, h]`."""
    return hidden * (1 + scale) + shift
