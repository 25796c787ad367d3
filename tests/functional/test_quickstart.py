"""scripts/quickstart.sh for real, in the environment that scripts/setup.sh made for this checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_quickstart(tmp_path):
    if not Path(sys.prefix, ".megatron_ext-setup").exists():
        pytest.skip(
            "this Python is not in an environment made by scripts/setup.sh; run scripts/test.sh --full"
        )
    page = ROOT / "runs" / "quickstart" / "compare" / "compare.html"
    page.unlink(missing_ok=True)
    environment = os.environ | {"MEGATRON_EXT_VENV": sys.prefix}
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "quickstart.sh"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "AGREE: Losses agree" in done.stdout
    assert "page: runs/quickstart/compare/compare.html" in done.stdout
    assert page.exists()
    steps = [line.split() for line in done.stdout.splitlines() if line.startswith("  step ")]
    losses = [float(words[words.index("loss") + 1]) for words in steps]
    assert len(losses) == 210, "30 steps in one process, in a pipeline of two, and with each feature"
    one = losses[:30]
    assert one[0] > 8.2, "an untrained model is as unsure as ln(4096) = 8.3"
    assert one[29] < 6.7
    for begin in (30, 60, 90, 120, 150, 180):
        assert losses[begin] == one[0]
        assert losses[begin : begin + 30] == pytest.approx(one, rel=1e-5)
    assert "pp2-vocab" in page.read_text()
    assert "pp2-v-half" in page.read_text()
    assert "tp4-linear3d" in page.read_text()
    assert "cp2-wallfacer" in page.read_text()
    assert "dp4-paro" in page.read_text()
    assert_feature_ran()


def assert_feature_ran() -> None:
    """The records say which runs had which feature, and that these sent its bytes."""
    runs = {"pp1": [], "pp2": [], "pp2-vocab": ["vocab"]}
    runs |= {"pp2-v-half": ["pipeline", "vocab"]}
    runs |= {"tp4-linear3d": ["linear3d"], "cp2-wallfacer": ["wallfacer"], "dp4-paro": ["paro"]}
    for name, features in runs.items():
        lines = (ROOT / "runs" / "quickstart" / name / "rank-0000.jsonl").read_text().splitlines()
        start, step = json.loads(lines[0]), json.loads(lines[2])
        assert start["features"] == features
        for feature in ("vocab", "linear3d", "wallfacer", "paro"):
            ours = [e["bytes"] for e in step["traffic"] if e["feature"].partition(":")[0] == feature]
            sent = sum(ours)
            assert bool(sent) == (feature in features)
