"""Benchmark of 3-D linear layers in real training, through pretrain_gpt.py, with one rank on each node.

    python scripts/bench/linear3d_train.py --ranks 8 --rate 20mbit --grids 4x2x1 2x2x2
    python scripts/bench/linear3d_train.py --ranks 4 --grids 2x1x2            # on links without limits

Compared in one run, round by round: stock's tensor and sequence parallelism as shipped, the same algorithm
over an efficient reduce-scatter (grid 1 x P x 1), and the grids asked for. All start from the weights of one
seed checkpoint, so that losses can be compared, too. A lab needs root, `ip` and `tc` (`scripts/netlab
doctor`). Writes train.json, train.md and train.svg.
"""

import argparse
import functools
import json
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from charts import bars  # noqa: E402

from megatron_ext.netlab.links import Links, parse_rate  # noqa: E402

STOCK, BASE = "stock, as shipped", "1-D"
WARM = 1
"""Steps of a run that are not timed."""


def main(argv: list[str]) -> int:
    """Train with every method, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=8)
    add("--grids", nargs="+", default=["4x2x1", "2x2x2"], metavar="XxYxZ")
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=2)
    add("--seq", type=int, default=128)
    add("--batch", type=int, default=8, help="sequences of a microbatch; one microbatch a step")
    add("--save", choices=("gathered", "shard_weight", "shard_all"), default="gathered")
    add("--overlap", choices=("all", "none", "grads", "prefetch", "defer"), default="all")
    add("--rate", type=parse_rate, help="of each node's NIC; builds a lab of one rank on each node")
    add("--steps", type=int, default=4, help="timed, of every job; medians are taken")
    add("--rounds", type=int, default=3, help="of every method, in turn")
    add("--output", type=Path, default=Path("out/linear3d-train"))
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    prepare()
    seed = args.output.resolve() / "seed"
    job(args, 1, ["--save", str(seed), "--save-interval", "1", "--no-save-optim", "--no-save-rng"], "seed", 1)
    from_seed = ["--load", str(seed), "--finetune", "--no-load-optim", "--no-load-rng"]
    found: dict[str, list[dict]] = {}
    for number in range(args.rounds):
        for name, flags in methods(args).items():
            tag = f"{name.replace(' ', '-').replace(',', '')}-{number}"
            lines = job(args, args.ranks, [*from_seed, *flags], tag, WARM + args.steps)
            found.setdefault(name, []).append(summary(lines))
    rows = [merged(name, runs) for name, runs in found.items()]
    setting = {key: str(value) for key, value in vars(args).items() if key != "output"}
    (args.output / "train.json").write_text(json.dumps({"setting": setting, "rows": rows}, indent=1))
    (args.output / "train.md").write_text(report(args, rows))
    named = [(row["method"], round(row["seconds"], 3)) for row in rows]
    (args.output / "train.svg").write_text(bars(named, "seconds of a step"))
    print((args.output / "train.md").read_text())
    return 0


def methods(args: argparse.Namespace) -> dict[str, list[str]]:
    """Flags of every method."""
    size = ["--tensor-model-parallel-size", str(args.ranks)]
    ways = ["--linear-3d-save", args.save, "--linear-3d-overlap", args.overlap, "--ext-check", "bytes"]
    grids = {f"3-D {text}": text.split("x") for text in args.grids}
    line = {BASE: ["1", str(args.ranks), "1"]}
    ours = {name: [*size, "--linear-3d", *grid, *ways] for name, grid in (line | grids).items()}
    return {STOCK: [*size, "--sequence-parallel"]} | ours


def prepare() -> None:
    """Import what ranks need, once."""
    import torch

    from megatron_ext.netlab.forked import PRELOAD, preload

    preload(PRELOAD, cpu=True)
    torch.set_num_threads(1)


def job(args: argparse.Namespace, world: int, flags: list[str], tag: str, steps: int) -> list[list[dict]]:
    """Train, and return the steps of each rank's record."""
    folder = args.output.resolve() / "records" / tag
    text = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads {args.hidden // 8} "
        f"--seq-length {args.seq} --max-position-embeddings {args.seq} --micro-batch-size {args.batch} "
        f"--global-batch-size {args.batch} --train-iters {steps} --eval-iters 0 --lr 1e-4 --min-lr 1e-4 "
        "--lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 1023 --log-interval 1 "
        "--make-vocab-size-divisible-by 1 --mock-data --hidden-dropout 0 --attention-dropout 0 --seed 5 "
        "--position-embedding-type rope --disable-bias-linear --ckpt-format torch_dist"
    )
    script = str(ROOT / "pretrain_gpt.py")
    command = ["--cpu", script, *text.split(), *flags, "--ext-report", str(folder)]
    for old in folder.glob("rank-*.jsonl"):
        old.unlink()
    body = functools.partial(launch, command)
    if args.rate is None or world == 1:
        from tests.ranks import run_ranks

        run_ranks(world, body, timeout=3600)
    else:
        from megatron_ext.netlab.forked import run_in_lab
        from megatron_ext.netlab.lab import Lab

        with Lab(world, Links(args.rate, None)) as lab:
            run_in_lab(lab, world, body, timeout=3600)
    records = [
        [json.loads(text) for text in (folder / f"rank-{rank:04d}.jsonl").read_text().splitlines()]
        for rank in range(world)
    ]
    return [[line for line in record if line["event"] == "step"] for record in records]


def launch(command: list[str]) -> None:
    """Body of a rank."""
    from megatron_ext.cli import main

    sys.exit(main(command))


def summary(ranks: list[list[dict]]) -> dict:
    """Seconds of the slowest rank, the last loss, and what the busiest rank sends over all groups in a
    step."""
    times = [max(rank[i]["step_time_s"] for rank in ranks) for i in range(WARM, len(ranks[0]))]
    sent = [sum(entry["bytes"] for entry in rank[-1]["traffic"]) for rank in ranks]
    peak = max(rank[-1]["peak_memory_bytes"] for rank in ranks)
    loss = next(rank[-1]["loss"] for rank in ranks if "loss" in rank[-1])
    return {"seconds": statistics.median(times), "loss": loss, "bytes": max(sent), "peak": peak}


def merged(name: str, runs: list[dict]) -> dict:
    """All rounds of a method."""
    assert len({run["loss"] for run in runs}) == 1, f"{name}: rounds differ in their losses"
    times = [run["seconds"] for run in runs]
    row = {"seconds": statistics.median(times), "least": min(times), "most": max(times)}
    return {"method": name, **runs[0], **row}


def report(args: argparse.Namespace, rows: list[dict]) -> str:
    """The table, with ratios to 1-D over the efficient reduce-scatter."""
    base = next(row for row in rows if row["method"] == BASE)
    rate = f"{args.rate / 1e6:g} Mbit/s a rank" if args.rate else "links without limits"
    lines = [
        f"{args.ranks} ranks, {rate}; {args.layers} layers, h {args.hidden}, {args.seq} x {args.batch} "
        f"tokens; save policy {args.save}, overlap {args.overlap}",
        "",
        "| method | step | per sample | against 1-D | MB sent | 1-D's bytes over these | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['method']} | {row['seconds']:.3f} s | {row['seconds'] / args.batch * 1e3:.1f} ms | "
        f"{base['seconds'] / row['seconds']:.2f} x | {row['bytes'] / 1e6:.2f} | "
        f"{base['bytes'] / row['bytes']:.2f} x | {row['loss']:.6f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
