"""Benchmark of PaRO in the slow-link lab: real training through pretrain_gpt.py, nodes joined by slow links.

    python scripts/bench/paro.py train --output out/paro                  # stock, and every strategy
    python scripts/bench/paro.py train --cases partial                    # a sixteenth, and little, trained
    python scripts/bench/paro.py scaling --output out/paro-scaling        # 1, 2 and 4 groups, weak scaling

Needs root, `ip` and `tc` (`scripts/netlab doctor`). Writes results.json, results.md and results.svg. All
cases run in turn, round by round, so ratios are within one run; times depend on the machine.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from paro_job import run_once  # noqa: E402

from megatron_ext.netlab.forked import preload  # noqa: E402
from megatron_ext.netlab.lab import Lab  # noqa: E402
from megatron_ext.netlab.links import Links, parse_rate  # noqa: E402
from megatron_ext.paro.strategy import NAMES  # noqa: E402

DISTOPT = ["--use-distributed-optimizer"]
FSDP = [
    *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
    *("--no-gradient-reduce-div-fusion", "--ckpt-format", "fsdp_dtensor"),
]
FROZEN = {
    "1/16 trained": r"layers\.\d+\.self_attention\.linear_proj\.weight",
    "norms trained": r"layernorm",
}


def paro(strategy: str, comm: str = "two-phase") -> list[str]:
    """Flags of a strategy."""
    return ["--paro-strategy", strategy, "--paro-comm", comm]


def case_table(nodes: int) -> dict[str, dict[str, tuple[list[str], str | None]]]:
    """Sets of cases: name -> (flags, what is trained)."""
    instances = [*DISTOPT, "--num-distributed-optimizer-instances", str(nodes)]
    stock = {
        "stock DDP": ([], None),
        "stock distributed optimizer": (DISTOPT, None),
        f"stock, {nodes} optimizer instances": (instances, None),
        "Megatron-FSDP": (FSDP, None),
        "NNG flat (stock's algorithm, efficient reduce-scatter)": (paro("NNG", "flat"), None),
        "GGG flat (ZeRO-3)": (paro("GGG", "flat"), None),
    }
    ours = {f"{name} two-phase": (paro(name), None) for name in NAMES}
    ring = {f"{name} ho-ring": (paro(name, "ho-ring"), None) for name in ("NNG", "NIG", "IIG", "GGG")}
    partial = {
        f"{name}, {what}": (flags, pattern)
        for what, pattern in FROZEN.items()
        for name, flags in (
            ("stock distributed optimizer", DISTOPT),
            ("NNG flat", paro("NNG", "flat")),
            ("GGG flat", paro("GGG", "flat")),
            *((f"{name} two-phase", paro(name)) for name in ("NNG", "NIG", "ING", "IIG", "III", "GGG")),
        )
    }
    table = stock | ours | ring
    compared = ("NNG flat (stock's algorithm, efficient reduce-scatter)", "GGG flat (ZeRO-3)")
    short = {name: table[name] for name in compared}
    short |= {name: table[name] for name in ours if name.split()[0] in ("NNG", "NIG", "IIG", "III")}
    return {"all": table, "short": short, "strategies": ours, "partial": partial}


def main() -> int:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="stock and all strategies on one lab")
    train.add_argument("--nodes", type=int, default=2)
    train.add_argument("--cases", choices=("all", "short", "strategies", "partial"), default="all")
    scaling = commands.add_parser("scaling", help="weak scaling over groups")
    scaling.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    for command in (train, scaling):
        command.add_argument("--ranks-per-node", type=int, default=2)
        command.add_argument("--rate", type=parse_rate, default=parse_rate("200mbit"))
        command.add_argument("--intra-rate", type=parse_rate, help="inside a node; no limit if not given")
        command.add_argument("--microbatches", type=int, default=4)
        command.add_argument("--layers", type=int, default=4)
        command.add_argument("--hidden", type=int, default=256)
        command.add_argument("--seq", type=int, default=32)
        command.add_argument("--steps", type=int, default=4)
        command.add_argument("--rounds", type=int, default=3)
        command.add_argument("--output", type=Path, default=Path(f"out/paro-{command.prog.split()[-1]}"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    preload(("torch", "megatron.training"), cpu=True)
    return run_train(args) if args.command == "train" else run_scaling(args)


def links(args: argparse.Namespace) -> Links:
    """The lab's links."""
    return Links(args.rate, args.intra_rate)


# --- all strategies ----------------------------------------------------------------------------------------

COLUMNS = ("case", "s/step", "spread", "over NNG flat", "NIC MiB/step", "kept MiB/rank", "modelled s/step")


def run_train(args: argparse.Namespace) -> int:
    """The table of all cases."""
    cases = case_table(args.nodes)[args.cases]
    found: dict[str, list[dict]] = {name: [] for name in cases}
    compute = {
        trained: unlimited(args, trained) for trained in dict.fromkeys(each[1] for each in cases.values())
    }
    with Lab(args.nodes, links(args)) as lab:
        for number in range(args.rounds):
            for name, (flags, trained) in cases.items():
                print(f"round {number + 1} of {args.rounds}: {name}", flush=True)
                tag = f"{name}-{number}"
                run = run_once(args, lab, args.nodes, flags, trained, tag, count=number == 0)
                found[name].append(run)
    rows = []
    for name, (_, trained) in cases.items():
        same = {other: found[other] for other, (_, others) in cases.items() if others == trained}
        rows.append(row(args, name, same, compute[trained]))
    summary = {"compute s/step": [round(seconds, 3) for seconds in compute.values()]}
    summary |= {"spearman": spearman(rows), "choice": choice(rows), "losses": losses(found)}
    write(args, rows, COLUMNS, summary)
    return 0


def unlimited(args: argparse.Namespace, trained: str | None) -> float:
    """Seconds of a step with nothing split on links without limits: compute, and what every case has."""
    with Lab(args.nodes, Links(parse_rate("20gbit"))) as lab:
        return statistics.median(
            run_once(args, lab, args.nodes, paro("NNN"), trained, f"compute-{i}", count=False)["seconds"]
            for i in range(3)
        )


def row(args: argparse.Namespace, name: str, found: dict[str, list[dict]], compute: float) -> dict:
    """One case: medians, and its ratio to the baseline that trains the same."""
    runs = found[name]
    times = [run["seconds"] for run in runs]
    seconds = statistics.median(times)
    base = next((value for key, value in found.items() if key.startswith("NNG flat")), None)
    return {
        "case": name,
        "s/step": round(seconds, 3),
        "spread": f"{min(times):.2f} to {max(times):.2f}",
        "over NNG flat": round(statistics.median(r["seconds"] for r in base) / seconds, 2) if base else None,
        "NIC MiB/step": round(runs[0]["nic"], 1),
        "kept MiB/rank": round(runs[0]["kept"] / 2**20, 1) if runs[0]["kept"] else None,
        "modelled s/step": modelled(args, name, runs[0], compute),
    }


def modelled(args: argparse.Namespace, name: str, run: dict, compute: float) -> float | None:
    """The planner's step time of a strategy, from the lab's rates and the measured compute."""
    if run["paro"] is None:
        return None
    from megatron_ext.paro.cost import Compute, step_seconds
    from megatron_ext.paro.network import Link, Network
    from megatron_ext.paro.strategy import Strategy
    from megatron_ext.paro.volume import Wire

    found = run["paro"]
    inside = Link(0.0, (args.intra_rate or parse_rate("16gbit")) / 8)
    network = Network.given(
        inside, Link(0.0, args.rate / 8), members=args.ranks_per_node, ranks_per_nic=args.ranks_per_node
    )
    comm = next(word for word in name.replace(",", "").split() if word in ("flat", "two-phase", "ho-ring"))
    step = step_seconds(
        Strategy.parse(found["strategy"]),
        units_of(found),
        Wire(found["groups"], found["members"], comm),
        network,
        args.microbatches,
        Compute(),
        overlap_params=False,
        overlap_grads=False,
    )
    return round(step.total + compute, 3)


def units_of(found: dict) -> list:
    """The units of a run, as its record describes them."""
    from megatron_ext.paro.passes import UnitSize

    return [
        UnitSize(
            unit["padded"],
            unit["param_bytes"],
            unit["grad_bytes"] or 4,
            unit["grad_bytes"] > 0,
            "" if unit["name"].startswith("root") else unit["name"],
        )
        for unit in found["units"]
    ]


def spearman(rows: list[dict]) -> float | None:
    """Rank correlation of modelled and measured step times."""
    pairs = [(r["s/step"], r["modelled s/step"]) for r in rows if r["modelled s/step"] is not None]
    if len(pairs) < 3:
        return None

    def ranks(values: list[float]) -> list[float]:
        ordered = sorted(values)
        return [statistics.mean(i for i, other in enumerate(ordered) if other == value) for value in values]

    return round(statistics.correlation(*(ranks(list(values)) for values in zip(*pairs, strict=True))), 3)


def choice(rows: list[dict]) -> str | None:
    """How far the case of the shortest modelled step is from the fastest one of those that are modelled."""
    ours = [found for found in rows if found["modelled s/step"] is not None]
    if not ours:
        return None
    chosen = min(ours, key=lambda found: found["modelled s/step"])
    fastest = min(ours, key=lambda found: found["s/step"])
    ratio = chosen["s/step"] / fastest["s/step"]
    return f"{chosen['case']}, {ratio:.2f} times the fastest, {fastest['case']}"


def losses(found: dict[str, list[dict]]) -> str:
    """How far the last losses of cases that train the same are apart."""
    values = [run["loss"] for name, runs in found.items() if "trained" not in name for run in runs]
    if not values:
        return "not compared: other parameters are trained"
    return f"{min(values):.6f} to {max(values):.6f}"


# --- weak scaling ------------------------------------------------------------------------------------------

SCALED = ("NIG two-phase", "IIG two-phase", "NNG flat", "GGG flat")


def run_scaling(args: argparse.Namespace) -> int:
    """Tokens per second and rank over those of the smallest lab, at the same batch per rank."""
    found: dict[tuple[str, int], list[float]] = {}
    for nodes in args.nodes:
        with Lab(nodes, links(args)) as lab:
            for number in range(args.rounds):
                for name in SCALED:
                    print(f"{nodes} nodes, round {number + 1} of {args.rounds}: {name}", flush=True)
                    tag = f"{name}-{nodes}-{number}"
                    run = run_once(args, lab, nodes, paro(*name.split()), None, tag, count=False)
                    speed = run["tokens"] / run["seconds"] / nodes / args.ranks_per_node
                    found.setdefault((name, nodes), []).append(speed)
    rows = []
    for name in SCALED:
        for nodes in args.nodes:
            speed = statistics.median(found[name, nodes])
            first = statistics.median(found[name, args.nodes[0]])
            cells = {"case": name, "groups": nodes, "tokens/s and rank": round(speed, 1)}
            rows.append(cells | {"efficiency": round(speed / first, 3)})
    write(args, rows, ("case", "groups", "tokens/s and rank", "efficiency"), {})
    return 0


# --- results -----------------------------------------------------------------------------------------------


def write(args: argparse.Namespace, rows: list[dict], columns: tuple[str, ...], summary: dict) -> None:
    """results.json, results.md and results.svg."""
    from charts import bars

    setting = {key: str(value) for key, value in vars(args).items() if key not in ("command", "output")}
    (args.output / "results.json").write_text(
        json.dumps({"setting": setting, "summary": summary, "rows": rows}, indent=1) + "\n"
    )
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for found in rows:
        cells = ["" if found[c] is None else str(found[c]) for c in columns]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(f"{key}: {value}" for key, value in summary.items())]
    (args.output / "results.md").write_text("\n".join(lines) + "\n")
    value = "s/step" if "s/step" in columns else "efficiency"
    named = [
        (f"{r['case']}{', groups ' + str(r['groups']) if 'groups' in r else ''}", r[value]) for r in rows
    ]
    (args.output / "results.svg").write_text(bars(named, value))
    print((args.output / "results.md").read_text())


if __name__ == "__main__":
    sys.exit(main())
