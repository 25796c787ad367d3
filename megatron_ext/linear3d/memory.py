"""Memory of a rank, in elements: parameters exactly, activations and buffers as the layers keep them.
Pure."""

from dataclasses import dataclass
from math import prod

from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.layouts import HEADS, INNER, LAYER_SITES, POSITIONS, RESIDUAL, VECTOR, Layout
from megatron_ext.linear3d.sizes import ModelSizes, Save, VocabMode, local_weight, sites_of


def layer_parameters(sizes: ModelSizes, grid: Grid3D) -> tuple[int, int]:
    """Elements of a layer that a rank holds: of matrices (1/P of all), and of vectors."""
    matrices = sum(prod(local_weight(sizes, site, grid)) for site in LAYER_SITES.values())
    norm = VECTOR.local_shape(grid, (sizes.hidden,))[0]
    vectors = 2 * norm * (1 if sizes.rms else 2)
    if sizes.qk_norm:
        vectors += 2 * sizes.head_dim * (1 if sizes.rms else 2)
    if sizes.bias:
        for name, site in LAYER_SITES.items():
            vectors += site.bias.local_shape(grid, (sizes.weight(name)[0],))[0]
    return matrices, vectors


def edge_parameters(sizes: ModelSizes, grid: Grid3D, mode: VocabMode) -> int:
    """Elements of the first and the last stage outside of their layers, of one stage that is both."""
    vocab = prod(sites_of(mode)["embedding"].weight.local_shape(grid, (sizes.vocab, sizes.hidden)))
    positions = prod(POSITIONS.local_shape(grid, (sizes.max_positions, sizes.hidden))) if sizes.learned else 0
    norm = VECTOR.local_shape(grid, (sizes.hidden,))[0] * (1 if sizes.rms else 2)
    return vocab * (1 if sizes.tied else 2) + positions + norm


def saved_by_linears(sizes: ModelSizes, grid: Grid3D, save: Save) -> tuple[int, int]:
    """Elements that the four linears of a layer keep for their backward pass: of inputs, and of weights."""
    inputs = weights = 0
    for name, site in LAYER_SITES.items():
        assert site.given is not None
        inside = sizes.weight(name)[1]
        given = prod(site.given.local_shape(grid, (sizes.seq, sizes.batch, inside)))
        gathered = prod(grid.size(move.axis) for move in site.plan.gathers)
        inputs += given if save == "shard_all" else given * gathered
        weights += prod(local_weight(sizes, site, grid)) * (grid.gi if save == "gathered" else 1)
    return inputs, weights


@dataclass(frozen=True)
class LayerMemory:
    """Elements of one layer and microbatch."""

    parameters: int
    activations: int
    """Kept from forward to backward, gathered weights included."""
    transient: int
    """The largest operands and products of one linear, which do not shrink with all of P."""


def layer_memory(sizes: ModelSizes, grid: Grid3D, save: Save) -> LayerMemory:
    """Memory of a layer; attention's scores are not in it (a fused kernel has none)."""

    def part(layout: Layout, features: int) -> int:
        return prod(layout.local_shape(grid, (sizes.seq, sizes.batch, features)))

    inputs, weights = saved_by_linears(sizes, grid, save)
    kept = inputs + (weights if save == "gathered" else 0)
    kept += 2 * part(RESIDUAL, sizes.hidden) + part(HEADS, sizes.qkv) + part(INNER, sizes.fc1)
    transient = 0
    for name, site in LAYER_SITES.items():
        assert site.given is not None
        out, inside = sizes.weight(name)
        given = part(site.given, inside) * prod(grid.size(move.axis) for move in site.plan.gathers)
        product = part(site.result, out) * prod(grid.size(move.axis) for move in site.plan.reduces)
        weight = prod(local_weight(sizes, site, grid)) * grid.gi
        transient = max(transient, given + product + 2 * weight)
    return LayerMemory(sum(layer_parameters(sizes, grid)), kept, transient)
