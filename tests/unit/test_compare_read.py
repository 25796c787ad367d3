"""Reading records: what is tolerated and noted, and what is an error with a message that helps."""

import json

import pytest

from megatron_ext.tools.compare import main
from megatron_ext.tools.compare_read import RecordError, as_number, read_run, step_range
from tests.unit.compare_records import end, start, step, write_rank, write_run


def refused(folder, *parts):
    with pytest.raises(RecordError) as caught:
        read_run(folder, "run")
    for part in parts:
        assert part in str(caught.value)


def test_a_whole_run(tmp_path):
    run = read_run(write_run(tmp_path / "a", world_size=2), "a")
    assert (run.world_size, run.steps, run.status, run.notes) == (2, [1, 2, 3, 4, 5], "ok", [])


def test_partial_last_line_is_tolerated_and_said(tmp_path):
    write_rank(tmp_path, 0, [start(), step(1), step(2)], tail=json.dumps(step(3))[:40])
    run = read_run(tmp_path, "a")
    assert run.steps == [1, 2]
    assert any("rank-0000.jsonl: the last line is cut short" in note for note in run.notes)
    assert "no end line on rank 0 (killed, or still running)" in run.status


def test_whole_last_line_without_newline_counts(tmp_path):
    write_rank(tmp_path, 0, [start(), step(1)], tail=json.dumps(step(2)))
    assert read_run(tmp_path, "a").steps == [1, 2]


@pytest.mark.parametrize("newline", ["", "\n"])
def test_cut_line_before_a_resumed_start(tmp_path, newline):
    write_rank(tmp_path, 0, [start(), step(1), step(2)], tail=json.dumps(step(3))[:40] + newline)
    write_rank(tmp_path, 0, [start(), step(3), end(3)])
    run = read_run(tmp_path, "a")
    assert (run.steps, run.status) == ([1, 2, 3], "ok")
    assert run.notes == ["rank-0000.jsonl: line 4 is cut short (the job was killed there); left out"]


def test_damage_in_the_middle(tmp_path):
    write_rank(tmp_path, 0, [start(), step(1)], tail='{"event": "st\n')
    write_rank(tmp_path, 0, [step(2), end(2)])
    refused(tmp_path, "rank-0000.jsonl, line 3: not a record line", "this file is damaged")


def test_rank_that_fell_behind(tmp_path):
    write_rank(tmp_path, 0, [start(0, 2), step(1), step(2), step(3)])
    write_rank(tmp_path, 1, [start(1, 2), step(1)])
    run = read_run(tmp_path, "a")
    assert run.steps == [1]
    assert "steps 2-3 are not on rank 1; left out" in run.notes


def test_failed_run_says_so(tmp_path):
    write_rank(tmp_path, 0, [start(), step(1), end(1, status="error", error="CUDA out of memory")])
    run = read_run(tmp_path, "a")
    assert run.status == "error on rank 0: CUDA out of memory"
    assert run.notes == ["did not end normally: error on rank 0: CUDA out of memory"]


def test_ranks_with_different_versions_are_noted(tmp_path):
    write_rank(tmp_path, 0, [start(0, 2), step(1), end(1)])
    write_rank(tmp_path, 1, [start(1, 2, versions={"torch": "2.0"}), step(1), end(1)])
    assert read_run(tmp_path, "a").notes == ["`versions` of rank 1 differs from rank 0's; rank 0's is shown"]


def test_missing_rank_file_is_named(tmp_path):
    for rank in (0, 2):
        write_rank(tmp_path, rank, [start(rank, 4), step(1), end(1)])
    refused(
        tmp_path,
        "lacks rank-0001.jsonl, rank-0003.jsonl: 2 of 4 ranks",
        "--ext-report must name a shared folder",
    )


def test_extra_rank_file(tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path, rank, [start(rank, 1), step(1), end(1)])
    refused(tmp_path, "holds rank 1 but its start lines say world size 1", "its own --ext-report folder")


def test_mixed_world_sizes(tmp_path):
    write_rank(tmp_path, 0, [start(0, 2), step(1), end(1)])
    write_rank(tmp_path, 1, [start(1, 4), step(1), end(1)])
    refused(tmp_path, "different world sizes: 2 (in rank-0000.jsonl), 4 (in rank-0001.jsonl)")


@pytest.mark.parametrize("lines", [[], [step(1), end(1)]])
def test_no_start_line(tmp_path, lines):
    write_rank(tmp_path, 0, lines)
    refused(tmp_path, "rank-0000.jsonl has no start line")


def test_no_step_lines(tmp_path):
    write_rank(tmp_path, 0, [start(), end(0, status="error", error="no such file: data.bin")])
    refused(tmp_path, "has no step line on rank 0", "error on rank 0: no such file: data.bin")


def test_no_step_that_all_ranks_finished(tmp_path):
    write_rank(tmp_path, 0, [start(0, 2), step(1), end(1)])
    write_rank(tmp_path, 1, [start(1, 2), step(2), end(2)])
    refused(tmp_path, "has no step that all 2 ranks finished")


def test_other_schema(tmp_path):
    write_rank(tmp_path, 0, [start(schema=2), step(1)])
    refused(tmp_path, "line 1: the record has schema 2, this tool reads schema 1")


@pytest.mark.parametrize("world_size", [None, "2", 0])
def test_unusable_world_size(tmp_path, world_size):
    write_rank(tmp_path, 0, [start() | {"world_size": world_size}, step(1)])
    refused(tmp_path, f"world_size is {world_size!r}")


def test_renamed_rank_file(tmp_path):
    write_rank(tmp_path, 0, [start(3, 4), step(1)])
    refused(tmp_path, "the start line is of rank 3, the file name says rank 0")


def test_two_files_of_one_rank(tmp_path):
    (write_rank(tmp_path, 0, [start(), step(1)])).with_name("rank-0.jsonl").write_text("")
    refused(tmp_path, "rank-0.jsonl", "rank-0000.jsonl", "are both of rank 0")


def test_step_without_a_number(tmp_path):
    write_rank(tmp_path, 0, [start(), step(1) | {"step": "1"}])
    refused(tmp_path, "line 2: a step line needs a whole number `step`, found '1'")


def test_not_a_folder(tmp_path):
    refused(tmp_path / "nowhere", "is not a folder", "--ext-report")


def test_parent_folder_given_by_mistake(tmp_path):
    write_run(tmp_path / "runs" / "a")
    refused(tmp_path / "runs", "holds no rank-*.jsonl file", f"Did you mean {tmp_path / 'runs' / 'a'}?")


def test_unknown_events_are_passed_over(tmp_path):
    write_rank(tmp_path, 0, [start(), {"event": "checkpoint", "step": 1}, step(1), end(1)])
    assert read_run(tmp_path, "a").steps == [1]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss", "low", "step 2: `loss` is 'low'; expected a number"),
        ("step_time_s", True, "step 2: `step_time_s` is True"),
        ("peak_memory_bytes", [], "step 2: `peak_memory_bytes` is []"),
        (
            "traffic",
            [{"kind": "send"}],
            "step 2: `traffic` has the entry {'kind': 'send'}; each needs feature",
        ),
    ],
)
def test_bad_values_are_located(tmp_path, capsys, field, value, message):
    a = write_run(tmp_path / "a", change=lambda rank, n: {field: value} if n == 2 else {})
    assert main([str(a), str(write_run(tmp_path / "b"))]) == 2
    assert message in capsys.readouterr().err


def test_run_without_any_loss(tmp_path, capsys):
    a = write_run(tmp_path / "a", world_size=2, change=lambda rank, n: {"loss": None, "losses": {}})
    assert main([str(a), str(write_run(tmp_path / "b"))]) == 2
    assert "holds no loss: none of ranks 0, 1 recorded one in 5 steps" in capsys.readouterr().err


def test_numbers():
    assert as_number(None, "x") is None
    assert as_number(3, "x") == 3.0
    assert as_number("-inf", "x") == float("-inf")


def test_step_range():
    assert step_range([1]) == "1"
    assert step_range([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert step_range(list(range(1, 40, 2))) == "1, 3, 5, 7, 9, 11, 13, ..., 39"
