"""megatron-ext plan layers: transformer layers over stages so that the slowest stage is as fast as can be.

Vocabulary layers stay where stock has them: the embedding on the first stage, the output layer on the last.
Layers cost the same each, so it is optimal to give one after the other to the stage that is cheapest with it:
what a stage came to with its last layer, every other stage would exceed with one more. Where stages are equal
the later one gets the layer, because it holds fewer microbatches.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megatron_ext.problems import UserError
from megatron_ext.tools.plan_args import Request, parse
from megatron_ext.tools.plan_costs import LayerCosts
from megatron_ext.vocab.memory_description import stage_layers

EXIT_OK, EXIT_BAD_INPUT = 0, 2
BAR = 30  # columns of the slowest stage's bar
SAME = 1e-9  # relative difference of costs that counts as none


@dataclass(frozen=True)
class Split:
    """Layers and costs by stage: forward and backward pass of one microbatch, in the unit of the costs."""

    layers: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def slowest(self) -> float:
        """The cost that sets the pace."""
        return max(self.costs)

    @property
    def mean(self) -> float:
        """What every stage would cost if all were equal."""
        return sum(self.costs) / len(self.costs)


def fixed_costs(costs: LayerCosts, stages: int) -> list[float]:
    """What each stage costs without transformer layers."""
    fixed = [0.0] * stages
    fixed[0] += costs.embedding
    fixed[-1] += costs.output
    return fixed


def split_of(layers: Sequence[int], costs: LayerCosts) -> Split:
    """The costs of a given split."""
    fixed = fixed_costs(costs, len(layers))
    return Split(
        tuple(layers), tuple(n * costs.layer + extra for n, extra in zip(layers, fixed, strict=True))
    )


def best_split(layers: int, stages: int, costs: LayerCosts) -> Split:
    """The split whose slowest stage is fastest. Only the first and the last stage may have no layer.

    Raises:
        ValueError: there are not enough layers for the stages in the middle.
    """
    counts = [int(0 < stage < stages - 1) for stage in range(stages)]
    if layers < sum(counts):
        raise ValueError(f"{layers} layers are too few for {sum(counts)} stages in the middle")
    fixed = fixed_costs(costs, stages)
    for _ in range(layers - sum(counts)):
        with_one = [extra + (n + 1) * costs.layer for n, extra in zip(counts, fixed, strict=True)]
        lowest = min(with_one)
        stage = max(s for s, cost in enumerate(with_one) if cost <= lowest * (1 + SAME))
        counts[stage] += 1
    return split_of(counts, costs)


def layout(layers: Sequence[int]) -> str:
    """For `--pipeline-model-parallel-layout`: E is the embedding, t a layer, L output layer and loss."""
    stages = ["" if n == 0 else "t" if n == 1 else f"t*{n}" for n in layers]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)


def other_flags(layers: Sequence[int]) -> list[str]:
    """Other stock flags that give the same split; an empty text stands for stock's own split."""
    first, last = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
    loss, embedding = "--account-for-loss-in-pipeline-split", "--account-for-embedding-in-pipeline-split"
    ends = {first: layers[0], last: layers[-1]}
    candidates = [{}, {loss: True}, {embedding: True}, {embedding: True, loss: True}]
    candidates += [{last: ends[last]}, {first: ends[first]}, ends]
    found = []
    for flags in candidates:
        if 0 in flags.values():  # stock takes numbers of layers from 1 on
            continue
        args = {flag[2:].replace("-", "_"): value for flag, value in flags.items()}
        sizes = {"num_layers": sum(layers), "pipeline_model_parallel_size": len(layers)}
        try:
            same = stage_layers(Namespace(**sizes, **args)) == tuple(layers)
        except ValueError:
            continue
        if same:
            found.append(
                " ".join(flag if value is True else f"{flag} {value}" for flag, value in flags.items())
            )
    return found[:1]


def table(split: Split, unit: str) -> list[str]:
    """One line per stage."""
    lines = [f"stage  layers  vocabulary       {unit:>10}"]
    last = len(split.layers) - 1
    for stage, (n, cost) in enumerate(zip(split.layers, split.costs, strict=True)):
        parts = ["embedding"] * (stage == 0) + ["output layer"] * (stage == last)
        share = cost / split.slowest
        lines.append(
            f"{stage:5d}  {n:6d}  {' + '.join(parts):<15}  {cost:10.3f}  {'#' * round(BAR * share):<{BAR}} "
            f"{100 * share:5.1f} %"
        )
    return lines


def report(request: Request, split: Split) -> str:
    """The text for the terminal."""
    costs, slowest, mean = request.costs, split.slowest, split.mean
    lines = [
        f"{request.layers} layers over {request.stages} stages. One microbatch, forward and backward, "
        f"{costs.source}, in {costs.unit}:",
        f"layer {costs.layer:.3f}, embedding {costs.embedding:.3f}, output layer {costs.output:.3f}",
        "",
        *table(split, costs.unit),
        "",
        f"The slowest stage takes {slowest:.3f}, the mean is {mean:.3f}: {slowest / mean:.2f} times as long.",
    ]
    if request.layers % request.stages == 0:
        even = split_of([request.layers // request.stages] * request.stages, costs).slowest
        lines.append(f"Stock's even split takes {even:.3f}; this one is {even / slowest:.2f} times as fast.")
    shared = (
        -(-request.layers // request.stages) * costs.layer + (costs.embedding + costs.output) / request.stages
    )
    lines.append(
        f"With --vocab-parallel the slowest stage takes {shared:.3f}: {slowest / shared:.2f} times as fast "
        "as this split, communication left out."
    )
    others = other_flags(split.layers)
    lines += ["", "Add to stock's command:", f'  --pipeline-model-parallel-layout "{layout(split.layers)}"']
    if "" in others:
        lines.append("or nothing: it is stock's own split.")
    lines += [f"or\n  {flags}" for flags in others if flags]
    return "\n".join(lines)


def as_json(request: Request, split: Split) -> str:
    """The same for programs."""
    found = {
        "layers": split.layers,
        "costs": split.costs,
        "slowest": split.slowest,
        "mean": split.mean,
        "model": asdict(request.costs),
        "flags": ["--pipeline-model-parallel-layout", layout(split.layers)],
        "other_flags": [flags.split() for flags in other_flags(split.layers)],
    }
    return json.dumps(found, indent=1)


def main(argv: list[str]) -> int:
    """Print the best split; 0, or 2 on bad input."""
    try:
        request = parse(argv)
    except UserError as error:
        print(
            "\n".join(f"megatron-ext plan layers: {problem}" for problem in error.problems), file=sys.stderr
        )
        return EXIT_BAD_INPUT
    split = best_split(request.layers, request.stages, request.costs)
    print((as_json if request.json else report)(request, split))
    return EXIT_OK
