# STAND-IN BY THE LEAD: SCHED overwrites this file.
from dataclasses import dataclass

from megatron_ext.schedules.action import Action
from megatron_ext.schedules.build import Schedule


@dataclass(frozen=True)
class Program:
    schedule: Schedule
    overlap: bool
    ranks: tuple


def lower(s, *, overlap=True):
    out = []
    for r in range(s.p):
        row, first, last = [], r == 0, r == s.p - 1
        for i in range(s.m):
            A = lambda k: row.append(Action(k, i))
            A("IF"); A("e")
            if not first: A("RF")
            A("F")
            if not last: A("SF")
            A("C0"); A("S"); A("C1")
            if s.vocab == "naive":
                A("U"); A("C2")
            if last: A("L")
            if s.forward_only:
                continue
            A("G"); A("T")
            if s.vocab != "vocab-2":
                A("C3" if s.vocab == "naive" else "C2")
            if not last: A("RB")
            A("B")
            if not first: A("SB")
            A("g"); A("IB")
        out.append(tuple(row))
    return Program(s, overlap, tuple(out))
