"""How activations and weights lie on the grid, and what a linear layer moves. Pure; no torch.

A layout names, for each dimension of a tensor, the axes that cut it, the outermost cut first. Along the axes
that it does not name, ranks hold equal copies. Between two linear layers the roles of j and l change: the
residual stream is cut along the sequence over j and along features over l, the inside of an MLP or of
attention the other way round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.linear3d.grid import AXES, Axis, Grid3D


@dataclass(frozen=True)
class Layout:
    """Axes that cut each dimension, as one string for each: ("j", "i", "l")."""

    name: str
    cuts: tuple[str, ...]

    @property
    def axes(self) -> str:
        """All axes that cut something."""
        return "".join(self.cuts)

    @property
    def replicated(self) -> str:
        """Axes along which ranks hold equal copies, so that gradients have to be summed over them."""
        return "".join(axis for axis in AXES if axis not in self.axes)

    def local_shape(self, grid: Grid3D, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of a rank's part. Raises ValueError when a dimension cannot be cut evenly."""
        local = []
        for dim, (size, cut) in enumerate(zip(shape, self.cuts, strict=True)):
            parts = grid.size(cut)
            if size % parts:
                raise ValueError(
                    f"{self.name}: dimension {dim} of {tuple(shape)} is not a multiple of {parts}"
                )
            local.append(size // parts)
        return tuple(local)

    def slices(self, grid: Grid3D, coords: Mapping[Axis, int], shape: Sequence[int]) -> tuple[slice, ...]:
        """Where a rank's part lies in the whole tensor."""
        local = self.local_shape(grid, shape)
        starts = (grid.index(cut, coords) * n for cut, n in zip(self.cuts, local, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, local, strict=True))

    def __str__(self) -> str:
        return f"{self.name} [{', '.join(f'/{cut}' if cut else 'whole' for cut in self.cuts)}]"


# Activations [s, b, features].
RESIDUAL = Layout("residual", ("j", "i", "l"))
INNER = Layout("inner", ("l", "i", "j"))
HEADS = Layout("heads", ("", "i", "jl"))
WHOLE_ROWS = Layout("whole-rows", ("", "i", ""))

# Weights [out, in]. The cut over i is along out-features: gathering it is contiguous.
COLUMN = Layout("column", ("ji", "l"))
ROW = Layout("row", ("li", "j"))
PLANE = Layout("plane", ("jli", ""))

WEIGHT_AXIS: Axis = "i"


@dataclass(frozen=True)
class Move:
    """One collective on an activation: over `axis`, along tensor dimension `dim`."""

    axis: Axis
    dim: int


@dataclass(frozen=True)
class LinearPlan:
    """What y = x W^T does on the grid: gathers of x, a gather of W over i, reduce-scatters of y.

    The backward pass runs them in reverse: gathers of dy, reduce-scatters of dx, and of dW over i.
    """

    gathers: tuple[Move, ...]
    reduces: tuple[Move, ...]


@dataclass(frozen=True)
class Site:
    """A place in the model where a weight is used."""

    name: str
    given: Layout | None
    """Layout of what comes in; None for token ids."""
    weight: Layout
    result: Layout
    plan: LinearPlan

    @property
    def bias(self) -> Layout:
        """Layout of the bias `[out]`, which is added to the finished sum."""
        return Layout(f"{self.name}.bias", (self.result.cuts[-1],))


def plan_linear(given: Layout, weight: Layout, result: Layout) -> LinearPlan:
    """Moves that take x in `given` through a weight in `weight` to y in `result`.

    Raises:
        ValueError: the three layouts do not fit together.
    """
    last = len(given.cuts) - 1
    gathers = [Move(axis, dim) for dim in range(last) for axis in reversed(given.cuts[dim]) if axis != "i"]
    inside = weight.cuts[1]
    extra = given.cuts[last].removeprefix(inside)
    if given.cuts[last] != inside + extra:
        raise ValueError(f"features of {given} are not those of {weight}")
    gathers += [Move(axis, last) for axis in reversed(extra)]
    return LinearPlan(tuple(gathers), _reduces(inside, weight.cuts[0].removesuffix("i"), result))


def plan_lookup(weight: Layout, result: Layout) -> LinearPlan:
    """Moves of an embedding: every rank looks up its rows of the table, and the sum is what is meant."""
    return LinearPlan((), _reduces(weight.cuts[0].removesuffix("i"), weight.cuts[1], result))


def _reduces(partial: str, features: str, result: Layout) -> tuple[Move, ...]:
    """Where the sum over `partial` is scattered, from features cut by `features` to `result`."""
    moves = []
    for axis in partial:
        dim = next((dim for dim, cut in enumerate(result.cuts) if axis in cut), None)
        if dim is None:
            raise ValueError(f"the sum over {axis} has no place in {result}")
        moves.append(Move(axis, dim))  # type: ignore[arg-type]
    scattered = "".join(m.axis for m in moves if m.dim == len(result.cuts) - 1)
    if features + scattered != result.cuts[-1]:
        raise ValueError(f"features cut over {features + scattered} are not those of {result}")
    return tuple(moves)


def _linear(name: str, given: Layout, weight: Layout, result: Layout) -> Site:
    return Site(name, given, weight, result, plan_linear(given, weight, result))


LAYER_SITES = {
    "qkv": _linear("qkv", RESIDUAL, COLUMN, HEADS),
    "proj": _linear("proj", HEADS, ROW, RESIDUAL),
    "fc1": _linear("fc1", RESIDUAL, COLUMN, INNER),
    "fc2": _linear("fc2", INNER, ROW, RESIDUAL),
}

HEAD_SITES = {
    "plane": _linear("head", RESIDUAL, PLANE, HEADS),
    "grid": _linear("head", RESIDUAL, COLUMN, INNER),
}

EMBEDDING_SITES = {
    "plane": Site("embedding", None, PLANE, RESIDUAL, plan_lookup(PLANE, RESIDUAL)),
    "grid": Site("embedding", None, COLUMN, RESIDUAL, plan_lookup(COLUMN, RESIDUAL)),
}

VOCAB_AXES = {"plane": "jl", "grid": "j"}
"""Axes over which the logits of a token are spread."""

VECTOR = Layout("vector", ("l",))
"""Norm weights and biases `[h]`."""
POSITIONS = Layout("positions", ("", "l"))
"""Learned positions `[S, h]`: every rank has all rows, and uses those of its part of the sequence."""


def glu_rows(grid: Grid3D, coords: Mapping[Axis, int], rows: int, layout: Layout = COLUMN) -> list[slice]:
    """Rows `[gate; up]` of a gated weight `[rows, in]` that a rank stores: one slice of each half."""
    half = layout.slices(grid, coords, (rows // 2, grid.size(layout.cuts[1])))[0]
    return [half, slice(half.start + rows // 2, half.stop + rows // 2)]
