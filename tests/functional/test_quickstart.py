"""scripts/quickstart.sh for real, in the environment that scripts/setup.sh made for this checkout."""

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
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "AGREE: Losses agree" in done.stdout
    assert "page: runs/quickstart/compare/compare.html" in done.stdout
    assert page.exists()
    steps = [line.split() for line in done.stdout.splitlines() if line.startswith("  step ")]
    losses = [float(words[words.index("loss") + 1]) for words in steps]
    assert len(losses) == 60, "30 steps in one process, 30 in a pipeline of two"
    assert losses[0] == losses[30] > 8.2, "an untrained model is as unsure as ln(4096) = 8.3"
    assert max(losses[29], losses[59]) < 6.7
