"""The picture and its tables as one HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megatron_ext import __version__
from megatron_ext.tools.page import document, numbers

_STYLE = """
main { max-width: none; }
section, header { max-width: 1280px; }
thead th { vertical-align: bottom; }
figure.schedule { overflow-x: auto; padding: 0; }
figure.schedule svg { display: block; }
"""


@dataclass(frozen=True)
class Table:
    """`rows` under the first of them, the header, whose cells may have several lines; `about` explains."""

    title: str
    rows: Sequence[Sequence[str]]
    about: str = ""


def page(
    title: str, picture: str, notes: Sequence[str], tables: Sequence[Table], texts: Sequence[tuple[str, str]]
) -> str:
    """The page. `texts` are (heading, text) of long plain text that is folded up."""
    parts = [f'<figure class="schedule">\n{picture}\n</figure>']
    parts += [_section(table) for table in tables]
    parts += [_folded(*text) for text in texts]
    footer = f"megatron-ext {__version__} trace. Hover over a block for its exact times."
    return document(title, "\n".join(parts), footer, notes=notes, more_style=_STYLE)


def _section(table: Table) -> str:
    about = f'<p class="note">{escape(table.about)}</p>' if table.about else ""
    return f"<section><h2>{escape(table.title)}</h2>{numbers(table.rows, 'all')}{about}</section>"


def _folded(heading: str, text: str) -> str:
    inside = f"<summary>{escape(heading)}</summary><pre>{escape(text)}</pre>"
    return f'<section><div class="card"><details>{inside}</details></div></section>'
