"""3-D linear layers through the real script: losses, gradients, bytes and shapes against stock.

Every case starts from one seed checkpoint: losses of 10 steps to 1e-5 relative, grad norms to 1e-4, every
gradient of step 1 within 5e-6 of the largest; fp32, dropout 0. The run record proves that the grid ran:
bytes per (site, kind, axis) are those of the formulas and above zero, local weights have the sharded shapes.
"""

import dataclasses
import functools
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron_ext.features import FEATURES
from megatron_ext.grads import assemble
from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.install import linear3d_adjust
from megatron_ext.linear3d.layouts import POSITIONS, VECTOR
from megatron_ext.linear3d.sizes import ModelSizes, local_weight, sites_of
from megatron_ext.linear3d.volume import edge_bytes, layer_bytes, vector_bytes
from megatron_ext.tools.grads import judge
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
from tests.functional.test_bad_input import refused
from tests.functional.test_stock_parity import DISTOPT, FULL_RECOMPUTE, OVERLAP, PP, TP, assert_gradients
from tests.ranks import run_ranks

full = pytest.mark.full
GPT: list[str] = []
# Vocabularies are padded by the tensor-parallel size; this one has 256 rows on up to 8 ranks.
BATCH = ["--micro-batch-size", "4", "--make-vocab-size-divisible-by", "32"]
# The plan of what is compared: architecture, ranks, pipeline stages, grid, and how it is trained.
CASES = {
    "2x2x2": (GPT, 8, 1, (2, 2, 2), []),
    "2x2x2-untied": (LLAMA8 := [*LLAMA, "--num-query-groups", "4"], 8, 1, (2, 2, 2), FULL_RECOMPUTE),
    "4x2x1": (LLAMA8, 8, 1, (4, 2, 1), []),
    "1x4x2": (WIDE := ["--num-attention-heads", "8"], 8, 1, (1, 4, 2), []),
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


@functools.cache
def _folder() -> Path:
    import atexit
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="linear3d-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def seed(arch: tuple[str, ...]) -> list[str]:
    return seed_checkpoint(_folder() / f"seed-{abs(hash(arch))}", *arch, *BATCH)


@functools.cache
def stock(arch: tuple[str, ...], training: tuple[str, ...] = ()) -> Run:
    folder = _folder() / f"stock-{abs(hash((arch, training)))}"
    return train(folder, 1, *arch, *BATCH, *seed(arch), *training, "--ext-dump-grads", str(folder))


def grid_flags(grid: tuple[int, int, int], p: int = 1) -> list[str]:
    size = grid[0] * grid[1] * grid[2]
    return [TP, str(size), PP, str(p), "--linear-3d", *map(str, grid)]


def like_stock(folder, arch, world, p, grid, flags=(), training=()) -> Run:
    reference = stock(tuple(arch), tuple(training))
    run = train(
        folder,
        world,
        *(*arch, *BATCH, *seed(tuple(arch)), *training, *grid_flags(grid, p), *flags),
        *("--ext-check", "bytes,replicas,layouts", "--ext-dump-grads", str(folder)),
        timeout=400.0,
    )
    assert len(run.losses()) == 10
    assert_close(reference.losses(), run.losses(), 1e-5)
    assert_close(reference.grad_norms(), run.grad_norms(), 1e-4)
    assert_gradients(reference, run)
    return run


COVERING = {"2x2x2", "2x2x1-pp2", "1x2x2-dp2", "2x2x1"}


def sizes_of(arch: list[str], tp: int) -> ModelSizes:
    """The model as the formulas take it."""
    llama = "--swiglu" in arch
    heads = int(arch[arch.index("--num-attention-heads") + 1]) if "--num-attention-heads" in arch else 4
    groups = [int(arch[n + 1]) for n, word in enumerate(arch) if word == "--num-query-groups"]
    return ModelSizes(
        seq=32,
        batch=4,
        hidden=64,
        heads=heads,
        kv_groups=groups[-1] if groups else heads,
        head_dim=64 // heads,
        ffn=128 if llama else 256,
        vocab=256,
        glu=llama,
        bias=not llama,
        rms=llama,
        learned=not llama,
        max_positions=32,
        tied=not llama,
    )


def assert_ran(
    run: Run,
    arch: list[str],
    grid: Grid3D,
    *,
    p: int = 1,
    save: str = "shard_weight",
    mode: str = "plane",
    recomputed: bool = False,
    keep: int = 0,
    microbatches: int = 2,
) -> None:
    """Bytes of every rank and step by (site, kind, axis) are the formulas'."""
    sizes, per_stage = sizes_of(arch, grid.ranks), 4 // p
    for rank in range(len(run.lines)):
        start = run.start(rank)
        assert "linear3d" in start["features"]
        at, stage = grid.coords(start["coords"]["tp"]), start["coords"]["pp"]
        ways = {"save": save, "how": "ordered", "coords": at}
        expected: Counter = Counter()
        for layer in range(per_stage):
            expected += layer_bytes(
                sizes,
                grid,
                **ways,
                forward=microbatches * (1 + recomputed),
                backward=microbatches,
                kept=microbatches if layer >= per_stage - keep else 0,
            )
        ends = {"first": stage == 0, "last": stage == p - 1}
        expected += edge_bytes(sizes, grid, mode, **ways, **ends, forward=microbatches, backward=microbatches)
        own = dataclasses.replace(sizes, learned=False) if mode == "stages" else sizes
        expected += vector_bytes(vectors(own, grid, per_stage, **ends), grid, at, 4)
        assert expected
        for line in run.steps(rank):
            assert sent(line) == expected, (rank, line["step"])


def vectors(sizes: ModelSizes, grid: Grid3D, layers: int, *, first: bool, last: bool) -> list:
    """(local elements, layout) of all vectors of a stage."""
    norm = [(sizes.hidden // grid.gl, VECTOR)] * (1 if sizes.rms else 2)
    layer = 2 * norm
    if sizes.bias:
        for name, site in sites_of("stages").items():
            layer.append((site.bias.local_shape(grid, (sizes.weight(name)[0],))[0], site.bias))
    positions = [(32 * sizes.hidden // grid.gl, POSITIONS)] if first and sizes.learned else []
    return layer * layers + positions + (norm if last else [])


def sent(line: dict) -> Counter:
    """Bytes of a step by (site, kind, axes)."""
    found: Counter = Counter()
    for entry in line["traffic"]:
        feature, _, site = entry["feature"].partition(":")
        if feature == "linear3d" and entry["bytes"]:
            axes = entry["group"].removeprefix("linear3d-").removesuffix("-grads")
            found[site, entry["kind"], axes] += entry["bytes"]
    return found


def assert_shapes(run: Run, arch: list[str], grid: Grid3D, p: int = 1, tied: bool = True) -> None:
    """Every rank says how many parameters it holds: its P-th part of the matrices, and its vectors."""
    sizes = sizes_of(arch, grid.ranks)
    matrices = sum(
        out * inside for out, inside in (local_weight(sizes, s, grid) for s in sites_of("stages").values())
    )
    assert matrices * grid.ranks == sizes.layer_parameters
    table = sizes.vocab * sizes.hidden // grid.ranks
    for rank in range(len(run.lines)):
        stage = run.start(rank)["coords"]["pp"]
        ends = {"first": stage == 0, "last": stage == p - 1}
        expected = 4 // p * matrices + sum(n for n, _ in vectors(sizes, grid, 4 // p, **ends))
        expected += table * (stage == 0) + table * (stage == p - 1 and (p > 1 or not sizes.tied))
        text = "".join(r.output for r in run.ranks)
        place = f"({run.start(rank)['coords']['tp']}, 0, {stage}): {expected}"
        assert f"number of parameters on (tensor, gtp_remat, pipeline) model parallel rank {place}" in text


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


def test_overlap_changes_no_bit(tmp_path):
    """Through real runs with recomputation and data parallelism: every level on its own, and all, against
    none."""
    runs = {}
    for level in ("none", "grads", "prefetch", "defer", "all"):
        recompute = FULL_RECOMPUTE if level != "grads" else []
        flags = [*grid_flags((2, 1, 1)), "--linear-3d-overlap", level, *DISTOPT, *OVERLAP, *recompute]
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
def test_optimizers_agree_to_the_bit(tmp_path, sizes):
    """Acceptance check 7: 20 steps of Adam like stock's, and like those of the distributed optimizer."""
    flags = [*BATCH, *seed(()), *grid_flags(sizes)]
    reference = train(tmp_path / "stock", 1, *BATCH, *seed(()), steps=20)
    plain = train(tmp_path / "plain", 8, *flags, steps=20)
    split = train(tmp_path / "split", 8, *flags, *DISTOPT, steps=20)
    assert len(plain.losses()) == 20
    assert plain.losses() == split.losses()
    assert_close(reference.losses(), plain.losses(), 1e-5)
    assert_close(reference.grad_norms(), plain.grad_norms(), 1e-4)


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


@pytest.mark.parametrize("sharding", ["plain", pytest.param("distopt", marks=full)])
def test_checkpoints_interchange(tmp_path, sharding):
    """Stock, a grid, and another grid go on from each other's checkpoints, optimizer states included."""
    distopt = [*DISTOPT, "--dist-ckpt-optim-fully-reshardable"] if sharding == "distopt" else []
    first = [*LLAMA, "--num-query-groups", "4", *BATCH, *distopt]
    arch = (*LLAMA, "--num-query-groups", "4")
    store = tmp_path / "store"
    whole = train(tmp_path / "whole", 1, *first, *seed(arch), steps=5)
    runs = [
        (1, []),
        (8, grid_flags((2, 2, 2))),
        (4, grid_flags((1, 2, 1), 2)),
        (4, [TP, "2", PP, "2"]),
        (2, grid_flags((2, 1, 1))),
    ]
    losses = {}
    for number, (world, flags) in enumerate(runs, start=1):
        source = seed(arch) if number == 1 else ["--load", str(store)]
        save = ["--save", str(store), "--save-interval", "1", "--exit-interval", str(number)]
        folder = tmp_path / str(number)
        run = train(folder, world, *first, *flags, *source, *save, steps=5, timeout=400.0)
        losses |= run.losses()
    assert_close(whole.losses(), losses, 1e-5)


@full
@pytest.mark.parametrize("arch", [WIDE, [*LLAMA, *WIDE, "--num-query-groups", "8"]], ids=["gpt", "llama"])
def test_checkpoints_keep_every_bit(tmp_path, arch):
    """Acceptance check 8: a grid's checkpoint, loaded and saved by stock and by other grids."""
    layouts = {
        "stock": [TP, "8", "--sequence-parallel"],
        "2x4x1": grid_flags((2, 4, 1)),
        "1x4x2": grid_flags((1, 4, 2)),
    }
    save = ["--save", str(tmp_path / "2x2x2"), "--save-interval", "2"]
    train(tmp_path / "run", 8, *arch, *BATCH, *grid_flags((2, 2, 2)), *save, steps=2)
    expected = tensors(tmp_path / "2x2x2" / "iter_0000002")
    states = [name for name in expected if "exp_avg" in name]
    assert len(states) >= len(expected) // 2
    source = tmp_path / "2x2x2"
    for name, flags in layouts.items():
        target = tmp_path / name
        passed_on = ["--load", str(source), "--save", str(target), "--save-interval", "100"]
        train(tmp_path / f"run-{name}", 8, *arch, *BATCH, *flags, *passed_on, steps=2)
        found = tensors(target / "iter_0000002")
        assert found.keys() == expected.keys()
        assert [key for key, value in found.items() if not value.equal(expected[key])] == []
        source = target


def tensors(checkpoint: Path) -> dict:
    """Every whole tensor of a checkpoint by name; random states differ between ranks, and are left out."""

    def body() -> dict:
        import torch
        from megatron.core.dist_checkpointing import load_plain_tensors

        torch.distributed.init_process_group("gloo")
        found = load_plain_tensors(str(checkpoint))
        return {key: value.numpy() for key, value in found.items() if isinstance(value, torch.Tensor)}

    import torch

    found = run_ranks(1, body)[0].value
    return {key: torch.from_numpy(value) for key, value in found.items() if "rng" not in key}


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
        (["--gradient-accumulation-fusion"], ("axis i of 2 ranks",)),
    ],
)
def test_refused_before_any_group_exists(flags, says):
    """Acceptance check 14, through the launcher: every rank exits with 2 and says why."""
    world = 4 if PP in flags else 2
    text = refused(*BATCH, "--global-batch-size", "12", *grid_flags((2, 1, 1)), *flags, world=world)
    assert all(part in text for part in says), text


def test_flat_buffers_of_another_layout_are_refused(tmp_path):
    """The distributed optimizer's other format stores buffers, which a grid must not take for its own."""
    store = tmp_path / "store"
    flags = [*BATCH, *DISTOPT, "--save", str(store), "--save-interval", "1"]
    train(tmp_path / "stock", 4, *flags, TP, "4", steps=1)
    run = train(
        tmp_path / "grid", 4, *flags, "--load", str(store), *grid_flags((2, 1, 2)), steps=2, check=False
    )
    assert "linear3d-2x1x2-ijl-plane" in "".join(str(r.error) for r in run.ranks)


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


@pytest.mark.full
def test_wallfacer(tmp_path):
    """Context parallelism on top: sequences are dealt out to context ranks first, then cut over the grid."""
    flags = ["--context-parallel-size", "2", "--cp-comm-type", "wallfacer", "--wallfacer-team-size", "1"]
    run = like_stock(tmp_path, LLAMA, 4, 1, (1, 2, 1), flags)
    assert run.start()["features"] == ["linear3d", "wallfacer"]
