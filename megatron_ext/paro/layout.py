"""Which parameters share a flat buffer, and where in it they lie. The same on every rank and for every
strategy.

A unit is what is gathered and reduced at once: the parameters of one transformer layer, or of everything
outside the layers ("root"). Parameters of different types, and frozen and trainable ones, never share a
buffer. A weight that another pipeline stage holds a copy of has a unit of its own, so that both stages cut it
alike.

Offsets depend on the model alone; only the padding behind the last parameter depends on the number of ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ALIGN = 64
"""Elements to whose multiples parameters are aligned, for the kernels that read them."""


@dataclass(frozen=True)
class UnitLayout:
    """Places of the parameters of a unit in its flat buffer."""

    name: str
    numels: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, name: str, numels: Sequence[int]) -> "UnitLayout":
        """Parameters one after the other, each aligned."""
        offsets, end = [], 0
        for numel in numels:
            offsets.append(end)
            end += -(-numel // ALIGN) * ALIGN
        return cls(name, tuple(numels), tuple(offsets))

    @property
    def numel(self) -> int:
        """Elements up to the end of the last parameter, its alignment included; 0 if there are none."""
        return sum(-(-numel // ALIGN) * ALIGN for numel in self.numels)

    def overlap(self, index: int, begin: int, end: int) -> tuple[int, int]:
        """The part of parameter `index` that lies in [begin, end), counted from the parameter's start."""
        offset, numel = self.offsets[index], self.numels[index]
        first = min(max(begin - offset, 0), numel)
        return first, max(first, min(end - offset, numel))


@dataclass(frozen=True)
class UnitParams:
    """Parameters that share a flat buffer."""

    name: str
    module: Any
    """The module whose forward pass uses them; None for the root."""
    params: "tuple[torch.nn.Parameter, ...]"
    names: tuple[str, ...]
    trainable: bool
    late: bool = False
    """Whether gradients come outside of autograd and at any time of a step."""

    @property
    def dtype(self) -> "torch.dtype":
        """Their type."""
        return self.params[0].dtype


ROOT = "root"


def split_units(model: Any, layer_type: type, late: frozenset[str] = frozenset()) -> list[UnitParams]:
    """All parameters of `model` in units: the root ones first, then the layers in the order of the modules.

    A parameter that several modules share belongs to the first of them. `late` names parameters outside of
    layers whose gradients come late (see `UnitParams`); they have a unit of their own.
    """
    names = {param: unwrapped(name) for name, param in model.named_parameters()}
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, layer_type)]
    in_layer = {param for _, layer in layers for param in layer.parameters()}
    root = [param for param in names if param not in in_layer]
    slow = [param for param in root if names[param] in late]
    rest = [param for param in root if names[param] not in late]
    tied = [param for param in rest if getattr(param, "shared_embedding", False)]
    plain = [param for param in rest if not getattr(param, "shared_embedding", False)]
    units = [*_by_kind(ROOT, None, plain, names), *_by_kind(f"{ROOT}.tied", None, tied, names)]
    units += _by_kind(f"{ROOT}.late", None, slow, names, late=True)
    taken: set[Any] = set()
    for name, layer in layers:
        own = [param for param in layer.parameters() if param not in taken]
        taken.update(own)
        units += _by_kind(unwrapped(name), layer, own, names)
    return units


def unwrapped(name: str) -> str:
    """A parameter's or module's name without the prefixes of wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _by_kind(name: str, module: Any, params: list, names: dict, late: bool = False) -> Iterator[UnitParams]:
    kinds: dict[tuple, list] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.requires_grad), []).append(param)
    for (dtype, trainable), members in kinds.items():
        parts = [name]
        if len({key[0] for key in kinds}) > 1:
            parts.append(str(dtype).removeprefix("torch."))
        if not trainable:
            parts.append("frozen")
        found = tuple(names[param] for param in members)
        yield UnitParams(".".join(parts), module, tuple(members), found, trainable, late)
