"""Arguments of `megatron-ext plan layers`, checked all at once, and what a layer costs by them."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.problems import UserError
from megatron_ext.schedules.costs import Costs
from megatron_ext.tools.plan_costs import LayerCosts, costs_of_layers, modelled_costs
from megatron_ext.tools.plan_read import (
    Numbers,
    add_model_flags,
    attention_widths,
    default_ffn,
    padded_vocabulary,
    parse_known,
)

_DESCRIPTION = """\
Split transformer layers over pipeline stages so that the slowest stage is as fast as possible, with
embedding and output layer on the first and the last stage as in stock Megatron, and print the flags for it:
the best that stock can do without vocabulary parallelism.
"""
_EPILOG = """\
Without measured times a layer costs its matrix products: per token, forward and backward,
  12 h (q + k) + 12 s q + 12 h f    layer (18 h f with --swiglu); 72 h h + 12 s h for f = 4 h, q = k = h
  6 h V                             output layer
and the embedding nothing (h hidden, s sequence, q heads x head size, k query groups x head size, f ffn, V
padded vocabulary). --costs takes the costs.json that `megatron-ext trace --measured` writes for a run of this
model with its layers spread evenly.

Exit code: 0, or 2 where arguments or files are wrong.
"""
_VOCABULARY = (
    "the output layer's cost follows from it. Give --padded-vocab-size or --vocab-size, or measured times"
)
# Where the costs above are not those of a stage.
_UNSUPPORTED = {
    "--num-experts": "layers differ in cost between ranks",
    "--mtp-num-layers": "its layers and losses are on the last stage, too",
    "--num-layers-per-virtual-pipeline-stage": "it gives each rank several stages",
    "--num-virtual-stages-per-pipeline-rank": "it gives each rank several stages",
}


@dataclass(frozen=True)
class Request:
    """A model to split."""

    layers: int
    stages: int
    costs: LayerCosts
    json: bool


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ext plan layers",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("the model, in Megatron's own flags")
    add_model_flags(model)
    for flag in _UNSUPPORTED:
        parser.add_argument(flag, help=argparse.SUPPRESS)
    measured = parser.add_argument_group("measured times of one microbatch, forward and backward, for FLOPs")
    measured.add_argument("--layer-ms", metavar="MS", help="one transformer layer")
    measured.add_argument("--output-ms", metavar="MS", help="output layer and loss")
    measured.add_argument("--embedding-ms", metavar="MS", help="input embedding (default 0)")
    measured.add_argument("--costs", metavar="FILE", help="all three from a file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def parse(argv: list[str]) -> Request:
    """The request. Raises UserError with all problems; SystemExit for --help and a flag without its value."""
    args, found = parse_known(_parser(), argv)
    found += [
        f"{flag} {value}: {why}, which this plan does not know. Leave it out to plan a model without."
        for flag, why in _UNSUPPORTED.items()
        if (value := getattr(args, flag[2:].replace("-", "_"))) not in (None, "0")
    ]
    read = Numbers(args, found)
    layers = read.count("--num-layers", "the model's transformer layers")
    stages = read.count("--pipeline-model-parallel-size", "the number of pipeline stages", flag="-p")
    costs = _measured(read, layers, stages) if _has_times(args) else _modelled(read)
    if layers and stages and layers < stages - 2:
        found.append(
            f"--num-layers {layers} with -p {stages}: each of the {stages - 2} stages between the first and "
            f"the last needs a layer. Use at most {layers + 2} stages."
        )
    if found:
        raise UserError(*found)
    assert layers is not None
    assert stages is not None
    assert costs is not None
    return Request(layers, stages, costs, args.json)


def _modelled(read: Numbers) -> LayerCosts | None:
    """Costs in transformer layers, from the FLOPs."""
    gated = read.args.swiglu
    h = read.count("--hidden-size", "the width of the model")
    s = read.count("--seq-length", "the length of a sequence")
    f = read.count("--ffn-hidden-size", "the width of the MLP", default=default_ffn(h or 1, gated=gated))
    q, k = attention_widths(read, h)
    v = padded_vocabulary(read, _VOCABULARY)
    if None in (h, s, f, q, k, v):
        return None
    return modelled_costs(h, s, f, q, k, v, gated=gated)


def _has_times(args: argparse.Namespace) -> bool:
    return any(value is not None for value in (args.costs, args.layer_ms, args.output_ms, args.embedding_ms))


def _measured(read: Numbers, layers: int | None, stages: int | None) -> LayerCosts | None:
    times = [read.time(name) for name in ("--layer-ms", "--output-ms", "--embedding-ms")]
    if read.args.costs is not None:
        if any(time is not None for time in times):
            read.problems.append(
                "--costs with --layer-ms, --output-ms or --embedding-ms: both say what layers cost. Keep one."
            )
        return _from_costs(read, layers, stages)
    layer, output, embedding = times
    missing = [name for name in ("--layer-ms", "--output-ms") if read.given(name) is None]
    if missing:
        read.problems.append(
            f"{' and '.join(missing)} missing: measured times and FLOPs have no common unit. Give --layer-ms "
            "and --output-ms together, or neither."
        )
    if layer == 0:
        read.problems.append("--layer-ms 0: layers that cost nothing need no plan. Give the measured time.")
    if missing or not layer or output is None:
        return None
    return LayerCosts(layer, embedding or 0.0, output, "ms", "as measured")


def _from_costs(read: Numbers, layers: int | None, stages: int | None) -> LayerCosts | None:
    path = Path(read.args.costs)
    try:
        costs = Costs.read(path)
    except OSError as error:
        read.problems.append(
            f"--costs {path}: cannot be read ({error.strerror}). Give the costs.json of a measured run."
        )
        return None
    except ValueError as error:
        read.problems.append(f"--costs {path}: {error}. Give the costs.json of a measured run.")
        return None
    if layers is None or stages is None:
        return None
    try:
        return costs_of_layers(costs, layers, stages)
    except ValueError as error:
        read.problems.append(f"--costs {path}: {error}. Give --layer-ms and --output-ms instead.")
        return None
