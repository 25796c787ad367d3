"""Benchmark of PaRO's overlap: communication half as long as compute, on links made slow enough for it.

    python scripts/bench/paro_overlap.py --output out/paro-overlap

One rank a node, so that every rank has a core of its own. Compute is measured on links without limits; the
rate is then set so that what the strategy sends takes half as long as that. Steps with overlap stand beside
steps without and beside the planner's model of both. Needs root, `ip` and `tc`.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from paro import DISTOPT, Lab, Links, paro, parse_rate, preload, units_of
from paro_job import run_once

OVERLAP = [*DISTOPT, "--overlap-grad-reduce", "--overlap-param-gather"]
FORWARD = 1 / 3
"""Part of compute that is the forward pass: a backward pass has twice the arithmetic."""


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--strategies", nargs="+", default=["NNN", "NNG", "GGG"])
    add("--part", type=float, default=0.5, help="communication over compute")
    add("--nodes", type=int, default=2)
    add("--microbatches", type=int, default=4)
    add("--layers", type=int, default=8)
    add("--hidden", type=int, default=256)
    add("--seq", type=int, default=128)
    add("--steps", type=int, default=4)
    add("--rounds", type=int, default=5)
    add("--output", type=Path, default=Path("out/paro-overlap"))
    args = parser.parse_args()
    args.ranks_per_node = 1
    args.output.mkdir(parents=True, exist_ok=True)
    preload(("torch", "megatron.training"), cpu=True)
    rows = [measured(args, strategy) for strategy in args.strategies]
    setting = {key: str(value) for key, value in vars(args).items() if key != "output"}
    (args.output / "results.json").write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")
    text = table(rows)
    (args.output / "results.md").write_text(text)
    print(text)
    return 0


def measured(args: argparse.Namespace, strategy: str) -> dict:
    """One strategy: compute alone, then without and with overlap in turn."""
    with Lab(args.nodes, Links(parse_rate("20gbit"))) as lab:
        runs = [times(args, lab, strategy, [], f"{strategy}-compute-{i}") for i in range(3)]
    compute = statistics.median(seconds for seconds, _ in runs)
    found = runs[0][1]
    rate = round(8 * modelled(args, found, 8, compute, overlap=False).exposed / (args.part * compute))
    print(f"{strategy}: compute {compute:.2f} s, {rate / 1e6:.1f} Mbit/s", flush=True)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with Lab(args.nodes, Links(rate)) as lab:
        for number in range(args.rounds):
            for overlap, all_of in seconds.items():
                flags = OVERLAP if overlap else []
                all_of.append(times(args, lab, strategy, flags, f"{strategy}-{overlap}-{number}")[0])
    models = {on: modelled(args, found, rate, compute, overlap=on).total for on in (False, True)}
    return {
        "strategy": strategy,
        "Mbit/s": round(rate / 1e6, 1),
        "compute": compute,
        "without": seconds[False],
        "with": seconds[True],
        "model without": models[False],
        "model with": models[True],
    }


def times(
    args: argparse.Namespace, lab: Lab, strategy: str, flags: list[str], tag: str
) -> tuple[float, dict]:
    """Median seconds of a step, and what the record says of the strategy."""
    run = run_once(args, lab, args.nodes, [*paro(strategy), *flags], None, tag, count=False)
    return run["seconds"], run["paro"]


def modelled(args: argparse.Namespace, found: dict, rate: int, compute: float, *, overlap: bool):
    """The planner's step; `rate` in bit/s."""
    from megatron_ext.paro.cost import Compute, step_seconds
    from megatron_ext.paro.network import Link, Network
    from megatron_ext.paro.strategy import Strategy
    from megatron_ext.paro.volume import Wire

    each = compute / args.microbatches
    return step_seconds(
        Strategy.parse(found["strategy"]),
        units_of(found),
        Wire(found["groups"], found["members"], "two-phase"),
        Network.given(Link(0.0, 1e12), Link(0.0, rate / 8), members=1, ranks_per_nic=1),
        args.microbatches,
        Compute(each * FORWARD, each * (1 - FORWARD)),
        overlap_params=overlap,
        overlap_grads=overlap,
    )


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = [
        "| strategy | Mbit/s | compute, s | without overlap, s | modelled "
        "| with overlap, s | spread | modelled | off by |",
        "|" + " --- |" * 9,
    ]
    for row in rows:
        without, with_ = (statistics.median(row[name]) for name in ("without", "with"))
        lines.append(
            f"| {row['strategy']} | {row['Mbit/s']} | {row['compute']:.2f} | {without:.2f} "
            f"| {row['model without']:.2f} | {with_:.2f} | {min(row['with']):.2f} to {max(row['with']):.2f} "
            f"| {row['model with']:.2f} | {100 * (with_ / row['model with'] - 1):+.1f} % |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
