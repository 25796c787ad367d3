# STAND-IN BY THE LEAD: SCHED overwrites this file.
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    p: int
    m: int
    pipeline: str
    vocab: str
    forward_only: bool


def build(p, m, *, pipeline="1f1b", vocab="off", costs=None, forward_only=False):
    return Schedule(p, m, pipeline, vocab, forward_only)


build_listed = build
