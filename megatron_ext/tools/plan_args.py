"""Arguments of `megatron-ext plan layers`, checked all at once, and what a layer costs by them."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from megatron_ext import configfile
from megatron_ext.problems import UserError
from megatron_ext.schedules.costs import Costs
from megatron_ext.tools.plan_costs import LayerCosts, costs_of_layers, modelled_costs

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
# Where the costs above are not those of a stage.
_UNSUPPORTED = {
    "--num-experts": "layers differ in cost between ranks",
    "--mtp-num-layers": "its layers and losses are on the last stage, too",
    "--num-layers-per-virtual-pipeline-stage": "it gives each rank several stages",
    "--num-virtual-stages-per-pipeline-rank": "it gives each rank several stages",
}
DEFAULT_DIVISOR = 128  # stock's --make-vocab-size-divisible-by


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
    for flag, what in (
        ("--num-layers", "transformer layers"),
        ("--hidden-size", "h"),
        ("--ffn-hidden-size", "f (default: stock's)"),
        ("--num-attention-heads", "only needed with --num-query-groups or --kv-channels"),
        ("--num-query-groups", "groups of keys and values"),
        ("--kv-channels", "head size"),
        ("--seq-length", "s"),
        ("--padded-vocab-size", "V; or"),
        ("--vocab-size", "rows before padding, which follows the next two"),
        ("--make-vocab-size-divisible-by", f"(default {DEFAULT_DIVISOR})"),
        ("--tensor-model-parallel-size", "(default 1)"),
    ):
        model.add_argument(flag, metavar="N", help=what)
    model.add_argument("-p", "--pipeline-model-parallel-size", metavar="N", help="pipeline stages")
    model.add_argument("--swiglu", action="store_true", help="gated MLP")
    model.add_argument("--ext-config", metavar="FILE", help="take these from a configuration file of a run")
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
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    found = [
        f"{word}: there is no such argument. `megatron-ext plan layers --help` lists those that there are."
        for word in unknown
    ]
    if args.ext_config is not None and not unknown:
        args = parser.parse_args(configfile.merge(_from_file(args.ext_config, parser), argv))
    found += [
        f"{flag} {value}: {why}, which this plan does not know. Leave it out to plan a model without."
        for flag, why in _UNSUPPORTED.items()
        if (value := getattr(args, flag[2:].replace("-", "_"))) not in (None, "0")
    ]
    read = _Numbers(args, found)
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


def _from_file(path: str, parser: argparse.ArgumentParser) -> list[str]:
    """The words of a configuration file as far as this tool knows their options."""
    entries = configfile.load(path).entries.values()
    known = parser._option_string_actions
    return [word for entry in entries if entry.flag in known for word in entry.argv()]


class _Numbers:
    """Reads numbers from the arguments; what is wrong goes to a list."""

    def __init__(self, args: argparse.Namespace, problems: list[str]):
        self.args, self.problems = args, problems

    def given(self, name: str) -> str | None:
        """The argument's text."""
        return getattr(self.args, name[2:].replace("-", "_"))

    def count(self, name: str, what: str, default: int | None = None, flag: str | None = None) -> int | None:
        """A whole number above zero."""
        text = self.given(name)
        if text is None:
            if default is None:
                self.problems.append(
                    f"{flag or name} is missing: it is {what}. Give it, or --ext-config FILE."
                )
            return default
        if text.isascii() and text.isdigit() and int(text) > 0:
            return int(text)
        self.problems.append(
            f"{name} {text}: {what} must be a whole number of 1 or more. Give such a number."
        )
        return None

    def time(self, name: str) -> float | None:
        """Milliseconds."""
        text = self.given(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if 0 <= value < float("inf"):
            return value
        self.problems.append(
            f"{name} {text}: a time is a number of milliseconds, 0 or more. Give such a number."
        )
        return None


def _modelled(read: _Numbers) -> LayerCosts | None:
    """Costs in transformer layers, from the FLOPs."""
    gated = read.args.swiglu
    h = read.count("--hidden-size", "the width of the model")
    s = read.count("--seq-length", "the length of a sequence")
    default = 4 * (h or 1) if not gated else int(4 * (h or 1) * 2 / 3) // 64 * 64
    f = read.count("--ffn-hidden-size", "the width of the MLP", default=max(default, 1))
    q, k = _attention_widths(read, h)
    v = _padded_vocabulary(read)
    if None in (h, s, f, q, k, v):
        return None
    return modelled_costs(h, s, f, q, k, v, gated=gated)


def _attention_widths(read: _Numbers, h: int | None) -> tuple[int | None, int | None]:
    """Widths of queries and of keys."""
    if h is None:
        return None, None
    if all(read.given(name) is None for name in ("--num-query-groups", "--kv-channels")):
        return h, h
    heads = read.count("--num-attention-heads", "the number of attention heads")
    if heads is None:
        return None, None
    size = read.count("--kv-channels", "the size of a head", default=max(1, h // heads))
    groups = read.count("--num-query-groups", "the number of groups of keys and values", default=heads)
    if size is None or groups is None:
        return None, None
    if heads % groups:
        read.problems.append(
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}: each group of keys "
            "serves as many heads as the others. Choose a divisor."
        )
        return None, None
    return heads * size, groups * size


def _padded_vocabulary(read: _Numbers) -> int | None:
    padded, rows = read.given("--padded-vocab-size"), read.given("--vocab-size")
    if padded is not None:
        return read.count("--padded-vocab-size", "the padded vocabulary")
    if rows is None:
        read.problems.append(
            "the size of the vocabulary is missing: the output layer's cost follows from it. Give "
            "--padded-vocab-size or --vocab-size, or measured times."
        )
        return None
    size = read.count("--vocab-size", "the vocabulary")
    divisor = read.count("--make-vocab-size-divisible-by", "the divisor", default=DEFAULT_DIVISOR)
    tensor = read.count("--tensor-model-parallel-size", "the tensor-parallel size", default=1)
    if size is None or divisor is None or tensor is None:
        return None
    return -(-size // (divisor * tensor)) * divisor * tensor


def _has_times(args: argparse.Namespace) -> bool:
    return any(value is not None for value in (args.costs, args.layer_ms, args.output_ms, args.embedding_ms))


def _measured(read: _Numbers, layers: int | None, stages: int | None) -> LayerCosts | None:
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


def _from_costs(read: _Numbers, layers: int | None, stages: int | None) -> LayerCosts | None:
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
