"""What transformer and vocabulary layers cost a pipeline stage: by FLOPs, or from measured pass times."""

from dataclasses import dataclass

from megatron_ext.schedules.costs import Costs


@dataclass(frozen=True)
class LayerCosts:
    """Forward and backward pass of one microbatch."""

    layer: float
    embedding: float
    output: float
    unit: str
    source: str


def modelled_costs(
    hidden: int, sequence: int, ffn: int, queries: int, keys: int, vocab: int, *, gated: bool
) -> LayerCosts:
    """From multiplications and additions of matrix products per token, forward and backward.

    `queries` and `keys` are widths, heads or groups times head size; `vocab` is padded.
    """
    projections = 12 * hidden * (queries + keys)
    layer = projections + 12 * sequence * queries + 6 * hidden * ffn * (3 if gated else 2)
    return LayerCosts(1.0, 0.0, 6 * hidden * vocab / layer, "layers", "by FLOPs")


def costs_of_layers(costs: Costs, layers: int, stages: int) -> LayerCosts:
    """From the pass times, in seconds, of a run of `layers` layers in an even split.

    With vocabulary passes the output layer is the sum of all ranks' shares. An embedding pass runs over all
    tokens on every rank, so one rank's time is the embedding's. Without them the vocabulary layers are what
    the end stages take longer than those in the middle.

    Raises:
        ValueError: the costs cannot be told apart.
    """
    lengths = {len(v) for v in vars(costs).values() if isinstance(v, tuple)}
    if len(lengths) > 1:
        raise ValueError(f"its lists have different lengths, {sorted(lengths)}")
    ranks = range(lengths.pop() if lengths else stages)
    transformer = [costs.of("F", r) + costs.of("B", r) for r in ranks]
    output = sum(costs.of(kind, r) for r in ranks for kind in ("S", "U", "T")) + costs.of("L", ranks[-1])
    if output:
        layer = sum(transformer) / layers
        embedding = max(costs.of("IF", r) for r in ranks) + max(costs.of("IB", r) for r in ranks)
    else:
        if len(ranks) < 3:
            raise ValueError(
                "of 2 stages or fewer none is without a vocabulary layer, so none shows what layers take"
            )
        if layers % len(ranks):
            raise ValueError(f"{layers} layers do not split evenly over its {len(ranks)} stages")
        middle = sum(transformer[1:-1]) / (len(ranks) - 2)
        layer = middle * len(ranks) / layers
        embedding, output = max(0.0, transformer[0] - middle), max(0.0, transformer[-1] - middle)
    if layer <= 0:
        raise ValueError("transformer passes take no time in it")
    return LayerCosts(1e3 * layer, 1e3 * embedding, 1e3 * output, "ms", "as measured")
