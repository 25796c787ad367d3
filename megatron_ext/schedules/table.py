"""The table of schedules in docs/pipeline-schedules.md, computed from schedule objects.

python -m megatron_ext.schedules.table          # prints it
"""

from megatron_ext.schedules.build import build
from megatron_ext.schedules.check import checked
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.families import FAMILIES
from megatron_ext.schedules.simulate import simulate

MODES = ("off", "vocab-2", "vocab-1")
P, M = 8, 64
OUTPUT = 2.4
"""Forward passes of a rank that all output passes of a microbatch take together, as with a vocabulary of
about a hundred thousand and four layers per rank. Without vocabulary parallelism the last stage runs them."""
HEADER = (
    "schedule",
    "vocabulary",
    "bubble of the layers",
    "time over balanced",
    "microbatches held",
    "busiest/idlest",
    "sends",
    "barriers",
)


def costs_of(mode: str, last: int, p: int = P) -> Costs:
    """Pass times: F = 1, B = 2 with weight gradients; the output layer, a third of it forward, where it "
    "runs."""
    if mode == "off":
        more = [OUTPUT / 3 if rank == last else 0.0 for rank in range(p)]
        return Costs(forward=tuple(1 + m for m in more), backward=tuple(2 + 2 * m for m in more))
    share = OUTPUT / p
    first, second = (2 / 3, 1 / 3) if mode == "vocab-2" else (1 / 3, 2 / 3)
    return Costs(output_s=share * first, output_t=share * second)


def row(name: str, mode: str, p: int = P, m: int = M) -> list[str]:
    """One schedule: every cell from the program and its simulation.

    In a V without vocabulary parallelism the output layer counts as spread over both chunks of its rank.
    """
    program = checked(build(p, m, pipeline=name, vocab=mode))
    schedule = program.schedule
    alone = simulate(program, Costs())
    timeline = simulate(program, costs_of(mode, schedule.place.last.rank, p))
    held = [timeline.in_flight_peak(rank) / schedule.chunks for rank in range(p)]
    busy = [timeline.busy(rank) for rank in range(p)]
    sends = sum(action.kind in ("SF", "SB") for action in program.ranks[p // 2]) / m
    barriers = {action.kind for action in schedule.collectives} & {"C1", "C2", "C3"}
    return [
        name,
        mode,
        f"{100 * sum(alone.bubble(rank) for rank in range(p)) / p:.1f} %",
        f"{timeline.makespan / (m * (3 + OUTPUT / p)):.2f}",
        f"{min(held):g}" if min(held) == max(held) else f"{min(held):g} to {max(held):g}",
        f"{max(busy) / min(busy):.2f}",
        f"{sends:g}",
        str(len(barriers)),
    ]


def lines() -> list[str]:
    """The table in Markdown."""
    rows = [row(name, mode) for mode in MODES for name in FAMILIES]
    out = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    return [*out, *("| " + " | ".join(cells) + " |" for cells in rows)]


if __name__ == "__main__":
    print("\n".join(lines()))
