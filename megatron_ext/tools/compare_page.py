"""The comparison as one self-contained HTML page: no script, no font, no image from anywhere else."""

import math
import shlex
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from string import Template

from megatron_ext import __version__
from megatron_ext.tools import compare_svg as svg
from megatron_ext.tools import page
from megatron_ext.tools.compare_args import differing_arguments
from megatron_ext.tools.compare_read import as_number, step_range
from megatron_ext.tools.compare_stats import Figures
from megatron_ext.tools.compare_text import (
    LOSS_ROWS,
    Row,
    loss_rows,
    summary_rows,
    traffic_keys,
    traffic_words,
)
from megatron_ext.tools.compare_units import (
    byte_unit,
    human_bytes,
    human_difference,
    human_loss,
    human_time,
    time_unit,
)
from megatron_ext.tools.compare_verdict import Comparison

MOST_COLUMNS = 96  # bars of the memory chart; more ranks than that share bars


def _lines(comparison: Comparison, metric: str, scale: float = 1.0) -> list[svg.Line]:
    return [
        svg.Line(of.run.name, i, [(s, v / scale) for s, v in of.series[metric].items() if v is not None])
        for i, of in enumerate(comparison.figures)
    ]


def _figure(heading: str, caption: str, chart: str, legend: str = "") -> str:
    return f"<figure><h3>{escape(heading)}</h3><p>{escape(caption)}</p>{legend}{chart}</figure>"


def _empty(text: str) -> str:
    return f'<div class="empty">{escape(text)}</div>'


def _legend(comparison: Comparison, kind: svg.Kind, first: int = 0) -> str:
    """Names with samples of their lines or bars, from run `first` on."""
    spans = [
        f"<span>{svg.swatch(i, kind)}{escape(of.run.name)}</span>"
        for i, of in enumerate(comparison.figures)
        if i >= first
    ]
    return f'<div class="legend">{"".join(spans)}</div>'


def _loss_chart(comparison: Comparison) -> str:
    chart = svg.line_chart("Loss over steps", "loss", _lines(comparison, "loss"), human_loss)
    caption = f"{comparison.figures[0].run.name} is the reference; runs that agree lie on its line."
    return _figure("Loss", caption, chart, _legend(comparison, "line"))


def _difference_chart(comparison: Comparison) -> str:
    heading = "Loss difference from the reference"
    lines = [
        svg.Line(verdict.name, i, list(verdict.differences["loss"].values.items()))
        for i, verdict in enumerate(comparison.verdicts, 1)
    ]
    values = [value for line in lines for _, value in line.points]
    if not values:
        return _figure(heading, "Relative, at each step.", _empty("no step has a loss on both sides"))
    if not any(values):
        nan = any(verdict.differences["loss"].both_nan for verdict in comparison.verdicts)
        nothing = f"0{', or NaN on both sides,' if nan else ''} at every step that was compared"
        return _figure(heading, "Relative, at each step.", _empty(nothing))
    limit = comparison.tolerance.of("loss")
    chart = svg.log_chart(heading, "relative difference", lines, human_difference, limit)
    caption = "Relative, at each step, on a logarithmic axis; 0 means equal bit for bit."
    return _figure(heading, caption, chart, _legend(comparison, "thin line", first=1))


def _grad_norm_chart(comparison: Comparison) -> str:
    lines = [line for line in _lines(comparison, "grad_norm") if line.points]
    if not lines:
        return _figure("Gradient norm", "Of all parameters.", _empty("not recorded"))
    chart = svg.line_chart("Gradient norm over steps", "norm", lines, human_loss)
    return _figure("Gradient norm", "Of all parameters, before clipping.", chart, _legend(comparison, "line"))


def _time_chart(comparison: Comparison) -> str:
    timed = [value for of in comparison.figures for value in of.timed_values("step_time_s")]
    every = [
        v for of in comparison.figures for v in of.series["step_time_s"].values() if v and math.isfinite(v)
    ]
    if not every:
        return _figure("Step time", "Of the slowest rank.", _empty("not recorded"))
    # One slow first step must not squeeze all others into a flat line.
    clip = max(timed) * 1.3 if timed else max(every)
    size, unit = time_unit(clip)
    first = min(of.run.steps[0] for of in comparison.figures)
    shade = (first - 0.5, first + comparison.warmup - 0.5, "warm-up") if comparison.warmup else None
    chart = svg.line_chart(
        "Step time",
        unit,
        [line for line in _lines(comparison, "step_time_s", size) if line.points],
        lambda value: human_time(value * size),
        from_zero=True,
        clip=clip / size,
        shade=shade,
    )
    beyond = " ▲ is above the chart; hover for its value." if max(every) > clip else ""
    caption = f"Of the slowest rank at each step.{beyond}"
    return _figure("Step time", caption, chart, _legend(comparison, "line"))


def _memory_block(of: Figures, colour: int, most: int, size: float) -> list[svg.Bar]:
    """A bar per rank, or per stretch of neighbouring ranks (its highest) when there are many."""
    stretch = math.ceil(len(of.memory) / most)
    bars = []
    for rank in range(0, len(of.memory), stretch):
        values = [value for value in of.memory[rank : rank + stretch] if value is not None]
        if not values:
            continue
        last = min(rank + stretch, len(of.memory)) - 1
        which = f"rank {rank}" if rank == last else f"highest of ranks {rank}-{last}"
        text = f"{max(values) / size:.3g}"
        bars.append(
            svg.Bar(
                colour,
                max(values) / size,
                text,
                f"{of.run.name}, {which}: {human_bytes(max(values))}",
                str(rank),
            )
        )
    return bars


def _memory_chart(comparison: Comparison) -> str:
    every = [value for of in comparison.figures for value in of.memory if value is not None]
    if not every:
        return _figure("Peak memory per rank", "Over all steps.", _empty("not recorded"))
    size, unit = byte_unit(max(every))
    most = max(1, MOST_COLUMNS // len(comparison.figures))
    blocks = [_memory_block(of, i, most, size) for i, of in enumerate(comparison.figures)]
    chart = svg.columns("Peak memory per rank", unit, blocks, "rank")
    caption = "Over all steps; one block of bars per run."
    return _figure("Peak memory per rank", caption, chart, _legend(comparison, "bar"))


def _traffic_chart(comparison: Comparison) -> str:
    heading = "Bytes sent per step"
    groups = []
    for key in traffic_keys(comparison):
        bars = []
        for i, of in enumerate(comparison.figures):
            sent = of.bytes_per_step(key)
            hover = f"{of.run.name}, {traffic_words(key)}: {human_bytes(sent)} per step"
            if sent is not None and key in of.traffic:
                hover += f" ({sent:,} bytes in {of.calls_per_step(key):,} calls)"
            bars.append(svg.Bar(i, sent or 0.0, human_bytes(sent), hover))
        groups.append((traffic_words(key), bars))
    groups.sort(key=lambda group: -max(bar.value for bar in group[1]))
    chart = svg.rows(heading, groups) if groups else _empty("no communication was counted")
    caption = "By kind and group, all ranks together, mean of the steps after warm-up."
    return _figure(heading, caption, chart, _legend(comparison, "bar") if groups else "")


def _table(header: list[str], body: list[Row], css: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    rows = []
    for i, row in enumerate(body):
        parting = ' class="parting"' if i and body[i - 1].setup and not row.setup else ""
        inner = ' class="inner"' if row.label.startswith(" ") else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
        rows.append(f'<tr{parting}><th scope="row"{inner}>{escape(row.label.strip())}</th>{cells}</tr>')
    head = f"<thead><tr>{head}</tr></thead>" if header else ""
    table = f"{head}<tbody>{''.join(rows)}</tbody>"
    return f'<div class="card"><table{css}>{table}</table></div>'


def _banner(comparison: Comparison) -> str:
    nan = any(of.both_nan for verdict in comparison.verdicts for of in verdict.differences.values())
    css, symbol = ("bad", "✕") if not comparison.agrees else ("warn", "!") if nan else ("good", "✓")
    against = escape(comparison.figures[0].run.name)
    items = "".join(
        f"<li><b>{escape(verdict.name)}</b> against {against}: {escape('; '.join(verdict.sentences))}.</li>"
        for verdict in comparison.verdicts
    )
    return _box(css, f"{symbol} {comparison.headline}", items)


def _box(css: str, heading: str, items: str) -> str:
    return f'<div class="banner {css}"><strong>{escape(heading)}</strong><ul>{items}</ul></div>'


def _warnings(comparison: Comparison) -> str:
    if not comparison.warnings:
        return ""
    items = "".join(f"<li>{escape(warning)}</li>" for warning in comparison.warnings)
    return _box("warn", "Warnings", items)


def _details(of: Figures) -> str:
    start = of.run.start
    when = as_number(start.get("time"), f"{of.run.folder}: `time`")
    started = f"{datetime.fromtimestamp(when, UTC):%Y-%m-%d %H:%M:%S} UTC" if when is not None else "unknown"
    patches = [
        f"{patch.get('target')} ({patch.get('kind')}, {patch.get('feature')})"
        for patch in start.get("patches") or []
    ]
    facts = [
        Row("record", [str(of.run.folder)]),
        Row("last started", [f"{started} on {start.get('hostname', 'unknown')}"]),
        Row("ended", [of.run.status]),
        *(Row(f"path of {name}", [str(path)]) for name, path in (start.get("paths") or {}).items()),
        Row("patches", ["; ".join(patches) or "none"]),
    ]
    command = shlex.join(str(word) for word in start.get("argv") or [])
    return (
        f"<details><summary>{escape(of.run.name)}</summary><pre>{escape(command)}</pre>"
        f"{_table([], facts)}</details>"
    )


def _arguments(comparison: Comparison, names: list[str]) -> str:
    differing = differing_arguments(comparison.figures)
    if not differing:
        return '<p class="note">None, apart from the record folder.</p>'
    return _table(["", *names], [Row(argument.name, argument.values) for argument in differing])


def as_html(comparison: Comparison) -> str:
    """The page's text."""
    names = [of.run.name for of in comparison.figures]
    header, losses = loss_rows(comparison)
    charts = (_loss_chart, _difference_chart, _time_chart, _memory_chart, _traffic_chart, _grad_norm_chart)
    tolerance = comparison.tolerance
    asked = (
        "losses and gradient norms equal bit for bit"
        if tolerance.bitwise
        else f"losses equal to {tolerance.loss:g} relative, gradient norms to {tolerance.grad_norm:g}"
    )
    template = (files("megatron_ext.tools") / "compare.html").read_text(encoding="utf-8")
    body = Template(template).substitute(
        banner=_banner(comparison),
        warnings=_warnings(comparison),
        charts="\n".join(chart(comparison) for chart in charts),
        summary=_table(["", *names], summary_rows(comparison)),
        summary_note=escape(
            f"Rates and bytes per step are over the steps after the first {comparison.warmup} of each start; "
            "bytes are of all ranks together. In brackets: the ratio to the reference."
        ),
        losses=_table(header, [Row(row[0], row[1:]) for row in losses], ' class="numbers"'),
        losses_note=escape(
            f"{'All' if len(comparison.steps) <= LOSS_ROWS else f'{LOSS_ROWS} of the'} "
            f"{len(comparison.steps)} compared steps ({step_range(comparison.steps)}). Exact values of all "
            "steps are in compare.csv and compare.json."
        ),
        arguments=_arguments(comparison, names),
        details=f'<div class="card">{"".join(_details(of) for of in comparison.figures)}</div>',
    )
    return page.document(
        (" and ".join(names) if len(names) == 2 else ", ".join(names)) + " compared",
        body,
        f"megatron-ext {__version__} compare. Agreement asked for: {asked}.",
    )
