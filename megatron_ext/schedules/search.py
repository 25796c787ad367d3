"""Schedule search: the fastest program for given pass costs within a memory limit.

    found = search(8, 128, costs, vocab="vocab-2", limit=9.0)
    print(trade_off(found))         # memory against bubble, what no other candidate beats in both
    best = found[0]

Candidates are all pipelines (families.py), each with as much additional memory as the limit leaves, in every
order of `build.ORDERS`, list-scheduled ones included. They are compared by simulation, first with few
microbatches, and the best of them with all.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import floor

from megatron_ext.schedules.build import ORDERS, Schedule, build_order, chunks_of
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.families import FAMILIES, family, make_block
from megatron_ext.schedules.lower import Program, Stuck, lower
from megatron_ext.schedules.simulate import simulate

FEW = 4
"""Microbatches per rank with which all candidates are compared."""
FINALISTS = 4


@dataclass(frozen=True)
class Recipe:
    """How to build a schedule, for any number of microbatches."""

    pipeline: str
    chunks: int = 1
    extra: tuple[int, ...] = ()
    order: str = "static"

    def build(self, p: int, m: int, vocab: str, costs: Costs, forward_only: bool = False) -> Schedule:
        """The schedule."""
        chunks = self.chunks if family(self.pipeline).chunks is None else None
        options = {"pipeline": self.pipeline, "vocab": vocab, "chunks": chunks, "extra": self.extra}
        return build_order(self.order, p, m, costs, forward_only=forward_only, **options)

    def __str__(self) -> str:
        chunks = f", {self.chunks} chunks" if family(self.pipeline).chunks is None else ""
        more = f", {'+'.join(map(str, self.extra))} more held" if any(self.extra) else ""
        return f"{self.pipeline}{chunks}{more}, order {self.order}"


@dataclass(frozen=True)
class Candidate:
    """A schedule that was simulated."""

    recipe: Recipe
    makespan: float
    busy: float
    """Of the rank that computes longest: no schedule is faster."""
    bubble: float
    """Share of the makespan in which ranks do not compute, averaged over them."""
    memory: float
    """Held at most on any rank, in microbatches of its layers: what `Measure` says."""


Measure = Callable[[Program], float]
"""Memory of a program, in microbatches of a rank's layers."""


def activations(program: Program) -> float:
    """The default measure: chunk activations that the fullest rank holds, from F to B or to W."""
    schedule = program.schedule
    return max(schedule.in_flight(rank) for rank in range(schedule.p)) / schedule.chunks


def search(
    p: int,
    m: int,
    costs: Costs,
    *,
    vocab: str = "off",
    limit: float,
    pipelines: Iterable[str] = tuple(FAMILIES),
    chunks: Sequence[int] = (2,),
    measure: Measure = activations,
) -> list[Candidate]:
    """Candidates of `m` microbatches on `p` ranks that hold at most `limit` microbatches, the fastest first.

    `chunks` are the numbers of chunks to try where a pipeline leaves that open. `measure` says what a program
    holds. Those behind the first few were only compared with few microbatches and are left out.

    Raises:
        ValueError: nothing fits into the limit, or costs of another number of ranks.
    """
    costs.check(p)
    few = min(m, FEW * p)
    recipes = [recipe for name in pipelines for recipe in _recipes(name, p, few, costs, vocab, limit, chunks)]
    every = [c for recipe in recipes if (c := _simulated(recipe, p, few, costs, vocab, measure))]
    found = [candidate for candidate in every if candidate.memory <= limit + 1e-9]
    if not found:
        least = (
            min(candidate.memory for candidate in every) if every else _least(p, m, costs, vocab, pipelines)
        )
        raise ValueError(
            f"no pipeline schedule of {p} ranks with vocabulary {vocab} holds only {limit:g} "
            "microbatches: the "
            f"least is {least:g}"
        )
    found.sort(key=_rank)
    if few < m:
        # In this order, not in that of a set: all ranks must choose the same one of equals.
        ahead = dict.fromkeys(candidate.recipe for candidate in (*found[:FINALISTS], *pareto(found)))
        found = [c for recipe in ahead if (c := _simulated(recipe, p, m, costs, vocab, measure))]
    return sorted((c for c in found if c.memory <= limit + 1e-9), key=_rank)


def pareto(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other one beats in memory and in time, from the least memory on."""
    out: list[Candidate] = []
    for candidate in sorted(found, key=lambda c: (c.memory, c.makespan)):
        if not out or candidate.makespan < out[-1].makespan * (1 - 1e-9):
            out.append(candidate)
    return out


def trade_off(found: Sequence[Candidate]) -> str:
    """A table of memory against bubble."""
    lines = ["memory (microbatches)  bubble  time over compute  schedule"]
    for c in pareto(found):
        lines.append(f"{c.memory:21.1f}  {100 * c.bubble:5.2f}%  {c.makespan / c.busy:17.4f}  {c.recipe}")
    return "\n".join(lines)


def _rank(candidate: Candidate) -> tuple[float, float]:
    return round(candidate.makespan / candidate.busy, 6), candidate.memory


def _recipes(
    name: str, p: int, m: int, costs: Costs, vocab: str, limit: float, chunks: Sequence[int]
) -> list[Recipe]:
    """What to try of one pipeline."""
    if vocab not in family(name).modes:
        return []
    found = []
    for count in chunks if family(name).chunks is None else (chunks_of(name),):
        left = floor(limit * count + 1e-9) - _most(name, p, m, count, vocab, costs)
        if left < 0:
            continue
        orders = ("static",) if vocab == "interlaced" else ORDERS
        for extra in _extras(count, left) if vocab != "interlaced" else ((),):
            found += [Recipe(name, count, extra, order) for order in orders]
    return found


def _least(p: int, m: int, costs: Costs, vocab: str, pipelines: Iterable[str]) -> float:
    """Microbatches that the pipeline with the fewest holds by itself."""
    names = [name for name in pipelines if vocab in family(name).modes]
    return min(_most(name, p, m, chunks_of(name), vocab, costs) / chunks_of(name) for name in names)


def _most(name: str, p: int, m: int, chunks: int, vocab: str, costs: Costs) -> int:
    """Chunk activations that a pipeline holds by itself, on the rank that holds most."""
    block = make_block(name, p, chunks, vocab, costs)
    return max(block.cap(rank, m) for rank in range(p))


def _extras(chunks: int, left: int) -> list[tuple[int, ...]]:
    """How to spread additional activations over the chunks."""
    none = (0,) * chunks
    if left == 0:
        return [()]
    if chunks == 1:
        return [(), (left,)]
    if chunks > 2:
        return [(), (left, *none[1:])]
    shares = sorted({0, left // 4, left // 2, left})
    return [(), *((left - share, share) for share in shares)]


def _simulated(
    recipe: Recipe, p: int, m: int, costs: Costs, vocab: str, measure: Measure
) -> Candidate | None:
    try:
        program = lower(recipe.build(p, m, vocab, costs))
        timeline = simulate(program, costs)
    except Stuck:
        return None
    busy = [timeline.busy(rank) for rank in range(p)]
    bubble = 1 - sum(busy) / p / timeline.makespan
    return Candidate(recipe, timeline.makespan, max(busy), bubble, measure(program))
