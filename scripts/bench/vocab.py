"""Benchmark of vocabulary parallelism on CPU: real training on two stages, and paced runs on more.

    python scripts/bench/vocab.py train --output out/vocab            # two stages on two cores, about 20 min
    python scripts/bench/vocab.py paced --output out/vocab-paced      # 4, 8 and 16 stages, about 5 min
    python scripts/bench/vocab.py paced --communication 0.5           # transfers half as long as compute

Both write results.json and results.md. Ratios are within one run of this script; times depend on the machine.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

MODES = ("stock", "redistributed", "interlaced", "vocab-1", "vocab-2")
VOCABULARIES = (8192, 16384, 32768, 65536, 131072, 262144)
MAX_NOT_SLEPT = 0.10


def main() -> int:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="two stages through pretrain_gpt.py, one rank per core")
    train.add_argument("--vocab", type=int, nargs="+", default=list(VOCABULARIES))
    train.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    train.add_argument("--layers", type=int, default=4)
    train.add_argument("--hidden", type=int, default=256)
    train.add_argument("--seq", type=int, default=256)
    train.add_argument("--microbatches", type=int, default=8)
    train.add_argument("--rounds", type=int, default=5, help="runs of every mode, in turn; medians are taken")
    train.add_argument("--output", type=Path, default=Path("out/vocab"))
    paced = commands.add_parser("paced", help="modelled compute, real schedule, runtime and communication")
    paced.add_argument("-p", "--stages", type=int, nargs="+", default=[4, 8, 16])
    paced.add_argument("--modes", nargs="+", default=["off", "interlaced", "vocab-1", "vocab-2", "naive"])
    paced.add_argument("--forward-ms", type=float, default=20.0)
    paced.add_argument("--communication", type=float, default=0.1, help="transfer time over compute time")
    paced.add_argument("--rounds", type=int, default=3)
    paced.add_argument("--output", type=Path, default=Path("out/vocab-paced"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    return run_train(args) if args.command == "train" else run_paced(args)


# --- training ----------------------------------------------------------------------------------------------


def run_train(args: argparse.Namespace) -> int:
    """Tokens per second, peak memory and output-layer cost for every vocabulary and mode."""
    rows = []
    for vocab in args.vocab:
        found: dict[str, list[dict]] = {mode: [] for mode in args.modes}
        for number in range(args.rounds):
            for mode in args.modes:
                print(f"vocabulary {vocab}, round {number + 1} of {args.rounds}: {mode}", flush=True)
                found[mode].append(train_once(args, vocab, mode, number))
        rows += [summary(vocab, mode, runs, found) for mode, runs in found.items()]
        write(args.output, rows, TRAIN_COLUMNS)
    print((args.output / "results.md").read_text())
    return 0


def train_once(args: argparse.Namespace, vocab: int, mode: str, number: int) -> dict:
    """One run of six steps: median step time of the last four, peak memory by rank, cost of the passes."""
    from tests.ranks import run_ranks

    folder = args.output.resolve() / f"v{vocab}-{mode}-{number}"
    flags = model_flags(args, vocab, mode)
    flags += ["--ext-report", str(folder)]
    if mode not in ("stock", "redistributed"):
        flags += ["--ext-trace", str(folder), "--ext-trace-step", "5"]

    def body() -> None:
        from megatron_ext.launch import main

        sys.exit(main(["--cpu", str(ROOT / "pretrain_gpt.py"), *flags]))

    run_ranks(2, body, timeout=600)
    steps, peaks = [], []
    for rank in range(2):
        lines = [json.loads(text) for text in (folder / f"rank-{rank:04d}.jsonl").read_text().splitlines()]
        mine = [line for line in lines if line["event"] == "step"]
        steps.append([line["step_time_s"] for line in mine])
        peaks.append(mine[-1]["peak_memory_bytes"])
        tokens = mine[-1]["tokens"]
    slowest = [max(times) for times in zip(*steps, strict=True)][2:]
    cost = output_cost(folder) if "--ext-trace" in flags else None
    return {"tokens_s": tokens / statistics.median(slowest), "peak": peaks, "output_over_layers": cost}


def model_flags(args: argparse.Namespace, vocab: int, mode: str) -> list[str]:
    """The stock command, and what a mode adds to it."""
    text = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads 4 "
        f"--seq-length {args.seq} --max-position-embeddings {args.seq} --micro-batch-size 1 "
        f"--global-batch-size {args.microbatches} "
        "--lr 1e-4 --min-lr 1e-4 --lr-decay-style constant --eval-iters 0 --tokenizer-type NullTokenizer "
        f"--vocab-size {vocab - 1} --log-interval 1 --mock-data --train-iters 6 --hidden-dropout 0 "
        "--attention-dropout 0 --pipeline-model-parallel-size 2 --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --disable-bias-linear"
    )
    flags = text.split()
    if mode == "redistributed":
        # What `megatron-ext plan layers` prints when the output layer costs more than all layers together.
        return [*flags, "--pipeline-model-parallel-layout", f"Et*{args.layers}|L"]
    return flags if mode == "stock" else [*flags, "--vocab-parallel", mode]


def output_cost(folder: Path) -> float:
    """Time of all output passes of a microbatch over that of all layers, forward and backward, as traced."""
    seconds = {"output": 0.0, "layers": 0.0}
    for path in sorted(folder.glob("trace-rank-*.jsonl")):
        for text in path.read_text().splitlines()[1:]:
            span = json.loads(text)
            kind = span["action"].rstrip("0123456789")
            if span["lane"] == "compute" and kind in ("S", "T", "U", "F", "B"):
                seconds["layers" if kind in "FB" else "output"] += span["end"] - span["start"]
    return seconds["output"] / seconds["layers"]


TRAIN_COLUMNS = ("vocabulary", "mode", "tokens/s", "over stock", "ideal", "peak MiB by rank", "output/layers")


def summary(vocab: int, mode: str, runs: list[dict], found: dict[str, list[dict]]) -> dict:
    """Medians of a mode, its ratio to stock, and the ideal ratio for the output layer's measured cost."""
    speed = statistics.median(run["tokens_s"] for run in runs)
    stock = statistics.median(run["tokens_s"] for run in found["stock"]) if found.get("stock") else None
    costs = [run["output_over_layers"] for run in found.get("vocab-2", []) if run["output_over_layers"]]
    a = statistics.median(costs) if costs else None
    peaks = [statistics.median(run["peak"][rank] for run in runs) / 2**20 for rank in range(2)]
    return {
        "vocabulary": vocab,
        "mode": mode,
        "tokens/s": round(speed, 1),
        "over stock": round(speed / stock, 3) if stock else None,
        "ideal": ideal(mode, a),
        "peak MiB by rank": [round(peak, 1) for peak in peaks],
        "output/layers": round(a, 2) if a else None,
    }


def ideal(mode: str, a: float | None) -> float | None:
    """Speed over stock on two stages if only compute counted: layers cost 1 in all, the output layer `a`."""
    if a is None or mode == "stock":
        return None
    stock = 0.5 + a
    other = max(1.0, a) if mode == "redistributed" else (1 + a) / 2
    return round(stock / other, 3)


# --- paced -------------------------------------------------------------------------------------------------


def run_paced(args: argparse.Namespace) -> int:
    """Measured against simulated time of one step, for every number of stages and mode."""
    rows = []
    for p in args.stages:
        for mode in args.modes:
            for overlap in (True, False) if args.communication >= 0.3 and mode != "off" else (True,):
                print(f"{p} stages, {mode}, overlap {'on' if overlap else 'off'}", flush=True)
                rows.append(paced_once(args, p, mode, overlap))
                write(args.output, rows, PACED_COLUMNS)
    print((args.output / "results.md").read_text())
    invalid = [row for row in rows if row["not slept"] > MAX_NOT_SLEPT]
    for row in invalid:
        print(f"invalid: {row['stages']} stages, {row['mode']}: {row['not slept']:.1%} of the time not slept")
    return 1 if invalid else 0


PACED_COLUMNS = ("stages", "mode", "overlap", "measured s", "simulated s", "ratio", "not slept", "in flight")


def paced_costs(args: argparse.Namespace, p: int, mode: str):
    """A model whose output layer costs as much as 2 p layers' stages, in the mode's placement; seconds."""
    from megatron_ext.schedules.costs import Costs

    f = args.forward_ms / 1e3
    output = (
        3.0 * f
    )  # all output passes of a microbatch, over all ranks, are p times a third of a stage's layers
    if mode == "off":
        last = (f + output / 3 * p / 4, 2 * f + output * 2 / 3 * p / 4)
        return Costs(forward=(*[f] * (p - 1), last[0]), backward=(*[2 * f] * (p - 1), last[1]))
    share = output / 4
    split = {"vocab-2": (2 / 3, 1 / 3), "naive": (1 / 3, 2 / 3)}.get(mode, (1 / 3, 2 / 3))
    compute = 3 * f + share
    parts = {"e": 1, "C0": 2, "C1": 3, "g": 1, "G": 0.5, "C2": 2, "C3": 2}
    used = {"vocab-2": ("e", "C0", "C1", "g", "G"), "naive": ("e", "C0", "C1", "C2", "C3", "g", "G")}
    kinds = used.get(mode, ("e", "C0", "C1", "C2", "g", "G"))
    unit = args.communication * compute / sum(parts[kind] for kind in kinds)
    return Costs(
        forward=f,
        backward=2 * f,
        output_s=share * split[0],
        output_t=share * split[1],
        comm={kind: unit * parts[kind] for kind in kinds},
    )


def paced_once(args: argparse.Namespace, p: int, mode: str, overlap: bool) -> dict:
    """The median of some rounds of one program, in forked ranks."""
    from megatron_ext.schedules.build import build
    from megatron_ext.schedules.check import checked
    from megatron_ext.schedules.simulate import simulate
    from tests.ranks import run_ranks

    costs, m = paced_costs(args, p, mode), 2 * p
    program = checked(build(p, m, vocab=mode), overlap=overlap)
    timeline = simulate(program, costs)
    folder = args.output.resolve() / f"p{p}-{mode}-{'on' if overlap else 'off'}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "costs.json").write_text(costs.to_json())

    def body() -> list:
        import torch.distributed as dist

        from megatron_ext.schedules.paced import PacedRun

        dist.init_process_group("gloo")
        place, everyone = program.schedule.place, list(range(p))
        comm = dist.new_group(everyone)
        ways = [(direction, way) for direction in "FB" for way in place.ways(direction)]
        groups = {key: dist.new_group(everyone) for key in ways}
        paced = PacedRun(comm, groups, overlap=overlap, placement=place)
        results = [paced.run(program, costs) for _ in range(args.rounds + 1)][1:]
        rank = dist.get_rank()
        write_trace(folder, rank, program, results[-1].spans)
        dist.barrier()
        return [(result.wall, result.not_slept) for result in results]

    ranks = run_ranks(p, body, timeout=600)
    walls = [max(r.value[i][0] for r in ranks) for i in range(args.rounds)]
    measured = statistics.median(walls)
    return {
        "stages": p,
        "mode": mode,
        "overlap": "on" if overlap else "off",
        "measured s": round(measured, 3),
        "simulated s": round(timeline.makespan, 3),
        "ratio": round(measured / timeline.makespan, 3),
        "not slept": round(max(value[1] for r in ranks for value in r.value), 4),
        "in flight": [timeline.in_flight_peak(rank) for rank in (0, p - 1)],
    }


def write_trace(folder: Path, rank: int, program, spans: list) -> None:
    """The spans in the form that `megatron-ext trace --measured` reads."""
    schedule = program.schedule
    head = {"event": "trace", "schema": 1, "rank": rank, "stage": rank, "p": schedule.p, "m": schedule.m}
    head |= {"pipeline": schedule.pipeline, "vocab": schedule.vocab, "overlap": program.overlap, "step": 1}
    lines = [{"action": a, "lane": lane, "start": start, "end": end} for lane, a, start, end in spans]
    lines.sort(key=lambda span: span["start"])
    text = "\n".join(json.dumps(line) for line in (head, *lines)) + "\n"
    (folder / f"trace-rank-{rank:04d}.jsonl").write_text(text)


def write(folder: Path, rows: list[dict], columns: tuple[str, ...]) -> None:
    """results.json and results.md."""
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        cells = ["" if row[c] is None else str(row[c]).strip("[]") for c in columns]
        lines.append("| " + " | ".join(cells) + " |")
    (folder / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
