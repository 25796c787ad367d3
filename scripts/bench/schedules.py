"""Pipeline schedules compared: searched with measured pass times, and paced runs against simulation.

    python scripts/bench/schedules.py a100                               # every row of the A100 table
    python scripts/bench/schedules.py paced --output out/schedules       # 8 and 16 stages, about 10 min
    python scripts/bench/schedules.py paced -p 4 --forward-ms 10         # a small one, seconds
    python scripts/bench/schedules.py balance                            # memory and compute by rank, 11 min

`a100` searches a schedule for the published pass times of 8 A100 GPUs (scripts/bench/validate_simulator.py
describes them); backward passes are split half and half. `paced` runs real schedules, runtime and
communication with passes that sleep; it fails where a time is more than 5 % off the simulated one, the order
of schedules is another, or more than a tenth of the time was not slept. `balance` trains with
`pretrain_gpt.py` and a vocabulary of 256,000 on one core and compares the ranks: planned and measured memory
at the peak, and the time of all passes; it fails where they differ by 2 % or more in V-Half with vocab-2.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "v-min", "v-half", "v-zb")
MAX_NOT_SLEPT = 0.10
MAX_OFF = 0.05
"""How far a measured time may be from the simulated one."""
RANKS, MICROBATCHES = 8, 128
LARGE = 128_000
"""Vocabularies from here on are searched with a limit of p microbatches, smaller ones with p + 1."""


def main() -> int:
    """Run one of the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    a100 = commands.add_parser("a100", help="the best schedule for the pass times of every row of the table")
    a100.add_argument("--methods", nargs="+", default=[], help="only these (default: all)")
    a100.add_argument("--vocab", type=int, nargs="+", default=[], help="only these (default: all)")
    a100.add_argument("--sequence", type=int, nargs="+", default=[], help="only these (default: all)")
    a100.add_argument("--output", type=Path, help="folder for a100.json and a100.md")
    paced = commands.add_parser("paced", help="modelled compute, real schedule, runtime and communication")
    paced.add_argument("-p", "--stages", type=int, nargs="+", default=[8, 16])
    paced.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    paced.add_argument("--modes", nargs="+", default=["off", "vocab-2"])
    paced.add_argument("--forward-ms", type=float, default=40.0, help="of all layers of a rank")
    paced.add_argument("--rounds", type=int, default=3)
    paced.add_argument("--output", type=Path, default=Path("out/schedules"))
    balance = commands.add_parser("balance", help="memory and pass times of the ranks of real training runs")
    balance.add_argument("-p", "--stages", type=int, default=4)
    balance.add_argument("--vocab", type=int, default=256_000, help="rows, a multiple of 128")
    balance.add_argument("--hidden", type=int, default=128)
    balance.add_argument("--sequence", type=int, default=256)
    balance.add_argument("--rounds", type=int, default=3, help="runs of each; memory is the last one's")
    balance.add_argument("--runs", nargs="+", default=list(BALANCE_RUNS), help="SCHEDULE/MODE, one or more")
    balance.add_argument("--output", type=Path, default=Path("out/schedules"))
    args = parser.parse_args()
    return {"a100": run_a100, "paced": run_paced, "balance": run_balance}[args.command](args)


# --- search ------------------------------------------------------------------------------------------------

A100 = (
    "method",
    "sequence",
    "vocabulary",
    "limit",
    "1F1B over compute",
    "best over compute",
    "memory",
    "schedule",
)


def run_a100(args: argparse.Namespace) -> int:
    """The table: time of an iteration over the largest sum of a rank's pass times, of 1F1B and of the "
    "best."""
    from scripts.bench.validate_simulator import DATA, read

    rows = []
    for run in read(DATA):
        wanted = ((args.methods, run.method), (args.vocab, run.vocab), (args.sequence, run.seq_length))
        if any(chosen and value not in chosen for chosen, value in wanted):
            continue
        rows.append(searched(run))
        print(" | ".join(str(rows[-1][name]) for name in A100), flush=True)
    lines = ["| " + " | ".join(A100) + " |", "|" + " --- |" * len(A100)]
    lines += ["| " + " | ".join(str(row[name]) for name in A100) + " |" for row in rows]
    print("\n" + "\n".join(lines))
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "a100.json").write_text(json.dumps(rows, indent=1) + "\n")
        (args.output / "a100.md").write_text("\n".join(lines) + "\n")
    return 0


def searched(run) -> dict:
    """One row of the table."""
    from megatron_ext.schedules.build import build
    from megatron_ext.schedules.lower import lower
    from megatron_ext.schedules.search import search
    from megatron_ext.schedules.simulate import simulate

    vocab = run.mode
    limit = RANKS if run.vocab >= LARGE else RANKS + 1
    if vocab == "interlaced":
        limit = 3 * RANKS // 2  # what it holds, in the only pipeline that it runs in
    best = search(RANKS, MICROBATCHES, run.costs, vocab=vocab, limit=limit)[0]
    plain = simulate(lower(build(RANKS, MICROBATCHES, vocab=vocab)), run.costs)
    return {
        "method": run.method,
        "sequence": run.seq_length,
        "vocabulary": run.vocab,
        "limit": limit,
        "1F1B over compute": round(plain.makespan / best.busy, 4),
        "best over compute": round(best.makespan / best.busy, 4),
        "memory": best.memory,
        "schedule": str(best.recipe),
    }


# --- paced -------------------------------------------------------------------------------------------------

PACED = ("stages", "mode", "schedule", "measured s", "simulated s", "ratio", "not slept", "chunks held")


def run_paced(args: argparse.Namespace) -> int:
    """Measured against simulated time of one step; the order of the schedules must be the simulated one."""
    args.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for p in args.stages:
        for mode in args.modes:
            for schedule in args.schedules:
                print(f"{p} stages, vocabulary {mode}, {schedule}", flush=True)
                rows.append(paced_once(args, p, mode, schedule))
                write(args.output, rows)
    print((args.output / "paced.md").read_text())
    problems = [
        f"{name(row)}: {row['not slept']:.1%} not slept" for row in rows if row["not slept"] > MAX_NOT_SLEPT
    ]
    off = [row for row in rows if abs(row["ratio"] - 1) > MAX_OFF]
    problems += [f"{name(row)}: {row['ratio']} of the simulated time" for row in off]
    problems += disordered(rows)
    print("\n".join(f"invalid: {problem}" for problem in problems))
    return 1 if problems else 0


def name(row: dict) -> str:
    """Which run a row is."""
    return f"{row['stages']} stages, {row['mode']}, {row['schedule']}"


def disordered(rows: list[dict]) -> list[str]:
    """Pairs whose simulated times differ by more than 1 % and whose measured times say otherwise."""
    found = []
    for a in rows:
        for b in rows:
            same = (a["stages"], a["mode"]) == (b["stages"], b["mode"])
            if same and a["simulated s"] < 0.99 * b["simulated s"] and a["measured s"] >= b["measured s"]:
                found.append(f"{name(a)} should be faster than {b['schedule']}")
    return found


def costs_of(args: argparse.Namespace, mode: str):
    """A model whose output layer costs a fifth of a rank's layers where it is shared out; seconds."""
    from megatron_ext.schedules.costs import Costs

    f = args.forward_ms / 1e3
    parts = {"off": (0.0, 0.0), "vocab-2": (0.4, 0.2), "vocab-1": (0.2, 0.4), "naive": (0.2, 0.4)}[mode]
    return Costs(forward=f, backward=2 * f, output_s=parts[0] * f, output_t=parts[1] * f)


def paced_once(args: argparse.Namespace, p: int, mode: str, pipeline: str) -> dict:
    """The median of some rounds of one program, in forked ranks."""
    from megatron_ext.schedules.build import build
    from megatron_ext.schedules.check import checked
    from megatron_ext.schedules.simulate import simulate
    from tests.ranks import run_ranks

    costs, m = costs_of(args, mode), 3 * p
    program = checked(build(p, m, pipeline=pipeline, vocab=mode))
    timeline = simulate(program, costs)

    def body() -> list:
        import torch.distributed as dist

        from megatron_ext.schedules.paced import PacedRun

        dist.init_process_group("gloo")
        place, everyone = program.schedule.place, list(range(p))
        comm = dist.new_group(everyone)
        ways = [(direction, way) for direction in "FB" for way in place.ways(direction)]
        groups = {key: dist.new_group(everyone) for key in ways}
        paced = PacedRun(comm, groups, overlap=True, placement=place)
        results = [paced.run(program, costs) for _ in range(args.rounds + 1)][1:]
        dist.barrier()
        held = most_held(results[-1].spans, program.schedule.releases)
        return [(result.wall, result.not_slept) for result in results], held

    ranks = run_ranks(p, body, timeout=600)
    measured = statistics.median(max(r.value[0][i][0] for r in ranks) for i in range(args.rounds))
    held = [r.value[1] for r in ranks]
    assert held == [program.schedule.in_flight(rank) for rank in range(p)], held
    return {
        "stages": p,
        "mode": mode,
        "schedule": pipeline,
        "measured s": round(measured, 3),
        "simulated s": round(timeline.makespan, 3),
        "ratio": round(measured / timeline.makespan, 3),
        "not slept": round(max(value[1] for r in ranks for value in r.value[0]), 4),
        "chunks held": f"{min(held)} to {max(held)}",
    }


def most_held(spans: list, releases: str) -> int:
    """Chunk activations that a rank held at most, from what it ran."""
    now = most = 0
    for lane, action, _, _ in sorted(spans, key=lambda span: span[2]):
        kind = action.split(".")[0].rstrip("0123456789")
        if lane == "compute":
            now += (kind == "F") - (kind == releases)
            most = max(most, now)
    return most


def write(folder: Path, rows: list[dict]) -> None:
    """paced.json and paced.md."""
    (folder / "paced.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = ["| " + " | ".join(PACED) + " |", "|" + " --- |" * len(PACED)]
    lines += ["| " + " | ".join(str(row[c]) for c in PACED) + " |" for row in rows]
    (folder / "paced.md").write_text("\n".join(lines) + "\n")


# --- balance -----------------------------------------------------------------------------------------------

BALANCE_RUNS = ("v-half/vocab-2", "1f1b/off")
BALANCED = "v-half/vocab-2"
MOST_SPREAD = 0.02
PER_STAGE = 8
"""Microbatches of a step, for each stage: so many samples of every pass."""
BALANCE = ("run", "what", "by rank", "largest over smallest")


def run_balance(args: argparse.Namespace) -> int:
    """Train each run for 3 steps: memory in the second one, times in the third."""
    args.output.mkdir(parents=True, exist_ok=True)
    runs, passes = {}, {}
    for label in args.runs:
        print(f"{label}: {args.stages} stages, vocabulary {args.vocab}", flush=True)
        runs[label], passes[label] = balance_once(args, *label.split("/"))
    lines = ["| " + " | ".join(BALANCE) + " |", "|" + " --- |" * len(BALANCE)]
    for label, found in runs.items():
        for what, values in found.items():
            shown = ", ".join(f"{value:.4g}" for value in values)
            lines.append(f"| {label} | {what} | {shown} | {1 + spread(values):.4g} |")
    about = {name: getattr(args, name) for name in ("stages", "vocab", "hidden", "sequence")}
    (args.output / "balance.json").write_text(
        json.dumps(about | {"runs": runs, "passes": passes}, indent=1) + "\n"
    )
    (args.output / "balance.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    uneven = [what for what, values in runs.get(BALANCED, {}).items() if spread(values) >= MOST_SPREAD]
    print("\n".join(f"{BALANCED}: ranks differ in {what}" for what in uneven))
    return 1 if uneven else 0


def spread(values: list[float]) -> float:
    """How much more the largest is than the smallest."""
    return max(values) / min(values) - 1


def balance_once(args: argparse.Namespace, schedule: str, mode: str) -> tuple[dict, list[dict]]:
    """What to compare, by rank: bytes in MiB, and seconds of a step; and the latter by pass.

    Times are processor times of the thread that runs the passes, since ranks share cores: the median of a
    pass (F of chunk 0, S, ...) over microbatches and rounds, times their number, summed over passes. Ranks
    take turns on one core: on two, a pass takes longer while another rank computes, and who computes beside
    whom follows from the schedule, not from the work. Rounds count because a pass of one run can be some
    percent off in all of its microbatches: where its memory happens to lie does not change before the
    processes end.
    """
    from tests.functional.runs import train

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    p, sequence = args.stages, args.sequence
    flags = (
        f"--num-layers {2 * p} --hidden-size {args.hidden} --seq-length {sequence} "
        f"--max-position-embeddings {sequence} --vocab-size {args.vocab - 1} "
        f"--global-batch-size {PER_STAGE * p} --disable-bias-linear --untie-embeddings-and-output-weights "
        f"--pipeline-model-parallel-size {p} --pipeline-schedule {schedule} --vocab-parallel {mode}"
    ).split()
    passes: list[dict[str, list[float]]] = [defaultdict(list) for _ in range(p)]
    for count in range(args.rounds):
        print(f"  round {count + 1} of {args.rounds}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace"
            traced = ["--ext-memory", "--ext-trace", str(trace), "--ext-trace-step", "3"]
            run = train(Path(folder), p, *flags, *traced, steps=3, timeout=1200)
            for rank in range(p):
                add_passes(trace / f"trace-rank-{rank:04d}.jsonl", passes[rank])
    planned = [sum(run.start(rank)["planned_memory"].values()) / 2**20 for rank in range(p)]
    memory = [next(line["memory"] for line in run.steps(rank) if "memory" in line) for rank in range(p)]
    times = [
        {kind: len(found) / args.rounds * statistics.median(found) for kind, found in sorted(each.items())}
        for each in passes
    ]
    return {
        "planned MiB": [round(value, 3) for value in planned],
        "measured MiB": [round(each["peak"] / 2**20, 3) for each in memory],
        "passes s": [round(sum(each.values()), 4) for each in times],
    }, times


def add_passes(path: Path, into: dict[str, list[float]]) -> None:
    """Add the processor seconds of every pass of a traced step, by kind and chunk."""
    from megatron_ext.schedules.action import parse

    for text in path.read_text().splitlines()[1:]:
        span = json.loads(text)
        if span["lane"] == "compute":
            action = parse(span["action"])
            into[f"{action.kind}{action.chunk}"].append(span["cpu"])


if __name__ == "__main__":
    sys.exit(main())
