"""The launcher under real torchrun: a whole run, a killed rank, and a machine with GPU packages installed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.functional.runs import MODEL, REPO, SCRIPT, data, merged, read_record, train

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(folder: Path, *flags: str, steps: int, path: list[Path] = ()) -> subprocess.Popen:
    """Two torchrun ranks, pipeline-parallel, output in `folder`/log."""
    args = merged(
        MODEL, data(), ["--train-iters", str(steps), "--pipeline-model-parallel-size", "2"], list(flags)
    )
    args += ["--ext-report", str(folder / "record")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*path, REPO])), "OMP_NUM_THREADS": "1"}
    log = (folder / "log").open("w")
    command = [*TORCHRUN, "-m", "megatron_ext", "--cpu", str(SCRIPT), *args]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, text=True)


def text_of(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


def test_run_with_gpu_packages_installed(tmp_path):
    """Transformer Engine and Apex may be installed: `--cpu` hides them (stand-ins that fail on import)."""
    stand_ins = tmp_path / "site"
    for name in ("transformer_engine", "apex", "flash_attn", "amp_C"):
        (stand_ins / name).mkdir(parents=True)
        (stand_ins / name / "__init__.py").write_text(f"raise RuntimeError('{name} was used on CPU')\n")
    process = start(tmp_path, steps=2, path=[stand_ins])
    code = process.wait(timeout=150)
    log = text_of(tmp_path)
    assert code == 0, log[-4000:]
    assert "--cpu: hidden GPU packages: transformer_engine, apex, amp_C, flash_attn" in log
    record = read_record(tmp_path / "record", 2)
    assert [lines[-1]["event"] for lines in record] == ["end", "end"]
    assert [line["step"] for line in record[1] if "loss" in line] == [1, 2]


def test_killed_rank_ends_the_job_and_the_last_checkpoint_loads(tmp_path):
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "3", "--log-interval", "100"]
    process = start(tmp_path, *save, steps=100000)
    try:
        pid = wait_for_steps(tmp_path, rank=1, steps=8)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        code = process.wait(timeout=60)
        assert time.monotonic() - killed < 60
    finally:
        process.kill()
    log = text_of(tmp_path)
    assert code != 0
    assert "local_rank: 1" in log
    assert "SIGKILL" in log
    record = read_record(tmp_path / "record", 2)
    assert all(line["event"] != "end" for line in record[1])
    assert len([line for line in record[1] if line["event"] == "step"]) >= 8
    latest = int((tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text())
    assert latest >= 6
    resume = ["--load", str(tmp_path / "ckpt"), "--pipeline-model-parallel-size", "2"]
    resume.append("--override-opt-param-scheduler")  # it was to train for longer
    run = train(tmp_path / "resumed", 2, *resume, steps=latest + 2)
    assert sorted(run.losses()) == [latest + 1, latest + 2]


def wait_for_steps(folder: Path, rank: int, steps: int, timeout: float = 120.0) -> int:
    """Wait until a rank has recorded that many steps; returns its process id."""
    deadline = time.monotonic() + timeout
    path = folder / "record" / f"rank-{rank:04d}.jsonl"
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) > steps:
            return json.loads(lines[0])["pid"]
        time.sleep(0.2)
    raise AssertionError(f"no {steps} steps within {timeout} s:\n{text_of(folder)[-3000:]}")
