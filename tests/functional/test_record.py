"""What the run record says is what happened: bytes by formula, memory, time, environment."""

import json

import pytest

from megatron_ext.tools.compare import main as compare
from tests.functional.runs import SCRIPT as SCRIPT_PATH
from tests.functional.runs import train

PP, TP = "--pipeline-model-parallel-size", "--tensor-model-parallel-size"
SEQ, HIDDEN, FP32, MICROBATCHES = 32, 64, 4, 8
ACTIVATION = SEQ * 1 * HIDDEN * FP32  # bytes of one [s, b, h] between stages


def entries(run, rank: int, kind: str, group: str) -> list[dict]:
    """Traffic entries of every step of a rank."""
    return [
        entry
        for line in run.steps(rank)
        for entry in line["traffic"]
        if entry["kind"] == kind and entry["group"] == group
    ]


def test_pipeline_sends_one_activation_per_microbatch_and_direction(tmp_path):
    run = train(tmp_path, 2, PP, "2", steps=3)
    for rank in (0, 1):
        sent = entries(run, rank, "send", "pp")
        assert [(e["bytes"], e["calls"]) for e in sent] == [(MICROBATCHES * ACTIVATION, MICROBATCHES)] * 3
        assert {e["feature"] for e in sent} == {"stock"}


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ([], {"all_reduce": 1.0}),
        (["--use-distributed-optimizer"], {"reduce_scatter": 0.5, "all_gather": 0.5}),
    ],
    ids=["ddp", "distopt"],
)
def test_data_parallel_moves_every_gradient_once(tmp_path, flags, kinds):
    """Two ranks: all-reduce sends 2 n (p-1)/p = n bytes per rank, reduce-scatter and all-gather n/2 each."""
    run = train(tmp_path, 2, *flags, "--log-params-norm", steps=3)
    numel = sum(PARAMETERS.values())
    for kind, share in kinds.items():
        per_step = [e["bytes"] for e in entries(run, 0, kind, "dp-cp")] or [
            e["bytes"] for e in entries(run, 0, kind, "dp")
        ]
        expected = numel * FP32 * share
        assert len(per_step) == 3
        for sent in per_step:
            # Buckets are padded to a multiple of the group; a few scalars (loss, token count) come on top.
            assert expected <= sent <= expected * 1.002 + 64, (kind, sent, expected)


def _parameters() -> dict[str, int]:
    """Elements of the test model's parameters, tied embeddings counted once."""
    h, layers, vocab = HIDDEN, 4, 256
    layer = {
        "qkv": 3 * h * h + 3 * h,
        "proj": h * h + h,
        "fc1": 4 * h * h + 4 * h,
        "fc2": 4 * h * h + h,
        "norms": 4 * h,
    }
    return {name: layers * n for name, n in layer.items()} | {
        "words": vocab * h,
        "positions": SEQ * h,
        "final": 2 * h,
    }


PARAMETERS = _parameters()


def test_start_line(tmp_path):
    run = train(tmp_path, 4, PP, "2", TP, "2", steps=2)
    for rank in range(4):
        start = run.start(rank)
        assert start["rank"] == rank
        assert start["world_size"] == 4
        assert start["layout"] == {"tp": 2, "pp": 2, "cp": 1, "dp": 1, "ep": 1, "vpp": None}
        assert start["coords"] == {"tp": rank % 2, "pp": rank // 2, "cp": 0, "dp": 0}
        assert start["groups"]["tp"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert start["groups"]["pp"] == [rank % 2, rank % 2 + 2]
        assert start["versions"]["megatron_core"].startswith("0.19.")
        assert all(patch["sites"] for patch in start["patches"])
        assert run.lines[rank][-1] == {"event": "end", "step": 2, "status": "ok", "error": None}


def test_step_line(tmp_path):
    run = train(tmp_path, 2, PP, "2", steps=3)
    assert all("loss" not in line for line in run.steps(0))
    assert all(line["losses"] == {"lm loss": line["loss"]} for line in run.steps(1))
    for line in run.steps(0) + run.steps(1):
        assert line["tokens"] == 8 * SEQ
        assert 0 < line["step_time_s"] < 60
        assert 0 < line["peak_memory_bytes"] < 4 << 30
        assert line["skipped"] is False
        assert line["learning_rate"] == 1e-3
    times = [line["peak_memory_bytes"] for line in run.steps(0)]
    assert times == sorted(times)


def test_a_failing_run_says_so(tmp_path):
    """The error of a script that raises is the record's last line."""
    script = tmp_path / "broken.py"
    script.write_text(
        "import runpy, sys, megatron.training.training as t\n"
        "def evaluate(*a, **k): raise RuntimeError('disk on fire')\n"
        "t.evaluate_and_print_results = evaluate\n"
        f"runpy.run_path({str(SCRIPT_PATH)!r}, run_name='__main__')\n"
    )
    run = train(tmp_path, 1, "--eval-interval", "1", "--eval-iters", "1", steps=2, script=script, check=False)
    assert run.ranks[0].exit_code == 1
    assert "disk on fire" in run.ranks[0].error
    end = run.lines[0][-1]
    assert (end["event"], end["status"]) == ("end", "error")
    assert "disk on fire" in end["error"]


def test_config_file_with_the_command_line_on_top(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("model:\n  num-layers: 2\ntraining:\n  seed: 11\n  lr: 5e-4\n")
    run = train(tmp_path, 1, steps=2, launcher=("--cpu", "--ext-config", str(config)))
    assert "--num-layers" in run.start()["argv"]
    # MODEL's own flags are on the command line, so they win over the file.
    assert run.steps(0)[0]["learning_rate"] == 1e-3


def test_compare_reads_the_records_of_real_runs(tmp_path, capsys):
    """One rank and two data-parallel ranks, same weights: agreement; another seed: none."""
    one = train(tmp_path / "one", 1, steps=4)
    train(tmp_path / "two", 2, steps=4)
    train(tmp_path / "other", 1, "--seed", "8", steps=4)
    records = {name: str(tmp_path / name / "record") for name in ("one", "two", "other")}
    out = ["--output", str(tmp_path / "compare")]
    assert compare([records["one"], records["two"], *out]) == 0
    assert "AGREE" in capsys.readouterr().out
    page = (tmp_path / "compare" / "compare.html").read_text()
    assert "all_reduce over dp" in page
    written = json.loads((tmp_path / "compare" / "compare.json").read_text())
    assert repr(one.losses()[4]) in json.dumps(written)
    assert compare([records["one"], records["other"], *out]) == 1
