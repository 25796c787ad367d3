"""The comparison as rows of words (the page shows the same rows), and as text for the terminal.

Everything here is ASCII, so that it survives any terminal and log collector.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.tools.compare_args import differing_arguments
from megatron_ext.tools.compare_read import step_range
from megatron_ext.tools.compare_stats import Figures, TrafficKey
from megatron_ext.tools.compare_units import (
    human_bytes,
    human_difference,
    human_loss,
    human_rate,
    human_time,
)
from megatron_ext.tools.compare_verdict import Comparison, Difference

LOSS_ROWS = 20


@dataclass(frozen=True)
class Row:
    """A line of the table: one cell per run. `setup` rows describe the run, the others measure it."""

    label: str
    cells: list[str]
    setup: bool = False


def layout_words(figures: Figures) -> str:
    """ "tp1 pp2 dp1 cp1 (2 ranks)", with further axes only where they are in use."""
    layout = figures.run.start.get("layout") or {}
    axes = [f"{axis}{layout.get(axis, '?')}" for axis in ("tp", "pp", "dp", "cp")]
    axes += [
        f"{axis}{size}"
        for axis, size in layout.items()
        if axis not in ("tp", "pp", "dp", "cp") and size not in (None, 1)
    ]
    ranks = figures.run.world_size
    return f"{' '.join(axes)} ({ranks} {'rank' if ranks == 1 else 'ranks'})"


def device_words(figures: Figures) -> str:
    """Device of the ranks, all that occur."""
    return ", ".join(sorted({str(record.starts[-1].get("device", "?")) for record in figures.run.ranks}))


def traffic_words(key: TrafficKey) -> str:
    """ "send over pp", with the feature in front if it is not stock Megatron's own communication."""
    feature, kind, group = key
    return f"{kind} over {group}" if feature == "stock" else f"{feature}: {kind} over {group}"


def traffic_keys(comparison: Comparison) -> list[TrafficKey]:
    """Every (feature, kind, group) that sent bytes in any run, stock first."""
    keys = {key for of in comparison.figures for key in of.traffic if of.bytes_per_step(key)}
    return sorted(keys, key=lambda key: (key[0] != "stock", key))


def _setup_rows(comparison: Comparison) -> list[Row]:
    all_figures = comparison.figures
    names = {name: None for of in all_figures for name in of.run.start.get("versions") or {}}
    rows = [
        Row("layout", [layout_words(of) for of in all_figures], setup=True),
        Row(
            "features", [", ".join(of.run.start.get("features") or []) or "none" for of in all_figures], True
        ),
        Row("device", [device_words(of) for of in all_figures], setup=True),
    ]
    for name in names:
        cells = [str((of.run.start.get("versions") or {}).get(name, "-")) for of in all_figures]
        rows.append(Row(name, cells, setup=True))
    return rows


def _difference_cell(found: Difference | None) -> str:
    if found is None or not found.compared:
        return "not compared"
    if found.bitwise:
        return "0 (bit for bit)"
    if found.one_sided:
        return f"one-sided at {step_range(found.one_sided)}"
    nan = f", NaN at {step_range(found.both_nan)}" if found.both_nan else ""
    return f"{human_difference(found.largest)} at step {found.step}{nan}"


def _difference_rows(comparison: Comparison) -> list[Row]:
    metrics = {metric: None for verdict in comparison.verdicts for metric in verdict.differences}
    rows = []
    for metric in metrics:
        cells = [_difference_cell(verdict.differences.get(metric)) for verdict in comparison.verdicts]
        label = {"loss": "largest loss difference", "grad_norm": "largest grad-norm difference"}
        rows.append(Row(label.get(metric, f"largest difference, {metric}"), ["reference", *cells]))
    return rows


def _against_reference(
    comparison: Comparison, read: Callable[[Figures], float | None], human: Callable[[float | None], str]
) -> list[str]:
    """Cells of a value, each with its ratio to the reference run's."""
    values = [read(of) for of in comparison.figures]
    cells = [human(values[0])]
    for value in values[1:]:
        ratio = f" ({value / values[0]:.2f}x)" if value is not None and values[0] else ""
        cells.append(human(value) + ratio)
    return cells


def _spread_cell(of: Figures) -> str:
    spread = of.spread("step_time_s")
    return f"{human_time(spread[0])} - {human_time(spread[1])}" if spread else "-"


def _measured_rows(comparison: Comparison) -> list[Row]:
    def over_ranks(choose: Callable[..., float]) -> Callable[[Figures], float | None]:
        return lambda of: choose((v for v in of.memory if v is not None), default=None)

    rows = [
        Row(
            "tokens/s, median",
            _against_reference(comparison, lambda of: of.median("tokens_per_s"), human_rate),
        ),
        Row(
            "step time, median",
            _against_reference(comparison, lambda of: of.median("step_time_s"), human_time),
        ),
        Row("step time, p10 - p90", [_spread_cell(of) for of in comparison.figures]),
        Row("peak memory, highest rank", _against_reference(comparison, over_ranks(max), human_bytes)),
        Row("peak memory, lowest rank", _against_reference(comparison, over_ranks(min), human_bytes)),
        Row(
            "sent per step", _against_reference(comparison, lambda of: of.total_bytes_per_step(), human_bytes)
        ),
    ]
    for key in traffic_keys(comparison):
        cells = [human_bytes(of.bytes_per_step(key)) for of in comparison.figures]
        rows.append(Row(f"  {traffic_words(key)}", cells))
    return rows


def _final_loss_cell(of: Figures) -> str:
    step, loss = of.final_loss
    return f"{human_loss(loss)} (step {step})"


def _skipped_cell(of: Figures) -> str:
    return f"{len(of.skipped)} (step {step_range(of.skipped)})" if of.skipped else "0"


def summary_rows(comparison: Comparison) -> list[Row]:
    """All rows of the summary table, setup first."""
    all_figures = comparison.figures
    return [
        *_setup_rows(comparison),
        Row("steps", [f"{len(of.run.steps)} ({step_range(of.run.steps)})" for of in all_figures]),
        Row("final loss", [_final_loss_cell(of) for of in all_figures]),
        *_difference_rows(comparison),
        *_measured_rows(comparison),
        Row("skipped steps", [_skipped_cell(of) for of in all_figures]),
    ]


def thinned(steps: list[int], most: int = LOSS_ROWS) -> list[int]:
    """At most `most` steps, evenly spread, with the first and the last."""
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def loss_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of the loss-per-step table: the losses, then each run's relative difference."""
    others = comparison.figures[1:]
    header = ["step", *(of.run.name for of in comparison.figures)]
    header += [f"difference, {of.run.name}" if len(others) > 1 else "difference" for of in others]
    rows = []
    for step in thinned(comparison.steps):
        row = [str(step), *(human_loss(of.series["loss"][step]) for of in comparison.figures)]
        row += [human_difference(v.differences["loss"].values.get(step)) for v in comparison.verdicts]
        rows.append(row)
    return header, rows


def grid(header: list[str], rows: list[list[str]], numeric: bool = False) -> str:
    """An aligned text table. `numeric`: right-aligned columns."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    align = str.rjust if numeric else str.ljust
    lines = [
        "  ".join(align(cell, w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def report(comparison: Comparison) -> str:
    """The whole text report."""
    names = [of.run.name for of in comparison.figures]
    rows = summary_rows(comparison)
    # What is the same everywhere is said once; the layout is always worth a row.
    same = [row for row in rows if row.setup and row.label != "layout" and len(set(row.cells)) == 1]
    shown = [row for row in rows if row not in same]
    after = (
        f"rates and bytes: steps after the first {comparison.warmup} of each start; bytes: all ranks together"
    )
    parts = [
        f"{len(names)} runs, reference {names[0]}; compared: step {step_range(comparison.steps)}",
        f"same in all: {', '.join(f'{row.label} {row.cells[0]}' for row in same)}" if same else "",
        "",
        grid(["", *names], [[row.label, *row.cells] for row in shown]),
        f"({after})",
        "",
        "Loss per step"
        + ("" if len(comparison.steps) <= LOSS_ROWS else " (thinned; all are in compare.csv)"),
        grid(*loss_rows(comparison), numeric=True),
        "",
    ]
    if differing := differing_arguments(comparison.figures):
        parts += ["Arguments that differ", grid(["", *names], [[a.name, *a.values] for a in differing]), ""]
    parts += [f"WARNING: {warning}" for warning in comparison.warnings]
    for verdict in comparison.verdicts:
        parts += [f"{verdict.name} against {names[0]}: {text}" for text in verdict.sentences]
    parts.append(f"{'AGREE' if comparison.agrees else 'DISAGREE'}: {comparison.headline}")
    return "\n".join(part for i, part in enumerate(parts) if part or i != 1)
