"""Vocabulary parallelism through the real script: losses, gradients, bytes and shards against stock.

Every case starts from one seed checkpoint: losses of 10 steps to 1e-5 relative, grad norms to 1e-4, every
gradient of step 1 within 5e-6 of the largest; fp32, dropout 0. The run record proves that the feature ran:
`assert_ran` compares the bytes of every step with the formulas, and `assert_shards` the rows of each rank.
"""

import dataclasses
import functools
import itertools
import json
import re
import sys

import pytest

from megatron_ext.features import FEATURES
from megatron_ext.grads import assemble
from megatron_ext.tools.grads import judge
from megatron_ext.vocab.volume import Sizes, step_bytes
from tests.functional.parity import DISTOPT, FULL_RECOMPUTE, OVERLAP, PP, TP, assert_gradients, assert_parity
from tests.functional.runs import (
    LLAMA,
    MODEL,
    SCRIPT,
    Run,
    assert_close,
    data,
    merged,
    read_record,
    seed_checkpoint,
    train,
)
from tests.ranks import run_ranks

MODES = ("naive", "vocab-1", "vocab-2", "interlaced")
SP = "--sequence-parallel"
EIGHT_LAYERS = ["--num-layers", "8"]
full = pytest.mark.full

# name: (architecture flags, world, p, t, layout flags)
GPT, SIX = [], ["--num-layers", "6"]
CASES = {
    "pp2": (GPT, 2, 2, 1, []),
    "pp2-untied": (LLAMA, 2, 2, 1, []),
    "pp4": (GPT, 4, 4, 1, []),
    "pp4-untied": (LLAMA, 4, 4, 1, []),
    "pp8": (EIGHT_LAYERS, 8, 8, 1, []),
    "pp8-untied": ([*LLAMA, *EIGHT_LAYERS], 8, 8, 1, []),
    "pp3-uneven": (SIX, 3, 3, 1, []),  # 256 rows over 3 ranks
    "pp1": (GPT, 1, 1, 1, []),
    "tp2-pp2": (GPT, 4, 2, 2, []),
    "tp2-pp2-sp": (GPT, 4, 2, 2, [SP]),
    "tp2-pp2-sp-untied": (LLAMA, 4, 2, 2, [SP]),
    "dp2-pp2": (GPT, 4, 2, 1, ["--overlap-grad-reduce"]),
    "dp2-pp2-distopt": (LLAMA, 4, 2, 1, [*DISTOPT, *OVERLAP]),
    "dp2-pp2-unaligned": (GPT, 4, 2, 1, [*DISTOPT, *OVERLAP, "--no-align-grad-reduce"]),
    "pp2-recompute": (GPT, 2, 2, 1, FULL_RECOMPUTE),
    "pp2-selective": (GPT, 2, 2, 1, ["--recompute-granularity", "selective"]),
    "pp2-logits": (LLAMA, 2, 2, 1, ["--vocab-save", "logits"]),
    "pp2-chunks": (GPT, 2, 2, 1, ["--vocab-save", "none", "--vocab-chunk-size", "48"]),
    "pp2-blocking": (GPT, 2, 2, 1, ["--vocab-overlap", "off"]),
    "pp4-blocking": (LLAMA, 4, 4, 1, ["--vocab-overlap", "off"]),
    "pp2-one": (GPT, 2, 2, 1, ["--global-batch-size", "1"]),
    "pp2-odd": (GPT, 2, 2, 1, ["--global-batch-size", "5"]),
    "pp4-two": (GPT, 4, 4, 1, ["--global-batch-size", "2"]),
    "pp4-many": (GPT, 4, 4, 1, ["--global-batch-size", "12"]),
    "pp8-one": (EIGHT_LAYERS, 8, 8, 1, ["--global-batch-size", "1"]),
    "pp8-many": (EIGHT_LAYERS, 8, 8, 1, ["--global-batch-size", "24"]),
    "per-token-loss": (GPT, 2, 2, 1, ["--calculate-per-token-loss"]),
    "decoupled-lr": (LLAMA, 2, 2, 1, ["--decoupled-lr", "3e-3", "--decoupled-min-lr", "1e-4"]),
}
COVERING = {
    "naive": {"pp4-untied"},
    "vocab-1": {"pp4", "tp2-pp2-sp-untied", "pp2-chunks"},
    "vocab-2": {
        *("pp3-uneven", "pp1", "tp2-pp2-sp", "dp2-pp2-distopt", "pp2-recompute", "pp2-logits", "pp2-odd"),
        "per-token-loss",
    },
    "interlaced": {"pp4"},
}
NEVER = {("pp8-many", "naive"), ("pp8-many", "interlaced")}
PARAMS = [
    pytest.param(mode, name, id=f"{mode}-{name}", marks=[] if name in COVERING[mode] else [full])
    for mode in MODES
    for name in CASES
    if (name, mode) not in NEVER
]
# These change what is trained, so stock is run with them, too; the others only say how.
TRAINING = ("--global-batch-size", "--calculate-per-token-loss", "--decoupled-lr", "--decoupled-min-lr")


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """(architecture, training flags) -> (seed flags, stock run on one rank), made at first use."""

    @functools.cache
    def seed(arch: tuple[str, ...]) -> list[str]:
        return seed_checkpoint(tmp_path_factory.mktemp("seed"), *arch)

    @functools.cache
    def reference(arch: tuple[str, ...], flags: tuple[str, ...]) -> tuple[list[str], Run]:
        folder = tmp_path_factory.mktemp("one")
        dump = ["--ext-dump-grads", str(folder)]
        return seed(arch), train(folder, 1, *arch, *seed(arch), *flags, *dump)

    return reference


def training_flags(flags: list[str]) -> tuple[str, ...]:
    """Those of the flags that stock needs as well, with their values."""
    out: list[str] = []
    for word in flags:
        if word.startswith("--"):
            keep = word in TRAINING
        if keep:
            out.append(word)
    return tuple(out)


def launch(references, tmp_path, mode: str, name: str) -> tuple[Run, Run]:
    arch, world, p, t, flags = CASES[name]
    seed, stock = references(tuple(arch), training_flags(flags))
    layout = [PP, str(p), TP, str(t), *flags]
    run = train(
        tmp_path,
        world,
        *(*arch, *seed, *layout, "--vocab-parallel", mode),
        *("--ext-check", "bytes,replicas", "--ext-dump-grads", str(tmp_path)),
    )
    return stock, run


@pytest.mark.parametrize(("mode", "name"), PARAMS)
def test_trains_like_stock(references, tmp_path, mode, name):
    stock, run = launch(references, tmp_path, mode, name)
    assert_parity(stock, run)
    _, world, p, t, flags = CASES[name]
    assert_ran(run, mode, world, p, t, flags)
    assert_shards(run, p * t)


def assert_ran(run: Run, mode: str, world: int, p: int, t: int, flags: list[str]) -> None:
    """The record shows the feature, and bytes of every step and rank that equal the formulas."""
    batch = int(flags[flags.index("--global-batch-size") + 1]) if "--global-batch-size" in flags else 8
    tied = "--untie-embeddings-and-output-weights" not in run.start()["argv"]
    learned = "--position-embedding-type" not in run.start()["argv"]
    for rank in range(world):
        assert run.start(rank)["features"] == ["vocab"]
        sizes = Sizes(
            mode,
            p=p,
            t=t,
            stage=run.start(rank)["coords"]["pp"],
            m=batch * p * t // world,
            n=32,
            hidden=64,
            itemsize=4,
            sum_itemsize=4,
            sequence_parallel=SP in flags,
            scatters=SP in flags and not learned,
        )
        expected = step_bytes(sizes)
        assert expected or world == 1
        for line in run.steps(rank)[1:]:  # the first one has sent the initial shards as well
            sent = {
                (entry["kind"], entry["group"]): entry["bytes"]
                for entry in line["traffic"]
                if entry["feature"] == "vocab" and entry["bytes"]
            }
            assert sent == expected, (rank, line["step"])
            # Both shards of a rank are one parameter when tied: no stage keeps in step with another.
            assert tied is False or not any(e["group"] == "embd" for e in line["traffic"])


def assert_shards(run: Run, parts: int) -> None:
    """Every rank says which rows it holds; they are equal but for one block, and all rows are held."""
    found = re.findall(r"vocabulary rows (\d+) to (\d+) of (\d+)", run.output)
    rows = sorted({(int(lo), int(hi)) for lo, hi, _ in found})
    assert len(rows) == parts
    assert rows[0][0] == 0
    assert rows[-1][1] == 256
    assert all(a[1] == b[0] for a, b in itertools.pairwise(rows))
    sizes = [hi - lo for lo, hi in rows]
    assert max(sizes) - min(sizes) <= 64


def test_a_run_that_ignores_the_flag_is_caught(references, tmp_path):
    """The doctored feature trains as stock does, so its losses are right; the record gives it away."""
    ignoring = tuple(
        dataclasses.replace(f, patches=lambda context: []) if f.name == "vocab" else f for f in FEATURES
    )
    seed, stock = references((), ())
    args = merged(MODEL, data(), ["--train-iters", "10"], seed, [PP, "2", "--vocab-parallel", "vocab-2"])

    def body() -> None:
        from megatron_ext.launch import main

        record = ["--ext-report", str(tmp_path / "record")]
        sys.exit(main(["--cpu", str(SCRIPT), *args, *record], table=ignoring))

    run = Run(tmp_path, run_ranks(2, body), read_record(tmp_path / "record", 2))
    assert_close(stock.losses(), run.losses(), 1e-5)
    with pytest.raises(AssertionError):
        assert_ran(run, "vocab-2", 2, 2, 1, [])
    with pytest.raises(AssertionError):
        assert_shards(run, 2)


@pytest.mark.parametrize(
    ("precision", "extra"),
    [
        (["--bf16"], []),
        (["--bf16"], ["--vocab-sum-dtype", "model"]),
        (["--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "3"], []),
    ],
    ids=["bf16", "bf16-sum", "fp16"],
)
@pytest.mark.parametrize("mode", ["vocab-2", pytest.param("vocab-1", marks=full)])
def test_low_precision(references, tmp_path, mode, precision, extra):
    """16 bits agree with stock as far as rounding lets them; fp16 scales the loss dynamically."""
    seed, _ = references((), ())
    stock = train(
        tmp_path / "stock", 2, *seed, PP, "2", *precision, "--ext-dump-grads", str(tmp_path / "stock")
    )
    flags = ["--vocab-parallel", mode, *extra, "--ext-check", "bytes"]
    run = train(
        tmp_path / "vp", 2, *seed, PP, "2", *precision, *flags, "--ext-dump-grads", str(tmp_path / "vp")
    )
    assert_close(stock.losses(), run.losses(), 2e-3)
    verdict = judge(assemble(stock.folder), assemble(run.folder), 2e-2)
    assert verdict.largest > 0
    assert verdict.within, str(verdict)
    scales = [line["loss_scale"] for line in run.steps(0)]
    assert scales == [line["loss_scale"] for line in stock.steps(0)]
    assert scales[-1] > scales[0] or "--fp16" not in precision


@pytest.mark.parametrize("mode", ["vocab-2", *(pytest.param(m, marks=full) for m in MODES if m != "vocab-2")])
def test_evaluation(references, tmp_path, mode):
    """Validation losses are stock's, to 1e-6 as printed."""
    seed, _ = references((), ())
    flags = [*seed, PP, "2", "--eval-iters", "2", "--eval-interval", "5", "--split", "80,20,0"]
    runs = [
        train(tmp_path / "stock", 2, *flags),
        train(tmp_path / "vp", 2, *flags, "--vocab-parallel", mode, "--ext-check", "bytes"),
    ]
    pattern = re.compile(r"validation loss at (.*) \| lm loss value: (\S+) ")
    stock, ours = ({place: float(loss) for place, loss in pattern.findall(run.output)} for run in runs)
    assert len(stock) == 3
    assert ours == pytest.approx(stock, rel=1e-6)


def test_batch_size_ramps_up(tmp_path):
    """The number of microbatches changes between steps; initial weights are stock's without a checkpoint."""
    at = MODEL.index("--global-batch-size")
    model = [*MODEL[:at], *MODEL[at + 2 :]]
    flags = [*SIX, PP, "3", "--step-batch-size-schedule", "0:2 128:4 512:8"]  # thresholds are tokens
    stock = train(tmp_path / "stock", 3, *flags, model=model)
    vocab = ["--vocab-parallel", "vocab-2", "--ext-check", "bytes"]
    run = train(tmp_path / "vp", 3, *flags, *vocab, model=model)
    assert sorted({line["tokens"] // 32 for line in run.steps(0)}) == [2, 4, 8]
    assert_close(stock.losses(), run.losses(), 1e-5)


def test_measured_in_flight(references, tmp_path):
    """Microbatches in flight at run time are min(p - r + k, m), as the schedule says."""
    seed, _ = references((), ())
    for mode, k in (("vocab-2", 1), ("vocab-1", 2), ("naive", 3)):
        folder = tmp_path / mode
        trace = ["--ext-trace", str(folder / "trace"), "--ext-trace-step", "2"]
        train(folder, 4, *seed, PP, "4", "--vocab-parallel", mode, *trace, steps=3)
        for rank in range(4):
            lines = [
                json.loads(text)
                for text in (folder / "trace" / f"trace-rank-{rank:04d}.jsonl").read_text().splitlines()
            ]
            assert (lines[0]["vocab"], lines[0]["step"]) == (mode, 2)
            passes = [line["action"] for line in lines[1:] if line["lane"] == "compute"]
            now = most = 0
            for action in passes:
                if action[0] in "FB":
                    now += 1 if action[0] == "F" else -1
                    most = max(most, now)
            assert most == min(4 - rank + k, 8)
            assert {"e(0)", "g(7)", "C0(3)", "C1(7)", "G(5)"} <= {
                line["action"] for line in lines[1:] if line["lane"] == "comm"
            }


def test_loss_terms_train(references, tmp_path):
    """Label smoothing and z-loss change the loss, and do the same on any number of stages."""
    seed, stock = references((), ())
    flags = [*seed, "--vocab-label-smoothing", "0.1", "--vocab-z-loss", "1e-3", "--ext-check", "bytes"]
    one = train(
        tmp_path / "1", 1, *flags, "--vocab-parallel", "vocab-1", "--ext-dump-grads", str(tmp_path / "1")
    )
    two = train(
        tmp_path / "2",
        2,
        *flags,
        PP,
        "2",
        "--vocab-parallel",
        "vocab-2",
        "--ext-dump-grads",
        str(tmp_path / "2"),
    )
    assert_close(one.losses(), two.losses(), 1e-5)
    assert_gradients(one, two)
    assert two.losses()[1] > stock.losses()[1] + 1e-3


def test_forward_step_that_changes_the_output_is_refused(tmp_path):
    """A script that works on the model's output itself is told what to do instead."""
    script = tmp_path / "script.py"
    text = SCRIPT.read_text()
    assert "    return output, partial(" in text
    script.write_text(text.replace("    return output, partial(", "    return output * 2, partial("))
    run = train(tmp_path / "run", 2, PP, "2", "--vocab-parallel", "vocab-2", script=script, check=False)
    assert "changed its output before returning it" in "".join(str(r.error) for r in run.ranks)
    assert all(r.exit_code != 0 for r in run.ranks)


@pytest.mark.parametrize("mode", ["vocab-2", pytest.param("off", marks=full)])
def test_planned_and_measured_memory(tmp_path, mode):
    """The record has both, by category; held bytes are planned exactly, activations within a tenth."""
    sizes = ["--vocab-size", "8191", "--seq-length", "64", "--max-position-embeddings", "64"]
    run = train(tmp_path, 4, *LLAMA, *sizes, PP, "4", "--vocab-parallel", mode, "--ext-memory", steps=3)
    held = []
    for rank in range(4):
        (measured,) = [line["memory"] for line in run.steps(rank) if "memory" in line]
        planned = run.start(rank)["planned_memory"]
        assert measured["weights"] == planned["weights"]
        assert measured["gradients"] == planned["gradients"]
        for category in ("activations", "vocabulary"):
            peak = measured["category_peaks"][category]
            assert peak == pytest.approx(planned[category], rel=0.1)
            assert category == "activations" or (peak > 0) == (mode != "off")
        held.append(planned["weights"])
    # Vocabulary rows are equal on all ranks; without the feature the first and last ranks hold all of them.
    assert max(held) / min(held) < 1.01 if mode != "off" else max(held) / min(held) > 5


def test_loss_function_may_work_in_place(references, tmp_path):
    """Stock's losses are no leaves of autograd, so a loss function may change them; ours may be, too."""
    script = tmp_path / "script.py"
    text = SCRIPT.read_text()
    before = "    loss = torch.sum(per_token_loss.reshape(-1).float() * mask)"
    assert before in text
    after = "    per_token_loss *= loss_mask\n    loss = torch.sum(per_token_loss)"
    script.write_text(text.replace(before, after))
    seed, stock = references((), ())
    run = train(tmp_path / "run", 2, *seed, PP, "2", "--vocab-parallel", "vocab-2", script=script, steps=3)
    assert_close({step: stock.losses()[step] for step in (1, 2, 3)}, run.losses(), 1e-5)
