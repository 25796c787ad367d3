"""Which data-parallel rank writes and reads which whole tensors of a checkpoint.

A unit is put together on all ranks, and each of them keeps only the parameters of its share, in host memory.
So a rank holds one whole unit and its share at a time, and everything is written and read once.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.paro.unit import Unit

Entry = ShardedTensor | ShardedTensorFactory


class Share:
    """Of a unit's parameters, those that this rank writes and reads."""

    def __init__(self, unit: Unit, loads: list[int]):
        """The largest parameter goes first, to the rank that has least; `loads` counts elements by rank."""
        self.unit = unit
        owner: dict[int, int] = {}
        for index in sorted(range(len(unit.params)), key=lambda index: -unit.params[index].numel()):
            owner[index] = loads.index(min(loads))
            loads[owner[index]] += unit.params[index].numel()
        self.mine = frozenset(index for index, rank in owner.items() if rank == unit.grid.rank)


def shares(units: Iterable[Unit]) -> list[Share]:
    """The shares of units; the same distribution on every rank."""
    units = list(units)
    loads = [0] * units[0].grid.n if units else []
    return [Share(unit, loads) for unit in units]


def host_copy(value: Tensor) -> Tensor:
    """A copy in host memory, whose source may be released."""
    return value.detach().to("cpu", copy=True)


def to_fill(param: Parameter, dtype: torch.dtype) -> Tensor:
    """A tensor in host memory for a loaded value of a parameter's shape; zeros, as rows may be missing."""
    return torch.zeros(param.shape, dtype=dtype, device="cpu")


def written_here(entry: Entry, value: Tensor, key: str | None = None) -> Entry:
    """A model's entry that holds `value`, perhaps under another key, and that this rank writes."""
    replica = entry.replica_id
    # The last number counts data-parallel copies; the others say which tensor-parallel copy this is.
    main = (*replica[:-1], 0) if isinstance(replica, tuple) else 0
    changes: dict[str, Any] = {"data": value, "replica_id": main, "key": key or entry.key}
    if isinstance(entry, ShardedTensor):
        changes["dtype"] = value.dtype
    return dataclasses.replace(entry, **changes)
