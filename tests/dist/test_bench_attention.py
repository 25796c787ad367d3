"""The attention benchmark end to end, on tiny calls: it checks results and bytes of every method itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--heads", "2", "--head-dim", "8", "--rounds", "1"]


def bench(*argv):
    script = [sys.executable, str(ROOT / "scripts" / "bench" / "attention.py")]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.run([*script, *argv], capture_output=True, text=True, env=environment, timeout=240)


def measured(done, folder):
    assert done.returncode == 0, done.stderr
    data = json.loads((folder / "results.json").read_text())
    assert all(second > 0 for row in data["rows"] for second in row["seconds"])
    return [row["method"]["name"] for row in data["rows"]], data


def test_every_shape_of_four_ranks(tmp_path):
    done = bench("calls", "--ranks", "4", "--seq", "64", *SMALL, "--output", str(tmp_path))
    names, data = measured(done, tmp_path)
    ours = ["C=1 K=1", "C=1 K=2", "C=1 K=4", "C=2 K=1", "C=2 K=2", "C=4 K=1", "C=2 K=2 direct"]
    assert names[:9] == ["plain ring", "key gather", *ours]
    assert {"torch all-to-all", "torch all-gather"} <= set(names)
    assert "yunchang" in names or any(note.startswith("yunchang") for note in data["notes"])
    assert len(data["compute"]) == 1
    assert "Best: C=" in done.stdout


@pytest.mark.full
def test_both_directions_and_fewer_key_heads(tmp_path):
    more = ["--kv-heads", "1", "--bidirectional", "--methods", "2x1", "1x1", "--peers"]
    done = bench("calls", "--ranks", "3", "2", "--seq", "24", *SMALL, *more, "--output", str(tmp_path))
    assert done.returncode == 2  # 2 x 1 does not divide 3 ranks
    assert "--ranks 3: team size C=2 times bundle K=1" in done.stderr
    done = bench("calls", "--ranks", "2", "--seq", "24", *SMALL, *more, "--output", str(tmp_path))
    names, _ = measured(done, tmp_path)
    assert names == ["plain ring", "key gather", "C=2 K=1", "C=1 K=1"]


def test_wrong_input():
    done = bench("calls", "--ranks", "4", "--seq", "30")
    assert done.returncode == 2
    assert "pad it to 32" in done.stderr
    done = bench("calls", "--methods", "2by2")
    assert done.returncode == 2
    assert "--methods 2by2: write team size x bundle, as 4x1 or 4x4-direct" in done.stderr
