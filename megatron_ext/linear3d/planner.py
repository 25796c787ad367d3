"""Which grid to take: all grids of P ranks by exact bytes, links, memory and what they can split. Pure.

Collectives are taken as rings, as NCCL and gloo run them: what a rank sends passes each link of its ring
once, so an axis with m of its ranks on each node leaves the node over what m ranks have of its NICs. Every
step of a ring has a latency. Gathers of weights and sums of their gradients (axis i) run beside compute as
far as there is any; those of activations (j, l) do not.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from megatron_ext.linear3d.grid import AXES, Grid3D, factorizations
from megatron_ext.linear3d.layouts import LAYER_SITES, RESIDUAL
from megatron_ext.linear3d.memory import edge_parameters, layer_memory
from megatron_ext.linear3d.sizes import ModelSizes, Save, VocabMode
from megatron_ext.linear3d.splits import unsplit
from megatron_ext.linear3d.volume import Volume, edge_bytes, layer_bytes
from megatron_ext.paro.network import Link


@dataclass(frozen=True)
class Situation:
    """What to choose for."""

    sizes: ModelSizes
    ranks: int
    layers: int
    node: int
    """Ranks of the tensor-parallel group on one node, which are consecutive."""
    inside: Link
    between: Link
    """What one rank has of the way out of its node while all of them send."""
    save: Save = "shard_weight"
    vocab: VocabMode = "plane"
    order: str = "ijl"
    flops: float = inf
    """Floating-point operations per second of a rank; without a figure compute takes no time."""
    overlap: bool = True
    memory_limit: int | None = None
    state_bytes: int = 16
    """Of a parameter: weight, gradient and optimizer states."""


@dataclass(frozen=True)
class Candidate:
    """A grid and what it costs, for one microbatch through one layer, forward and backward."""

    grid: Grid3D
    axis_bytes: dict[str, int]
    calls: dict[str, int]
    seconds: float
    communication: float
    memory: int
    """Bytes of a rank for all layers and vocabulary rows."""
    fits: bool

    @property
    def bytes(self) -> int:
        """Over all axes."""
        return sum(self.axis_bytes.values())


@dataclass(frozen=True)
class Refused:
    """A grid that cannot split the model, and why."""

    grid: Grid3D
    reasons: tuple[str, ...]


def peers(grid: Grid3D, axis: str, node: int) -> tuple[int, int]:
    """Peers inside the node and outside of it, of the rank that has most outside."""
    worst = (grid.size(axis) - 1, 0)
    for place in grid.places(axis):
        for rank in place:
            outside = sum(1 for other in place if other // node != rank // node)
            if outside > worst[1]:
                worst = (len(place) - 1 - outside, outside)
    return worst


def layer_calls(grid: Grid3D, save: Save) -> Counter[str]:
    """Large collectives of a layer over each axis, forward and backward; norms have two small ones more."""
    calls: Counter[str] = Counter()
    for site in LAYER_SITES.values():
        calls["i"] += 2 + (save != "gathered")
        for move in site.plan.gathers:
            calls[move.axis] += 2 + (save == "shard_all")
        for move in site.plan.reduces:
            calls[move.axis] += 2
    calls["l"] += 4  # statistics
    return Counter({axis: n for axis, n in calls.items() if grid.size(axis) > 1})


def axis_seconds(s: Situation, grid: Grid3D, axis: str, num_bytes: int, calls: int) -> float:
    """Time of `calls` collectives that send `num_bytes` together over an axis."""
    near, far = peers(grid, axis, s.node)
    if near + far == 0:
        return 0.0
    rate, latency = s.inside.bytes_per_s, s.inside.latency_s
    if far:
        rate = min(rate, s.between.bytes_per_s * (near + 1)) if near else s.between.bytes_per_s
        latency = s.between.latency_s
    return num_bytes / rate + calls * (near + far) * latency


def by_axis(volume: Volume) -> dict[str, int]:
    """Bytes of layers by axis."""
    found: Counter[str] = Counter()
    for (_, _, axis), amount in volume.items():
        found[axis] += amount
    return {axis: found[axis] for axis in AXES}


def evaluate(s: Situation, grid: Grid3D) -> Candidate:
    """Costs of a grid that can split the model."""
    volume = layer_bytes(s.sizes, grid, save=s.save, how="native")
    amounts, calls = by_axis(volume), layer_calls(grid, s.save)
    seconds = {axis: axis_seconds(s, grid, axis, amounts[axis], calls[axis]) for axis in AXES}
    tokens = s.sizes.seq * s.sizes.batch
    compute = 6 * tokens * s.sizes.layer_parameters / s.ranks / s.flops
    hidden = min(seconds["i"], compute) if s.overlap else 0.0
    total = sum(seconds.values())
    layer = layer_memory(s.sizes, grid, s.save)
    kept = s.layers * layer.parameters + edge_parameters(s.sizes, grid, s.vocab)
    memory = kept * s.state_bytes + (s.layers * layer.activations + layer.transient) * s.sizes.itemsize
    fits = s.memory_limit is None or memory <= s.memory_limit
    return Candidate(grid, amounts, dict(calls), compute + total - hidden, total, memory, fits)


def ranking(s: Situation) -> tuple[list[Candidate], list[Refused]]:
    """All grids that can split the model, the best first (those that do not fit last), and the others."""
    found, refused = [], []
    for grid in factorizations(s.ranks):
        grid = replace(grid, order=s.order)
        problems = unsplit(s.sizes, grid, s.vocab)
        if problems:
            refused.append(Refused(grid, tuple(f"{u.option} {u.value} by {u.step}" for u in problems)))
        else:
            found.append(evaluate(s, grid))
    critical = lambda c: c.axis_bytes["j"] + c.axis_bytes["l"]  # noqa: E731
    found.sort(key=lambda c: (not c.fits, c.seconds, critical(c), sum(c.calls.values()), c.grid.sizes))
    return found, refused


def one_axis(s: Situation, found: Sequence[Candidate]) -> Candidate | None:
    """Tensor and sequence parallelism as stock has it: the grid 1 x T x 1."""
    return next((c for c in found if c.grid.sizes == (1, s.ranks, 1)), None)


def edge_share(s: Situation, grid: Grid3D) -> int:
    """Bytes of embedding, head and loss for one microbatch, forward and backward."""
    return sum(edge_bytes(s.sizes, grid, s.vocab, save=s.save, how="native").values())


def residual_elements(sizes: ModelSizes, grid: Grid3D) -> int:
    """Elements of the residual stream on a rank."""
    return prod(RESIDUAL.local_shape(grid, (sizes.seq, sizes.batch, sizes.hidden)))
