"""`megatron-ext trace --measured DIR`: planned above measured, mean costs, and folders that are refused."""

import json
import re

import pytest

from megatron_ext.schedules.build import build, build_listed
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lower import lower
from megatron_ext.schedules.simulate import simulate
from megatron_ext.tools.trace import main
from megatron_ext.tools.trace_read import measured_costs, read_measured
from tests.unit.trace_records import COSTS, read_lines, write_lines, write_trace


@pytest.fixture
def folder(tmp_path):
    return write_trace(tmp_path / "run")


def _main(capsys, folder, *words: str) -> tuple[int, str]:
    code = main(["--measured", str(folder), *words])
    captured = capsys.readouterr()
    return code, captured.out + re.sub(r"\s+", " ", captured.err)


def _makespan_ms(costs: Costs = COSTS, **options) -> float:
    program = lower(build(2, 4, vocab=options.pop("vocab", "vocab-2")), **options)
    return 1e3 * simulate(program, costs).makespan


def test_planned_and_measured_agree_where_the_run_is_a_simulation(folder, capsys):
    code, text = _main(capsys, folder)
    assert code == 0
    expected = f"{_makespan_ms():.1f} ms"
    assert f"makespan planned {expected}, measured {expected}" in text
    assert re.search(r"^measured / planned +1\.000", text, re.MULTILINE)
    assert "Measured: step 3." in text
    schedule = build(2, 4, vocab="vocab-2")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if re.match(r"[01] ", line)}
    for rank in range(2):
        assert rows[str(rank)][-2:] == [str(schedule.in_flight(rank))] * 2
    for name in ("schedule.svg", "schedule.html", "schedule.json", "costs.json"):
        assert (folder / name).stat().st_size > 0


def test_written_costs_are_those_of_the_run_and_can_be_given_again(folder, tmp_path, capsys):
    assert _main(capsys, folder)[0] == 0
    costs = Costs.read(folder / "costs.json")
    assert costs.forward == pytest.approx((0.010, 0.012), rel=1e-3)
    assert costs.backward == pytest.approx((0.020, 0.020), rel=1e-3)
    assert costs.output_s == pytest.approx((0.004, 0.004), rel=1e-3)
    assert costs.loss == pytest.approx((0.0, 0.001), rel=1e-3)
    assert dict(costs.comm) == pytest.approx(dict(COSTS.comm), rel=1e-3)
    words = ["-p", "2", "-m", "4", "--vocab-parallel", "vocab-2", "--costs", str(folder / "costs.json")]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    assert f"makespan {_makespan_ms():.1f} ms" in capsys.readouterr().out


def test_waiting_for_the_last_rank_is_not_the_cost_of_a_collective(tmp_path):
    early = write_trace(tmp_path / "run", early=0.005)
    spans = read_measured(early).panel.timeline.spans
    lengths = [sum(s.end - s.start for s in spans if s.lane == "comm" and s.rank == r) for r in range(2)]
    assert lengths[0] > lengths[1] + 0.01  # rank 0 waits for rank 1
    costs = measured_costs(read_measured(early).panel.timeline)
    assert dict(costs.comm) == pytest.approx(dict(COSTS.comm), rel=1e-3)


def test_other_costs_change_the_plan_only(folder, tmp_path, capsys):
    costs = tmp_path / "costs.json"
    costs.write_text(Costs(forward=0.02, backward=0.04).to_json())
    code, text = _main(capsys, folder, "--costs", str(costs), "--output", str(tmp_path / "out"))
    assert code == 0
    plan = _makespan_ms(Costs(forward=0.02, backward=0.04))
    assert f"planned {plan:.1f} ms, measured {_makespan_ms():.1f} ms" in text
    assert "simulated with the --costs file" in text
    assert (tmp_path / "out" / "schedule.html").exists()
    assert Costs.read(tmp_path / "out" / "costs.json").forward == pytest.approx((0.010, 0.012), rel=1e-3)
    assert not (folder / "schedule.html").exists()


@pytest.mark.parametrize("vocab", ["off", "naive", "vocab-1", "vocab-2", "interlaced"])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_mode_is_read(tmp_path, capsys, vocab, overlap):
    costs = Costs(**{**COSTS.__dict__, "output_u": 0.001, "comm": {**COSTS.comm, "C2": 0.003, "C3": 0.002}})
    folder = write_trace(tmp_path / "run", vocab=vocab, overlap=overlap, costs=costs)
    code, text = _main(capsys, folder)
    assert code == 0
    assert re.search(r"^measured / planned +1\.000", text, re.MULTILINE)
    assert ("without overlap" in text) == (not overlap)
    assert ("exposed" in text) == (vocab != "off")


def test_communication_is_moving_hidden_or_exposed(tmp_path, capsys):
    folder = write_trace(tmp_path / "run", early=0.005)
    code, text = _main(capsys, folder)
    assert code == 0
    rows = {line.split()[0]: line for line in text.splitlines() if re.match(r"(e|C0|C1|G|g|all) ", line)}
    assert set(rows) >= {"e", "C0", "C1", "G", "g", "all"}
    # Four collectives of each kind; those that cost 2 ms move 8 ms on each rank.
    assert rows["e"].split()[1:3] == ["8.000", "8.000"]
    assert rows["C1"].split()[1:3] == ["12.00", "12.00"]
    assert float(rows["C1"].split()[-1]) > 0  # early


def test_a_listed_order_is_recognized(tmp_path, capsys):
    costs = Costs(forward=0.02, backward=0.021, output_s=0.008, output_t=0.004)
    schedule = build_listed(4, 8, vocab="vocab-1", costs=costs)
    static = build(4, 8, vocab="vocab-1")
    assert schedule.ranks != static.ranks  # else this tests nothing
    folder = write_trace(tmp_path / "run", 4, 8, vocab="vocab-1", costs=costs, schedule=schedule)
    code, text = _main(capsys, folder)
    assert code == 0
    assert "did not have the static order" in text
    assert re.search(r"^measured / planned +1\.000", text, re.MULTILINE)


def test_of_several_ranks_of_a_stage_the_first_is_shown_or_the_one_that_is_asked_for(tmp_path, capsys):
    folder = write_trace(tmp_path / "run", replicas=2)
    slow = read_lines(folder, 1)
    for line in slow[1:]:
        line["end"] += 0.0004 if line["action"].startswith("F") else 0.0
    write_lines(folder, 1, slow)
    code, text = _main(capsys, folder)
    assert code == 0
    assert "Each stage has 2 ranks" in text
    assert Costs.read(folder / "costs.json").forward[0] == pytest.approx(0.010, rel=1e-3)
    assert _main(capsys, folder, "--replica", "1")[0] == 0
    assert Costs.read(folder / "costs.json").forward[0] == pytest.approx(0.0104, rel=1e-3)
    code, text = _main(capsys, folder, "--replica", "2")
    assert code == 2
    assert "Give 0 to 1" in text


def test_clocks_that_differ_are_mentioned_and_do_not_change_the_costs(tmp_path, capsys):
    folder = write_trace(tmp_path / "run", early=0.005)
    late = read_lines(folder, 0)
    for line in late[1:]:
        line["start"] += 0.5
        line["end"] += 0.5
    write_lines(folder, 0, late)
    code, text = _main(capsys, folder)
    assert code == 0
    assert "Clocks of the ranks differ by 499 ms or more" in re.sub(r"\s+", " ", text)
    assert dict(Costs.read(folder / "costs.json").comm) == pytest.approx(dict(COSTS.comm), rel=1e-3)


def test_window_of_a_measured_step(folder, capsys):
    code, text = _main(capsys, folder, "--window", "30:60")
    assert code == 0
    grids = [line for line in text.splitlines() if re.match(r"rank \d  ", line)]
    assert len(grids) == 4
    assert "F0" not in "".join(grids)
    assert "B0" in grids[3]


def test_chrome_trace_has_both(folder, capsys):
    assert _main(capsys, folder)[0] == 0
    events = json.loads((folder / "schedule.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"rank {rank}, {kind}" for rank in range(2) for kind in ("planned", "measured")}


def _no_folder(folder):
    return folder / "nowhere"


def _empty(folder):
    for path in folder.iterdir():
        path.unlink()


def _missing_stage(folder):
    (folder / "trace-rank-0001.jsonl").unlink()


def _missing_first(folder):
    (folder / "trace-rank-0000.jsonl").unlink()


def _empty_file(folder):
    (folder / "trace-rank-0001.jsonl").write_text("")


def _broken_line(folder):
    path = folder / "trace-rank-0001.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], lines[4][:20], *lines[5:]]) + "\n")


def _broken_last_line(folder):
    path = folder / "trace-rank-0001.jsonl"
    path.write_text(path.read_text()[:-15])


def _edit(change):
    def damage(folder):
        lines = read_lines(folder, 1)
        lines = change(lines) or lines
        write_lines(folder, 1, lines)

    return damage


def _head(**values):
    return _edit(lambda lines: lines[0].update(values))


def _line(**values):
    return _edit(lambda lines: lines[2].update(values))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_no_folder, "there is no such folder"),
        (_empty, "holds no trace-rank-*.jsonl"),
        (_missing_stage, "2 pipeline stages, and there are no files of stage 1, or too few"),
        (_missing_first, "there are no files of stage 0, or too few, and there are none of rank 0"),
        (_empty_file, "trace-rank-0001.jsonl is empty"),
        (_broken_line, "line 5 is no JSON object"),
        (_broken_last_line, "(the last: the rank was stopped while it wrote) is no JSON object"),
        (_head(event="step"), "of event 'step'"),
        (_head(schema=2), "schema 2; expected 'trace', schema 1"),
        (_head(p=0), "p 0, which is no value for it"),
        (_head(vocab="vocab-9", overlap="yes"), "vocab 'vocab-9', overlap 'yes'"),
        (_head(rank=0), "its first line is of rank 0, not of rank 1"),
        (_head(step=4), "step is 3 on rank 0; 4 on rank 1"),
        (_head(m=5), "m is 4 on rank 0; 5 on rank 1"),
        (_head(vocab="vocab-1"), "vocab is vocab-2 on rank 0; vocab-1 on rank 1"),
        (_head(overlap=False), "overlap is True on rank 0; False on rank 1"),
        (_head(stage=0), "2 pipeline stages, and there are no files of stage 1, or too few"),
        (_head(stage=5), "there are files of stage 5"),
        (_line(action="X3"), "line 3 is no span"),
        (_line(action=None), "line 3 is no span"),
        (_line(lane="gpu"), "line 3 is no span"),
        (_line(end=0), "line 3 is no span"),
        (_line(start="soon"), "line 3 is no span"),
        (_line(start=float("nan")), "line 3 is no span"),
        (
            _edit(lambda lines: [line for line in lines if line.get("action") != "B2"]),
            "lacks 1 of the step's actions: B2",
        ),
        (_edit(lambda lines: lines.append(lines[-1])), "has too many of 1 of the step's actions"),
        (_edit(lambda lines: lines[:1]), "trace-rank-0001.jsonl: lacks"),
    ],
)
def test_folders_that_are_refused(folder, capsys, damage, says):
    shown = damage(folder) or folder
    code, text = _main(capsys, shown)
    assert code == 2
    assert says in text
    assert not (folder / "schedule.html").exists()


def test_all_broken_files_are_named(folder, capsys):
    (folder / "trace-rank-0000.jsonl").write_text("")
    _broken_line(folder)
    code, text = _main(capsys, folder)
    assert code == 2
    assert "trace-rank-0000.jsonl is empty" in text
    assert "trace-rank-0001.jsonl: line 5" in text


def test_flags_of_a_planned_schedule_are_refused(folder, capsys):
    words = (
        "-p",
        "2",
        "-m",
        "3",
        "--vocab-parallel",
        "off",
        "--order",
        "list",
        "--forward-only",
        "--no-overlap",
    )
    code, text = _main(capsys, folder, *words, "--pipeline-schedule", "1f1b")
    assert code == 2
    for word in words:
        assert word in text or not word.startswith("-")
    assert "the record says which schedule the run had" in text


def test_costs_of_other_stages_are_refused(folder, tmp_path, capsys):
    costs = tmp_path / "costs.json"
    costs.write_text(Costs(forward=(1.0, 1.0, 1.0)).to_json())
    code, text = _main(capsys, folder, "--costs", str(costs))
    assert code == 2
    assert "forward has 3 values, but there are 2 pipeline ranks" in text
