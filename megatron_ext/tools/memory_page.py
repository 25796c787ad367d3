"""Measured memory as one HTML page."""

from html import escape

from megatron_ext import __version__
from megatron_ext.tools import compare_svg as svg
from megatron_ext.tools import memory_svg, page
from megatron_ext.tools.memory_read import RunMemory
from megatron_ext.tools.memory_text import heading, notes, tables


def _figure(memory: RunMemory, most: int) -> str:
    samples = [
        f"<span>{svg.swatch(i, 'bar')}{escape(name)}</span>" for i, name in enumerate(memory.categories)
    ]
    pale = "Beside each measured bar, pale: planned." if memory.planned else f"Step {memory.step}."
    return (
        f"<figure><h3>{escape(memory.run.name)}</h3><p>{pale}</p>"
        f'<div class="legend">{"".join(samples)}</div>{memory_svg.chart(memory, most)}</figure>'
    )


def _section(memory: RunMemory) -> str:
    parts = [f"<section><h2>{escape(heading(memory))}</h2>"]
    for name, rows in tables(memory, memory.planned):
        parts.append(f"<h3>{escape(name)}</h3>{page.numbers(rows, 'max')}")
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes(memory)]
    return "\n".join([*parts, "</section>"])


def as_html(memories: list[RunMemory]) -> str:
    """The page's text."""
    most = memory_svg.highest(memories)
    words = "All runs have one scale." if len(memories) > 1 else ""
    charts = "\n".join(_figure(memory, most) for memory in memories)
    body = f'<section class="charts" aria-label="Charts">\n{charts}\n</section>\n'
    return page.document(
        "Memory of " + ", ".join(memory.run.name for memory in memories),
        body + "\n".join(_section(memory) for memory in memories),
        f"megatron-ext {__version__} memory. Exact bytes are in memory.csv.",
        notes=[
            f"Bytes of live tensors by category, at the moment of each rank's highest total. {words}".strip()
        ],
        more_style=memory_svg.STYLE,
    )
