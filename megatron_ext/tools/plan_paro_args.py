"""Arguments of `megatron-ext plan paro`, checked all at once."""

import argparse
from dataclasses import dataclass
from typing import get_args

from megatron_ext.paro.planner import Situation
from megatron_ext.paro.volume import COMMS, Backend, Comm, InterDtype, Wire
from megatron_ext.problems import UserError
from megatron_ext.tools import plan_paro_read as of
from megatron_ext.tools.plan_paro_read import DEFAULT_LAYERS
from megatron_ext.tools.plan_read import Numbers, add_model_flags, parse_known
from megatron_ext.tools.plan_units import RATE_EXAMPLE, SIZE_EXAMPLE

_DESCRIPTION = """\
Compare the fourteen sharding strategies of --paro-strategy for a model, a number of ranks and a network:
bytes between and inside groups, memory of a rank, predicted step time; and recommend one.
"""
_EPILOG = f"""\
Rates are written as {RATE_EXAMPLE}, sizes as {SIZE_EXAMPLE}. Without --compute-ms or --tflops compute takes
no time, and strategies are ranked by their communication alone. Without --memory all of them are candidates.
Predicted times are there to rank strategies by, not to foretell a run's.

    megatron-ext plan paro --parameters 65e9 --bf16 --data-parallel-size 32 --paro-group-size 8 \\
        --microbatches 10 --rate-inside 2000gbit --rate-between 80gbit --memory 80GB

Exit code: 0, or 2 where arguments or files are wrong.
"""
_UNSUPPORTED = {
    "--num-experts": "experts have data-parallel groups of their own",
    "--mtp-num-layers": "its layers are units of another size",
}


@dataclass(frozen=True)
class Request:
    """What to compare."""

    situation: Situation
    comms: tuple[Comm, ...]
    network_source: str
    json: bool


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ext plan paro",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("the model: its size, or Megatron's own flags")
    model.add_argument(
        "--parameters", metavar="N",
        help=f"of the whole model, such as 7e9, in --num-layers (default {DEFAULT_LAYERS}) equal layers",
    )  # fmt: skip
    add_model_flags(model)
    for flag in ("--untie-embeddings-and-output-weights", "--disable-bias-linear", "--sequence-parallel"):
        model.add_argument(flag, action="store_true", help="as stock's")
    model.add_argument(
        "--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm", help="as stock's"
    )
    model.add_argument("--trainable-fraction", metavar="F", help="of every layer's parameters (default 1)")
    types = parser.add_argument_group("types, in Megatron's own flags (default: fp32)")
    for flag in ("--bf16", "--fp16", "--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"):
        types.add_argument(flag, action="store_true", help="as stock's")
    ranks = parser.add_argument_group("ranks and batch")
    ranks.add_argument("--data-parallel-size", metavar="N", help="data-parallel ranks")
    ranks.add_argument("--context-parallel-size", metavar="N", help="they share gradients, too (default 1)")
    ranks.add_argument("--paro-group-size", metavar="M", help="data x context ranks per group (node)")
    ranks.add_argument("--microbatches", metavar="N", help="per step and rank; or the next two")
    ranks.add_argument("--global-batch-size", metavar="N", help="sequences per step")
    ranks.add_argument("--micro-batch-size", metavar="N", help="sequences per microbatch (default 1)")
    network = parser.add_argument_group("the network: measured, or by its rates")
    network.add_argument("--bandwidths", metavar="FILE", help="what `megatron-ext probe` wrote")
    network.add_argument("--rate-inside", metavar="RATE", help="what a rank sends to others of its group")
    network.add_argument("--rate-between", metavar="RATE", help="what a NIC sends to other groups")
    network.add_argument("--ranks-per-nic", metavar="N", help="that share it (default: the group)")
    network.add_argument("--latency-inside", metavar="US", help="microseconds (default 0)")
    network.add_argument("--latency-between", metavar="US", help="microseconds (default 0)")
    network.add_argument("--backend", choices=get_args(Backend), help="(default: the file's, or nccl)")
    time = parser.add_argument_group("compute of a rank")
    time.add_argument("--compute-ms", metavar="MS", help="forward and backward of one microbatch")
    time.add_argument("--tflops", metavar="N", help="that it reaches, for the same from FLOPs (needs s)")
    time.add_argument("--optimizer-ms", metavar="MS", help="updating all of its parameters (default 0)")
    time.add_argument("--no-overlap", action="store_true", help="communication does not run beside compute")
    memory = parser.add_argument_group("memory of a rank")
    memory.add_argument("--memory", metavar="SIZE", help="what it has")
    memory.add_argument("--other-memory", metavar="SIZE", help="activations and everything else (default 0)")
    run = parser.add_argument_group("flags of the run")
    run.add_argument("--paro-comm", choices=COMMS, help="(default: all are compared)")
    run.add_argument(
        "--paro-inter-dtype", choices=get_args(InterDtype), default="native", help="(default native)"
    )
    run.add_argument("--paro-reshard-after-forward", choices=("on", "off"), default="on", help="(default on)")
    for flag in _UNSUPPORTED:
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def parse(argv: list[str]) -> Request:
    """The request. Raises UserError with all problems; SystemExit for --help and a flag without its value."""
    args, found = parse_known(_parser(), argv)
    read = Numbers(args, found)
    found += [
        f"{flag} {value}: {why}, which this plan does not know. Leave it out to plan a model without."
        for flag, why in _UNSUPPORTED.items()
        if (value := read.given(flag)) not in (None, "0")
    ]
    grid, microbatches = of.grid(read), of.microbatches(read)
    units, tokens, scores = of.model(read, grid, of.types(read))
    network = of.network(read, grid)
    compute = of.compute(read, units, tokens, scores)
    limit, other = of.size(read, "--memory"), of.size(read, "--other-memory")
    comms = of.comms(read)
    if found:
        raise UserError(*found)
    assert None not in (grid, microbatches, units, network, compute, comms)
    wire = Wire(*grid, comm=comms[0], inter_dtype=args.paro_inter_dtype, backend=of.backend(read, network))
    situation = Situation(
        units=units,
        wire=wire,
        microbatches=microbatches,
        network=network,
        compute=compute,
        overlap_params=not args.no_overlap,
        overlap_grads=not args.no_overlap,
        reshard_after_forward=args.paro_reshard_after_forward == "on",
        memory_limit=limit,
        other_bytes=other or 0,
    )
    return Request(situation, comms, args.bandwidths or "as given", args.json)
