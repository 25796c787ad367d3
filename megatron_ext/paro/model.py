"""The units of a GPT on one rank, from its description: for plans that are made before there is a model."""

from dataclasses import replace

from megatron_ext.paro.passes import UnitSize
from megatron_ext.vocab import memory_layers as layers
from megatron_ext.vocab.memory_description import Description


def units_of(d: Description, trainable: float = 1.0) -> tuple[UnitSize, ...]:
    """Units of the pipeline stage that holds most parameters.

    Args:
        d: the model; data x context ranks share its gradients.
        trainable: how much of every unit is trained.
    """
    stage = max(range(d.pipeline), key=lambda rank: layers.params(d, rank))
    layer = layers.layer_params(d)
    outside = layers.params(d, stage) - d.stage_layers[stage] * layer
    late = 0
    if d.vocab_mode != "off":
        late = layers.shard_rows_of(d, stage) * d.hidden * (1 if d.tied else 2)
    types = (d.data * d.context, d.itemsize, d.grad_itemsize, trainable)
    units = split({"": outside - late}, *types)
    units += tuple(replace(unit, late=True) for unit in split({"": late}, *types))
    return units + split({f"layer {index}": layer for index in range(d.stage_layers[stage])}, *types)


def equal_units(
    parameters: int, num_layers: int, n: int, itemsize: int, grad_itemsize: int, trainable: float = 1.0
) -> tuple[UnitSize, ...]:
    """Parameters in equal layers, nothing outside of them."""
    each, more = divmod(parameters, num_layers)
    sizes = {f"layer {index}": each + (index < more) for index in range(num_layers)}
    return split(sizes, n, itemsize, grad_itemsize, trainable)


def split(
    sizes: dict[str, int], n: int, itemsize: int, grad_itemsize: int, trainable: float
) -> tuple[UnitSize, ...]:
    """A unit of trained and one of frozen parameters for each layer, as far as there are any."""
    units = []
    for layer, numel in sizes.items():
        trained = round(trainable * numel)
        for part, trains in ((trained, True), (numel - trained, False)):
            if part:
                padded = -(-part // n) * n
                units.append(UnitSize(padded, itemsize, grad_itemsize, trainable=trains, layer=layer))
    return tuple(units)


def score_flops(d: Description, units: tuple[UnitSize, ...]) -> float:
    """Floating-point operations per token of attention's scores and weighted sums, forward, on a rank."""
    num_layers = len({unit.layer for unit in units if unit.layer})
    return 4.0 * d.seq_length * d.heads * d.head_dim / d.tensor * num_layers


def flops(units: tuple[UnitSize, ...], tokens: int, scores: float = 0.0) -> tuple[float, float]:
    """Floating-point operations of one microbatch of `tokens` on a rank, forward and backward.

    Two for each parameter and token forward, two for input gradients, two for gradients of trained weights.
    """
    everything = sum(unit.padded for unit in units)
    trained = sum(unit.padded for unit in units if unit.trainable)
    return tokens * (2 * everything + scores), tokens * (2 * (everything + trained) + 2 * scores)
