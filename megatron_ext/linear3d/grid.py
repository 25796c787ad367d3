"""The grid: a tensor-parallel group of P = Gi x Gj x Gl ranks on three axes. Pure; no torch.

With y = x W^T, x `[M, K]` and W `[N, K]`: rows M (tokens) live on axis i, out-features N on axis j,
in-features K on axis l, and each of the three matrices is cut once more along the axis that it lacks, so that
every rank stores 1/P of each. Source: Bian et al., arXiv 2105.14450 (the cube); axes of any length are ours.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Literal, get_args

from megatron_ext import layout

Axis = Literal["i", "j", "l"]
AXES: tuple[Axis, ...] = get_args(Axis)
PLANES = ("ij", "il", "jl")
ORDERS = tuple("".join(order) for order in permutations(AXES))


@dataclass(frozen=True)
class Grid3D:
    """Lengths of the axes, and how ranks are numbered: `order` names the axes, the last one fastest.

    The default keeps j and l, whose traffic is on the critical path, among neighbours, l closest.
    """

    gi: int
    gj: int
    gl: int
    order: str = "ijl"

    def __post_init__(self) -> None:
        if min(self.sizes) < 1:
            raise ValueError(f"a grid of {self}: every axis counts ranks, so it is at least 1")
        if self.order not in ORDERS:
            raise ValueError(f"axis order {self.order!r}: use one of {', '.join(ORDERS)}")

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.gi, self.gj, self.gl

    @property
    def ranks(self) -> int:
        """P, the tensor-parallel size."""
        return self.gi * self.gj * self.gl

    def __str__(self) -> str:
        return f"{self.gi} x {self.gj} x {self.gl}"

    def size(self, axes: str) -> int:
        """Ranks along one axis or over several: `size("jl")` is Gj * Gl."""
        lengths = dict(zip(AXES, self.sizes, strict=True))
        product = 1
        for axis in axes:
            product *= lengths[axis]
        return product

    def coords(self, rank: int) -> dict[Axis, int]:
        """Place on each axis of a tensor-parallel rank."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not on a grid of {self}")
        found: dict[Axis, int] = {}
        for axis in reversed(self.order):
            rank, found[axis] = divmod(rank, self.size(axis))
        return found

    def rank_of(self, coords: Mapping[Axis, int]) -> int:
        """The inverse of `coords`."""
        rank = 0
        for axis in self.order:
            rank = rank * self.size(axis) + coords[axis]
        return rank

    def index(self, axes: str, coords: Mapping[Axis, int]) -> int:
        """Which of `size(axes)` parts is this rank's, when parts are numbered with the last axis fastest."""
        found = 0
        for axis in axes:
            found = found * self.size(axis) + coords[axis]
        return found

    def places(self, axes: str) -> layout.Groups:
        """Tensor-parallel ranks that differ on `axes` alone: one tuple for each group."""
        names = layout.Grid((axis, self.size(axis)) for axis in reversed(self.order))
        return names.groups(*axes)

    def owns(self, replicated: str, coords: Mapping[Axis, int]) -> bool:
        """Whether this rank's copy is the one that counts, of what is equal along the axes `replicated`."""
        return all(coords[axis] == 0 for axis in replicated)


def factorizations(ranks: int) -> Iterator[Grid3D]:
    """Every grid of that many ranks."""
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    for gi in divisors:
        for gj in divisors:
            if ranks % (gi * gj) == 0:
                yield Grid3D(gi, gj, ranks // gi // gj)
