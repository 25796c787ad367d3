"""3-D linear layers through the real script: overlap, optimizers, other features, and 16 bits."""

import pytest

from megatron_ext.grads import assemble
from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.tools.grads import judge
from tests.functional.linear3d_runs import BATCH, GPT, assert_ran, grid_flags, like_stock, seed, stock
from tests.functional.parity import DISTOPT, FULL_RECOMPUTE, OVERLAP, assert_gradients
from tests.functional.runs import LLAMA, assert_close, train

full = pytest.mark.full


def test_overlap_changes_no_bit(tmp_path):
    """Through real runs with recomputation and data parallelism: every level on its own, and all, against
    none. Updated parameters come in several buckets, each behind the one whose layer is at work."""
    runs = {}
    buckets = ["--ddp-bucket-size", "20000"]
    for level in ("none", "grads", "prefetch", "defer", "all"):
        recompute = FULL_RECOMPUTE if level != "grads" else []
        flags = [
            *grid_flags((2, 1, 1)),
            "--linear-3d-overlap",
            level,
            *DISTOPT,
            *OVERLAP,
            *buckets,
            *recompute,
        ]
        runs[level] = train(tmp_path / level, 4, *BATCH, *seed(()), *flags, "--ext-check", "bytes", steps=3)
    expected = (runs["none"].losses(), runs["none"].grad_norms())
    for level, run in runs.items():
        assert (run.losses(), run.grad_norms()) == expected, level


@full
@pytest.mark.parametrize("save", ["gathered", "shard_all"])
def test_overlap_changes_no_bit_on_the_cube(tmp_path, save):
    """Losses, gradients of step 1, and the weights after three steps by the losses that they give."""
    runs = {}
    for level in ("none", "grads", "prefetch", "defer", "all"):
        flags = [*grid_flags((2, 2, 2)), "--linear-3d-overlap", level, "--linear-3d-save", save]
        folder = tmp_path / level
        dump = ["--ext-dump-grads", str(folder)]
        runs[level] = train(folder, 8, *BATCH, *seed(()), *flags, *dump, steps=3)
    for level, run in runs.items():
        assert run.losses() == runs["none"].losses(), level
        assert run.grad_norms() == runs["none"].grad_norms(), level
        verdict = judge(assemble(runs["none"].folder), assemble(run.folder), 0.0)
        assert verdict.largest > 0
        assert verdict.within, str(verdict)


@full
@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)])
def test_twenty_steps(tmp_path, sizes):
    """Acceptance check 7: Adam's steps like stock's, and without clipping, whose norms are added up in
    another order, those of the distributed optimizer to the bit."""
    flags = [*BATCH, *seed(()), *grid_flags(sizes)]
    reference = train(tmp_path / "stock", 1, *BATCH, *seed(()), steps=20)
    run = train(tmp_path / "clipped", 8, *flags, *DISTOPT, steps=20)
    assert len(run.losses()) == 20
    assert_close(reference.losses(), run.losses(), 1e-5)
    assert_close(reference.grad_norms(), run.grad_norms(), 1e-4)
    plain = train(tmp_path / "plain", 8, *flags, "--clip-grad", "0", steps=3)
    split = train(tmp_path / "split", 8, *flags, "--clip-grad", "0", *DISTOPT, steps=3)
    assert plain.losses() == split.losses()


@full
def test_optimizer_instances(tmp_path):
    """Optimizer states are shared out inside each half of the data-parallel ranks."""
    flags = [*DISTOPT, *OVERLAP, "--num-distributed-optimizer-instances", "2"]
    run = like_stock(tmp_path, GPT, 8, 1, (2, 1, 1), flags, ["--global-batch-size", "16"])
    assert_ran(run, GPT, Grid3D(2, 1, 1), microbatches=1)


@pytest.mark.parametrize("order", ["ijl"])
def test_vocabulary_parallelism(tmp_path, order):
    """The vocabulary layers go to the stages, the layers in between lie on the grid."""
    run = like_stock(tmp_path, GPT, 8, 2, (2, 1, 2), ["--vocab-parallel", "vocab-2"])
    assert run.start()["features"] == ["vocab", "linear3d"]
    assert_ran(run, GPT, Grid3D(2, 1, 2), p=2, mode="stages")


@pytest.mark.parametrize("strategy", ["NNG", pytest.param("NIG", marks=full)])
def test_paro(tmp_path, strategy):
    size = ["--paro-group-size", "2"] if strategy == "NIG" else ["--paro-group-size", "1"]
    world = 8 if strategy == "NIG" else 4
    run = like_stock(
        tmp_path,
        GPT,
        world,
        1,
        (2, 1, 1),
        ["--paro-strategy", strategy, *size, *OVERLAP, *DISTOPT],
        ["--global-batch-size", "16"],
    )
    assert run.start()["features"] == ["linear3d", "paro"]


FP16 = ("--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "3")


@pytest.mark.parametrize(
    ("sizes", "precision"),
    [
        ((2, 1, 2), ("--bf16",)),
        pytest.param((2, 1, 2), FP16, marks=full),
        pytest.param((1, 2, 2), FP16, marks=full),
    ],
)
def test_low_precision(tmp_path, sizes, precision):
    """16 bits agree with stock as far as rounding lets them; fp16 scales the loss dynamically."""
    reference = stock((), precision)
    run = train(
        tmp_path, 4, *BATCH, *seed(()), *grid_flags(sizes), *precision, "--ext-check", "bytes,layouts",
        "--ext-dump-grads", str(tmp_path),
    )  # fmt: skip
    assert_close(reference.losses(), run.losses(), 2e-3)
    assert_gradients(reference, run, 2e-2)
    scales = [line["loss_scale"] for line in run.steps(0)]
    assert scales == [line["loss_scale"] for line in reference.steps(0)]
    assert scales[-1] > scales[0] or "--fp16" not in precision


@pytest.mark.full
def test_wallfacer(tmp_path):
    """Context parallelism on top: sequences are dealt out to context ranks first, then cut over the grid."""
    flags = ["--context-parallel-size", "2", "--cp-comm-type", "wallfacer", "--wallfacer-team-size", "1"]
    run = like_stock(tmp_path, LLAMA, 4, 1, (1, 2, 1), flags)
    assert run.start()["features"] == ["linear3d", "wallfacer"]
