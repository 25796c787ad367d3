"""What the pages of the tools have in common: one self-contained HTML document each, and how it is written.

No script, no font and no image comes from anywhere else.
"""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

_DOCUMENT = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<main>
<header>
<h1>{title}</h1>
{notes}
</header>
{body}
<footer>{footer}</footer>
</main>
</body>
</html>
"""


def style() -> str:
    """The style sheet of all pages."""
    return (files("megatron_ext.tools") / "compare.css").read_text(encoding="utf-8")


def document(title: str, body: str, footer: str, *, notes: Sequence[str] = (), more_style: str = "") -> str:
    """A page. `title`, `footer` and `notes` (under the title) are plain text, `body` is HTML."""
    return _DOCUMENT.format(
        title=escape(title),
        style=style() + more_style,
        notes="\n".join(f'<p class="note">{escape(note)}</p>' for note in notes),
        body=body,
        footer=escape(footer),
    )


def numbers(rows: Sequence[Sequence[str]], total: str) -> str:
    """A table of numbers: a header, whose cells may have several lines, then rows that start with a name.

    A line parts the row called `total` from those above it.
    """
    titles = (escape(cell).replace("\n", "<br>") for cell in rows[0])
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = []
    for row in rows[1:]:
        parting = ' class="parting"' if row[0] == total else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        body.append(f'<tr{parting}><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    inside = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="card"><table class="numbers">{inside}</table></div>'


def write_all(folder: Path, contents: Mapping[str, str], error: type[ValueError]) -> None:
    """Write files by name into `folder`, which is made; raises `error` with what to do when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_text(content, encoding="utf-8")
    except OSError as reason:
        raise error(
            f"Cannot write to {folder}: {reason.strerror}. Give another folder as --output."
        ) from reason
