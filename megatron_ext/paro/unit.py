"""The flat buffers of one unit on this rank: parameters, gradients, and the parts of them that it holds.

Views into a buffer stay valid while its storage is released (resized to nothing) and allocated again, so that
modules and optimizers keep their tensors whatever the strategy.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.paro.blocks import Grid
from megatron_ext.paro.layout import UnitLayout, UnitParams
from megatron_ext.paro.strategy import Level, Strategy


def release(flat: Tensor) -> None:
    """Free the storage of a whole buffer; views of it stay."""
    flat.untyped_storage().resize_(0)


def allocate(flat: Tensor) -> None:
    """Give a released buffer storage again, with undefined contents."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def is_released(flat: Tensor) -> bool:
    """Whether a buffer has no storage."""
    return flat.untyped_storage().size() == 0


class Unit:
    """Parameters and gradients of a unit in flat buffers; `padded` elements each when whole.

    Attributes:
        full: all parameters; without storage while they are split and at rest.
        rest: this rank's part of the parameters at their level (`full` itself when they are not split).
        grad_full: gradients of all parameters as backward writes them; without storage between backward
            passes when gradients are split. None if frozen.
        grads: the accumulated gradient, this rank's part at its level.
        staged: new values of the part that this rank updates, in fp32, where an update is sent as differences
            from the old values; else None, and they are in `rest`.
        strategy: the levels; gradients that come late are not split, since passes add to them all through a
            step.
    """

    def __init__(
        self, source: UnitParams, grid: Grid, strategy: Strategy, grad_dtype: torch.dtype, factor: float
    ):
        self.name, self.module, self.trainable = source.name, source.module, source.trainable
        self.params, self.names, self.late = source.params, source.names, source.late
        if source.late:
            strategy = Strategy(strategy.params, Level.N, strategy.optimizer)
        self.grid, self.strategy, self.factor = grid, strategy, factor
        self.layout = UnitLayout.of(source.name, [param.numel() for param in source.params])
        self.padded = grid.padded(self.layout.numel)
        self._place_params(source.dtype)
        self.grad_full: Tensor | None = None
        self.grads: Tensor | None = None
        self.staged: Tensor | None = None
        if self.trainable:
            self._place_grads(grad_dtype)

    # --- parameters -----------------------------------------------------------------------------------------

    def _place_params(self, dtype: torch.dtype) -> None:
        device = self.params[0].device
        self.full = torch.zeros(self.padded, dtype=dtype, device=device)
        for index, param in enumerate(self.params):
            view = self.view(self.full, index)
            view.copy_(param.data)
            param.data = view
        if self.strategy.params is Level.N:
            self.rest = self.full
        else:
            self.rest = self.full[self.own(Level.N, self.strategy.params)].clone()
            release(self.full)

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Parameter `index` in its shape, as a view of a whole buffer."""
        offset, numel = self.layout.offsets[index], self.layout.numels[index]
        return flat[offset : offset + numel].view(self.params[index].shape)

    def own(self, outer: Level, level: Level) -> slice:
        """This rank's part at `level` within its part at the coarser `outer`."""
        return self.grid.within(level, outer, self.padded)

    @property
    def split(self) -> bool:
        """Whether parameters are split, so that they must be gathered for use."""
        return self.strategy.params is not Level.N

    @property
    def gathered(self) -> bool:
        """Whether `full` has storage; its contents are valid once the gather has ended."""
        return not is_released(self.full)

    def place_own(self) -> None:
        """Give `full` storage, and put this rank's part in its place."""
        allocate(self.full)
        self.full[self.own(Level.N, self.strategy.params)].copy_(self.rest)

    def drop_full(self) -> None:
        """Release the gathered parameters."""
        if self.split and self.gathered:
            release(self.full)

    def keep_own(self) -> None:
        """Take this rank's part from `full`, after something else wrote there."""
        assert self.gathered, f"{self.name} is not gathered"
        if self.split:
            self.rest.copy_(self.full[self.own(Level.N, self.strategy.params)])

    def shard(self, index: int) -> tuple[int, int]:
        """Part of parameter `index` that this rank updates, counted from the parameter's start."""
        return self.layout.overlap(index, *self.grid.range(self.strategy.optimizer, self.padded))

    def param_shard(self, index: int) -> Tensor:
        """View `[elements]` of the part of parameter `index` that this rank updates, in `rest`."""
        return self._cut(self.rest, self.strategy.params, index)

    def grad_shard(self, index: int) -> Tensor:
        """View `[elements]` of the reduced gradient of that part, in `grads`."""
        assert self.grads is not None
        return self._cut(self.grads, self.strategy.grads, index)

    def cut_states(self, part: Tensor, index: int) -> Tensor:
        """View `[elements]` of what belongs to parameter `index`, in a buffer like the optimizer's part."""
        return self._cut(part, self.strategy.optimizer, index)

    def _cut(self, flat: Tensor, level: Level, index: int) -> Tensor:
        first, last = self.shard(index)
        start = self.layout.offsets[index] - self.grid.range(level, self.padded)[0]
        return flat[start + first : start + last] if last > first else flat[:0]

    def stage(self) -> None:
        """Keep new values apart from the old ones until the update is sent."""
        size = self.padded // self.grid.parts(self.strategy.optimizer)
        self.staged = torch.zeros(size, dtype=torch.float32, device=self.rest.device)

    def new_values(self, index: int) -> Tensor:
        """View `[elements]` that takes the new values of this rank's part of parameter `index`."""
        return self.param_shard(index) if self.staged is None else self.cut_states(self.staged, index)

    # --- gradients ------------------------------------------------------------------------------------------

    def _place_grads(self, dtype: torch.dtype) -> None:
        level, device = self.strategy.grads, self.params[0].device
        self.grad_full = torch.zeros(self.padded, dtype=dtype, device=device)
        self._views = [self.view(self.grad_full, index) for index in range(len(self.params))]
        if level is Level.N:
            self.grads = self.grad_full
        else:
            size = self.padded // self.grid.parts(level)
            self.grads = torch.zeros(size, dtype=dtype, device=device)
            release(self.grad_full)
        self.point_at_full()

    @property
    def transient(self) -> bool:
        """Whether gradients are split, so that `grad_full` lives during a backward pass only."""
        return self.trainable and self.strategy.grads is not Level.N

    def open_grads(self) -> None:
        """Have zeros to which backward adds; nothing if there is something already."""
        if self.transient and is_released(self.grad_full):
            allocate(self.grad_full)
            self.grad_full.zero_()

    def close_grads(self) -> None:
        """Release what has been reduced."""
        if self.transient:
            release(self.grad_full)

    @property
    def owned(self) -> int:
        """Elements of parameters that this rank updates, alignment and padding left out."""
        if not self.trainable:
            return 0
        ranges = (self.shard(index) for index in range(len(self.params)))
        return sum(last - first for first, last in ranges)

    def point_at_full(self) -> None:
        """`main_grad` of every parameter is its place in `grad_full`: what backward expects."""
        for param, view in zip(self.params, self._views, strict=True):
            param.main_grad = view

    def point_at_shards(self) -> None:
        """`main_grad` is the reduced part that this rank updates: what the optimizer may use."""
        for index, param in enumerate(self.params):
            shard = self.grad_shard(index)
            param.main_grad = shard.view(param.shape) if shard.numel() == param.numel() else shard

    def reduced(self) -> Tensor:
        """This rank's part of the reduced gradient, at the level of the optimizer states."""
        return self.grads[self.own(self.strategy.grads, self.strategy.optimizer)]

    def spread_gradient(self) -> Tensor:
        """A whole buffer with this rank's reduced part in its place, and zeros elsewhere."""
        flat = torch.zeros(self.padded, dtype=self.grads.dtype, device=self.grads.device)
        flat[self.own(Level.N, self.strategy.optimizer)] = self.reduced()
        return flat

    def describe(self) -> dict[str, Any]:
        """For the run record; `UnitSize.of_record` reads it."""
        return {
            "name": self.name,
            "numel": sum(self.layout.numels),
            "padded": self.padded,
            "owned": self.owned,
            "param_bytes": self.rest.element_size(),
            "grad_bytes": self.grads.element_size() if self.trainable else 0,
            "late": self.late,
        }

    def check_unchanged(self) -> None:
        """Raises RuntimeError when a parameter was frozen or unfrozen since the buffers were made."""
        for name, param in zip(self.names, self.params, strict=True):
            if param.requires_grad != self.trainable:
                now = "trainable" if param.requires_grad else "frozen"
                raise RuntimeError(
                    f"{name} became {now} after the model was wrapped. PaRO lays out its buffers once: "
                    "freeze or unfreeze parameters in the model provider, before training starts."
                )


def by_param(units: list[Unit]) -> dict[Parameter, tuple[Unit, int]]:
    """Where each parameter lies: its unit, and its number in it."""
    return {param: (unit, index) for unit in units for index, param in enumerate(unit.params)}
