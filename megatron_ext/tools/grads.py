"""`megatron-ext grads A B`: compare two gradient dumps, parameter by parameter."""

import argparse
import sys
from typing import Any


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(name, largest absolute difference, largest absolute value of the reference), worst ratio first.

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
    return sorted(rows, key=lambda row: -(row[1] / row[2] if row[2] else row[1]))


def main(argv: list[str]) -> int:
    """Exit code 0: within tolerance, 1: not, 2: dumps that cannot be compared."""
    parser = argparse.ArgumentParser(prog="megatron-ext grads", description=__doc__)
    parser.add_argument("first", help="folder given to --ext-dump-grads of the reference run")
    parser.add_argument("second", help="folder given to --ext-dump-grads of the other run")
    parser.add_argument("--step", type=int, default=1, help="the dumped step (default 1)")
    parser.add_argument("--tolerance", type=float, default=5e-6, help="relative to the largest gradient")
    args = parser.parse_args(argv)
    from megatron_ext.grads import assemble

    try:
        first = assemble(args.first, args.step)
        rows = differences(first, assemble(args.second, args.step))
    except ValueError as problem:
        print(f"megatron-ext grads: {problem}", file=sys.stderr)
        return 2
    largest = max(row[2] for row in rows)
    worst = max(row[1] for row in rows)
    for name, difference, size in rows[:10]:
        print(f"{difference:10.3e} of {size:10.3e}  {name}")
    agree = worst <= args.tolerance * largest
    share = worst / largest if largest else 0.0
    print(
        f"{len(rows)} gradients; largest difference {worst:.3e} = {share:.3e} of the largest "
        f"gradient {largest:.3e}; {'within' if agree else 'NOT within'} {args.tolerance:g}"
    )
    return 0 if agree else 1
