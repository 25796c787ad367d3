"""A plan as a table and as a picture: which rank holds which keys at which step, and what it computes of
them.

The picture has a row per rank, teams set apart, and a column per step. A cell shows the bundle that is there,
in its colour, and the part of the score matrix that the rank computes: its team's rows downwards, the
bundle's keys to the right. Exact ranges are shown on hover, without a script. Colours follow the light or
dark theme.
"""

import colorsys
from collections.abc import Iterable
from html import escape

from megatron_ext.schedules.render_style import STYLE
from megatron_ext.wallfacer.plan import Plan, Step
from megatron_ext.wallfacer.tiles import Tile

LEFT, TOP, CELL, LABEL, GAP, TEAM_GAP = 150, 96, 56, 15, 10, 12
LEGEND = 250
MORE_STYLE = (
    ".wf .score { fill: var(--idle); }\n"
    ".wf .tile { stroke: var(--card); stroke-width: 0.5; }\n"
    ".wf .tile:hover { stroke: var(--ink); stroke-width: 1.4; }\n"
    ".wf .ring { stroke: var(--soft); stroke-width: 1.2; fill: none; }\n"
)


def table(plan: Plan) -> str:
    """Ranks, their places, bundles step by step, and whom they exchange bundles with, in columns of text."""
    geometry = plan.geometry
    head = ["rank", "team,member", "group,position", "bundles", "from", "to", "next", "work"]
    rows = [head]
    for rank in range(geometry.size):
        place, steps = geometry.place(rank), plan.key_steps(rank)
        ring = geometry.ring(place.group, place.member)
        after = ring[(place.position + 1) % len(ring)]
        work = " ".join(_shape(step) for step in steps)
        rows.append(
            [
                str(rank),
                f"{geometry.team_of(rank)},{place.member}",
                f"{place.group},{place.position}",
                ",".join(str(step.bundle) for step in steps),
                _other(geometry.source(rank), rank),
                _other(geometry.destination(rank), rank),
                "-" if after == rank else str(after),
                work,
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _other(rank: int, own: int) -> str:
    return "self" if rank == own else str(rank)


def _shape(step: Step) -> str:
    """The tiles of a step in a few letters: F full, C causal, R causal turned round."""
    letters = [tile.mode[0].upper() for tile in step.tiles]
    if not letters:
        return "-"
    parts = [f"{letters.count(letter) if letters.count(letter) > 1 else ''}{letter}" for letter in "CFR"]
    return "+".join(part for part, letter in zip(parts, "CFR", strict=True) if letter in letters)


def svg(plan: Plan, title: str | None = None) -> str:
    """The picture, a file of its own."""
    geometry = plan.geometry
    columns = sorted({step.hop for rank in range(geometry.size) for step in plan.key_steps(rank)})
    title = title or (
        f"{geometry.size} ranks, teams of {geometry.team_size}, bundles of {geometry.bundle_size}: "
        f"{len(columns)} of {geometry.ring_length} steps"
    )
    body = [_text(20, 26, title, "title"), *_explained(plan)]
    for index, hop in enumerate(columns):
        words = "first" if hop == 0 else f"after {hop} hop{'s' if hop > 1 else ''}"
        body.append(_text(_x(index) + CELL / 2, TOP - 8, words, "soft", "middle"))
    y = TOP
    for team in range(geometry.num_teams):
        for rank in geometry.team(team):
            body += _row(plan, rank, columns, y)
            y += CELL + LABEL + GAP
        y += TEAM_GAP
    width = max(_x(len(columns)) + LEGEND, 640)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sched wf" role="img" width="{width:.0f}" '
        f'height="{y + 6:.0f}" viewBox="0 0 {width:.0f} {y + 6:.0f}">\n<style>\n{STYLE}{MORE_STYLE}</style>\n'
        f'<desc>{escape(title)}</desc>\n<rect class="card" width="100%" height="100%"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _explained(plan: Plan) -> list[str]:
    layout, mask = plan.layout, plan.mask
    seen = "all keys"
    if mask.left is not None or mask.right is not None:
        back = "all keys before" if mask.left is None else f"{mask.left} keys before"
        ahead = "no later one" if mask.right == 0 else f"{mask.right if mask.right else 'all'} later ones"
        seen = f"{back} and {ahead}"
    documents = f" in {len(layout.documents)} documents" if len(layout.documents) > 1 else ""
    lines = (
        f"{layout.length} tokens{documents}, {layout.split} split; a query sees {seen}",
        "a cell: rows of the team downwards, keys of the bundle to the right",
    )
    return [_text(20, 45 + 16 * number, line, "soft") for number, line in enumerate(lines)]


def _row(plan: Plan, rank: int, columns: list[int], y: float) -> list[str]:
    geometry, place = plan.geometry, plan.geometry.place(rank)
    body = [
        _text(LEFT - 14, y + LABEL + 16, f"rank {rank}", "", "end"),
        _text(
            LEFT - 14, y + LABEL + 31, f"team {geometry.team_of(rank)}, member {place.member}", "soft", "end"
        ),
    ]
    steps = {step.hop: step for step in plan.key_steps(rank)}
    for index, hop in enumerate(columns):
        if hop in steps:
            body += _cell(plan, rank, steps[hop], _x(index), y)
        if index and hop in steps:
            middle, start = y + LABEL + CELL / 2, _x(index) - GAP
            body.append(f'<path class="ring" d="M{start + 1:.1f} {middle:.1f}h{GAP - 2}m-3 -3l3 3l-3 3"/>')
    work = plan.work()
    load = f"{work[rank] * len(work) / max(sum(work), 1.0):.2f} of the mean work"
    body.append(_text(_x(len(columns)) + 6, y + LABEL + 16, load, ""))
    source, target = geometry.source(rank), geometry.destination(rank)
    if geometry.bundle_size > 1:
        words = f"first bundle from {_other(source, rank)}, own goes to {_other(target, rank)}"
        body.append(_text(_x(len(columns)) + 6, y + LABEL + 31, words, "soft"))
    return body


def _cell(plan: Plan, rank: int, step: Step, x: float, y: float) -> list[str]:
    geometry = plan.geometry
    owners = geometry.bundle(step.bundle)
    colour = _colour(step.bundle, geometry.num_bundles)
    rows = geometry.team_size * plan.rows
    keys = geometry.bundle_size * plan.rows
    share = 100 * step.area / max(sum(plan.work()), 1.0)
    hover = f"bundle {step.bundle}: keys of ranks {', '.join(map(str, owners))}; {share:.2g} % of all work"
    top = y + LABEL
    return [
        _text(x + CELL / 2, y + 10, f"bundle {step.bundle}", "soft", "middle"),
        f'<rect class="score" x="{x:.1f}" y="{top:.1f}" width="{CELL}" height="{CELL}">'
        f"<title>{escape(hover)}</title></rect>",
        *_tiles(step.tiles, x, top, CELL / keys, CELL / rows, colour),
    ]


def _tiles(
    tiles: Iterable[Tile], x: float, y: float, per_key: float, per_row: float, colour: str
) -> list[str]:
    found = []
    for tile in tiles:
        left, right = x + tile.k0 * per_key, x + tile.k1 * per_key
        top, bottom = y + tile.q0 * per_row, y + tile.q1 * per_row
        corners = {
            "full": [(left, top), (right, top), (right, bottom), (left, bottom)],
            "causal": [(left, top), (right, bottom), (left, bottom)],
            "reverse": [(left, top), (right, top), (right, bottom)],
        }[tile.mode]
        points = " ".join(f"{a:.2f},{b:.2f}" for a, b in corners)
        hover = f"{tile.mode}: rows {tile.q0} to {tile.q1 - 1}, keys {tile.k0} to {tile.k1 - 1}"
        found.append(
            f'<polygon class="tile" fill="{colour}" points="{points}"><title>{hover}</title></polygon>'
        )
    return found


def _colour(bundle: int, of: int) -> str:
    red, green, blue = colorsys.hls_to_rgb(bundle / max(of, 1), 0.62, 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _x(column: int) -> float:
    return LEFT + column * (CELL + GAP)


def _text(x: float, y: float, text: str, css: str, anchor: str = "start") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
