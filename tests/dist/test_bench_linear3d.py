"""The benchmark of 3-D linears at a small size: every method is right, and what it writes is what it should."""

import importlib
import sys
from pathlib import Path

import pytest

from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.volume import layer_bytes
from tests.ranks import run_ranks

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture(scope="module")
def bench():
    """The benchmark's module."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("linear3d")
    finally:
        sys.path.remove(str(BENCH))
        for name in set(sys.modules) - before:
            if (BENCH / f"{name}.py").exists():
                del sys.modules[name]


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.full)])
def test_methods(bench, tmp_path, ranks):
    """Each checks its result against one rank before anything is timed."""
    args = bench.parse("--hidden 32 --batch 8 --heads 16 --rounds 1 --overlap none all --gflops 50".split())
    args.ranks = [ranks]
    assert bench.unfit(args, ranks) == []
    rows = run_ranks(ranks, lambda: bench.measure(args, ranks))[0].value
    named = {row["method"]: row for row in rows}
    square = "2-D SUMMA 2 x 2" if ranks == 4 else "2.5-D 2 x 2 x 2"
    assert {"1-D as shipped", "1-D", square, f"{square}, panels in turn"} <= named.keys()
    assert len({row["macs"] for row in rows}) == 1
    sizes = bench.sizes_of(bench.shape_of(args, ranks))
    assert rows[0]["macs"] == 3 * 12 * sizes.seq * sizes.batch * 32 * 32 // ranks
    for grid in (Grid3D(1, ranks, 1), *bench.grids_of(args, ranks, bench.shape_of(args, ranks))):
        name = "1-D" if grid.gj == ranks else f"3-D {grid}"
        assert named[name]["bytes"] == sum(layer_bytes(sizes, grid, save="gathered", how="ordered").values())
    assert named[square]["mean_bytes"] == named[f"{square}, panels in turn"]["mean_bytes"]
    bench.save(tmp_path, rows, {})
    bench.save(tmp_path, [{**row, "ranks": 2 * ranks} for row in rows], {})
    text = (tmp_path / "results.md").read_text()
    assert f"## {ranks} ranks" in text
    assert "## Strong scaling" in text
    assert f"{ranks} ranks, 1-D as shipped" in (tmp_path / "results.svg").read_text()


def test_shapes_that_cannot_be_compared(bench):
    with pytest.raises(SystemExit, match="--num-attention-heads 36"):
        bench.main(["--ranks", "8", "--hidden", "144"])


def test_products_can_be_paced(bench):
    def body() -> tuple[int, float]:
        import time

        import torch

        compute = importlib.import_module("linear3d_compute")
        a, b = torch.ones(10, 20), torch.ones(20, 50)
        with compute.Products() as products:
            a @ b
        begin = time.perf_counter()
        with compute.Paced(1e5):
            a @ b
        return products.multiply_adds, time.perf_counter() - begin

    count, seconds = run_ranks(1, body)[0].value
    assert count == 10 * 20 * 50
    assert seconds >= 0.1
