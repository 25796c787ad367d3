"""The measured memory in a run's record: what each rank held, by category, and what was planned."""

from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.tools.compare_read import RankRecord, RecordError, Run, rank_list, step_range

MEASURE = "Run with --ext-memory to measure a step."


@dataclass(frozen=True)
class RankMemory:
    """One rank, in bytes by category.

    `at_peak`: at the moment of the highest total, which is `peak`. `highest`: each category's own highest
    value, whenever that was. `planned`: what a memory model said before the run, if one did.
    """

    rank: int
    at_peak: dict[str, int]
    peak: int
    highest: dict[str, int]
    planned: dict[str, int] | None


@dataclass(frozen=True)
class RunMemory:
    """The measured step of a run; `categories` in the order of the record, planned ones last."""

    run: Run
    step: int
    ranks: list[RankMemory]
    categories: list[str]

    @property
    def planned(self) -> bool:
        return all(of.planned is not None for of in self.ranks)


def _bytes_by_name(value: Any, where: str) -> dict[str, int]:
    sizes = value.values() if isinstance(value, dict) else [None]
    if all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
        return dict(value)
    raise RecordError(f"{where} is {value!r}; expected a whole number of bytes for each category.")


def _rank_memory(record: RankRecord, step: int) -> RankMemory:
    where = f"{record.path}, step {step}: `memory`"
    measured = record.steps[step]["memory"]
    if not isinstance(measured, dict) or not {"peak", "category_peaks"} <= measured.keys():
        raise RecordError(f"{where} is {measured!r}; expected categories, `peak` and `category_peaks`.")
    measured = dict(measured)
    highest = _bytes_by_name(measured.pop("category_peaks"), f"{where}, `category_peaks`")
    sizes = _bytes_by_name(measured, where)
    peak = sizes.pop("peak")
    planned = record.starts[-1].get("planned_memory")
    if planned is not None:
        planned = _bytes_by_name(planned, f"{record.path}: `planned_memory`")
    return RankMemory(record.rank, sizes, peak, highest, planned)


def _measured_step(run: Run, step: int | None) -> int:
    """The step to show: `step`, or the last that every rank measured."""
    by_rank = [{number for number, line in r.steps.items() if line.get("memory")} for r in run.ranks]
    every, common = set.union(*by_rank), set.intersection(*by_rank)
    if not every:
        raise RecordError(f"{run.folder} holds no measured memory. {MEASURE}")
    if step is not None and step not in every:
        raise RecordError(f"{run.folder} has no measured memory of step {step}, only of {_steps(every)}.")
    if common and (step is None or step in common):
        return max(common) if step is None else step
    wanted = max(every) if step is None else step
    without = [r.rank for r, steps in zip(run.ranks, by_rank, strict=True) if wanted not in steps]
    raise RecordError(
        f"{run.folder}: memory of step {wanted} was measured, but not on {rank_list(without)}. All ranks "
        "must have the same --ext-memory flags, and finish the step."
    )


def _steps(steps: set[int]) -> str:
    return f"step {step_range(sorted(steps))}"


def read_memory(run: Run, step: int | None = None) -> RunMemory:
    """What was measured at `step`, by default the last measured one. Raises RecordError if there is none."""
    step = _measured_step(run, step)
    ranks = [_rank_memory(record, step) for record in run.ranks]
    without = [of.rank for of in ranks if of.planned is None]
    if 0 < len(without) < len(ranks):
        raise RecordError(
            f"{run.folder}: {rank_list(without)} recorded no planned memory, the other ranks did. Files of "
            "different runs are in the folder; give each run its own --ext-report folder."
        )
    names = [*(name for of in ranks for name in of.at_peak), *(n for of in ranks for n in of.planned or {})]
    return RunMemory(run, step, ranks, list(dict.fromkeys(names)))


def in_one_order(memories: list[RunMemory]) -> list[RunMemory]:
    """The same runs with the categories of all of them, so that each has one colour and one column."""
    names = list(dict.fromkeys(name for memory in memories for name in memory.categories))
    return [replace(memory, categories=names) for memory in memories]
