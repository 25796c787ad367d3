"""Measured memory as tables: for the terminal (ASCII), the page and the CSV file."""

import csv
import io
from collections.abc import Callable

from megatron_ext.tools.compare_text import grid
from megatron_ext.tools.memory_read import RankMemory, RunMemory

MIB = 1 << 20
MOST_ROWS = 64  # ranks that are listed; the CSV file has all
Sizes = Callable[[RankMemory], dict[str, int]]

AT_PEAK = "At each rank's highest total"
HIGHEST = "Each category's own highest value"
PLANNED = "Planned"


def planned_total(of: RankMemory) -> int:
    """Bytes that were planned for a rank, all categories together."""
    return sum((of.planned or {}).values())


def mib(most: float) -> Callable[[float], str]:
    """Bytes as MiB, with the digits that values up to `most` bytes need."""
    decimals = 3 if most < 10 * MIB else 2 if most < 1000 * MIB else 1
    return lambda size: f"{size / MIB:,.{decimals}f}"


def ratio(numerator: float, denominator: float) -> str:
    """ "1.25", or "-" where nothing can be divided by."""
    return f"{numerator / denominator:.2f}" if denominator else "-"


def table(memory: RunMemory, sizes: Sizes, total: Callable[[RankMemory], int] | None) -> list[list[str]]:
    """Header, a row for each rank in MiB, then the largest, the smallest and their ratio.

    `total` gives the last column; without it there is none.
    """
    names = memory.categories
    values = {
        of.rank: [sizes(of).get(name, 0) for name in names] + ([total(of)] if total else [])
        for of in memory.ranks
    }
    text = mib(max(of.peak for of in memory.ranks))
    shown = memory.ranks if len(memory.ranks) <= MOST_ROWS else []
    rows = [[str(of.rank), *map(text, values[of.rank])] for of in shown]
    columns = list(zip(*values.values(), strict=True))
    return [
        ["rank", *names, *(["total"] if total else [])],
        *rows,
        ["max", *(text(max(column)) for column in columns)],
        ["min", *(text(min(column)) for column in columns)],
        ["max/min", *(ratio(max(column), min(column)) for column in columns)],
    ]


def plan_table(memory: RunMemory) -> list[list[str]]:
    """The planned table, with each rank's planned total against the measured one."""
    rows = table(memory, lambda of: of.planned or {}, planned_total)
    against = {str(of.rank): ratio(planned_total(of), of.peak) for of in memory.ranks}
    return [[*rows[0], "planned/measured"], *([*row, against.get(row[0], "")] for row in rows[1:])]


def tables(memory: RunMemory, planned: bool) -> list[tuple[str, list[list[str]]]]:
    """(heading, table) of everything there is to say about one run."""
    found = [
        (AT_PEAK, table(memory, lambda of: of.at_peak, lambda of: of.peak)),
        (HIGHEST, table(memory, lambda of: of.highest, None)),
    ]
    return [*found, (PLANNED, plan_table(memory))] if planned else found


def heading(memory: RunMemory) -> str:
    """ "vocab-2: memory of step 2, in MiB, 4 ranks"."""
    count = len(memory.ranks)
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    return f"{memory.run.name}: memory of step {memory.step}, in MiB, {ranks}"


def notes(memory: RunMemory) -> list[str]:
    """What a reader of the numbers should know."""
    found = list(memory.run.notes)
    if any(record.steps[memory.step].get("skipped") for record in memory.run.ranks):
        found.append(
            f"step {memory.step} was skipped (loss scaling): optimizer states may not exist yet. Measure a "
            "later step with --ext-memory-step."
        )
    if len(memory.ranks) > MOST_ROWS:
        found.append(f"{len(memory.ranks)} ranks are too many to list; all are in memory.csv")
    return found


def report(memories: list[RunMemory], planned: bool) -> str:
    """The whole text report."""
    parts = []
    for memory in memories:
        parts.append(heading(memory))
        for name, rows in tables(memory, planned):
            parts += ["", f"{name}:", grid(rows[0], rows[1:], numeric=True)]
        parts += ["", *(f"NOTE: {note}" for note in notes(memory))]
    return "\n".join(parts).rstrip()


def as_csv(memories: list[RunMemory]) -> str:
    """Exact bytes, one line per run, rank and category; the category "total" is each rank's peak."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "step", "rank", "category", "at_peak", "highest", "planned"])
    for memory in memories:
        for of in memory.ranks:
            lead = [memory.run.name, memory.step, of.rank]
            plan = of.planned
            for name in memory.categories:
                cells = [of.at_peak.get(name, 0), of.highest.get(name, 0)]
                writer.writerow([*lead, name, *cells, "" if plan is None else plan.get(name, 0)])
            writer.writerow([*lead, "total", of.peak, of.peak, "" if plan is None else planned_total(of)])
    return out.getvalue()
