"""Runs with 3-D linear layers through the real script: stock references, and the proof that the grid ran."""

import dataclasses
import functools
from collections import Counter
from pathlib import Path

from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.layouts import POSITIONS, VECTOR
from megatron_ext.linear3d.sizes import ModelSizes, local_weight, sites_of
from megatron_ext.linear3d.volume import edge_bytes, layer_bytes, vector_bytes
from tests.functional.parity import PP, TP, assert_parity
from tests.functional.runs import LLAMA, Run, seed_checkpoint, train

GPT: list[str] = []
WIDE = ["--num-attention-heads", "8"]
LLAMA8 = [*LLAMA, "--num-query-groups", "4"]
# Vocabularies are padded by the tensor-parallel size; this one has 256 rows on up to 8 ranks.
BATCH = ["--micro-batch-size", "4", "--make-vocab-size-divisible-by", "32"]


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
    assert_parity(reference, run)
    return run


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
