"""`megatron-ext trace` for planned schedules: every option, and every wrong one."""

import itertools
import json
import re
import subprocess
import sys

import pytest

from megatron_ext.schedules.build import PIPELINES, build
from megatron_ext.schedules.costs import Costs
from megatron_ext.tools.trace import main


@pytest.fixture
def trace(tmp_path, capsys):
    """Run the tool with its output in a folder of the test; returns (exit code, what it printed)."""

    def run(*words: str) -> tuple[int, str]:
        code = main([*words, "--output", str(tmp_path / "out")])
        captured = capsys.readouterr()
        return code, captured.out + re.sub(r"\s+", " ", captured.err)

    return run


def _grid(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"rank +\d", line)]


def _slices(tmp_path) -> dict[str, dict]:
    """Passes of the first rank by name."""
    events = json.loads((tmp_path / "out" / "schedule.json").read_text())["traceEvents"]
    return {e["name"]: e for e in events if e["ph"] == "X" and e["pid"] == 0}


def test_plain_schedule_prints_grid_and_table_and_writes_three_files(trace, tmp_path):
    code, text = trace("-p", "2", "-m", "3")
    assert code == 0
    assert "1F1B without vocabulary parallelism, p = 2, m = 3: makespan 12 F, bubble 25.0 %" in text
    assert _grid(text) == [
        "rank 0  F0--F1--........B0------F2--B1------....B2------",
        "rank 1  ....F0--B0------F1--B1------F2--B2------........",
    ]
    assert re.search(r"^0 +9 +25\.0 % +2$", text, re.MULTILINE)
    assert re.search(r"^1 +9 +25\.0 % +1$", text, re.MULTILINE)
    for name in ("schedule.svg", "schedule.html", "schedule.json"):
        assert str(tmp_path / "out" / name) in text.splitlines()[-1]
        assert "B2" in (tmp_path / "out" / name).read_text()
    assert not (tmp_path / "out" / "costs.json").exists()


@pytest.mark.parametrize("pipeline", [name for name in PIPELINES if name != "1f1b"])
def test_every_pipeline(trace, tmp_path, pipeline):
    code, text = trace("-p", "4", "-m", "8", "--pipeline-schedule", pipeline, "--vocab-parallel", "vocab-2")
    assert code == 0
    schedule = build(4, 8, pipeline=pipeline, vocab="vocab-2")
    for rank in range(4):
        assert re.search(rf"^{rank} +[\d.]+ +[\d.]+ % +{schedule.in_flight(rank)}$", text, re.MULTILINE)
    events = json.loads((tmp_path / "out" / "schedule.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert ("W0" in {event["name"] for event in slices}) == schedule.split
    # Slices of one thread must not overlap: in a V, the two chunks' transfers have threads of their own.
    threads: dict[tuple, list] = {}
    for event in slices:
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans))


def test_chunks_are_only_for_interleaved(trace):
    flag = "--num-virtual-stages-per-pipeline-rank"
    code, text = trace("-p", "4", "-m", "8", "--pipeline-schedule", "interleaved", flag, "3")
    assert code == 0
    code, text = trace("-p", "4", "-m", "8", "--pipeline-schedule", "v-half", flag, "3")
    assert code == 2
    assert "is only for --pipeline-schedule interleaved" in text
    code, text = trace("-p", "4", "-m", "8", "--pipeline-schedule", "zb-h1", "--vocab-parallel", "interlaced")
    assert code == 2
    assert "runs only with --pipeline-schedule 1f1b" in text


@pytest.mark.parametrize("vocab", ["off", "naive", "vocab-1", "vocab-2", "interlaced"])
def test_every_vocabulary_mode_and_says_which_costs_it_assumes(trace, vocab):
    code, text = trace("-p", "4", "-m", "8", "--pipeline-schedule", "1f1b", "--vocab-parallel", vocab)
    assert code == 0
    assert "Times: F = 1, B = 2" in text
    assert ("S = 0." in text) == (vocab != "off")
    assert ("U = 0." in text) == (vocab == "naive")
    assert ("without vocabulary parallelism" in text) == (vocab == "off")


def test_forward_only(trace):
    code, text = trace(
        "-p", "2", "-m", "3", "--vocab-parallel", "vocab-2", "--forward-only", "--width", "200"
    )
    assert code == 0
    assert "forward only" in text
    assert "B0" not in text
    assert "T0" not in text
    assert "S0" in text


def test_costs_are_seconds(trace, tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"forward": [0.010, 0.014], "backward": 0.020, "comm": {"p2p": 0.002}}))
    code, text = trace("-p", "2", "-m", "2", "--costs", str(costs))
    assert code == 0
    assert "Times: as in the --costs file" in text
    # By hand, ms: F0 0-10, F0' 12-26, B0' 26-46, F1' 46-60, B1' 60-80, sent until 82, B1 82-102.
    assert "makespan 102.0 ms" in text
    first = _slices(tmp_path)["B1"]
    assert (first["ts"], first["dur"]) == (82000, 20000)


def test_no_overlap(trace, tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text(Costs(output_s=0.4, output_t=0.2, comm={"C1": 0.5, "C0": 0.5, "p2p": 0.5}).to_json())
    words = ("-p", "4", "-m", "8", "--vocab-parallel", "vocab-2", "--costs", str(costs))
    spans = []
    for more in ((), ("--no-overlap",)):
        code, text = trace(*words, *more)
        assert code == 0
        assert ("without overlap" in text) == bool(more)
        spans.append(float(re.search(r"makespan ([\d.]+) s", text)[1]))
    assert spans[0] < spans[1]


def test_order_list_is_never_longer_than_static(trace, tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text(Costs(forward=2, backward=2.4, output_s=0.4, output_t=0.2).to_json())
    spans = {}
    for order in ("static", "list"):
        code, text = trace(
            "-p", "4", "-m", "8", "--vocab-parallel", "vocab-1", "--costs", str(costs), "--order", order
        )
        assert code == 0
        assert f"Order: {order}." in text
        spans[order] = float(re.search(r"makespan ([\d.]+) s", text)[1])
    assert spans["list"] <= spans["static"]


def test_window_of_times_and_of_microbatches(trace, tmp_path):
    code, text = trace("-p", "2", "-m", "3", "--window", "4:9")
    assert code == 0
    assert _grid(text)[0] == "rank 0  B0------F2--B1------"
    svg = (tmp_path / "out" / "schedule.svg").read_text()
    assert "B1 on rank 0" in svg
    assert "B2 on rank 0" not in svg
    code, text = trace("-p", "2", "-m", "3", "--window", "m0:m0")
    assert code == 0
    assert "B2" not in "".join(_grid(text))


def test_width_and_lists(trace):
    code, text = trace("-p", "2", "-m", "16", "--width", "60", "--lists")
    assert code == 0
    assert max(len(line) for line in _grid(text)) <= 60
    assert "(cut at" in text
    assert re.search(r"^rank 0 +F0 +RB\(0\) +SF\(0\) +F1", text, re.MULTILINE)


def test_large_schedule_is_quick_and_its_files_can_be_opened(trace, tmp_path):
    code, _ = trace("-p", "16", "-m", "128", "--vocab-parallel", "vocab-2")
    assert code == 0
    assert (tmp_path / "out" / "schedule.html").stat().st_size < 3_000_000


def test_table_has_the_schedules_own_peaks(trace):
    code, text = trace("-p", "4", "-m", "8", "--vocab-parallel", "vocab-1")
    assert code == 0
    schedule = build(4, 8, vocab="vocab-1")
    for rank in range(4):
        assert re.search(rf"^{rank} +[\d.]+ +[\d.]+ % +{schedule.in_flight(rank)}$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), ["-p is missing", "-m is missing", "--measured DIR"]),
        (("-p", "0", "-m", "x"), ["-p 0: the number of pipeline stages", "-m x: the number of microbatches"]),
        (
            ("-p", "2", "-m", "2", "--vocab-parallel", "vocab-3"),
            ["--vocab-parallel vocab-3", "naive, vocab-1"],
        ),
        (("-p", "2", "-m", "2", "--pipeline-schedule", "gpipe"), ["--pipeline-schedule gpipe", "1f1b"]),
        (("-p", "2", "-m", "2", "--order", "best"), ["--order best", "static, list"]),
        (("-p", "2", "-m", "2", "--width", "5"), ["--width 5", "40 or more"]),
        (("-p", "2", "-m", "2", "--replica", "1"), ["--replica", "--measured DIR"]),
        (("-p", "2", "-m", "2", "--window", "9"), ["--window 9", "START:END"]),
        (("-p", "2", "-m", "2", "--window", "50:60"), ["--window 50:60", "0 to 9"]),
        (("-p", "2", "-m", "2", "--microbatches", "3"), ["--microbatches", "--help"]),
        (("-p", "2", "-m", "2", "--costs", "nowhere.json"), ["--costs nowhere.json: cannot be read"]),
    ],
)
def test_wrong_arguments(trace, tmp_path, words, says):
    code, text = trace(*words)
    assert code == 2
    for part in says:
        assert part in text
    assert not (tmp_path / "out").exists()


def test_all_problems_at_once(trace):
    code, text = trace("-p", "0", "--vocab-parallel", "on", "--order", "best", "--width", "5", "--nonsense")
    assert code == 2
    for part in ("-p 0", "-m is missing", "--vocab-parallel on", "--order best", "--width 5", "--nonsense"):
        assert part in text
    assert "6 problems" in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "no JSON"),
        ("[1]", "a JSON object with some of the fields"),
        ('{"forwards": 1}', "a JSON object with some of the fields"),
        ('{"forward": [1, 2, 3]}', "3 values, but there are 2 pipeline ranks"),
        ('{"forward": -1}', "finite and not negative"),
        ('{"forward": 0}', "must take time"),
        ('{"comm": {"C9": 1}}', "its kinds are"),
    ],
)
def test_wrong_costs(trace, tmp_path, content, says):
    path = tmp_path / "costs.json"
    path.write_text(content)
    code, text = trace("-p", "2", "-m", "2", "--costs", str(path))
    assert code == 2
    assert f"--costs {path}: " in text
    assert says in text


def test_output_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["-p", "2", "-m", "2", "--output", str(tmp_path / "file" / "below")]) == 2
    assert "Give another folder as --output" in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_output_that_is_left_out_is_a_folder_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["-p", "2", "-m", "2"]) == 0
    assert (tmp_path / "trace" / "schedule.html").exists()
    assert "trace/schedule.html" in capsys.readouterr().out


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    plan = (
        "--pipeline-schedule",
        "--vocab-parallel",
        "-p",
        "-m",
        "--order",
        "--forward-only",
        "--no-overlap",
    )
    for option in (*plan, "--costs", "--window", "--output", "--measured", "--replica"):
        assert option in text


def test_needs_neither_torch_nor_megatron():
    code = (
        "import sys; from megatron_ext.tools import trace; "
        "sys.exit(bool({'torch', 'megatron', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
