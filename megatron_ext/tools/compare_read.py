"""Read a run's record: the folder of rank-NNNN.jsonl files that `--ext-report DIR` writes.

A record may be imperfect: a killed rank leaves a last line that is cut short and no `end` line, and a
resumed job appends a second `start` to the same files. Both are read, and both are reported as notes.
Anything that would make the comparison wrong (a rank is missing, two runs in one folder) is an error.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
_FILE_NAME = re.compile(r"rank-(\d+)\.jsonl")
# A killed rank's half line has no newline, so a resumed job's `start` may stand on the same line.
_START_INSIDE_LINE = re.compile(rb'\{"event": ?"start"')


class RecordError(ValueError):
    """A record that cannot be compared. The message names the file and says what to do."""


@dataclass
class RankRecord:
    """What one rank wrote.

    `steps` maps a step to its line. `age` maps a step to the number of steps this process had finished
    before it since its (re)start: 0 is the first one, the slowest.
    """

    path: Path
    rank: int
    starts: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    age: dict[int, int] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Run:
    """One run: the records of all its ranks, and the steps (ascending) that every rank finished."""

    name: str
    folder: Path
    start: dict[str, Any]
    ranks: list[RankRecord]
    steps: list[int]
    status: str
    notes: list[str]

    @property
    def world_size(self) -> int:
        return len(self.ranks)


def as_number(value: Any, where: str) -> float | None:
    """A recorded number as a float; None stays None; "nan", "inf" and "-inf" are the non-finite ones."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise RecordError(f'{where} is {value!r}; expected a number, null, "nan", "inf" or "-inf".')


def plain_number(value: float | None) -> float | str | None:
    """The inverse of `as_number`: a value that strict JSON can hold."""
    if value is None or math.isfinite(value):
        return value
    return str(value)


def rank_list(ranks: list[int], most: int = 8) -> str:
    """[0, 1, 5] -> "ranks 0, 1, 5", shortened when there are many."""
    shown = ", ".join(str(rank) for rank in ranks[:most])
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def step_range(steps: list[int]) -> str:
    """[3, 4, 5, 9] -> "3-5, 9" (ascending input)."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    shown = [str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in parts]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:7], "...", shown[-1]])


def _parse(raw: bytes) -> Any:
    """The JSON value of a line, or None when the line is not JSON (no valid line is `null`)."""
    try:
        return json.loads(raw)
    except ValueError:
        return None


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, line) of each whole line. Lines cut short by a kill are skipped and noted."""
    cut_at = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            line = _parse(raw)
            if line is None and not cut_at:
                cut_at = number
                inside = _START_INSIDE_LINE.search(raw, 1)
                line = _parse(raw[inside.start() :]) if inside else None
                if line is None:
                    continue
            if not isinstance(line, dict) or "event" not in line or (cut_at and line["event"] != "start"):
                raise RecordError(
                    f"{path}, line {cut_at or number}: not a record line. Only the last line before the end "
                    "of a process may be cut short; this file is damaged. Run the job again, or remove it."
                )
            if cut_at:
                notes.append(f"{path.name}: line {cut_at} is cut short (the job was killed there); left out")
                cut_at = 0
            yield number, line
    if cut_at:
        notes.append(
            f"{path.name}: the last line is cut short (the rank was killed, or still runs); left out"
        )


def read_rank(path: Path, rank: int) -> RankRecord:
    """Read one rank's file. Raises RecordError when it is damaged or holds no start line."""
    record = RankRecord(path, rank)
    age = 0
    for number, line in _lines(path, record.notes):
        where = f"{path}, line {number}"
        if line["event"] == "start":
            _check_start(line, rank, where)
            record.starts.append(line)
            record.end = None
            age = 0
        elif not record.starts:
            break
        elif line["event"] == "step":
            step = line.get("step")
            if not isinstance(step, int) or isinstance(step, bool):
                raise RecordError(f"{where}: a step line needs a whole number `step`, found {step!r}.")
            if age == 0:
                _roll_back(record, step)
            record.steps[step] = line
            record.age[step] = age
            age += 1
        elif line["event"] == "end":
            record.end = line
        # Other events are later versions' additions, and say nothing that is compared here.
    if not record.starts:
        raise RecordError(
            f"{path} has no start line before its first event, so its layout is unknown. Give a folder "
            "written by --ext-report, unedited."
        )
    return record


def _check_start(line: dict[str, Any], rank: int, where: str) -> None:
    if line.get("schema") != SCHEMA:
        raise RecordError(
            f"{where}: the record has schema {line.get('schema')!r}, this tool reads schema {SCHEMA}. "
            "Compare with the megatron_ext version that wrote the record."
        )
    world_size = line.get("world_size")
    if not isinstance(world_size, int) or world_size < 1:
        raise RecordError(f"{where}: the start line's world_size is {world_size!r}, not a rank count.")
    if line.get("rank") != rank:
        raise RecordError(
            f"{where}: the start line is of rank {line.get('rank')!r}, the file name says rank {rank}. "
            "Files of a record must keep their names."
        )


def _roll_back(record: RankRecord, step: int) -> None:
    """A (re)start that continues at `step` abandons what an earlier attempt did from there on."""
    abandoned = sorted(old for old in record.steps if old >= step)
    for old in abandoned:
        del record.steps[old], record.age[old]
    if abandoned:
        record.notes.append(
            f"{record.path.name}: resumed at step {step}; the earlier attempt's steps "
            f"{step_range(abandoned)} are superseded"
        )


def _rank_files(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        raise RecordError(f"{folder} is not a folder. Give the folder that the run got as --ext-report.")
    files: dict[int, Path] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        match = _FILE_NAME.fullmatch(path.name)
        if match is None:
            continue
        if (rank := int(match[1])) in files:
            raise RecordError(f"{files[rank]} and {path} are both of rank {rank}. Keep one of them.")
        files[rank] = path
    if not files:
        inner = sorted({str(path.parent) for path in folder.glob("*/rank-*.jsonl")})
        hint = f" Did you mean {' or '.join(inner[:4])}?" if inner else ""
        raise RecordError(
            f"{folder} holds no rank-*.jsonl file. Give the folder that the run got as --ext-report.{hint}"
        )
    return files


def _check_world(folder: Path, ranks: list[RankRecord]) -> None:
    first_seen: dict[int, str] = {}
    for record in ranks:
        for line in record.starts:
            first_seen.setdefault(line["world_size"], record.path.name)
    if len(first_seen) > 1:
        sizes = ", ".join(f"{size} (in {name})" for size, name in sorted(first_seen.items()))
        raise RecordError(
            f"{folder} mixes runs of different world sizes: {sizes}. Give each run its own --ext-report "
            "folder."
        )
    (world_size,) = first_seen
    found = {record.rank for record in ranks}
    if extra := sorted(found - set(range(world_size))):
        raise RecordError(
            f"{folder} holds {rank_list(extra)} but its start lines say world size {world_size}: files of "
            "another run are in the folder. Give each run its own --ext-report folder."
        )
    if missing := [rank for rank in range(world_size) if rank not in found]:
        names = ", ".join(f"rank-{rank:04d}.jsonl" for rank in missing[:8])
        raise RecordError(
            f"{folder} lacks {names}{' and more' if len(missing) > 8 else ''}: {len(missing)} of "
            f"{world_size} ranks wrote no record here. On several nodes --ext-report must name a shared "
            "folder; otherwise copy the missing files into it."
        )


def _status(ranks: list[RankRecord]) -> str:
    """How the run ended, in words: "ok" only if every rank said so."""
    failed = [record for record in ranks if record.end and record.end.get("status") != "ok"]
    silent = [record.rank for record in ranks if record.end is None]
    parts = []
    if failed:
        why = failed[0].end.get("error") or "no reason recorded"
        parts.append(f"error on {rank_list([record.rank for record in failed])}: {why}")
    if silent:
        parts.append(f"no end line on {rank_list(silent)} (killed, or still running)")
    return "; ".join(parts) or "ok"


def _finished_steps(folder: Path, ranks: list[RankRecord], status: str, notes: list[str]) -> list[int]:
    """Steps that every rank finished. The others lack a step time and a byte total, and are left out."""
    empty = [record.rank for record in ranks if not record.steps]
    if empty:
        raise RecordError(
            f"{folder} has no step line on {rank_list(empty)}: the run ended before its first step was "
            f"recorded (status: {status}). Nothing can be compared; see the run's own log."
        )
    every = set.union(*(set(record.steps) for record in ranks))
    common = set.intersection(*(set(record.steps) for record in ranks))
    if not common:
        raise RecordError(
            f"{folder} has no step that all {len(ranks)} ranks finished (status: {status}). Nothing can be "
            "compared; see the run's own log."
        )
    if partial := sorted(every - common):
        behind = [record.rank for record in ranks if any(step not in record.steps for step in partial)]
        notes.append(f"steps {step_range(partial)} are not on {rank_list(behind)}; left out")
    return sorted(common)


def read_run(folder: Path, name: str) -> Run:
    """Read all ranks of a run. Raises RecordError for anything that would make a comparison wrong."""
    ranks = [read_rank(path, rank) for rank, path in sorted(_rank_files(folder).items())]
    _check_world(folder, ranks)
    status = _status(ranks)
    notes = [note for record in ranks for note in record.notes]
    steps = _finished_steps(folder, ranks, status, notes)
    start = ranks[0].starts[-1]
    for key in ("layout", "versions", "features"):
        differing = [r.rank for r in ranks if r.starts[-1].get(key) != start.get(key)]
        if differing:
            notes.append(f"`{key}` of {rank_list(differing)} differs from rank 0's; rank 0's is shown")
    if status != "ok":
        notes.append(f"did not end normally: {status}")
    return Run(name, folder, start, ranks, steps, status, notes)
