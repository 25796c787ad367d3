"""Tables for README and docs, generated from the feature table."""

from collections.abc import Sequence

from megatron_ext.compositions import STOCK_OPTIONS, UNTESTED, WORKS
from megatron_ext.features import FEATURES, Feature, composition


def feature_table(table: Sequence[Feature] = FEATURES) -> str:
    """The features as markdown: what each does, and whether it is there."""
    rows = [_row("feature", "what it does", "status"), _row("---", "---", "---")]
    for feature in table:
        title = f"[{feature.title}]({feature.doc})" if feature.doc else feature.title
        rows.append(_row(title, feature.what, feature.status))
    return "\n".join(rows) + "\n"


def composes_table(table: Sequence[Feature] = FEATURES) -> str:
    """The composes-with table as markdown: stock's options and features down, `--cpu` and features across.

    Reasons for a refusal become numbered notes under the table.
    """
    notes: list[str] = []

    def cell(verdict: str) -> str:
        if verdict in (WORKS, UNTESTED):
            return "yes" if verdict == WORKS else "untested"
        if verdict not in notes:
            notes.append(verdict)
        return f"no [{notes.index(verdict) + 1}]"

    def pair(other: Feature, feature: Feature) -> str:
        if other is feature:
            return "-"
        if "planned" in (other.status, feature.status):
            return "planned"
        return cell(composition(feature, other.name, table))

    def with_stock(feature: Feature, name: str) -> str:
        return "planned" if feature.status == "planned" else cell(composition(feature, name, table))

    lines = [
        _row("", "stock with `--cpu`", *(f.title for f in table)),
        _row("---", *("---" for _ in range(len(table) + 1))),
    ]
    for option in STOCK_OPTIONS:
        lines.append(_row(option.title, cell(option.cpu), *(with_stock(f, option.name) for f in table)))
    for other in table:
        on_cpu = "planned" if other.status == "planned" else cell(other.cpu)
        lines.append(_row(other.title, on_cpu, *(pair(other, f) for f in table)))
    if notes:
        lines += ["", *(f"[{number}] {note}  " for number, note in enumerate(notes, start=1))]
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
