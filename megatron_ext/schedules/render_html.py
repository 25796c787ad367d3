"""The picture and its tables as one self-contained HTML page: no script, no font, no image from anywhere
else."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

from megatron_ext import __version__

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
main { max-width: none; }
section, header { max-width: 1280px; }
thead th { vertical-align: bottom; }
figure.schedule { overflow-x: auto; padding: 0; }
figure.schedule svg { display: block; }
</style>
</head>
<body>
<main>
<header>
<h1>$title</h1>
$notes
</header>
<figure class="schedule">
$picture
</figure>
$tables
$details
<footer>$footer</footer>
</main>
</body>
</html>
""")


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
    style = (files("megatron_ext.tools") / "compare.css").read_text(encoding="utf-8")
    return _PAGE.substitute(
        title=escape(title),
        style=style,
        notes="\n".join(f'<p class="note">{escape(note)}</p>' for note in notes),
        picture=picture,
        tables="\n".join(map(_table, tables)),
        details="\n".join(_folded(*text) for text in texts),
        footer=f"megatron-ext {escape(__version__)} trace. Hover over a block for its exact times.",
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_lines(cell)}</th>' for cell in table.rows[0])
    body = []
    for row in table.rows[1:]:
        parting = ' class="parting"' if row[0] == "all" else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        body.append(f'<tr{parting}><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    inside = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    about = f'<p class="note">{escape(table.about)}</p>' if table.about else ""
    card = f'<div class="card"><table class="numbers">{inside}</table></div>'
    return f"<section><h2>{escape(table.title)}</h2>{card}{about}</section>"


def _lines(text: str) -> str:
    return "<br>".join(map(escape, text.split("\n")))


def _folded(heading: str, text: str) -> str:
    inside = f"<summary>{escape(heading)}</summary><pre>{escape(text)}</pre>"
    return f'<section><div class="card"><details>{inside}</details></div></section>'
