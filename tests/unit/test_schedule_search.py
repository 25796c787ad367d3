"""The search: what it finds keeps the limit, beats every plain schedule, and can be built again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.schedules.build import build
from megatron_ext.schedules.check import checked
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.families import FAMILIES, family
from megatron_ext.schedules.lower import lower
from megatron_ext.schedules.search import Candidate, Recipe, pareto, search, trade_off
from megatron_ext.schedules.simulate import simulate
from scripts.bench.schedules import A100, LARGE, MICROBATCHES, RANKS, searched
from scripts.bench.validate_simulator import DATA, read

COSTS = Costs(forward=1.0, backward=1.9, weight=0.8, output_s=0.2, output_t=0.1)
full = pytest.mark.full


def makespan(schedule, costs=COSTS) -> float:
    return simulate(lower(schedule), costs).makespan


@pytest.mark.parametrize("limit", [3.5, 4.0, 5.0])
def test_the_best_keeps_the_limit_and_beats_the_plain_ones(limit):
    found = search(4, 24, COSTS, vocab="vocab-2", limit=limit)
    best = found[0]
    assert [c.makespan for c in found] == sorted(c.makespan for c in found)
    assert all(c.memory <= limit for c in found)
    again = best.recipe.build(4, 24, "vocab-2", COSTS)
    checked(again)
    assert makespan(again) == best.makespan
    assert max(again.in_flight(rank) for rank in range(4)) / again.chunks == best.memory
    for name in FAMILIES:
        plain = build(4, 24, pipeline=name, vocab="vocab-2")
        if max(plain.in_flight(rank) for rank in range(4)) / plain.chunks <= limit:
            assert best.makespan <= makespan(plain) * (1 + 1e-9), name


def test_more_memory_is_never_slower_and_the_trade_off_says_so():
    times = [search(4, 16, COSTS, limit=limit)[0].makespan for limit in (2.5, 3.0, 4.0)]
    assert times == sorted(times, reverse=True)
    found = search(4, 16, COSTS, limit=4.0)
    front = pareto(found)
    assert [c.memory for c in front] == sorted({c.memory for c in front})
    lines = trade_off(found).splitlines()
    assert len(lines) == len(front) + 1
    assert str(front[-1].recipe) in lines[-1]


def test_pareto_drops_what_is_beaten():
    def candidate(memory, time):
        return Candidate(Recipe("1f1b"), time, 1.0, 0.0, memory)

    a, b, c, d = candidate(2, 9.0), candidate(3, 9.0), candidate(3, 8.0), candidate(5, 8.5)
    assert pareto([d, c, b, a]) == [a, c]


def test_extra_memory_is_used_and_checked():
    plain = build(4, 24, pipeline="v-half")
    more = build(4, 24, pipeline="v-half", extra=(1, 1))
    checked(more)
    assert {more.in_flight(rank) - plain.in_flight(rank) for rank in range(4)} <= {1, 2}
    assert more.cap(0) == plain.cap(0) + 2
    assert makespan(more, Costs()) <= makespan(plain, Costs())


def test_nothing_fits():
    with pytest.raises(ValueError, match=r"holds only 1 microbatches: the least is 2.5"):
        search(4, 8, COSTS, limit=1.0)


def test_interlaced_is_only_searched_in_1f1b():
    found = search(4, 8, COSTS, vocab="interlaced", limit=6.0)
    assert {c.recipe.pipeline for c in found} == {"1f1b"}


# --- the table of A100 pass times in the documentation -----------------------------------------------------

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "pipeline-schedules.md"
MEASURED = list(read(DATA))


def documented() -> dict[tuple[str, int, int], dict[str, str]]:
    """Rows of the table by method, sequence length and vocabulary."""
    lines = DOCUMENT.read_text().splitlines()
    start = lines.index("| " + " | ".join(A100) + " |")
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        row = dict(zip(A100, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        rows[row["method"], int(row["sequence"]), int(row["vocabulary"])] = row
    return rows


def recipe_of(text: str) -> Recipe:
    """The recipe that prints as `text`."""
    pipeline, *rest = text.split(", ")
    order = rest[-1].removeprefix("order ")
    chunks = family(pipeline).chunks
    extra: tuple[int, ...] = ()
    for part in rest[:-1]:
        if part.endswith(" chunks"):
            chunks = int(part.split()[0])
        else:
            extra = tuple(int(number) for number in part.removesuffix(" more held").split("+"))
    recipe = Recipe(pipeline, chunks, extra, order)
    assert str(recipe) == text
    return recipe


def test_a100_table_is_whole_and_within_two_percent():
    """All 40 rows; the better of vocab-1 and vocab-2 is within 2 % of compute, at p microbatches or p + 1."""
    rows = documented()
    assert sorted(rows) == sorted((run.method, run.seq_length, run.vocab) for run in MEASURED)
    assert len(rows) == 40
    for sequence, vocabulary in {key[1:] for key in rows}:
        pair = [rows[mode, sequence, vocabulary] for mode in ("vocab-1", "vocab-2")]
        limit = RANKS if vocabulary >= LARGE else RANKS + 1
        assert all(float(row["memory"]) <= int(row["limit"]) == limit for row in pair)
        assert min(float(row["best over compute"]) for row in pair) <= 1.02


FAST = {("vocab-2", 2048, 256000), ("vocab-1", 4096, 256000)}


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            run,
            id=f"{run.method}-{run.seq_length}-{run.vocab}",
            marks=[] if (run.method, run.seq_length, run.vocab) in FAST else [full],
        )
        for run in MEASURED
    ],
)
def test_a100_rows(run):
    """Every row's schedule, built again, takes the time and holds the memory that the table says."""
    row = documented()[run.method, run.seq_length, run.vocab]
    recipe = recipe_of(row["schedule"])
    schedule = recipe.build(RANKS, MICROBATCHES, run.mode, run.costs)
    timeline = simulate(checked(schedule), run.costs)
    passes = ("F", "B") if run.mode == "off" else ("F", "B", "S", "T", "IF", "IB")
    compute = max(MICROBATCHES * sum(run.costs.of(kind, r) for kind in passes) for r in range(RANKS))
    assert timeline.makespan / compute == pytest.approx(float(row["best over compute"]), abs=1e-4)
    held = max(schedule.in_flight(rank) for rank in range(RANKS)) / schedule.chunks
    assert held == float(row["memory"]) <= int(row["limit"])


@full
@pytest.mark.parametrize(
    ("method", "sequence", "vocabulary"), [("vocab-2", 4096, 128000), ("vocab-1", 2048, 256000)]
)
def test_a100_searches_find_the_rows(method, sequence, vocabulary):
    """The search itself, which takes its time; the others are `schedules.py a100`."""
    run = next(r for r in MEASURED if (r.method, r.seq_length, r.vocab) == (method, sequence, vocabulary))
    row = documented()[method, sequence, vocabulary]
    assert {name: str(value) for name, value in searched(run).items()} == row


def test_equals_are_chosen_alike_in_every_process():
    """Ranks search by themselves: the order among equals must not come from Python's hashing."""
    code = (
        "from megatron_ext.schedules.search import search; from megatron_ext.schedules.costs import Costs; "
        "print([str(c.recipe) for c in search(3, 15, Costs(), limit=3)])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            cwd=DOCUMENT.parents[1],
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
