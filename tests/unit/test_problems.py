import subprocess
import sys
import time

import pytest

from megatron_ext import problems


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


def test_other_ranks_exit_silently(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as stop:
        problems.refuse(["x"])
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", "")


def test_rank_argument_wins(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        problems.refuse(["x"], rank=0)
    assert "1. x" in capsys.readouterr().err


def test_under_torchrun_other_ranks_wait_and_then_speak(capsys, monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as stop:
        problems.refuse(["only here"])
    assert stop.value.code == 2
    assert waited == [problems.TORCHRUN_GRACE_S + 0.5]
    assert "1 problem on rank 9, nothing was started" in capsys.readouterr().err


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


def caught(function):
    with pytest.raises((AssertionError, ValueError)) as info:
        function()
    return problems.from_stock(info.value)


def test_stock_error_with_a_text():
    def stock():
        raise ValueError("num_attention_heads (8) must be\n a multiple of 3")

    text = caught(stock)
    assert text.startswith(
        "Megatron refuses these arguments: num_attention_heads (8) must be a multiple of 3 ("
    )
    assert "(test_problems.py, line " in text


def test_stock_error_without_a_text_shows_the_condition():
    def stock():
        save_interval = None
        # No text, as most of stock's assertions; pytest would fill one in for a plain assert.
        if save_interval is None: raise AssertionError  # noqa: E701  # fmt: skip

    assert "it needs `if save_interval is None: raise AssertionError" in caught(stock)


def test_stock_error_that_was_never_raised():
    assert problems.from_stock(RuntimeError()) == "Megatron refuses these arguments: RuntimeError."


def test_modules_import_without_torch_or_megatron():
    modules = "problems config configfile parse_errors rules features tables compositions"
    code = (
        f"import sys; [__import__('megatron_ext.' + m) for m in {modules.split()!r}]; "
        "assert not {'torch', 'megatron', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
