import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ext import problems

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def test_rank_0_prints_the_numbered_list(capsys):
    with pytest.raises(SystemExit) as stop:
        problems.refuse(["The first.", "The second\n  indented"])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "megatron_ext: 2 problems, nothing was started",
        "-" * 100,
        "  1. The first.",
        "  2. The second",
        "       indented",
        "-" * 100,
    ]


def test_one_problem_is_singular():
    assert problems.render(["x"]).startswith("megatron_ext: 1 problem, nothing was started\n")


def test_long_problems_are_wrapped_and_options_stay_whole():
    text = "--tensor-model-parallel-size 2 " * 12
    lines = problems.render([text]).splitlines()
    assert max(len(line) for line in lines) <= problems.WIDTH
    assert " ".join(" ".join(lines[2:-1]).split()) == "1. " + text.strip()
    assert all(not line.endswith("-") for line in lines[2:-1])


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (["No file x.\n  details"], "megatron_ext: rank 3 refuses as well, 1 problem: No file x.\n"),
        (["One.", "Two."], "megatron_ext: rank 3 refuses as well, 2 problems, the first: One.\n"),
    ],
)
def test_without_torchrun_other_ranks_say_one_line_at_once(capsys, monkeypatch, found, line):
    """The problem may be this rank's alone (a file that is missing on its node)."""
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as stop:
        problems.refuse(found)
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", line)


def test_rank_argument_wins(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        problems.refuse(["x"], rank=0)
    assert "1. x" in capsys.readouterr().err


def test_under_torchrun_other_ranks_wait_and_then_speak(capsys, monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(signal, "signal", lambda *handler: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as stop:
        problems.refuse(["only here"])
    assert stop.value.code == 2
    assert waited == [problems.TORCHRUN_GRACE_S + 0.5]
    assert "1 problem on rank 9, nothing was started" in capsys.readouterr().err


def test_rank_that_torchrun_stops_while_it_waits_exits_2_too():
    code = "from megatron_ext.problems import refuse; print('waiting', flush=True); refuse(['x'])"
    environ = os.environ | {"TORCHELASTIC_RUN_ID": "job", "RANK": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as rank:
        assert rank.stdout.readline() == "waiting\n"
        time.sleep(0.5)
        rank.terminate()
        assert rank.stderr.read() == ""
        assert rank.wait(timeout=10) == 2


def test_refusing_nothing_is_a_bug():
    with pytest.raises(AssertionError, match="at least one problem"):
        problems.refuse([])


def test_user_error():
    error = problems.UserError("one", "two")
    assert isinstance(error, ValueError)
    assert error.problems == ["one", "two"]
    assert str(error) == "one\ntwo"
    with pytest.raises(AssertionError):
        problems.UserError()


def test_modules_import_without_torch_or_megatron():
    modules = "problems config configfile parse_errors rules features tables compositions"
    code = (
        f"import sys; [__import__('megatron_ext.' + m) for m in {modules.split()!r}]; "
        "assert not {'torch', 'megatron', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
