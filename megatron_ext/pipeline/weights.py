"""Weight gradients in a pass of their own: what a split backward pass leaves for W.

A linear layer's backward pass has two parts: the gradient of its input, which the stage before waits for, and
that of its weight, which nobody waits for. Stock's linear function can leave the second part out and hand the
output's gradient over (an option made for --defer-embedding-wgrad-compute). So while a chunk's forward pass
runs, layers of `megatron.core.tensor_parallel` are called with that option and without their weight's
autograd, and W adds the products to Megatron's gradient buffers. Biases and norms stay with B.

Data-parallel hooks never see these weights: they are announced as ready after the last W.
Source: Qi et al., arXiv 2401.10241, section 2.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.hooks import bound
from megatron_ext.vocab.functional_weight import accumulate_weight_gradient
from megatron_ext.vocab.output import main_gradient

Key = tuple[int, int]
"""(microbatch, chunk)"""


@dataclass(frozen=True)
class _Product:
    """The weight gradient of one call: gradient^T input, once backward has appended the gradient."""

    weight: Parameter
    input: Tensor
    gradients: list[Tensor]
    gathered: bool
    """The input is split along the sequence, over the ranks of `group`."""
    group: Any


class WeightGradients:
    """Queues of weight gradients by microbatch and chunk; one object per job."""

    def __init__(self, fused: bool):
        self.fused = fused
        self.kept: set[int] = set()
        """Ids of weights that stay with B."""
        self.count = 0
        """Weight gradients computed in W passes so far."""
        self._active: list[_Product] | None = None
        self._queues: dict[Key, list[_Product]] = {}
        self._seen: dict[int, dict[int, Parameter]] = {}  # chunk -> its weights that came through here

    @contextlib.contextmanager
    def during(self, key: Key) -> Iterator[None]:
        """While a forward pass runs, or a backward pass that recomputes it."""
        self._active = self._queues.setdefault(key, [])
        try:
            yield
        finally:
            self._active = None

    def forget(self) -> None:
        """After an evaluation step, which has no backward passes."""
        assert not any(self._queues.values()), "weight gradients were left over"
        self._queues.clear()

    def linear(self, original: Callable) -> Callable:
        """Wrap of stock's linear function."""

        @functools.wraps(original)
        def call(input, weight, bias, *args, **kwargs):
            if self._active is None or not torch.is_grad_enabled() or id(weight) in self.kept:
                return original(input, weight, bias, *args, **kwargs)
            named = bound(original, (input, weight, bias, *args), kwargs)
            # Without a gradient of its input nothing would come through; other users of the buffer go first.
            if not input.requires_grad or named["grad_output_buffer"] is not None:
                return original(input, weight, bias, *args, **kwargs)
            product = _Product(weight, input.detach(), [], named["sequence_parallel"], named["tp_group"])
            named |= {
                "weight": weight.detach(),
                "bias": None,  # added outside, so that its gradient is autograd's
                "gradient_accumulation_fusion": True,  # the variant that makes no product of its own
                "grad_output_buffer": product.gradients,
                "wgrad_deferral_limit": 0,
            }
            output = original(**named)
            self._active.append(product)
            return output if bias is None else output + bias

        return call

    @torch.no_grad()
    def run(self, key: Key) -> None:
        """W of a microbatch: add its weight gradients to the buffers."""
        seen = self._seen.setdefault(key[1], {})
        for product in self._queues.pop(key):
            for gradient in product.gradients:
                self._add(product, gradient)
                seen[id(product.weight)] = product.weight

    def _add(self, product: _Product, gradient: Tensor) -> None:
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        x = product.input
        if product.gathered:
            x = gather_from_sequence_parallel_region(x, group=product.group)
        weight = product.weight
        accumulate_weight_gradient(
            main_gradient(weight),
            gradient.reshape(-1, gradient.shape[-1]),
            x.reshape(-1, x.shape[-1]),
            slice(None),
            fused=self.fused,
        )
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
        self.count += 1

    def weights(self, chunk: int) -> list[Parameter]:
        """Weights of a chunk whose gradients W has made."""
        return list(self._seen.get(chunk, {}).values())
