"""megatron-ext plan wallfacer: team sizes, bundles and placements of attention compared; who meets whom."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ext.problems import UserError
from megatron_ext.tools.compare_text import grid
from megatron_ext.tools.compare_units import human_bytes, human_time
from megatron_ext.tools.plan_units import rate_text
from megatron_ext.tools.plan_wallfacer_args import Request, parse
from megatron_ext.wallfacer.picture import svg, table
from megatron_ext.wallfacer.plan import make_plan
from megatron_ext.wallfacer.planner import Candidate, Situation, of_each_shape, ranking, reason

EXIT_OK, EXIT_BAD_INPUT = 0, 2
_HEAD = [
    *("C", "K", "steps", "order", "keys move", "travels back", "inside", "between"),
    *("buffers", "kept a layer", "in all", "attention", "time", "against the best"),
]


def main(argv: list[str]) -> int:
    """Print the comparison; 0, or 2 on bad input."""
    try:
        request = parse(argv)
    except UserError as error:
        text = "\n".join(f"megatron-ext plan wallfacer: {problem}" for problem in error.problems)
        print(text, file=sys.stderr)
        return EXIT_BAD_INPUT
    found = ranking(request.situation)
    plan = make_plan(found[0].geometry, request.situation.layout, request.situation.mask)
    if request.svg is not None:
        try:
            Path(request.svg).write_text(svg(plan), encoding="utf-8")
        except OSError as error:
            print(f"megatron-ext plan wallfacer: --svg {request.svg}: {error.strerror}.", file=sys.stderr)
            return EXIT_BAD_INPUT
    print((as_json if request.json else report)(request, found))
    if request.table and not request.json:
        print(f"\n{table(plan)}\n\n{_TABLE_WORDS}")
    return EXIT_OK


_TABLE_WORDS = (
    "bundles: the keys that a rank holds, step by step; from, to: where its first bundle comes from and its\n"
    "own goes; next: where it passes bundles on to; work: tiles of each step, F full, C causal, R causal\n"
    "turned round."
)


def report(request: Request, found: tuple[Candidate, ...]) -> str:
    """The text for the terminal."""
    s, best = request.situation, found[0]
    shown = list(found) if request.all else of_each_shape(found)
    g = best.geometry
    lines = [
        *_setting(request),
        "",
        grid(_HEAD, [_row(s, best, c) for c in shown], numeric=True),
        "",
        "Forward and backward pass of one layer and microbatch; bytes are exact, means over the ranks:",
        "inside nodes, and between them. buffers: what a rank needs while a layer runs; in all: with what",
        f"{_layers(s)} keep; attention: time without any communication; time: predicted with it.",
        "",
        f"Take C={g.team_size} and K={g.bundle_size}: {reason(found)}.",
        "",
        "Add to stock's command:",
        f"  --context-parallel-size {g.size} --cp-comm-type wallfacer \\",
        "  " + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in best.choices().items()),
    ]
    return "\n".join(lines)


def _layers(s: Situation) -> str:
    kept = s.kept
    if not kept.recomputed:
        return f"{kept.whole} {'layer' if kept.whole == 1 else 'layers'} in flight"
    whole = f"{kept.whole} and " if kept.whole else ""
    return f"{whole}{kept.recomputed} recomputed layers in flight"


def _row(s: Situation, best: Candidate, c: Candidate) -> list[str]:
    g = c.geometry
    return [
        str(g.team_size),
        str(g.bundle_size),
        str(g.ring_length),
        g.order,
        c.movement if g.bundle_size > 1 else "-",
        c.backward if g.ring_length > 1 else "-",
        human_bytes(c.inside),
        human_bytes(c.between),
        human_bytes(float(max(c.memory.forward, c.memory.backward) + c.memory.kernel)),
        human_bytes(float(c.memory.saved if s.kept.whole else c.memory.result)),
        human_bytes(float(c.needed)),
        "-" if s.rate is None else human_time(c.seconds.attention),
        human_time(c.seconds.total),
        _verdict(s, best, c),
    ]


def _verdict(s: Situation, best: Candidate, c: Candidate) -> str:
    if not c.fits:
        return f"{human_bytes(float(c.needed - s.memory_limit))} too much"
    if c is best:
        return "take this"
    return f"{c.seconds.total / best.seconds.total:.2f} x as long" if best.seconds.total else "equal"


def _setting(request: Request) -> list[str]:
    s = request.situation
    shape, links = s.shape, s.links
    seen = "bidirectional" if s.mask.right is None else "causal"
    if s.mask.left is not None:
        seen += f", {s.mask.left} keys back"
    nodes = -(-s.size // links.ranks_per_node)
    lines = [
        f"{s.layout.length} tokens x {shape.batch}, {shape.query_heads} query and {shape.key_heads} key "
        f"heads of {shape.head_dim} on each tensor-parallel rank, {shape.itemsize} bytes a value, {seen}",
        f"{s.size} context-parallel ranks on {nodes} {'node' if nodes == 1 else 'nodes'}, "
        f"{min(s.size, links.ranks_per_node)} on each"
        + ("; attention's own time left out" if s.rate is None else f", {s.rate / 1e12:g} TFLOP/s each"),
    ]
    rates = []
    if links.ranks_per_node > 1:
        rates.append(f"inside a node {rate_text(links.inside.bytes_per_s)} a rank")
    if nodes > 1:
        of = "a rank" if links.ranks_per_nic == 1 else f"for {links.ranks_per_nic} ranks"
        rates.append(f"between nodes {rate_text(links.nic.bytes_per_s)} {of}")
    lines.append(f"links ({request.network_source}): {', '.join(rates)}")
    return lines


def as_json(request: Request, found: tuple[Candidate, ...]) -> str:
    """The same for programs, all candidates: bytes and seconds."""
    s = request.situation
    data: dict[str, Any] = {
        "recommended": {**_name(found[0]), "reason": reason(found)},
        "ranks": {"context": s.size, "per_node": s.links.ranks_per_node},
        "memory_limit": s.memory_limit,
        "layers": asdict(s.kept),
        "candidates": [_as_dict(c) for c in found],
    }
    return json.dumps(data, indent=1)


def _name(c: Candidate) -> dict[str, Any]:
    g = c.geometry
    return {
        "team_size": g.team_size,
        "kv_bundle": g.bundle_size,
        "order": g.order,
        "backward": c.backward,
        "movement": c.movement if g.bundle_size > 1 else None,
    }


def _as_dict(c: Candidate) -> dict[str, Any]:
    passes = {"forward": c.forward_bytes, "backward": c.backward_bytes}
    return {
        **_name(c),
        "steps": c.geometry.ring_length,
        "fits": c.fits,
        "bytes_by_rank": {
            name: {where: [getattr(each, where) for each in found] for where in ("inside", "between")}
            for name, found in passes.items()
        },
        "memory": {**asdict(c.memory), "needed": c.needed},
        "forward_s": c.seconds.forward,
        "backward_s": c.seconds.backward,
        "attention_s": c.seconds.attention,
    }
