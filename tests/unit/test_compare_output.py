"""What compare prints and writes: the table, JSON, CSV, the page, and its command line."""

import csv
import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_ext.tools import compare_svg as svg
from megatron_ext.tools.compare import default_names, main
from megatron_ext.tools.compare_args import parse_arguments
from megatron_ext.tools.compare_text import thinned
from megatron_ext.tools.compare_units import human_bytes, human_loss, human_rate, human_time
from tests.unit.compare_records import LAYOUT, MIB, loss_at, write_run


def pipeline_step(rank, number):
    """Rank 1 owns the loss, is slower, and holds more; both send over pp, and our feature gathers."""
    sent = [
        {"feature": "stock", "kind": "send", "group": "pp", "bytes": 1000 + rank, "calls": 2},
        {"feature": "vocab", "kind": "all_gather", "group": "tp", "bytes": 3 * MIB, "calls": 1},
    ]
    return {
        "loss": loss_at(number) if rank == 1 else None,
        "losses": {"lm loss": loss_at(number)} if rank == 1 else {},
        "step_time_s": (9.0 if number == 1 else 0.2) + 0.05 * rank + 0.001 * number,
        "peak_memory_bytes": (50 + 10 * rank) * MIB + number,
        "skipped": number == 3,
        # What the first step sends includes setting up; warm-up keeps it out of the mean.
        "traffic": [item | {"bytes": 10 * item["bytes"]} for item in sent] if number == 1 else sent,
    }


@pytest.fixture
def pair(tmp_path):
    argv = ["pretrain_gpt.py", "--num-layers", "4", "--pipeline-model-parallel-size=2", "--bf16"]
    a = write_run(tmp_path / "base", steps=range(1, 11))
    b = write_run(
        tmp_path / "pipe",
        steps=range(1, 11),
        world_size=2,
        change=pipeline_step,
        argv=[*argv, "--ext-report", "elsewhere"],
        features=["vocab"],
        device="cuda",
        layout=LAYOUT | {"pp": 2, "vpp": 3},
    )
    return a, b


def cells(out, label):
    """The cells of a row of the printed table."""
    line = next(line for line in out.splitlines() if line.strip().startswith(label))
    return re.split(r" {2,}", line.strip())[1:]


def test_table(pair, tmp_path, capsys):
    assert main([*map(str, pair), "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "2 runs, reference base; compared: step 1-10" in out
    assert "same in all: megatron_ext 0.1.0, megatron_core 0.19.2, torch 2.11.0, python 3.12.1" in out
    assert cells(out, "layout") == ["tp1 pp1 dp1 cp1 (1 rank)", "tp1 pp2 dp1 cp1 vpp3 (2 ranks)"]
    assert cells(out, "features") == ["none", "vocab"]
    assert cells(out, "device") == ["cpu", "cuda"]
    assert cells(out, "steps") == ["10 (1-10)", "10 (1-10)"]
    assert cells(out, "final loss") == ["3.700000 (step 10)", "3.700000 (step 10)"]
    assert cells(out, "largest loss difference") == ["reference", "0 (bit for bit)"]
    # Steps 3-10 of the slower rank: 0.253 .. 0.260 s.
    assert cells(out, "step time, median") == ["500 ms", "256 ms (0.51x)"]
    assert cells(out, "step time, p10 - p90") == ["500 ms - 500 ms", "254 ms - 259 ms"]
    assert cells(out, "tokens/s, median") == ["2,048", "3,992 (1.95x)"]
    assert cells(out, "peak memory, highest rank") == ["100 MiB", "60.0 MiB (0.60x)"]
    assert cells(out, "peak memory, lowest rank") == ["100 MiB", "50.0 MiB (0.50x)"]
    assert cells(out, "sent per step") == ["0 B", "6.00 MiB"]
    assert cells(out, "send over pp") == ["0 B", "1.95 KiB"]
    assert cells(out, "vocab: all_gather over tp") == ["0 B", "6.00 MiB"]
    assert cells(out, "skipped steps") == ["0", "1 (step 3)"]
    assert cells(out, "--pipeline-model-parallel-size") == ["-", "2"]
    assert cells(out, "--bf16") == ["-", "given"]
    assert "--ext-report" not in out
    assert "--num-layers" not in out
    assert cells(out, "10") == ["3.700000", "3.700000", "0"]
    assert out.isascii()
    assert out.rstrip().endswith(f"page: {tmp_path / 'out' / 'compare.html'}")


def test_long_runs_print_a_thinned_loss_table(tmp_path, capsys):
    a, b = (write_run(tmp_path / name, steps=range(1, 201)) for name in "ab")
    assert main([str(a), str(b)]) == 0
    out = capsys.readouterr().out
    table = (
        out[out.index("Loss per step (thinned; all are in compare.csv)") :].split("\n\n")[0].splitlines()[3:]
    )
    steps = [int(line.split()[0]) for line in table]
    assert len(steps) == 20
    assert (steps[0], steps[-1]) == (1, 200)
    rows = (tmp_path / "compare" / "compare.csv").read_text().splitlines()
    assert sum(",loss," in row for row in rows) == 400


def test_json_and_csv_say_the_same(pair, tmp_path):
    main([*map(str, pair), "--output", str(tmp_path / "out"), "--warmup", "1"])
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    with (tmp_path / "out" / "compare.csv").open() as file:
        table = {(row["run"], int(row["step"]), row["metric"]): row["value"] for row in csv.DictReader(file)}
    for run in result["runs"]:
        for metric, values in run["series"].items():
            for step, value in zip(run["steps"], values, strict=True):
                cell = table.get((run["name"], step, metric))
                assert (None if cell is None else float(cell)) == value
    pipe = result["runs"][1]
    for rank, peak in enumerate(pipe["peak_memory_bytes_per_rank"]):
        assert peak == max(int(table["pipe", s, f"peak_memory_bytes/rank-{rank:04d}"]) for s in pipe["steps"])
    for item in pipe["traffic"]:
        metric = f"bytes/{item['feature']}/{item['kind']}/{item['group']}"
        assert item["total_bytes"] == sum(int(table["pipe", s, metric]) for s in pipe["steps"])
        timed = [int(table["pipe", s, metric]) for s in pipe["timed_steps"]]
        assert item["bytes_per_step"] == sum(timed) / len(timed)
    assert pipe["timed_steps"] == list(range(2, 11))
    assert [s for s in pipe["steps"] if table["pipe", s, "skipped"] == "1"] == pipe["skipped_steps"] == [3]


def test_exact_figures_in_json(pair, tmp_path):
    main([*map(str, pair), "--output", str(tmp_path / "out")])
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    base, pipe = result["runs"]
    assert pipe["traffic"][0] == {
        "feature": "stock",
        "kind": "send",
        "group": "pp",
        "bytes_per_step": 2001,
        "calls_per_step": 4,
        "total_bytes": 2001 * 19,
        "total_calls": 40,
    }
    assert pipe["peak_memory_bytes_per_rank"] == [50 * MIB + 10, 60 * MIB + 10]
    assert base["step_time_s"] == {"median": 0.5, "p10": 0.5, "p90": 0.5}
    assert pipe["step_time_s"]["median"] == pytest.approx(0.2565)
    assert base["against_reference"] is None
    assert result["differing_arguments"]["--bf16"] == ["-", "given"]


class Page(HTMLParser):
    """Checks nesting; collects tags, attributes and text."""

    VOID = frozenset({"meta", "br", "path", "rect", "circle"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_page_is_self_contained_and_escaped(pair, tmp_path):
    names = ['<script>alert("x")</script>', "a & b's"]
    code = main([*map(str, pair), "--names", *names, "--output", str(tmp_path / "out")])
    assert code == 0
    text = (tmp_path / "out" / "compare.html").read_text()
    page = Page(text)
    assert not re.search(r"https?://|//[a-z]|url\(|@import", text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "srcset"} & {name for name, _ in page.attributes}
    for name in names:
        assert name not in text
        assert name in unescape(text)
    assert page.tags.count("figure") == 6
    assert "prefers-color-scheme: dark" in text


def test_page_shows_everything(pair, tmp_path):
    main([*map(str, pair), "--output", str(tmp_path / "out")])
    text = (tmp_path / "out" / "compare.html").read_text()
    said = " ".join(Page(text).words)
    for part in (
        "✓ Losses agree bit for bit",
        "tp1 pp2 dp1 cp1 vpp3 (2 ranks)",
        "pipe, step 10: 3.700000",  # hovering over the loss plot
        "base, step 4: 500 ms",
        "pipe, rank 1: 60.0 MiB",
        "pipe, send over pp: 1.95 KiB per step (2,001 bytes in 4 calls)",
        "vocab: all_gather over tp",
        "--pipeline-model-parallel-size",
        "pretrain_gpt.py --num-layers 4 --pipeline-model-parallel-size=2 --bf16",
        "a.b:C.d (wrap, record)",
        "2026-09-21",  # the start time
        "warm-up",
    ):
        assert part in said, part
    assert "▲" in said  # the slow first step does not set the scale


def test_page_of_a_disagreement(tmp_path):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", change=lambda r, n: {"loss": loss_at(n) * 1.1, "grad_norm": None})
    assert main([str(a), str(b)]) == 1
    text = (tmp_path / "compare" / "compare.html").read_text()
    said = " ".join(Page(text).words)
    assert "✕ NOT in agreement with a within tolerance: b" in said
    assert "tolerance 1e-05" in said
    assert "no communication was counted" in said
    assert '<div class="banner bad">' in text


@pytest.mark.parametrize(("everything", "code"), [("nan", 1), (None, 0)])
def test_page_of_runs_with_nothing_to_draw(tmp_path, everything, code):
    changes = {"grad_norm": everything, "step_time_s": None, "peak_memory_bytes": None, "tokens": None}
    for name in "ab":
        write_run(tmp_path / name, steps=[1], change=lambda r, n: changes | {"loss": everything or 1.0})
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == code
    said = " ".join(Page((tmp_path / "compare" / "compare.html").read_text()).words)
    assert "not recorded" in said
    assert "at every step that was compared" in said


def test_too_few_steps_for_rates(tmp_path, capsys):
    a, b = (write_run(tmp_path / name, steps=[1, 2]) for name in "ab")
    assert main([str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "WARNING: a: no step is left after warm-up, so no rates; use a smaller --warmup" in out
    assert cells(out, "tokens/s, median") == ["-", "-"]
    assert main([str(a), str(b), "--warmup", "0"]) == 0
    assert cells(capsys.readouterr().out, "tokens/s, median") == ["2,048", "2,048 (1.00x)"]


def test_hundreds_of_ranks_share_bars(tmp_path):
    a = write_run(tmp_path / "a", steps=[1])
    b = write_run(
        tmp_path / "b", steps=[1], world_size=200, change=lambda r, n: {"peak_memory_bytes": r * MIB}
    )
    assert main([str(a), str(b)]) == 0
    text = (tmp_path / "compare" / "compare.html").read_text()
    assert "b, highest of ranks 195-199: 199 MiB" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "One run is given (a); a comparison needs two or more"),
        (["a", "b", "--names", "x"], "--names has 1 names for 2 runs"),
        (["a", "b", "--names", "x", "x"], "--names has a name twice: x x"),
        (["a", "b", "--output", "a/rank-0000.jsonl"], "Give another folder as --output"),
        (["a", "b", "--output", "a/rank-0000.jsonl/deeper"], "Give another folder as --output"),
        (["a", "missing"], "missing is not a folder"),
    ],
)
def test_bad_command_lines(tmp_path, monkeypatch, capsys, arguments, message):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--loss-rtol", "-1", "invalid tolerance (a number, 0 or more) value: '-1'"),
        ("--grad-norm-rtol", "nan", "invalid tolerance (a number, 0 or more) value: 'nan'"),
        ("--warmup", "1.5", "invalid count (a whole number, 0 or more) value: '1.5'"),
    ],
)
def test_bad_numbers(capsys, flag, value, message):
    with pytest.raises(SystemExit) as caught:
        main(["a", "b", f"{flag}={value}"])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_default_output_is_beside_the_first_run(tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "b")
    monkeypatch.chdir(tmp_path / "runs" / "a")
    assert main([".", "../../b"]) == 0
    assert sorted(path.name for path in (tmp_path / "runs" / "compare").iterdir()) == [
        "compare.csv",
        "compare.html",
        "compare.json",
    ]


def test_default_names():
    def names(*folders):
        return default_names([Path(folder) for folder in folders])

    assert names("/r/a", "/r/b") == ["a", "b"]
    assert names("/r/tp2/record", "/r/pp2/record") == ["tp2", "pp2"]
    assert names("/x/one/a", "/x/two/a", "/x/two/b") == ["one/a", "two/a", "two/b"]
    assert names("/r/a", "/r/a") == ["a", "a (2)"]
    assert names("/r/a/../b", "/r/c/") == ["b", "c"]


def test_needs_neither_torch_nor_megatron(pair, tmp_path):
    code = (
        "import sys; from megatron_ext.tools.compare import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'megatron', 'numpy'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, pair)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_arguments():
    argv = [
        "run.py",
        "--lr",
        "1e-3",
        "--lr=2e-3",
        "--bf16",
        "--data-path",
        "0.5",
        "a",
        "-0.5",
        "b",
        "-x",
        "y",
    ]
    assert parse_arguments(argv) == {
        "script": "run.py",
        "--lr": "2e-3",
        "--bf16": "given",
        "--data-path": "0.5 a -0.5 b",
        "-x": "y",
    }


def test_units():
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536, 5 * MIB, 3 << 30, 2.5)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 KiB",
        "5.00 MiB",
        "3.00 GiB",
        "2.50 B",
    ]
    assert [human_time(s) for s in (2.5, 0.0412, 3e-5, None)] == ["2.50 s", "41.2 ms", "30.0 us", "-"]
    assert [human_rate(r) for r in (9934.2, 0.5, None)] == ["9,934", "0.500", "-"]
    assert [human_loss(v) for v in (10.5, float("nan"), None)] == ["10.50000", "NaN", "-"]


def test_thinning_keeps_the_ends():
    assert thinned([1, 2, 3]) == [1, 2, 3]
    kept = thinned(list(range(1, 1001)))
    assert (len(kept), kept[0], kept[-1]) == (20, 1, 1000)


def test_thinned_lines_keep_spikes():
    points = [(step, 100.0 if step == 777 else 1.0 + step / 1e6) for step in range(5000)]
    kept = svg.thin(points, 200)
    assert len(kept) <= 200
    assert (777, 100.0) in kept
    assert kept == sorted(kept)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (3.4, 9.8, [2, 4, 6, 8, 10]),
        (0.0, 0.41, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
    ],
)
def test_ticks(low, high, expected):
    assert svg.ticks(low, high) == pytest.approx(expected)


def test_step_ticks_are_whole_steps():
    assert svg.ticks(0.5, 3.5, 8, whole=True) == [1, 2, 3]
