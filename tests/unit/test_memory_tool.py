"""`megatron-ext memory`: tables, files, and what it says about records that it cannot show."""

import csv
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_ext.tools.memory import main
from megatron_ext.tools.memory_svg import MOST_BARS
from megatron_ext.tools.memory_text import MOST_ROWS
from tests.unit.compare_records import MIB, write_run

PLANNED = {"weights": 300 * MIB, "vocabulary": 30 * MIB}


def measured(rank: int, scale: int = MIB) -> dict:
    """Rank r holds 100 (r + 1) weights, 50 activations at the peak, 60 at most, and no vocabulary."""
    parts = {"weights": 100 * (rank + 1) * scale, "activations": 50 * scale, "vocabulary": 0}
    highest = parts | {"activations": 60 * scale}
    return {**parts, "peak": sum(parts.values()), "category_peaks": highest}


def run(folder: Path, ranks: int = 2, steps: tuple[int, ...] = (2,), scale: int = MIB, **start) -> Path:
    """A run whose `steps` were measured."""

    def change(rank, number):
        return {"memory": measured(rank, scale)} if number in steps else {}

    return write_run(folder / "record", range(1, 4), ranks, change, **start)


def show(capsys, *argv) -> str:
    assert main([str(word) for word in argv]) == 0
    return capsys.readouterr().out


def refused(capsys, *argv) -> str:
    assert main([str(word) for word in argv]) == 2
    return capsys.readouterr().err


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """The rows of a table by their first cell."""
    lines = text[text.index(heading) :].splitlines()[1:]
    lines = lines[: lines.index("")] if "" in lines else lines
    return {line.split()[0]: line.split()[1:] for line in lines if line[0] != "-"}


def test_tables(tmp_path, capsys):
    out = show(capsys, run(tmp_path / "stock"))
    assert out.startswith("stock/record: memory of step 2, in MiB, 2 ranks\n")
    at_peak = rows(out, "At each rank's highest total")
    assert at_peak == {
        "rank": ["weights", "activations", "vocabulary", "total"],
        "0": ["100.00", "50.00", "0.00", "150.00"],
        "1": ["200.00", "50.00", "0.00", "250.00"],
        "max": ["200.00", "50.00", "0.00", "250.00"],
        "min": ["100.00", "50.00", "0.00", "150.00"],
        "max/min": ["2.00", "1.00", "-", "1.67"],
    }
    highest = rows(out, "Each category's own highest value")
    assert highest["rank"] == ["weights", "activations", "vocabulary"]
    assert highest["1"] == ["200.00", "60.00", "0.00"]
    assert "Planned" not in out
    assert f"page: {tmp_path}/stock/memory/memory.html" in out


def test_planned_stands_beside_measured(tmp_path, capsys):
    folder = run(tmp_path / "vocab", planned_memory=PLANNED)
    assert "Planned" not in show(capsys, folder)
    planned = rows(show(capsys, folder, "--planned"), "Planned:")
    assert planned["rank"] == ["weights", "activations", "vocabulary", "total", "planned/measured"]
    assert planned["0"] == ["300.00", "0.00", "30.00", "330.00", "2.20"]
    assert planned["1"][-1] == "1.32"
    page = (tmp_path / "vocab" / "memory" / "memory.html").read_text()
    assert "<h3>Planned</h3>" in page
    assert "rank 1, vocabulary, planned: 30.0 MiB of 330 MiB" in page
    assert "rank 1, weights, measured: 200 MiB of 250 MiB" in page


def bars(text: str, kind: str) -> list[tuple[float, float]]:
    """(top, bottom) of the bars of a kind, in drawing order."""
    found = re.findall(rf'<rect class="{kind} s\d" [^>]*?y="([\d.]+)"[^>]*?height="([\d.]+)"', text)
    return [(float(y), float(y) + float(height)) for y, height in found]


def test_bars_are_stacked_to_scale(tmp_path, capsys):
    folder = run(tmp_path / "vocab", planned_memory=PLANNED)
    show(capsys, folder, "--output", tmp_path / "out")
    text = (tmp_path / "out" / "memory.html").read_text()
    weights, activations, more_weights, _ = bars(text, "bar")
    assert activations[1] == pytest.approx(weights[0], abs=0.02)  # one stands on the other

    def height(bar):
        return bar[1] - bar[0]

    assert height(more_weights) == pytest.approx(2 * height(weights), abs=0.02)
    assert height(activations) == pytest.approx(0.5 * height(weights), abs=0.02)
    assert height(bars(text, "bar planned")[0]) == pytest.approx(3 * height(weights), abs=0.02)


def test_several_runs_have_one_scale_and_one_order_of_categories(tmp_path, capsys):
    a = run(tmp_path / "stock")
    b = run(tmp_path / "vocab", scale=2 * MIB, planned_memory={"lanes": MIB, **PLANNED})
    out = show(capsys, a, b, "--output", tmp_path / "out")
    first, second = out[: out.index("vocab: ")], out[out.index("vocab: ") :]
    names = ["weights", "activations", "vocabulary", "lanes"]
    assert rows(first, "At each")["rank"] == rows(second, "At each")["rank"] == [*names, "total"]
    text = (tmp_path / "out" / "memory.html").read_text()
    heights = [bottom - top for top, bottom in bars(text, "bar")]
    assert heights[4] == pytest.approx(2 * heights[0], abs=0.02)


def test_files(tmp_path, capsys):
    folder = run(tmp_path / "vocab & more", planned_memory=PLANNED)
    show(capsys, folder, "--output", tmp_path / "out")
    lines = list(csv.DictReader((tmp_path / "out" / "memory.csv").open()))
    assert len(lines) == 2 * 4
    assert lines[1] == {
        "run": "vocab & more/record",
        "step": "2",
        "rank": "0",
        "category": "activations",
        "at_peak": str(50 * MIB),
        "highest": str(60 * MIB),
        "planned": "0",
    }
    assert (lines[-1]["category"], lines[-1]["at_peak"]) == ("total", str(250 * MIB))
    picture = ElementTree.parse(tmp_path / "out" / "memory.svg").getroot()
    assert picture.tag.endswith("svg")
    words = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "vocab & more/record, step 2 (pale: planned)" in words
    page = (tmp_path / "out" / "memory.html").read_text()
    assert "vocab &amp; more" in page
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", page)  # nothing from anywhere else


def test_which_step(tmp_path, capsys):
    folder = run(tmp_path / "run", steps=(1, 3))
    assert "memory of step 3" in show(capsys, folder)
    assert "memory of step 1" in show(capsys, folder, "--step", "1")
    assert "no measured memory of step 2, only of step 1, 3" in refused(capsys, folder, "--step", "2")


def test_many_ranks(tmp_path, capsys):
    count = 2 * MOST_BARS
    out = show(capsys, run(tmp_path / "run", ranks=count))
    assert set(rows(out, "At each")) == {"rank", "max", "min", "max/min"}
    assert f"{count} ranks are too many to list" in out
    assert count > MOST_ROWS
    text = (tmp_path / "run" / "memory" / "memory.html").read_text()
    assert len(bars(text, "bar")) == 2 * MOST_BARS  # weights and activations
    assert "rank 1 (highest of ranks 0-1), weights" in text
    lines = (tmp_path / "run" / "memory" / "memory.csv").read_text().splitlines()
    assert len(lines) == 1 + 4 * count


def test_skipped_step_is_noted(tmp_path, capsys):
    folder = write_run(
        tmp_path / "record", range(1, 4), 1, lambda rank, n: {"memory": measured(rank), "skipped": True}
    )
    assert "step 3 was skipped (loss scaling)" in show(capsys, folder)


def test_nothing_was_measured(tmp_path, capsys):
    text = refused(capsys, write_run(tmp_path / "record"))
    assert "holds no measured memory. Run with --ext-memory to measure a step." in text


def test_planned_is_asked_for_and_not_there(tmp_path, capsys):
    text = refused(capsys, run(tmp_path / "run"), "--planned")
    assert "recorded no planned memory. Leave --planned off." in text


def test_one_rank_was_not_measured(tmp_path, capsys):
    def change(rank, number):
        return {"memory": measured(rank)} if (rank, number) == (0, 2) else {}

    text = refused(capsys, write_run(tmp_path / "record", range(1, 4), 2, change))
    assert "memory of step 2 was measured, but not on rank 1." in text


def test_one_rank_has_no_plan(tmp_path, capsys):
    folder = run(tmp_path / "run", planned_memory=PLANNED)
    path = folder / "rank-0001.jsonl"
    path.write_text(path.read_text().replace('"planned_memory"', '"something"'))
    assert "rank 1 recorded no planned memory, the other ranks did" in refused(capsys, folder)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ([1], "`memory` is [1]; expected categories"),
        ({"weights": 1}, "expected categories, `peak` and `category_peaks`"),
        (measured(0) | {"weights": "much"}, "expected a whole number of bytes for each category"),
        (measured(0) | {"weights": -1}, "expected a whole number of bytes for each category"),
        (measured(0) | {"category_peaks": 3}, "`category_peaks` is 3; expected a whole number"),
    ],
)
def test_damaged_record(tmp_path, capsys, memory, message):
    folder = write_run(tmp_path / "record", range(1, 4), 1, lambda rank, number: {"memory": memory})
    text = refused(capsys, folder)
    assert message in text
    assert "rank-0000.jsonl, step 3" in text


def test_folders_that_cannot_be_read_or_written(tmp_path, capsys):
    assert "is not a folder" in refused(capsys, tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    text = refused(capsys, run(tmp_path / "run"), "--output", tmp_path / "file")
    assert "Give another folder as --output." in text


def test_needs_no_torch():
    code = "import sys; import megatron_ext.tools.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
