"""megatron-ext plan paro: the sharding strategies compared, and the one to take."""

import json
import sys
from dataclasses import asdict
from typing import Any

from megatron_ext.paro.planner import GIB, Candidate, Situation, ranking, reason
from megatron_ext.problems import UserError
from megatron_ext.tools.compare_text import grid
from megatron_ext.tools.compare_units import human_bytes, human_time
from megatron_ext.tools.plan_paro_args import Request, parse
from megatron_ext.tools.plan_units import rate_text

EXIT_OK, EXIT_BAD_INPUT = 0, 2


def main(argv: list[str]) -> int:
    """Print the comparison; 0, or 2 on bad input."""
    try:
        request = parse(argv)
    except UserError as error:
        print("\n".join(f"megatron-ext plan paro: {problem}" for problem in error.problems), file=sys.stderr)
        return EXIT_BAD_INPUT
    found = ranking(request.situation, request.comms)
    print((as_json if request.json else report)(request, found))
    return EXIT_OK


def report(request: Request, found: list[Candidate]) -> str:
    """The text for the terminal."""
    best, m = found[0], request.situation.wire.m
    lines = [*_setting(request), "", grid(_HEAD, _rows(request.situation, found), numeric=True), ""]
    lines += [
        "between: what a group sends to other groups in a step; inside: what a rank sends within its group;",
        "memory: of a rank, at most; step: the predicted time of one, and that without any overlap.",
        "",
        f"Take {best.strategy} over {best.comm}: {reason(request.situation, found)}.",
        "",
        "Add to stock's command:",
        f"  --paro-strategy {best.strategy} --paro-comm {best.comm} --paro-group-size {m}",
    ]
    return "\n".join(lines)


_HEAD = ["strategy", "comm", "between", "inside", "memory", "step", "no overlap", "against the best"]


def _rows(situation: Situation, found: list[Candidate]) -> list[list[str]]:
    best = found[0]
    return [
        [
            str(c.strategy),
            c.comm,
            human_bytes(c.bytes.between),
            human_bytes(float(c.bytes.inside)),
            f"{c.needed / GIB:.2f} GiB",
            human_time(c.step.total),
            human_time(c.step.compute + c.communication),
            _verdict(situation, best, c),
        ]
        for c in found
    ]


def _verdict(situation: Situation, best: Candidate, c: Candidate) -> str:
    if not c.fits:
        return f"{(c.needed - situation.memory_limit) / GIB:.1f} GiB too much"
    if c is best:
        return "take this"
    return f"{c.step.total / best.step.total:.2f} x as long" if best.step.total else "equal"


def _setting(request: Request) -> list[str]:
    s = request.situation
    wire, total = s.wire, sum(unit.padded for unit in s.units)
    trained = sum(unit.padded for unit in s.units if unit.trainable)
    first = s.units[0]
    share = "all trained" if trained == total else f"{100 * trained / total:.3g} % trained"
    lines = [
        f"{total / 1e9:.4g} B parameters, {share}: what a rank holds if they are not split; {first.itemsize} "
        f"bytes each, gradients {first.grad_itemsize}",
        f"{wire.n} ranks = {wire.k} groups x {wire.m}, {s.microbatches} microbatches a step, "
        f"{_compute_words(s)}",
    ]
    words = {"members": "inside groups", "groups": "between groups", "flat": "over all ranks, flat"}
    used = {"members": wire.m > 1, "groups": wire.k > 1, "flat": "flat" in request.comms}
    rates = [
        f"{words[scope]} {rate_text(s.network.link(scope, 'gather').bytes_per_s)}"
        for scope in words
        if used[scope] and wire.n > 1
    ]
    if rates:
        lines.append(f"links of a rank while all send ({request.network_source}): {', '.join(rates)}")
    measured = s.network.groups, s.network.members
    if all(measured) and measured != (wire.k, wire.m):
        lines.append(
            f"measured with {measured[0]} groups of {measured[1]}, whose ranks may share NICs otherwise"
        )
    return lines


def _compute_words(s: Situation) -> str:
    if not s.compute.forward + s.compute.backward:
        return "compute left out"
    beside = "beside communication" if s.overlap_params else "not beside communication"
    return f"compute {human_time(s.compute.forward + s.compute.backward)} a microbatch, {beside}"


def as_json(request: Request, found: list[Candidate]) -> str:
    """The same for programs: bytes and seconds."""
    s = request.situation
    wire = s.wire
    data: dict[str, Any] = {
        "recommended": {
            "strategy": str(found[0].strategy),
            "comm": found[0].comm,
            "reason": reason(s, found),
        },
        "ranks": {"groups": wire.k, "members": wire.m},
        "microbatches": s.microbatches,
        "memory_limit": s.memory_limit,
        "candidates": [_as_dict(c) for c in found],
    }
    return json.dumps(data, indent=1)


def _as_dict(c: Candidate) -> dict[str, Any]:
    return {
        "strategy": str(c.strategy),
        "comm": c.comm,
        "fits": c.fits,
        "bytes_between_per_group": c.bytes.between,
        "bytes_inside_per_rank": float(c.bytes.inside),
        "memory": {**asdict(c.memory), "persistent": c.memory.persistent, "needed": c.needed},
        "step_s": c.step.total,
        "compute_s": c.step.compute,
        "params_s": c.step.params,
        "grads_s": c.step.grads,
    }
