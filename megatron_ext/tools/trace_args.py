"""Arguments of `megatron-ext trace`, checked all at once."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.problems import UserError
from megatron_ext.schedules.action import MODES
from megatron_ext.schedules.build import PIPELINES
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.families import family

ORDERS = ("static", "list")
LEAST_WIDTH = 40

_EPILOG = """\
Without --costs: F = 1, B = 2, passes of the output layer 0.6 together, all other passes and all transfers 0.
FILE is a JSON object of seconds: any of forward, backward, output_s, output_u, output_t, loss, input_forward
and input_backward (one number, or a list with one per rank), weight (the part of backward that weight
gradients take where a schedule splits it, half of it if not given), and comm, an object with any of p2p,
e, g,
C0, C1, C2, C3, G. forward is 1 and backward 2 where the file does not say, all others 0. A trace of a
measured
step writes such a file.

Exit code: 0, or 2 where arguments or files are wrong.
"""


@dataclass(frozen=True)
class Planned:
    """A schedule to be built and simulated."""

    p: int
    m: int
    pipeline: str
    vocab: str
    order: str
    forward_only: bool
    overlap: bool
    chunks: int | None


@dataclass(frozen=True)
class Request:
    """What to show: a planned schedule, or the step recorded in the folder `measured`; the other is None."""

    planned: Planned | None
    measured: Path | None
    replica: int
    costs: Costs | None
    window: str | None
    width: int | None
    lists: bool
    out: Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ext trace",
        description="Show a pipeline schedule: the grid, bubbles and microbatches in flight; write pictures "
        "and a Chrome trace. Or compare a measured step with its plan.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    plan = parser.add_argument_group("a schedule")
    plan.add_argument("--pipeline-schedule", metavar="NAME", help=f"{', '.join(PIPELINES)} (default 1f1b)")
    plan.add_argument("--vocab-parallel", metavar="MODE", help=f"{', '.join(MODES)} (default off)")
    plan.add_argument(
        "--num-virtual-stages-per-pipeline-rank", metavar="N", help="chunks per rank, interleaved (default 2)"
    )
    plan.add_argument("-p", metavar="N", help="pipeline ranks")
    plan.add_argument("-m", metavar="N", help="microbatches")
    plan.add_argument(
        "--order", metavar="ORDER", help="static (default), or list: the best order found for the costs"
    )
    plan.add_argument("--forward-only", action="store_true", help="evaluation: no backward passes")
    plan.add_argument("--no-overlap", action="store_true", help="every transfer holds its rank")
    run = parser.add_argument_group("a measured step")
    run.add_argument("--measured", metavar="DIR", help="what a run with --ext-trace DIR recorded")
    run.add_argument("--replica", metavar="N", help="which of several ranks of a stage to show (default 0)")
    both = parser.add_argument_group("both")
    both.add_argument(
        "--costs", metavar="FILE", help="times of passes and transfers; default: below, or measured"
    )
    both.add_argument(
        "--window", metavar="START:END",
        help="show only this stretch: times as on the axis (10:25), or microbatches (m0:m3)",
    )  # fmt: skip
    both.add_argument("--width", metavar="N", help="columns of the terminal's grid (default: the terminal's)")
    both.add_argument("--lists", action="store_true", help="print each rank's actions in order, too")
    both.add_argument(
        "--output",
        "--out",
        metavar="DIR",
        help="for schedule.svg, .html, .json (default: trace; measured: its DIR)",
    )
    return parser


def parse(argv: list[str]) -> Request:
    """The request. Raises UserError with all problems; SystemExit for --help and a flag without its value."""
    args, unknown = _parser().parse_known_args(argv)
    found: list[str] = [
        f"{word}: trace has no such argument. `megatron-ext trace --help` lists those that there are."
        for word in unknown
    ]
    replica = _count(args.replica, "--replica", "a replica", 0, found) if args.replica else 0
    width = _count(args.width, "--width", "the grid", LEAST_WIDTH, found) if args.width else None
    planned = None if args.measured else _planned(args, found)
    if args.measured:
        found += _conflicts(args)
    elif args.replica:
        found.append("--replica chooses ranks of a measured step. Give --measured DIR, or leave it out.")
    costs = _costs(args.costs, planned.p if planned else None, found) if args.costs else None
    if found:
        raise UserError(*found)
    measured = Path(args.measured) if args.measured else None
    out = Path(args.output) if args.output else measured or Path("trace")
    assert replica is not None
    return Request(planned, measured, replica, costs, args.window, width, args.lists, out)


def _planned(args: argparse.Namespace, found: list[str]) -> Planned | None:
    pipeline = _choice(args.pipeline_schedule or "1f1b", "--pipeline-schedule", PIPELINES, found)
    vocab = _choice(args.vocab_parallel or "off", "--vocab-parallel", MODES, found)
    order = _choice(args.order or "static", "--order", ORDERS, found)
    sizes = []
    for flag, given, what in (("-p", args.p, "pipeline stages"), ("-m", args.m, "microbatches")):
        if given is None:
            found.append(
                f"{flag} is missing: a schedule needs the number of {what}. Give {flag} N, or --measured DIR "
                "to show a recorded run."
            )
            sizes.append(None)
        else:
            sizes.append(_count(given, flag, f"the number of {what}", 1, found))
    if None in sizes:
        return None
    chunks = _chunks(args.num_virtual_stages_per_pipeline_rank, pipeline, vocab, found)
    return Planned(*sizes, pipeline, vocab, order, args.forward_only, not args.no_overlap, chunks)


def _chunks(given: str | None, pipeline: str, vocab: str, found: list[str]) -> int | None:
    """Chunks per rank; also whether the pipeline can have this vocabulary mode."""
    flag = "--num-virtual-stages-per-pipeline-rank"
    if pipeline not in PIPELINES:
        return None
    if vocab in MODES and vocab not in family(pipeline).modes:
        found.append(
            f"--vocab-parallel {vocab} runs only with --pipeline-schedule 1f1b. Give one of "
            f"{', '.join(family(pipeline).modes)} with {pipeline}."
        )
    if given is None:
        return None
    if family(pipeline).chunks is not None:
        found.append(f"{flag} is only for --pipeline-schedule interleaved. Leave it out with {pipeline}.")
        return None
    return _count(given, flag, "the number of chunks", 2, found)


def _conflicts(args: argparse.Namespace) -> list[str]:
    given = {
        "--pipeline-schedule": args.pipeline_schedule,
        "--vocab-parallel": args.vocab_parallel,
        "-p": args.p,
        "-m": args.m,
        "--order": args.order,
        "--forward-only": args.forward_only,
        "--no-overlap": args.no_overlap,
        "--num-virtual-stages-per-pipeline-rank": args.num_virtual_stages_per_pipeline_rank,
    }
    flags = [flag for flag, value in given.items() if value]
    if not flags:
        return []
    return [
        f"{', '.join(flags)} with --measured {args.measured}: the record says which schedule the run had. "
        f"Leave {'it' if len(flags) == 1 else 'them'} out, or leave --measured out to see any schedule."
    ]


def _choice(value: str, flag: str, choices: tuple[str, ...], found: list[str]) -> str:
    if value not in choices:
        found.append(f"{flag} {value}: there is no such choice. Give one of {', '.join(choices)}.")
    return value


def _count(value: str, flag: str, what: str, least: int, found: list[str]) -> int | None:
    if value.isascii() and value.isdigit() and int(value) >= least:
        return int(value)
    found.append(f"{flag} {value}: {what} must be a whole number of {least} or more. Give such a number.")
    return None


def _costs(path: str, p: int | None, found: list[str]) -> Costs | None:
    """The costs in a file, checked against `p` stages where that is known."""
    try:
        costs = Costs.read(path)
        if p is not None:
            costs.check(p)
    except OSError as error:
        found.append(f"--costs {path}: cannot be read ({error.strerror}). Give a JSON file of costs.")
    except ValueError as error:
        found.append(
            f"--costs {path}: {error}. Correct the file; `megatron-ext trace --help` says what is in it."
        )
    else:
        return costs
    return None
