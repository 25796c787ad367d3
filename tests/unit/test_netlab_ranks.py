"""Ranks of netlab and their supervision, without a network: nodes that are nowhere."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from megatron_ext.netlab import RanksFailed, forked, ranks, run_in_lab, supervise
from megatron_ext.netlab.supervise import Outcome, StopSignals


class NoNetwork:
    """What starting ranks needs of a lab."""

    nodes = 2

    def enter(self, node):
        pass

    def new_port(self):
        return 29500

    def environment(self, rank, world, port):
        return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": str(port)}


def run(code, world=2, **options):
    """Start `python -c code` in each rank; the outcome and all lines as (rank, stream, line)."""
    lines = []
    started = ranks.start(NoNetwork(), world, ranks.exec_body([sys.executable, "-c", code]), {"MORE": "x"})
    outcome = supervise.supervise(
        started, lambda rank, stream, line: lines.append((rank.rank, stream, line)), **options
    )
    return outcome, sorted(lines), started


def test_output_comes_line_by_line_with_its_rank_and_stream():
    code = (
        "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['MORE'])\n"
        "sys.stderr.write('no end')"
    )
    outcome, lines, started = run(code, world=4)
    assert outcome == Outcome()
    assert outcome.exit_code == 0
    expected = [[(rank, 1, f"{rank} 4 x"), (rank, 2, "no end")] for rank in range(4)]
    assert lines == [line for of_rank in expected for line in of_rank]
    assert [rank.node for rank in started] == [0, 0, 1, 1]


def test_the_first_rank_that_fails_decides_and_the_others_are_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(supervise, "LINGER", 0.2)
    code = (
        "import os, signal, sys, time\n"
        f"ready = {str(tmp_path / 'ready')!r}\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists(ready): time.sleep(0.01)\n"
        "    sys.exit('it broke')\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(9))\n"
        "open(ready, 'w')\n"
        "time.sleep(1000)"
    )
    outcome, _, found = run(code)
    assert outcome.exit_code == 1
    assert outcome.explain() == "rank 1 on node 1 ended with exit code 1; its last line on stderr: it broke"
    assert found[0].exit_code == 9


def test_others_may_still_speak_after_a_failure(monkeypatch, tmp_path):
    monkeypatch.setattr(supervise, "LINGER", 20.0)
    code = (
        "import os, sys, time\n"
        f"done = {str(tmp_path / 'done')!r}\n"
        "if os.environ['RANK'] == '1': open(done, 'w'); os._exit(7)\n"
        "while not os.path.exists(done): time.sleep(0.01)\n"
        "time.sleep(1); print('the reason'); sys.exit(2)"
    )
    outcome, lines, _ = run(code)
    assert outcome.exit_code == 7
    assert lines == [(0, 1, "the reason")]


def test_a_killed_rank_gives_128_and_its_signal():
    outcome, _, _ = run("import os; os.kill(os.getpid(), 9)", world=2)
    assert outcome.exit_code == 137
    assert "was killed by SIGKILL" in outcome.explain()


def test_the_limit_of_time(monkeypatch):
    monkeypatch.setattr(supervise, "GRACE", 0.3)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on'); time.sleep(100)"
    outcome, _, started = run(deaf, timeout=1.0)
    assert outcome.exit_code == supervise.TIMED_OUT
    assert outcome.explain() == "ranks 0, 1 still ran after 1 s, the limit of --timeout"
    assert {rank.exit_code for rank in started} <= {-signal.SIGKILL, -signal.SIGTERM}


def test_a_signal_ends_all():
    with StopSignals() as stop:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        try:
            outcome, _, started = run("import time; time.sleep(100)", stop=stop)
        finally:
            signal.signal(signal.SIGALRM, previous)
    assert outcome.exit_code == 130
    assert outcome.explain() == "stopped by SIGINT"
    assert [rank.exit_code for rank in started] == [-signal.SIGTERM] * 2


def test_a_program_that_cannot_start(tmp_path):
    file = tmp_path / "empty"
    file.write_text("")
    lines = []
    started = ranks.start(NoNetwork(), 2, ranks.exec_body([str(file)]), {})
    outcome = supervise.supervise(started, lambda rank, stream, line: lines.append(line))
    assert outcome.exit_code == 127
    assert f"netlab: cannot start '{file}': Permission denied." in lines


def test_output_that_cannot_be_passed_on_ends_the_ranks():
    def broken(rank, stream, line):
        raise BrokenPipeError

    code = "import time; print('x', flush=True); time.sleep(100)"
    started = ranks.start(NoNetwork(), 2, ranks.exec_body([sys.executable, "-c", code]), {})
    with pytest.raises(BrokenPipeError):
        supervise.supervise(started, broken)
    assert [rank.exit_code for rank in started] == [-signal.SIGKILL] * 2


def test_ranks_are_shared_out_evenly():
    with pytest.raises(ValueError, match="3 ranks cannot be shared out evenly to 2 nodes"):
        run("", world=3)


def test_forked_ranks_return_values():
    def body():
        print("out")
        return int(os.environ["RANK"]) * 10

    found = run_in_lab(NoNetwork(), 4, body)
    assert [(r.rank, r.node, r.exit_code, r.value, r.error, r.output) for r in found] == [
        (rank, rank // 2, 0, 10 * rank, None, "out") for rank in range(4)
    ]


def test_a_forked_rank_that_raises():
    def body():
        if os.environ["RANK"] == "1":
            raise KeyError("lost")

    with pytest.raises(RanksFailed, match=r"rank 1 on node 1 ended with exit code 1[\s\S]*KeyError: 'lost'"):
        run_in_lab(NoNetwork(), 2, body)
    found = run_in_lab(NoNetwork(), 2, body, check=False)
    assert found[0].error is None
    assert "KeyError: 'lost'" in found[1].error


def test_a_forked_rank_that_hangs_shows_where():
    def body():
        where_it_hangs()

    def where_it_hangs():
        if os.environ["RANK"] == "0":
            time.sleep(100)

    with pytest.raises(RanksFailed, match=r"ranks 0 still ran after 0.5 s[\s\S]*in where_it_hangs"):
        run_in_lab(NoNetwork(), 2, body, timeout=0.5, check=False)


def forked_script(tmp_path: Path, text: str, *args: str):
    script = tmp_path / "script.py"
    script.write_text(text)
    lines = []
    started = ranks.start(NoNetwork(), 2, forked.script_body([str(script), *args]), {})
    outcome = supervise.supervise(started, lambda rank, stream, line: lines.append((rank.rank, line)))
    return outcome, sorted(lines)


def test_a_forked_script_runs_as_python_would_run_it(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    text = (
        "import atexit, beside, os, sys\n"
        "atexit.register(print, 'at exit')\n"
        "print(__name__, beside.NAME, sys.argv[1:])"
    )
    outcome, lines = forked_script(tmp_path, text, "--a", "b")
    assert outcome.exit_code == 0
    said = ["__main__ beside ['--a', 'b']", "at exit"]
    assert lines == [(rank, line) for rank in range(2) for line in said]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys; sys.exit(5)", 5, ""),
        ("import sys; sys.exit('why')", 1, "why"),
        ("raise ValueError('why')", 1, "ValueError: why"),
        ("import sys; sys.exit()", 0, ""),
    ],
)
def test_exit_codes_of_forked_scripts(tmp_path, text, code, said):
    outcome, lines = forked_script(tmp_path, text)
    assert outcome.exit_code == code
    assert not said or (0, said) in lines


def test_a_forked_module():
    lines = []
    started = ranks.start(NoNetwork(), 2, forked.script_body(["-m", "this"]), {})
    outcome = supervise.supervise(started, lambda rank, stream, line: lines.append(line))
    assert outcome.exit_code == 0
    assert lines.count("Beautiful is better than ugly.") == 2
