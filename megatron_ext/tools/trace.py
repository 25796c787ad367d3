"""megatron-ext trace: a pipeline schedule in the terminal and as pictures, planned or measured.

Prints the grid and tables; writes schedule.svg, schedule.html and schedule.json (a Chrome trace), and of a
measured step its costs.json. Needs neither torch nor megatron.
"""

import os
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.problems import UserError, render
from megatron_ext.schedules import render_text
from megatron_ext.schedules.build import build, build_listed
from megatron_ext.schedules.check import check
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lower import lower
from megatron_ext.schedules.render_chrome import chrome_trace
from megatron_ext.schedules.render_html import Table, page
from megatron_ext.schedules.render_panel import Panel, Units, parse_window, units_of
from megatron_ext.schedules.render_svg import picture
from megatron_ext.schedules.simulate import simulate
from megatron_ext.tools import trace_report
from megatron_ext.tools.page import write_all
from megatron_ext.tools.trace_args import Planned, Request, parse
from megatron_ext.tools.trace_read import measured_costs, read_measured

EXIT_OK, EXIT_BAD_INPUT = 0, 2
COLUMNS_OF_FILE = 160  # of the grid, where the output is no terminal
PROSE = 110  # columns of text, at most


@dataclass(frozen=True)
class Shown:
    """What is printed and drawn: panels from top to bottom, notes about them, and costs to be written."""

    panels: list[Panel]
    units: Units
    notes: list[str]
    costs: Costs | None = None


def planned(request: Planned, costs: Costs | None) -> Shown:
    """A schedule, checked and simulated."""
    given = costs or trace_report.unit_costs(request.vocab)
    options = {
        "pipeline": request.pipeline,
        "vocab": request.vocab,
        "forward_only": request.forward_only,
        "chunks": request.chunks,
    }
    if request.order == "list":
        schedule = build_listed(request.p, request.m, costs=given, **options)
    else:
        schedule = build(request.p, request.m, **options)
    program = lower(schedule, overlap=request.overlap)
    check(program)
    panels = [Panel("planned", simulate(program, given))]
    words = "as in the --costs file" if costs else trace_report.unit_words(request.vocab)
    notes = [f"Times: {words}. Order: {request.order}."]
    return Shown(panels, units_of(panels, seconds=costs is not None), notes)


def measured(folder: Path, replica: int, costs: Costs | None) -> Shown:
    """A measured step below the simulation of its schedule."""
    found = read_measured(folder, replica)
    mean = measured_costs(found.panel.timeline)
    try:
        plan = simulate(found.program, costs or mean)
    except ValueError as error:
        which = "--costs: " if costs else f"{folder}: measured "
        raise UserError(f"{which}{error}. Give costs of this run's stages.") from error
    panels = [Panel("planned", plan), found.panel]
    words = "the --costs file" if costs else "its own mean times of passes and transfers"
    return Shown(panels, units_of(panels, seconds=True), trace_report.measured_notes(found, words), mean)


def write(shown: Shown, request: Request, tables: list[Table]) -> list[Path]:
    """Write the pictures, the page and the Chrome trace; returns their paths."""
    title = trace_report.title(shown.panels, shown.units)
    window = parse_window(request.window, shown.panels, shown.units) if request.window else None
    program = shown.panels[0].timeline.program
    lists = [
        ("Passes of each rank in order", program.schedule.text),
        ("With launches of transfers", program.text),
    ]
    inside = picture(shown.panels, shown.units, title, window, titled=False)
    contents = {
        "schedule.svg": picture(shown.panels, shown.units, title, window),
        "schedule.html": page(title, inside, shown.notes, tables, lists),
        "schedule.json": chrome_trace(shown.panels, shown.units),
    }
    if shown.costs is not None:
        contents["costs.json"] = shown.costs.to_json() + "\n"
    write_all(request.out, contents, UserError)
    return [request.out / name for name in contents]


def report(shown: Shown, request: Request, tables: list[Table]) -> str:
    """The text for the terminal."""
    terminal = sys.stdout.isatty()
    width = request.width or (shutil.get_terminal_size().columns if terminal else COLUMNS_OF_FILE)
    window = parse_window(request.window, shown.panels, shown.units) if request.window else None
    colour = terminal and "NO_COLOR" not in os.environ
    parts = ["\n".join([trace_report.title(shown.panels, shown.units), *shown.notes])]
    for panel in shown.panels:
        grid = render_text.grid(panel, shown.units, width=width, window=window, colour=colour)
        parts.append(f"{panel.name}\n{grid}" if len(shown.panels) > 1 else grid)
    if request.lists:
        parts.append(render_text.lists(shown.panels[0].timeline.program.ranks, width))
    for table in tables:
        about = textwrap.fill(table.about, min(width, PROSE))
        parts.append(f"{render_text.table(table.rows)}\n{about}".rstrip())
    return "\n\n".join(parts)


def main(argv: list[str]) -> int:
    """Run the tool; returns 0, or 2 on bad input."""
    try:
        request = parse(argv)
        if request.planned is not None:
            shown = planned(request.planned, request.costs)
        else:
            assert request.measured is not None
            shown = measured(request.measured, request.replica, request.costs)
        tables = trace_report.tables(shown.panels, shown.units)
        paths = write(shown, request, tables)
        print(report(shown, request, tables))
    except ValueError as error:
        problems = error.problems if isinstance(error, UserError) else [str(error)]
        print(render(problems), file=sys.stderr)
        return EXIT_BAD_INPUT
    print("\nwritten: " + " ".join(map(str, paths)))
    return EXIT_OK
