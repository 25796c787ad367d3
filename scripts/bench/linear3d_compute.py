"""The matrix products of a layer: counted, timed alone, or made as slow as on a device of a given speed."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
"""Attention's own products are part of one fused operation, and not among these."""


class Products(TorchDispatchMode):
    """Notes the shapes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[torch.Size, torch.Size]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self.shapes[args[0].shape, args[1].shape] += 1
        return func(*args, **(kwargs or {}))

    @property
    def multiply_adds(self) -> int:
        return sum(a.numel() * b[-1] * count for (a, b), count in self.shapes.items())

    def again(self) -> Callable[[], None]:
        """A function that computes as many products of these shapes."""
        pairs = [(torch.randn(a), torch.randn(b), count) for (a, b), count in self.shapes.items()]

        def compute() -> None:
            for a, b, count in pairs:
                for _ in range(count):
                    torch.matmul(a, b)

        return compute


class Paced(TorchDispatchMode):
    """Every product ends when a device of so many multiply-adds a second, one for each rank, would be
    done."""

    def __init__(self, multiply_adds: float):
        super().__init__()
        self.speed = multiply_adds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        end = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            end += args[0].numel() * args[1].shape[-1] / self.speed
            time.sleep(max(0.0, end - time.perf_counter()))
        return result
