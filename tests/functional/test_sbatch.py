"""scripts/pretrain.sbatch without a cluster: stand-ins for Slurm's commands start two "nodes" right here."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = Path(__file__).parent / "slurm_standins"
SCRIPT = "scripts/pretrain.sbatch"
CONFIG = "configs/gpt-cpu-small.yaml"

# Writes down what it was called with and in which environment, as one JSON line a call.
RECORDER = """#!{python}
import json, os, sys
keys = ["CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", "SLURMD_NODENAME"]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([sys.argv[1:], {{key: os.environ.get(key) for key in keys}}]) + "\\n")
print("hello from", os.environ["SLURMD_NODENAME"])
sys.exit(int(os.environ.get("DOCTOR_EXIT" if "doctor" in sys.argv else "TRAIN_EXIT", "0")))
"""


class Cluster:
    """Two "nodes" on this machine, with everything a job writes below one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run_dir = folder / "run"
        self.spool = folder / "spool"
        self.calls_file = folder / "calls"
        self.recorder = folder / "recording-python"
        self.recorder.write_text(RECORDER.format(python=sys.executable))
        self.recorder.chmod(0o755)
        self.jobs: list[subprocess.Popen] = []

    def environment(self, **settings: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER_", "CUDA_"))}
        return kept | {
            "PATH": f"{STAND_INS}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_STANDIN_DIR": str(self.spool),
            "RUN_DIR": str(self.run_dir),
            "CALLS": str(self.calls_file),
            "PYTHON": sys.executable,
            **settings,
        }

    def start(self, *args: str, sbatch=("--nodes=2",), cwd: Path = ROOT, **settings: str) -> subprocess.Popen:
        output = f"--output={self.folder}/%x-%j.out"
        job = subprocess.Popen(
            ["sbatch", "--wait", output, *sbatch, ROOT / SCRIPT, *args],
            cwd=cwd,
            env=self.environment(**settings),
            stdin=subprocess.DEVNULL,
        )
        self.jobs.append(job)
        return job

    def submit(self, *args: str, **options) -> int:
        """The job's exit code."""
        return self.start(*args, **options).wait(timeout=170)

    def kill(self) -> None:
        """End what a failed test left running, with everything below it."""
        for job in self.jobs:
            if job.poll() is None:
                job_process = psutil.Process(job.pid)
                for process in [*job_process.children(recursive=True), job_process]:
                    process.kill()
                job.wait()

    def output(self) -> str:
        """What the newest job printed."""
        return sorted(self.folder.glob("megatron_ext-*.out"))[-1].read_text()

    def calls(self) -> list:
        """(arguments, environment) of each call of the recording Python, ordered by node within each step."""
        calls = [json.loads(line) for line in self.calls_file.read_text().splitlines()]
        return sorted(calls, key=lambda call: ("doctor" not in call[0], call[1]["SLURMD_NODENAME"]))

    def steps(self, job_id: int, rank: int) -> list[dict]:
        """The step lines of the run record so far."""
        path = self.run_dir / "report" / f"{job_id}-0" / f"rank-{rank:04d}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == "step"]


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.kill()


def value_of(words: list[str], flag: str) -> str:
    """The last value of a flag, which is the one that counts."""
    return [words[i + 1] for i, word in enumerate(words[:-1]) if word == flag][-1]


# ---- what each node is asked to run


def test_every_node_is_checked_then_runs_one_torchrun(cluster):
    code = cluster.submit(CONFIG, "--mock-data", "--train-iters", "7", PYTHON=str(cluster.recorder))
    assert code == 0, cluster.output()
    doctors, trainings = cluster.calls()[:2], cluster.calls()[2:]
    for node, (words, environment) in enumerate(doctors, start=1):
        assert words == ["-m", "megatron_ext", "doctor", "--require-gpu"]
        assert environment["SLURMD_NODENAME"] == f"127.0.0.{node}"
        assert f"node 127.0.0.{node} is healthy" in cluster.output()
    assert len(trainings) == 2
    for node, (words, environment) in enumerate(trainings, start=1):
        assert words[:2] == ["-m", "torch.distributed.run"]
        launcher = words.index("megatron_ext") - 1
        torchrun, job = words[2:launcher], words[launcher:]
        assert value_of(torchrun, "--nnodes") == "2"
        assert value_of(torchrun, "--nproc-per-node") == "8"
        assert value_of(torchrun, "--rdzv-backend") == "c10d"
        assert value_of(torchrun, "--rdzv-id") == "4211"
        assert value_of(torchrun, "--rdzv-endpoint") == "127.0.0.1:24211"
        assert value_of(torchrun, "--local-addr") == f"127.0.0.{node}"
        assert job[:5] == ["-m", "megatron_ext", "--ext-config", CONFIG, "pretrain_gpt.py"]
        assert value_of(job, "--save") == value_of(job, "--load") == f"{cluster.run_dir}/checkpoints"
        assert value_of(job, "--exit-signal") == "SIGUSR1"
        assert value_of(job, "--ext-report") == f"{cluster.run_dir}/report/4211-0"
        assert job[-3:] == ["--mock-data", "--train-iters", "7"]
        assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert environment["OMP_NUM_THREADS"] == "1"
        assert f"hello from 127.0.0.{node}" in (cluster.run_dir / f"logs/4211/127.0.0.{node}.log").read_text()
        assert f"{node - 1}: hello from 127.0.0.{node}" in cluster.output()


def test_settings_from_the_environment(cluster):
    code = cluster.submit(
        CONFIG,
        sbatch=("--nodes=1", "--gpus-per-node=0"),
        PYTHON=str(cluster.recorder),
        CPU="1",
        NPROC_PER_NODE="3",
        SCRIPT="mine/pretrain.py",
        CHECKPOINT_DIR=str(cluster.folder / "elsewhere"),
        MASTER_PORT="29511",
        CUDA_DEVICE_MAX_CONNECTIONS="8",
        SRUN_ARGS="--container-image=nvidia/pytorch",
    )
    assert code == 0, cluster.output()
    (doctor, _), (words, environment) = cluster.calls()
    assert doctor == ["-m", "megatron_ext", "doctor", "--cpu"]
    assert value_of(words, "--nproc-per-node") == "3"
    assert value_of(words, "--rdzv-endpoint") == "127.0.0.1:29511"
    assert words[words.index("megatron_ext") + 1 :][:4] == [
        "--cpu",
        "--ext-config",
        CONFIG,
        "mine/pretrain.py",
    ]
    assert value_of(words, "--load") == str(cluster.folder / "elsewhere")
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_without_a_count_of_gpus_torchrun_counts_them(cluster):
    one = ("--nodes=1", "--gpus-per-node=0")
    assert cluster.submit(CONFIG, sbatch=one, PYTHON=str(cluster.recorder)) == 0
    assert value_of(cluster.calls()[-1][0], "--nproc-per-node") == "gpu"


def test_unhealthy_node_stops_the_job_before_training(cluster):
    assert cluster.submit(CONFIG, PYTHON=str(cluster.recorder), DOCTOR_EXIT="1") == 1
    assert all("doctor" in words for words, _ in cluster.calls())
    assert "0: hello from 127.0.0.1" in cluster.output(), "the report of an unhealthy node is shown"
    assert "1: hello from 127.0.0.2" in cluster.output(), "and each node's, not only the first to fail"
    assert "a node is not healthy, so nothing was started" in cluster.output()


SEED_LINES = {
    "two words": ["--load", "/seed", "--finetune", "--no-load-optim", "--no-load-rng"],
    "one word": ["--no-load-rng", "--load=/seed", "--ckpt-step", "5"],
}


@pytest.mark.parametrize("seed", SEED_LINES.values(), ids=SEED_LINES)
def test_load_is_for_the_first_start_only(cluster, seed):
    """It wins over the run's own checkpoints, so that every requeue would start from the seed again."""
    line = [CONFIG, "--mock-data", *seed, "--train-iters", "7"]
    one = ("--nodes=1",)
    own = cluster.run_dir / "checkpoints"

    assert cluster.submit(*line, sbatch=one, PYTHON=str(cluster.recorder)) == 0, cluster.output()
    assert cluster.calls()[-1][0][-len(line) + 1 :] == line[1:], "the first start uses it"
    assert "resuming" not in cluster.output()

    (own / "latest_checkpointed_iteration.txt").write_text("3")
    cluster.calls_file.unlink()
    assert cluster.submit(*line, sbatch=one, PYTHON=str(cluster.recorder)) == 0, cluster.output()
    words = cluster.calls()[-1][0]
    assert value_of(words, "--load") == str(own)
    assert words[-3:] == ["--mock-data", "--train-iters", "7"]
    assert not set(seed) & (set(words) - {"--load"})
    assert f"resuming from {own}; {' '.join(seed)} is for the first start only" in cluster.output()


def test_resuming_without_load_changes_no_argument(cluster):
    own = cluster.run_dir / "checkpoints"
    own.mkdir(parents=True)
    (own / "latest_checkpointed_iteration.txt").write_text("3")
    line = ["--mock-data", "--no-load-rng", "--train-iters", "7"]
    assert cluster.submit(CONFIG, *line, sbatch=("--nodes=1",), PYTHON=str(cluster.recorder)) == 0
    assert cluster.calls()[-1][0][-4:] == line
    assert "first start only" not in cluster.output()


def test_failed_training_fails_the_job_and_says_how_to_go_on(cluster):
    assert cluster.submit(CONFIG, PYTHON=str(cluster.recorder), TRAIN_EXIT="1") == 1
    assert f"the first error is in one of {cluster.run_dir}/logs/4211/*.log" in cluster.output()
    assert "Submit the same line again to continue" in cluster.output()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no YAML file with the arguments was given"),
        (("configs/none.yaml",), "configs/none.yaml cannot be read"),
    ],
)
def test_bad_config_is_refused(cluster, args, message):
    assert cluster.submit(*args, PYTHON=str(cluster.recorder)) != 0
    assert message in cluster.output()
    assert not cluster.calls_file.exists()


def test_submitting_from_elsewhere_is_refused(cluster):
    assert cluster.submit(CONFIG, cwd=cluster.folder, PYTHON=str(cluster.recorder)) == 2
    assert "submit this from the root of the checkout" in cluster.output()


def test_missing_python_is_named(cluster):
    assert cluster.submit(CONFIG, PYTHON="/nowhere/python") == 1
    assert "node 127.0.0.1 has no /nowhere/python" in cluster.output()


# ---- a real training


@pytest.mark.full
def test_two_nodes_train_stop_on_the_signal_and_resume(cluster):
    """Two nodes of one rank (PP=2) train, Slurm's warning makes them save, the same line goes on from it."""
    arguments = [CONFIG, "--mock-data", "--pipeline-model-parallel-size", "2", "--train-iters", "100000"]
    settings = {"CPU": "1", "OMP_NUM_THREADS": "1"}
    two = ("--nodes=2", "--gpus-per-node=0")

    job = cluster.start(*arguments, sbatch=two, **settings)
    wait_until(lambda: len(cluster.steps(4211, rank=1)) >= 2 or job.poll() is not None, seconds=150)
    assert job.poll() is None, cluster.output()
    subprocess.run(["scancel", "--signal=USR1", "4211"], env=cluster.environment(), check=True)
    assert job.wait(timeout=60) == 0, cluster.output()
    first = cluster.steps(4211, rank=1)
    stopped_at = int((cluster.run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert first[-1]["step"] == stopped_at

    assert cluster.submit(*arguments, "--exit-interval", "1", sbatch=two, **settings) == 0, cluster.output()
    second = cluster.steps(4212, rank=1)
    assert [step["step"] for step in second] == [stopped_at + 1]
    # Mock data repeat themselves, so a run that had not resumed would start again near ln(4096) = 8.3.
    assert second[0]["loss"] < first[0]["loss"]
    assert second[0]["learning_rate"] >= first[-1]["learning_rate"]
    assert f"successfully loaded checkpoint from {cluster.run_dir}/checkpoints" in cluster.output()


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened for {seconds} s"
        time.sleep(0.2)
