"""Real training runs for functional tests: the script, through the launcher, in forked ranks."""

import atexit
import contextlib
import functools
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ranks import RankResult, preload, run_ranks

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "pretrain_gpt.py"

# A GPT small enough for seconds: 4 layers, every size divisible by 4, 8 sequences of 32 tokens a step.
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --weight-decay 0.1 --clip-grad 1.0 "
    "--lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --seed 7 --ckpt-format torch_dist"
).split()

# The second architecture: what LLaMA-style models use.
LLAMA = (
    "--position-embedding-type rope --group-query-attention --num-query-groups 2 --normalization RMSNorm "
    "--swiglu --untie-embeddings-and-output-weights --disable-bias-linear"
).split()


@functools.cache
def data() -> list[str]:
    """Flags for a small indexed dataset, written once per test session with Megatron's own builder."""
    preload()
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = Path(tempfile.mkdtemp(prefix="tokens-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    builder = IndexedDatasetBuilder(str(folder / "tokens.bin"), dtype=np.uint16)
    rng = np.random.default_rng(0)
    for length in rng.integers(40, 200, size=60):
        # A walk with small steps: predictable enough that the loss falls.
        tokens = np.cumsum(rng.integers(0, 4, size=length)) % 250
        builder.add_document(torch.from_numpy(tokens.astype(np.int64)), [int(length)])
    builder.finalize(str(folder / "tokens.idx"))
    return ["--data-path", str(folder / "tokens"), "--split", "100,0,0"]


@dataclass
class Run:
    """One finished training run and its record."""

    folder: Path
    ranks: list[RankResult]
    lines: list[list[dict[str, Any]]] = field(default_factory=list)  # of each rank

    @property
    def output(self) -> str:
        return "\n".join(r.output for r in self.ranks)

    def start(self, rank: int = 0) -> dict[str, Any]:
        return next(line for line in self.lines[rank] if line["event"] == "start")

    def steps(self, rank: int) -> list[dict[str, Any]]:
        return [line for line in self.lines[rank] if line["event"] == "step"]

    def losses(self) -> dict[int, float]:
        """Loss by step; all ranks that own it must agree."""
        out: dict[int, float] = {}
        for rank in range(len(self.lines)):
            for line in self.steps(rank):
                if "loss" in line:
                    assert out.setdefault(line["step"], line["loss"]) == line["loss"], (rank, line)
        return out

    def grad_norms(self) -> dict[int, float]:
        return {line["step"]: line["grad_norm"] for line in self.steps(0)}

    def traffic(self, kind: str) -> int:
        """Bytes of a kind, all ranks and steps together."""
        return sum(
            entry["bytes"]
            for rank in range(len(self.lines))
            for line in self.steps(rank)
            for entry in line["traffic"]
            if entry["kind"] == kind
        )


def launch(argv: list[str], cwd: str | Path | None = None) -> None:
    """Body of a rank: the launcher's command line, as `python -m megatron_ext ARGV` runs it."""
    from megatron_ext.cli import main

    if cwd is not None:
        os.chdir(cwd)
    sys.exit(main(argv))


def train(
    folder: Path,
    world: int,
    *extra: str,
    steps: int = 10,
    launcher: tuple[str, ...] = ("--cpu",),
    script: Path = SCRIPT,
    check: bool = True,
    timeout: float = 150.0,
    model: list[str] = MODEL,
) -> Run:
    """Train in `world` forked ranks with the record in `folder`; `extra` flags override the model's."""
    folder.mkdir(parents=True, exist_ok=True)
    args = merged(
        model, data(), ["--train-iters", str(steps)], list(extra), ["--ext-report", str(folder / "record")]
    )
    body = functools.partial(launch, [*launcher, str(script), *args], folder)
    ranks = run_ranks(world, body, timeout=timeout, check=check)
    return Run(folder, ranks, read_record(folder / "record", world))


def merged(*groups: list[str]) -> list[str]:
    """Flags of several groups; a later group's value replaces an earlier one's."""
    flags: dict[str, list[str]] = {}
    for group in groups:
        name = None
        for word in group:
            if word.startswith("--"):
                name = word
                flags.pop(name, None)
                flags[name] = []
            else:
                flags[name].append(word)
    return [word for name, values in flags.items() for word in (name, *values)]


def read_record(folder: Path, world: int) -> list[list[dict[str, Any]]]:
    """The lines of every rank's record, as far as there are any."""
    out = []
    for rank in range(world):
        path = folder / f"rank-{rank:04d}.jsonl"
        lines = []
        if path.exists():
            for text in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the cut last line of a killed rank
                    lines.append(json.loads(text))
        out.append(lines)
    return out


def seed_checkpoint(folder: Path, *extra: str) -> list[str]:
    """Save a seed checkpoint from one rank and return the flags that load it in any layout.

    Initial weights depend on the layout, so runs that are compared must start from one checkpoint.
    """
    seed = folder / "seed"
    save = ["--save", str(seed), "--save-interval", "1", "--no-save-optim", "--no-save-rng"]
    train(folder, 1, *extra, *save, steps=1)
    return ["--load", str(seed), "--finetune", "--no-load-optim", "--no-load-rng"]


def assert_close(reference: dict[int, float], other: dict[int, float], rtol: float) -> None:
    """Every step agrees to a relative tolerance."""
    assert reference.keys() == other.keys(), (sorted(reference), sorted(other))
    assert reference, "no step was recorded"
    for step, value in reference.items():
        assert abs(other[step] - value) <= rtol * abs(value), f"step {step}: {value} and {other[step]}"
