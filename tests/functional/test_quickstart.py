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
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "AGREE: Losses agree" in done.stdout
    assert "page: runs/quickstart/compare/compare.html" in done.stdout
    assert page.exists()
    steps = [line.split() for line in done.stdout.splitlines() if line.startswith("  step ")]
    losses = [float(words[words.index("loss") + 1]) for words in steps]
    assert len(losses) == 90, "30 steps in one process, 30 in a pipeline of two, 30 with the feature"
    one, pipeline, feature = losses[:30], losses[30:60], losses[60:]
    assert one[0] == pipeline[0] == feature[0] > 8.2, "an untrained model is as unsure as ln(4096) = 8.3"
    assert one[29] < 6.7
    assert pipeline == pytest.approx(one, rel=1e-5)
    assert feature == pytest.approx(one, rel=1e-5)
    assert "pp2-vocab" in page.read_text()
    assert_feature_ran()


def assert_feature_ran() -> None:
    """The records say that only the last run had the feature, and that it sent the vocabulary's bytes."""
    for name, features in (("pp1", []), ("pp2", []), ("pp2-vocab", ["vocab"])):
        lines = (ROOT / "runs" / "quickstart" / name / "rank-0000.jsonl").read_text().splitlines()
        start, step = json.loads(lines[0]), json.loads(lines[2])
        assert start["features"] == features
        sent = sum(entry["bytes"] for entry in step["traffic"] if entry["feature"] == "vocab")
        assert bool(sent) == bool(features)
