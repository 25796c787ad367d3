"""3-D linear layers through the real script: losses, gradients, bytes and shapes against stock.

Every case starts from one seed checkpoint: losses of 10 steps to 1e-5 relative, grad norms to 1e-4, every
gradient of step 1 within 5e-6 of the largest; fp32, dropout 0. The run record proves that the grid ran:
bytes per (site, kind, axis) are those of the formulas and above zero, local weights have the sharded shapes.
"""

import dataclasses
import sys
from pathlib import Path

import pytest

from megatron_ext.features import FEATURES
from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.install import linear3d_adjust
from tests.functional.linear3d_runs import (
    BATCH,
    GPT,
    LLAMA8,
    WIDE,
    assert_ran,
    assert_shapes,
    grid_flags,
    like_stock,
    seed,
    stock,
)
from tests.functional.parity import DISTOPT, FULL_RECOMPUTE, OVERLAP, PP, TP
from tests.functional.runs import LLAMA, MODEL, SCRIPT, Run, assert_close, data, merged, read_record, train
from tests.functional.test_bad_input import refused
from tests.ranks import run_ranks

full = pytest.mark.full
# The plan of what is compared: architecture, ranks, pipeline stages, grid, and how it is trained.
CASES = {
    "2x2x2": (GPT, 8, 1, (2, 2, 2), []),
    "2x2x2-untied": (LLAMA8, 8, 1, (2, 2, 2), FULL_RECOMPUTE),
    "4x2x1": (LLAMA8, 8, 1, (4, 2, 1), []),
    "1x4x2": (WIDE, 8, 1, (1, 4, 2), []),
    "1x8x1": (WIDE, 8, 1, (1, 8, 1), []),
    "1x2x4": (WIDE, 8, 1, (1, 2, 4), []),
    "1x1x8": (WIDE, 8, 1, (1, 1, 8), []),
    "2x2x1-pp2": (GPT, 8, 2, (2, 2, 1), []),
    "1x2x1-pp4": (GPT, 8, 4, (1, 2, 1), []),
    "1x2x2-dp2": (GPT, 8, 1, (1, 2, 2), [*DISTOPT, *OVERLAP]),
    "2x2x1-dp2": (GPT, 8, 1, (2, 2, 1), DISTOPT),
    "2x1x2": (GPT, 4, 1, (2, 1, 2), []),
    "2x2x1": (LLAMA, 4, 1, (2, 2, 1), FULL_RECOMPUTE),
    "1x2x2": (GPT, 4, 1, (1, 2, 2), ["--recompute-granularity", "selective"]),
}
COVERING = {"2x2x2", "2x2x1-pp2", "1x2x2-dp2", "2x2x1"}


@pytest.mark.parametrize("name", [n if n in COVERING else pytest.param(n, marks=full) for n in CASES])
def test_trains_like_stock(tmp_path, name):
    arch, world, p, sizes, flags = CASES[name]
    grid = Grid3D(*sizes)
    run = like_stock(tmp_path, arch, world, p, sizes, flags)
    copies = world // grid.ranks // p
    assert_ran(run, arch, grid, p=p, recomputed="full" in flags, microbatches=2 // copies)
    assert_shapes(run, arch, grid, p)


VARIANTS = {
    "grid-gathered": (
        ["--linear-3d-vocab", "grid", "--linear-3d-save", "gathered"],
        {"mode": "grid", "save": "gathered"},
    ),
    "shard-all": (["--linear-3d-save", "shard_all"], {"save": "shard_all"}),
    "keep": (["--linear-3d-keep-layers", "2"], {"keep": 2}),
    "order": (["--linear-3d-order", "lji"], {}),
}


@pytest.mark.parametrize(
    "variant", [*["grid-gathered"], *(pytest.param(v, marks=full) for v in VARIANTS if v != "grid-gathered")]
)
def test_variants_train_like_stock(tmp_path, variant):
    flags, ways = VARIANTS[variant]
    order = "lji" if variant == "order" else "ijl"
    run = like_stock(tmp_path, GPT, 4, 1, (2, 1, 2), flags)
    assert_ran(run, GPT, Grid3D(2, 1, 2, order), **ways)


def test_a_run_that_ignores_the_flag_is_caught(tmp_path):
    """The doctored feature trains as stock does, so its losses are right; the record gives it away."""
    ignoring = tuple(
        dataclasses.replace(f, patches=lambda context: [], adjust=lambda args, flags: None)
        if f.name == "linear3d"
        else f
        for f in FEATURES
    )
    args = merged(MODEL, data(), ["--train-iters", "3"], BATCH, seed(()), grid_flags((2, 1, 2)))

    def body() -> None:
        from megatron_ext.launch import main

        record = ["--ext-report", str(tmp_path / "record")]
        sys.exit(main(["--cpu", str(SCRIPT), *args, *record], table=ignoring))

    run = Run(tmp_path, run_ranks(4, body), read_record(tmp_path / "record", 4))
    losses = stock(()).losses()
    assert_close({step: losses[step] for step in (1, 2, 3)}, run.losses(), 1e-5)
    with pytest.raises(AssertionError):
        assert_ran(run, GPT, Grid3D(2, 1, 2))
    with pytest.raises(AssertionError):
        assert_shapes(run, GPT, Grid3D(2, 1, 2))


def test_auto(tmp_path):
    run = train(
        tmp_path, 4, *BATCH, *seed(()), TP, "4", "--linear-3d", "auto", "--ext-check", "bytes", steps=2
    )
    losses = stock(()).losses()
    assert_close({step: losses[step] for step in (1, 2)}, run.losses(), 1e-5)
    assert "--linear-3d auto: " in run.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--micro-batch-size", "3", "--ffn-hidden-size", "255"], ("--micro-batch-size 3", "size 255")),
        (["--transformer-impl", "transformer_engine"], ("know one tensor-parallel axis",)),
        ([PP, "2", "--pipeline-schedule", "zb-h1"], ("passes of their own", "Remove --pipeline-schedule")),
        (
            [PP, "2", "--num-layers-per-virtual-pipeline-stage", "1"],
            ("shapes between virtual stages", "--num-layers-per-virtual-pipeline-stage"),
        ),
        (["--num-experts", "4"], ("experts are not split", "Remove --num-experts")),
    ],
)
def test_refused_before_any_group_exists(flags, says):
    """Acceptance check 14, through the launcher: every rank exits with 2 and says why."""
    world = 4 if PP in flags else 2
    text = refused(*BATCH, "--global-batch-size", "12", *grid_flags((2, 1, 1)), *flags, world=world)
    assert all(part in text for part in says), text


DROPOUT = """
import os, torch
masks, plain = [], torch.nn.functional.dropout

def dropout(x, p=0.5, training=True, inplace=False):
    out = plain(x, p, training, inplace)
    if p == 0.5 and training and len(masks) < 2:
        masks.append((out != 0).flatten()[:4096])
        if len(masks) == 2:
            torch.save(masks[1], f"mask-{os.environ['RANK']}.pt")
    return out

torch.nn.functional.dropout = dropout
import runpy
runpy.run_path(SCRIPT, run_name="__main__")
"""


def agreement(folder: Path, *, control: bool) -> tuple[float, float]:
    """Least and largest share of equal entries in two ranks' masks of hidden dropout."""
    import torch

    folder.mkdir()
    script = folder / "script.py"
    script.write_text(DROPOUT.replace("SCRIPT", repr(str(SCRIPT))))

    def without_sequence_parallelism(args, flags) -> None:
        linear3d_adjust(args, flags)
        args.sequence_parallel = False

    table = tuple(
        dataclasses.replace(f, adjust=without_sequence_parallelism) if f.name == "linear3d" and control else f
        for f in FEATURES
    )
    sizes = ["--hidden-size", "128", "--hidden-dropout", "0.5", "--train-iters", "1"]
    args = merged(MODEL, data(), BATCH, grid_flags((2, 1, 2)), sizes)

    def body() -> None:
        import os

        from megatron_ext.launch import main

        os.chdir(folder)
        sys.exit(main(["--cpu", str(script), *args], table=table))

    run_ranks(4, body)
    masks = [torch.load(folder / f"mask-{rank}.pt") for rank in range(4)]
    pairs = [(a, b) for n, a in enumerate(masks) for b in masks[n + 1 :]]
    shares = [(a == b).double().mean().item() for a, b in pairs]
    return min(shares), max(shares)


def test_dropout_differs_between_ranks(tmp_path):
    """Acceptance check 10, with the negative control: without the flag, all ranks would drop the same."""
    least, most = agreement(tmp_path / "on", control=False)
    assert 0.45 <= least <= most <= 0.55
    assert agreement(tmp_path / "control", control=True) == (1.0, 1.0)
