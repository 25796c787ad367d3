"""Measured memory as one self-contained HTML page: no script, no font, no image from anywhere else."""

from html import escape
from importlib.resources import files
from string import Template

from megatron_ext import __version__
from megatron_ext.tools import compare_svg as svg
from megatron_ext.tools import memory_svg
from megatron_ext.tools.memory_read import RunMemory
from megatron_ext.tools.memory_text import heading, notes, tables

_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
$style
</style>
</head>
<body>
<main>
<header>
<h1>$title</h1>
<p class="note">Bytes of live tensors by category, at the moment of each rank's highest total. $words</p>
</header>
<section class="charts" aria-label="Charts">
$charts
</section>
$tables
<footer>$footer</footer>
</main>
</body>
</html>
""")


def style() -> str:
    """The style sheet that the comparison page has, too."""
    return (files("megatron_ext.tools") / "compare.css").read_text(encoding="utf-8")


def _figure(memory: RunMemory, most: int) -> str:
    samples = [
        f"<span>{svg.swatch(i, 'bar')}{escape(name)}</span>" for i, name in enumerate(memory.categories)
    ]
    pale = "Beside each measured bar, pale: planned." if memory.planned else f"Step {memory.step}."
    return (
        f"<figure><h3>{escape(memory.run.name)}</h3><p>{pale}</p>"
        f'<div class="legend">{"".join(samples)}</div>{memory_svg.chart(memory, most)}</figure>'
    )


def _table(rows: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = []
    for row in rows[1:]:
        parting = ' class="parting"' if row[0] == "max" else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        body.append(f'<tr{parting}><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    inside = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="card"><table class="numbers">{inside}</table></div>'


def _section(memory: RunMemory) -> str:
    parts = [f"<section><h2>{escape(heading(memory))}</h2>"]
    for name, rows in tables(memory, memory.planned):
        parts.append(f"<h3>{escape(name)}</h3>{_table(rows)}")
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes(memory)]
    return "\n".join([*parts, "</section>"])


def as_html(memories: list[RunMemory]) -> str:
    """The page's text."""
    most = memory_svg.highest(memories)
    return _PAGE.substitute(
        title=escape("Memory of " + ", ".join(memory.run.name for memory in memories)),
        style=style() + memory_svg.STYLE,
        words="All runs have one scale." if len(memories) > 1 else "",
        charts="\n".join(_figure(memory, most) for memory in memories),
        tables="\n".join(_section(memory) for memory in memories),
        footer=f"megatron-ext {escape(__version__)} memory. Exact bytes are in memory.csv.",
    )
