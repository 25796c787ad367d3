"""`--ext-check layouts`: activations carry the name of their layout, and every operation on the grid asks for
it.

While a model runs, torch's own operations hand the tag on to results of the same shape, and refuse operands
of two layouts: the shapes of two layouts can be equal, and then nothing else would notice. What views and
attention make of a tensor has no tag; there the width of its features is checked alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.layouts import RESIDUAL, Layout

_MARK = "linear3d_layout"


class LayoutError(RuntimeError):
    """An activation is not in the layout that an operation needs."""


class Tags:
    """The check of one rank; `checked` counts what it has looked at."""

    def __init__(self, grid: Grid3D):
        self.grid = grid
        self.checked = 0

    def expect(self, x: Tensor, layout: Layout, features: int, where: str) -> None:
        """Raises LayoutError unless `x` `[.., .., features/parts]` is in this layout."""
        self.checked += 1
        found = getattr(x, _MARK, layout)
        if found != layout:
            raise LayoutError(f"--ext-check layouts: {where} takes {layout}, and gets {found}")
        parts = self.grid.size(layout.cuts[-1])
        if x.shape[-1] * parts != features:
            raise LayoutError(
                f"--ext-check layouts: {where} takes {features} features over {parts} ranks, and gets "
                f"{x.shape[-1]} on this one"
            )

    def mark(self, x: Tensor, layout: Layout) -> Tensor:
        """Say in which layout a new tensor is."""
        setattr(x, _MARK, layout)
        return x

    def watch(self, model: Any) -> None:
        """Hand tags on while `model` runs, and check what goes into and comes out of its layers."""
        forward, width = model.forward, model.config.hidden_size

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with _HandOn():
                return forward(*args, **kwargs)

        model.forward = watched
        for number, layer in enumerate(model.decoder.layers):
            layer.register_forward_pre_hook(
                functools.partial(self._layer_input, width, f"layer {number}"), with_kwargs=True
            )

    def _layer_input(self, width: int, where: str, module: Any, args: tuple, kwargs: dict) -> None:
        self.expect(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], RESIDUAL, width, where)


_MIXED: frozenset[Callable] = frozenset(
    getattr(owner, name) for owner in (torch, Tensor) for name in ("add", "sub", "mul", "div")
) | {Tensor.__add__, Tensor.__sub__, Tensor.__mul__, Tensor.add_, Tensor.mul_, Tensor.__iadd__}


class _HandOn(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        tagged = [a for a in args if isinstance(a, Tensor) and getattr(a, _MARK, None) is not None]
        if not tagged:
            return result
        layouts = {getattr(a, _MARK) for a in tagged}
        if len(layouts) > 1:
            if func in _MIXED:
                names = " and ".join(sorted(map(str, layouts)))
                raise LayoutError(f"--ext-check layouts: {func.__name__} of activations in {names}")
            return result
        if result.shape == tagged[0].shape and getattr(result, _MARK, None) is None:
            setattr(result, _MARK, layouts.pop())
        return result
