"""`attention.py train`: tokens per second of real training, a ring (C=K=1) against other shapes.

Every context-parallel rank is on a node of its own. Each case is one job through the launcher; jobs take
turns, round by round, so ratios are within rounds.
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from attention_report import Method

ROOT = Path(__file__).resolve().parents[2]
WARM = 1
"""Steps of a run that are not timed."""
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
COLUMNS = (
    *("script", "recompute", "shape", "tokens/s", "spread", "over the ring", "spread of ratios"),
    *("attention MiB/step", "last loss"),
)


@dataclass(frozen=True)
class Job:
    """One case."""

    script: str
    recompute: bool
    method: Method

    def text(self) -> str:
        """In a line, and as a folder's name."""
        return f"{self.script}{' recompute' if self.recompute else ''} {self.method.name}"


def add_arguments(commands) -> None:
    """The subcommand's."""
    from megatron_ext.netlab.links import parse_rate

    train = commands.add_parser("train", help="pretrain_gpt.py and pretrain_dit.py")
    add = train.add_argument
    add("--scripts", nargs="+", choices=("gpt", "dit"), default=["gpt", "dit"])
    add("--shapes", nargs="+", type=shape, default=[shape("1x1"), shape("4x1")], metavar="CxK")
    add("--recompute", nargs="+", choices=("full", "none"), default=["full", "none"])
    add("--ranks", type=int, default=16, metavar="P", help="context-parallel ranks, one on each node")
    add("--rate", type=parse_rate, default=parse_rate("100mbit"))
    add("--layers", type=int, default=2)
    add("--hidden", type=int, default=512)
    add("--heads", type=int, default=8)
    add("--seq", type=int, default=1024, help="tokens of a sequence")
    add("--steps", type=int, default=3)
    add("--rounds", type=int, default=3)
    add("--output", type=Path, default=Path("out/attention-train"))


def shape(text: str) -> Method:
    """Ours with this team size and bundle, of `4x1` or `4x4-direct`."""
    try:
        method = Method.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(error) from error
    if method.shape is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write team size x bundle, as 4x1")
    return method


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    from megatron_ext.netlab.forked import preload
    from megatron_ext.netlab.lab import Lab
    from megatron_ext.netlab.links import Links

    jobs = [
        Job(script, recompute == "full", method)
        for script in args.scripts
        for recompute in args.recompute
        for method in args.shapes
    ]
    args.output.mkdir(parents=True, exist_ok=True)
    preload(("torch", "megatron.training"), cpu=True)
    found: dict[Job, list[dict]] = {job: [] for job in jobs}
    with Lab(args.ranks, Links(args.rate)) as lab:
        for number in range(args.rounds):
            for job in jobs:
                print(f"round {number + 1} of {args.rounds}: {job.text()}", flush=True)
                found[job].append(train(args, lab, job))
    rows = [row(job, found) for job in jobs]
    write(args, rows)
    print((args.output / "results.md").read_text())
    return 0


def train(args: argparse.Namespace, lab, job: Job) -> dict:
    """One job: tokens per second, bytes of attention, and the last loss."""
    from megatron_ext.netlab.forked import run_in_lab

    folder = args.output.resolve() / "records" / job.text().replace(" ", "-").replace("=", "")
    for old in folder.glob("rank-*.jsonl"):
        old.unlink()
    command = [*command_of(args, job), "--ext-report", str(folder)]

    def body() -> None:
        from megatron_ext.cli import main

        sys.exit(main(command))

    run_in_lab(lab, args.ranks, body, timeout=1800)
    records = [
        [json.loads(line) for line in (folder / f"rank-{rank:04d}.jsonl").read_text().splitlines()]
        for rank in range(args.ranks)
    ]
    return result(records, args.steps)


def result(records: list[list[dict]], steps: int) -> dict:
    """What a job's records say: a step takes as long as on its slowest rank; bytes are the busiest rank's."""
    by_rank = [[line for line in lines if line["event"] == "step"] for lines in records]
    timed = range(WARM, WARM + steps)
    seconds = [max(rank[index]["step_time_s"] for rank in by_rank) for index in timed]
    tokens = [by_rank[0][index]["tokens"] for index in timed]
    return {
        "tokens/s": statistics.median(n / s for n, s in zip(tokens, seconds, strict=True)),
        "bytes": max(attention_bytes(rank[-1]) for rank in by_rank),
        "loss": next(rank[-1]["loss"] for rank in by_rank if "loss" in rank[-1]),
    }


def attention_bytes(step: dict) -> int:
    """Sent by attention in a step."""
    return sum(entry["bytes"] for entry in step["traffic"] if entry["feature"] == "wallfacer")


def command_of(args: argparse.Namespace, job: Job) -> list[str]:
    """The launcher's arguments."""
    common = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads {args.heads} "
        f"--micro-batch-size 1 --global-batch-size 1 --train-iters {WARM + args.steps} --eval-iters 0 "
        "--lr 1e-4 --min-lr 1e-4 --lr-decay-style constant --log-interval 1 --hidden-dropout 0 "
        "--attention-dropout 0 --seed 5 --disable-bias-linear "
        f"--context-parallel-size {args.ranks} --cp-comm-type wallfacer"
    ).split()
    c, k = job.method.shape
    common += ["--wallfacer-team-size", str(c), "--wallfacer-kv-bundle", str(k)]
    common += ["--wallfacer-movement", job.method.movement]
    common += RECOMPUTE if job.recompute else []
    if job.script == "gpt":
        own = (
            f"--seq-length {args.seq} --max-position-embeddings {args.seq} --position-embedding-type rope "
            "--tokenizer-type NullTokenizer --vocab-size 255 --mock-data"
        ).split()
        return ["--cpu", str(ROOT / "pretrain_gpt.py"), *own, *common]
    return ["--cpu", str(ROOT / "pretrain_dit.py"), *picture(args.seq), *common]


def picture(seq: int) -> list[str]:
    """Flags of random videos of `seq` tokens: square frames of 2 x 2 patches, as large as they fit."""
    side = max(n for n in range(1, seq + 1) if seq % (n * n) == 0)
    frames = seq // side**2
    return f"--dit-data random --dit-channels 4 --dit-image-size {2 * side} --dit-frames {frames}".split()


def row(job: Job, found: dict[Job, list[dict]]) -> dict:
    """One case, and its ratio to the ring of the same script and recomputation, round by round."""
    speeds = [one["tokens/s"] for one in found[job]]
    ring = found.get(Job(job.script, job.recompute, Method.parse("1x1")), [])
    ratios = [own / base["tokens/s"] for own, base in zip(speeds, ring, strict=False)]
    return {
        "script": f"pretrain_{job.script}.py",
        "recompute": "full" if job.recompute else "none",
        "shape": job.method.name,
        "tokens/s": round(statistics.median(speeds), 1),
        "spread": f"{min(speeds):.1f} to {max(speeds):.1f}",
        "over the ring": round(statistics.median(ratios), 2) if ratios else None,
        "spread of ratios": f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else None,
        "attention MiB/step": round(found[job][-1]["bytes"] / 2**20, 2),
        "last loss": round(found[job][-1]["loss"], 6),
    }


def write(args: argparse.Namespace, rows: list[dict]) -> None:
    """results.json, results.md and results.svg."""
    from charts import bars

    setting = {key: str(value) for key, value in vars(args).items() if key not in ("command", "output")}
    text = json.dumps({"setting": setting, "rows": rows}, indent=1)
    (args.output / "results.json").write_text(text + "\n")
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for one in rows:
        lines.append("| " + " | ".join("" if one[c] is None else str(one[c]) for c in COLUMNS) + " |")
    (args.output / "results.md").write_text("\n".join(lines) + "\n")
    labels = [
        (f"{one['script']}, recompute {one['recompute']}: {one['shape']}", one["tokens/s"]) for one in rows
    ]
    (args.output / "results.svg").write_text(bars(labels, "tokens/s"))
