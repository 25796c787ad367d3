"""The collectives' benchmark end to end, on tiny buffers: every method is checked by the benchmark itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def bench(*argv):
    script = [sys.executable, str(ROOT / "scripts" / "bench" / "collectives.py")]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.run([*script, *argv], capture_output=True, text=True, env=environment, timeout=240)


def test_every_method_on_two_grids(tmp_path):
    done = bench("--grids", "2x2", "3x1", "--sizes", "0.01", "--rounds", "1", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert len(rows) == 2 * 3 * 5
    assert all(row["seconds"] > 0 for row in rows)
    assert (tmp_path / "results.svg").exists()
    assert "HO-Ring" in done.stdout


def test_wrong_grid():
    done = bench("--grids", "2by2")
    assert done.returncode == 2
    assert "'2by2' is no grid: write groups x members, as 2x4" in done.stderr
    done = bench("--intra-rate", "400mbit")
    assert done.returncode == 2
    assert "--intra-rate needs --rate" in done.stderr
