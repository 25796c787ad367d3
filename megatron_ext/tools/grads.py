"""`megatron-ext grads A B`: compare two gradient dumps, parameter by parameter."""

import argparse
import math
import sys
from dataclasses import dataclass
from typing import Any

SHOWN = 10  # gradients that are listed


@dataclass(frozen=True)
class Verdict:
    """What a comparison of two dumps came to.

    `rows`: (name, largest absolute difference, largest absolute value of the reference), worst ratio first.
    `not_finite`: names of gradients with NaN or infinity on either side; any is too many.
    `worst_name`, `worst`: the gradient with the largest absolute difference; not finite before all else.
    `largest`: largest finite absolute value of the reference.
    """

    rows: list[tuple[str, float, float]]
    not_finite: list[str]
    worst_name: str
    worst: float
    largest: float
    tolerance: float

    @property
    def within(self) -> bool:
        return not self.not_finite and self.worst <= self.tolerance * self.largest

    def __str__(self) -> str:
        if self.not_finite:
            names = ", ".join(self.not_finite[:SHOWN])
            more = f" and {len(self.not_finite) - SHOWN} more" if len(self.not_finite) > SHOWN else ""
            return (
                f"{len(self.rows)} gradients; NOT within {self.tolerance:g}: NaN or infinity in "
                f"{len(self.not_finite)} of them: {names}{more}"
            )
        share = self.worst / self.largest if self.largest else 0.0
        return (
            f"{len(self.rows)} gradients; largest difference {self.worst:.3e} ({self.worst_name}) = "
            f"{share:.3e} of the largest gradient {self.largest:.3e}; "
            f"{'within' if self.within else 'NOT within'} {self.tolerance:g}"
        )


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(name, largest absolute difference, largest absolute value of the reference), worst ratio first.

    NaN and infinity, which count as the worst, carry over from a tensor's elements to its row.

    Raises:
        ValueError: names or shapes differ.
    """
    if a.keys() != b.keys():
        only_a, only_b = sorted(a.keys() - b.keys())[:5], sorted(b.keys() - a.keys())[:5]
        raise ValueError(f"parameters differ: only in the first {only_a}, only in the second {only_b}")
    rows = []
    for name in a:
        if a[name].shape != b[name].shape:
            raise ValueError(f"{name}: shapes {tuple(a[name].shape)} and {tuple(b[name].shape)} differ")
        difference = (a[name].double() - b[name].double()).abs().max().item()
        rows.append((name, difference, a[name].double().abs().max().item()))
    return sorted(rows, key=_ratio, reverse=True)


def _is_finite(row: tuple[str, float, float]) -> bool:
    return math.isfinite(row[1]) and math.isfinite(row[2])


def _ratio(row: tuple[str, float, float]) -> float:
    _, difference, size = row
    if not _is_finite(row):  # NaN has no place in an order
        return math.inf
    return difference / size if size else difference


def judge(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> Verdict:
    """Whether no gradient of `b` differs from `a`, the reference, by more than `tolerance * largest`.

    `a` and `b`: name -> tensor, as `megatron_ext.grads.assemble` gives them.

    Raises:
        ValueError: names or shapes differ, or there is no gradient at all.
    """
    rows = differences(a, b)
    if not rows:
        raise ValueError(
            "both dumps are complete but hold no gradient, so there is nothing to compare. Dump a run that "
            "has trainable parameters."
        )
    not_finite = [row for row in rows if not _is_finite(row)]
    worst = not_finite[0] if not_finite else max(rows, key=lambda row: row[1])
    largest = max((row[2] for row in rows if math.isfinite(row[2])), default=0.0)
    return Verdict(rows, [row[0] for row in not_finite], worst[0], worst[1], largest, tolerance)


def main(argv: list[str]) -> int:
    """Exit code 0: within tolerance, 1: not (NaN and infinity never), 2: dumps that cannot be compared."""
    parser = argparse.ArgumentParser(prog="megatron-ext grads", description=__doc__)
    parser.add_argument("first", help="folder given to --ext-dump-grads of the reference run")
    parser.add_argument("second", help="folder given to --ext-dump-grads of the other run")
    parser.add_argument("--step", type=int, default=1, help="the dumped step (default 1)")
    parser.add_argument("--tolerance", type=float, default=5e-6, help="relative to the largest gradient")
    args = parser.parse_args(argv)
    from megatron_ext.grads import assemble

    try:
        verdict = judge(assemble(args.first, args.step), assemble(args.second, args.step), args.tolerance)
    except ValueError as problem:
        print(f"megatron-ext grads: {problem}", file=sys.stderr)
        return 2
    for name, difference, size in verdict.rows[:SHOWN]:
        print(f"{difference:10.3e} of {size:10.3e}  {name}")
    print(verdict)
    return 0 if verdict.within else 1
