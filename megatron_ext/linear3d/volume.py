"""Bytes that a rank sends, as exact formulas by (site, kind, axis); docs/linear-3d.md states them in words.

Everything follows from the plans of layouts.py. With M = s b tokens of the whole group and P ranks, a linear
[M, K] x [N, K] of orientation 0 sends, in elements,

    forward                 [(Gj-1) M K + (Gi-1) K N + (Gl-1) M N] / P
    backward, gathered      the same again
    re-gathered weight      + (Gi-1) K N / P          shard_weight, shard_all
    re-gathered input       + (Gj-1) M K / P          shard_all

and of orientation 1 the same with j and l exchanged. Source: arXiv 2105.14450 for the cube.
"""

from collections import Counter
from collections.abc import Sequence
from math import prod

from megatron_ext.ledger import ideal_bytes
from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.layouts import RESIDUAL, VOCAB_AXES, Layout, Move, Site
from megatron_ext.linear3d.sizes import ModelSizes, Save, Sum, VocabMode, local_weight, sites_of

Volume = Counter[tuple[str, str, str]]
"""(site, kind, axis) -> bytes."""

FEATURE = "linear3d"
"""Communication is counted under this name and that of its site: "linear3d:fc1"."""

REDUCE_KIND = {"ordered": "all_to_all", "native": "reduce_scatter"}
FP32 = 4


class _Count:
    def __init__(self, grid: Grid3D, how: Sum):
        self.grid, self.how = grid, how
        self.total: Volume = Counter()

    def gather(self, site: str, axis: str, local_bytes: int, times: int = 1) -> None:
        self._add(site, "all_gather", axis, (self.grid.size(axis) - 1) * local_bytes * times)

    def reduce(self, site: str, axis: str, whole_bytes: int, times: int = 1) -> None:
        size = self.grid.size(axis)
        self._add(site, REDUCE_KIND[self.how], axis, (whole_bytes - whole_bytes // size) * times)

    def all_reduce(self, site: str, axis: str, num_bytes: int, rank: int, times: int = 1) -> None:
        size = self.grid.size(axis)
        if size > 1:
            self._add(site, "all_reduce", axis, ideal_bytes("all_reduce", size, rank, num_bytes) * times)

    def _add(self, site: str, kind: str, axis: str, amount: int) -> None:
        if amount:
            self.total[site, kind, axis] += amount


def _walk(grid: Grid3D, shape: Sequence[int], moves: Sequence[Move], factor: int) -> list[tuple[Move, int]]:
    """Elements that each move in turn works on (before a gather, before a reduce-scatter)."""
    elements, found = prod(shape), []
    for move in moves:
        found.append((move, elements))
        elements = elements * grid.size(move.axis) if factor > 0 else elements // grid.size(move.axis)
    return found


def _forward_linear(count: _Count, sizes: ModelSizes, site: Site, times: int) -> None:
    grid, e = count.grid, sizes.itemsize
    tokens = (sizes.seq, sizes.batch)
    out, inside = sizes.weight(site.name)
    weight = prod(local_weight(sizes, site, grid))
    count.gather(site.name, "i", weight * e, times)
    if site.given is not None:
        given = site.given.local_shape(grid, (*tokens, inside))
        for move, elements in _walk(grid, given, site.plan.gathers, 1):
            count.gather(site.name, move.axis, elements * e, times)
        features = out
    else:
        features = inside
    for move, elements in _walk(grid, _partial(grid, site, (*tokens, features)), site.plan.reduces, -1):
        count.reduce(site.name, move.axis, elements * e, times)


def _partial(grid: Grid3D, site: Site, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the product before its reduce-scatters."""
    local = list(site.result.local_shape(grid, shape))
    for move in site.plan.reduces:
        local[move.dim] *= grid.size(move.axis)
    return tuple(local)


def _backward_linear(count: _Count, sizes: ModelSizes, site: Site, save: Save, times: int, kept: int) -> None:
    """`kept` of the `times` passes find the gathered weight in memory."""
    grid, e = count.grid, sizes.itemsize
    tokens = (sizes.seq, sizes.batch)
    out, inside = sizes.weight(site.name)
    weight = prod(local_weight(sizes, site, grid))
    result = site.result.local_shape(grid, (*tokens, out if site.given is not None else inside))
    for move, elements in _walk(grid, result, list(reversed(site.plan.reduces)), 1):
        count.gather(site.name, move.axis, elements * e, times)
    count.reduce(site.name, "i", weight * grid.gi * e, times)
    if site.given is None:
        return
    if save != "gathered":
        count.gather(site.name, "i", weight * e, times - kept)
    given = site.given.local_shape(grid, (*tokens, inside))
    gathers = _walk(grid, given, site.plan.gathers, 1)
    if save == "shard_all":
        for move, elements in gathers:
            count.gather(site.name, move.axis, elements * e, times)
    for move, elements in gathers:  # dx, whole along the axis, is scattered again
        count.reduce(site.name, move.axis, elements * grid.size(move.axis) * e, times)


def _norm(count: _Count, sizes: ModelSizes, rank_l: int, site: str, forward: int, backward: int) -> None:
    tokens = prod(RESIDUAL.local_shape(count.grid, (sizes.seq, sizes.batch, sizes.hidden))[:2])
    words = 1 if sizes.rms else 2
    count.gather(site, "l", words * tokens * FP32, forward)
    count.all_reduce(site, "l", words * tokens * FP32, rank_l, backward)


def layer_bytes(
    sizes: ModelSizes,
    grid: Grid3D,
    *,
    save: Save,
    how: Sum,
    coords: dict | None = None,
    forward: int = 1,
    backward: int = 1,
    kept: int = 0,
) -> Volume:
    """Bytes of `forward` and `backward` passes of one transformer layer, as the rank at `coords` sends them.

    A recomputed layer has two forward passes for one backward. In `kept` of the backward passes, gathered
    weights are still there.
    """
    count = _Count(grid, how)
    at = coords or {"i": 0, "j": 0, "l": 0}
    for site in sites_of("stages").values():
        _forward_linear(count, sizes, site, forward)
        _backward_linear(count, sizes, site, save, backward, kept)
    _norm(count, sizes, at["l"], "norm", 2 * forward, 2 * backward)
    return count.total


def edge_bytes(
    sizes: ModelSizes,
    grid: Grid3D,
    mode: VocabMode,
    *,
    save: Save,
    how: Sum,
    coords: dict | None = None,
    first: bool = True,
    last: bool = True,
    forward: int = 1,
    backward: int = 1,
) -> Volume:
    """Bytes of the first and the last stage outside of their layers: embedding, final norm, head and loss."""
    count = _Count(grid, how)
    at = coords or {"i": 0, "j": 0, "l": 0}
    if first and mode != "stages":
        site = sites_of(mode)["embedding"]
        _forward_linear(count, sizes, site, forward)
        _backward_linear(count, sizes, site, save, backward, 0)
    if last:
        _norm(count, sizes, at["l"], "norm", forward, backward)
    if last and mode != "stages":
        site = sites_of(mode)["head"]
        _forward_linear(count, sizes, site, forward)
        _backward_linear(count, sizes, site, save, backward, 0)
        _loss(count, sizes, site, mode, at, forward)
    if mode == "stages":
        if first:
            _relayout(count, sizes, at, forward + backward)
        if last:
            _relayout(count, sizes, at, forward + backward)
    return count.total


def _loss(count: _Count, sizes: ModelSizes, site: Site, mode: VocabMode, at: dict, forward: int) -> None:
    """Maximum, then sum of exponentials with the target's logit, of the local tokens; losses put together."""
    grid, axes = count.grid, VOCAB_AXES[mode]
    tokens = prod(site.result.local_shape(grid, (sizes.seq, sizes.batch, sizes.vocab))[:2])
    place = plane_rank(grid, axes, at)
    count.all_reduce("loss", axes, tokens * FP32, place, forward)
    count.all_reduce("loss", axes, 2 * tokens * FP32, place, forward)
    for dim in (0, 1):
        for axis in reversed(site.result.cuts[dim]):
            count.gather("loss", axis, tokens * FP32, forward)
            tokens *= grid.size(axis)


def plane_rank(grid: Grid3D, axes: str, coords: dict) -> int:
    """Rank inside the process group over `axes`, which torch sorts by rank and not by layout."""
    members = next(g for g in grid.places(axes) if grid.rank_of(coords) in g)
    return members.index(grid.rank_of(coords))


def _relayout(count: _Count, sizes: ModelSizes, at: dict, times: int) -> None:
    """Between slices along the sequence `[s/P, b, h]` and the residual layout: one all-to-all.

    A slice goes to the Gi x Gl ranks that have its part of the sequence, maybe this rank among them.
    """
    grid = count.grid
    elements = sizes.seq * sizes.batch * sizes.hidden // grid.ranks
    receivers = grid.gi * grid.gl
    kept = elements // receivers if grid.rank_of(at) // receivers == at["j"] else 0
    count._add("relayout", "all_to_all", "ijl", (elements - kept) * sizes.itemsize * times)


def vector_bytes(params: Sequence[tuple[int, Layout]], grid: Grid3D, coords: dict, itemsize: int) -> Volume:
    """Bytes of summing the gradients of vectors, once a step: `params` are (local elements, layout).

    Those that are equal along the same axes are summed together.
    """
    count = _Count(grid, "native")
    together: Counter[str] = Counter()
    for numel, layout in params:
        together[layout.replicated] += numel
    for axes, numel in together.items():
        count.all_reduce("vectors", axes, numel * itemsize, plane_rank(grid, axes, coords))
    return count.total
