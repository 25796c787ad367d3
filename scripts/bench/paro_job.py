"""One training job of PaRO's benchmarks in the slow-link lab: its times, losses, memory and NIC bytes."""

import argparse
import itertools
import json
import statistics
import sys
import textwrap
from pathlib import Path

from megatron_ext.netlab.forked import run_in_lab
from megatron_ext.netlab.lab import Lab
from megatron_ext.netlab.report import difference

ROOT = Path(__file__).resolve().parents[2]
WARM = 1
"""Steps of a run that are not timed."""


def run_once(
    args: argparse.Namespace,
    lab: Lab,
    nodes: int,
    flags: list[str],
    trained: str | None,
    tag: str,
    *,
    count: bool = True,
) -> dict:
    """One job: step times, losses, memory; with `count` what a node's NIC sent in a timed step (MiB).

    The bytes of start and untimed steps are those of a second, shorter job, and are taken off.
    """
    counters = [lab.counters()]
    lines = job(args, lab, nodes, flags, trained, tag, WARM + args.steps)
    counters.append(lab.counters())
    if count:
        job(args, lab, nodes, flags, trained, f"{tag}-warm", WARM)
        counters.append(lab.counters())
    sent = [
        sum(found["nic"].tx_bytes for found in difference(later, earlier))
        for earlier, later in itertools.pairwise(counters)
    ]
    steps = [[line for line in rank if line["event"] == "step"] for rank in lines]
    times = [max(rank[i]["step_time_s"] for rank in steps) for i in range(WARM, WARM + args.steps)]
    return {
        "seconds": statistics.median(times),
        "loss": next(line["loss"] for rank in steps for line in rank[-1:] if "loss" in line),
        "nic": (sent[0] - sent[1]) / args.steps / nodes / 2**20 if count else None,
        "tokens": steps[0][-1]["tokens"],
        "paro": steps[0][-1].get("paro"),
        "kept": max(sum(rank[-1]["paro"]["bytes"].values()) for rank in steps)
        if "paro" in steps[0][-1]
        else None,
    }


def job(
    args: argparse.Namespace,
    lab: Lab,
    nodes: int,
    flags: list[str],
    trained: str | None,
    tag: str,
    steps: int,
) -> list[list[dict]]:
    """Train, and return the record of each rank."""
    world = nodes * args.ranks_per_node
    folder = args.output.resolve() / "records" / tag.replace(" ", "-").replace("/", "-").replace(",", "")
    batch = args.microbatches * world
    text = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads 4 "
        f"--seq-length {args.seq} --max-position-embeddings {args.seq} --micro-batch-size 1 "
        f"--global-batch-size {batch} --train-iters {steps} --eval-iters 0 --lr 1e-4 --min-lr 1e-4 "
        "--lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 2047 --log-interval 1 "
        "--mock-data --hidden-dropout 0 --attention-dropout 0 --position-embedding-type rope --seed 5"
    )
    command = ["--cpu", str(script(args, trained)), *text.split(), *flags, "--ext-report", str(folder)]
    if "--paro-strategy" in flags:
        command += ["--paro-group-size", str(args.ranks_per_node)]
    for old in folder.glob("rank-*.jsonl"):
        old.unlink()

    def body() -> None:
        from megatron_ext.cli import main

        sys.exit(main(command))

    run_in_lab(lab, world, body, timeout=900)
    return [
        [json.loads(text) for text in (folder / f"rank-{rank:04d}.jsonl").read_text().splitlines()][1:-1]
        for rank in range(world)
    ]


def script(args: argparse.Namespace, trained: str | None) -> Path:
    """pretrain_gpt.py, or one that freezes every parameter whose name does not match."""
    if trained is None:
        return ROOT / "pretrain_gpt.py"
    path = args.output.resolve() / "pretrain_frozen.py"
    text = f"""\
        import re
        import runpy

        from megatron.core.models.gpt.gpt_model import GPTModel

        built = GPTModel.__init__

        def build(self, *args, **kwargs):
            built(self, *args, **kwargs)
            for name, param in self.named_parameters():
                param.requires_grad_(bool(re.search({trained!r}, name)))

        GPTModel.__init__ = build
        if __name__ == "__main__":
            runpy.run_path({str(ROOT / "pretrain_gpt.py")!r}, run_name="__main__")
        """
    path.write_text(textwrap.dedent(text))
    return path
