"""The comparison as compare.json (everything, nested) and compare.csv (long: run,step,metric,value)."""

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from megatron_ext.tools.compare_args import differing_arguments
from megatron_ext.tools.compare_read import plain_number
from megatron_ext.tools.compare_stats import Figures
from megatron_ext.tools.compare_verdict import Comparison, Verdict

SCHEMA = 1


def _differences(verdict: Verdict) -> dict[str, Any]:
    return {
        metric: {
            "agrees": found.agrees,
            "bit_for_bit": found.bitwise,
            "largest_relative_difference": plain_number(found.largest),
            "step": found.step,
            "tolerance": found.tolerance,
            "both_nan_steps": found.both_nan,
            "one_sided_steps": found.one_sided,
            "per_step": {str(step): plain_number(value) for step, value in found.values.items()},
        }
        for metric, found in verdict.differences.items()
    }


def _traffic(of: Figures) -> list[dict[str, Any]]:
    return [
        {
            "feature": key[0],
            "kind": key[1],
            "group": key[2],
            "bytes_per_step": of.bytes_per_step(key),
            "calls_per_step": of.calls_per_step(key),
            "total_bytes": sum(traffic.bytes.values()),
            "total_calls": sum(traffic.calls.values()),
        }
        for key, traffic in of.traffic.items()
    ]


def _run(of: Figures, verdict: Verdict | None) -> dict[str, Any]:
    start = of.run.start
    step, loss = of.final_loss
    spread = of.spread("step_time_s")
    return {
        "name": of.run.name,
        "folder": str(of.run.folder),
        "status": of.run.status,
        "notes": of.run.notes,
        "world_size": of.run.world_size,
        **{key: start.get(key) for key in ("layout", "features", "versions", "device", "argv")},
        "steps": of.run.steps,
        "timed_steps": of.timed,
        "skipped_steps": of.skipped,
        "final_loss": plain_number(loss),
        "final_loss_step": step,
        "tokens_per_s_median": of.median("tokens_per_s"),
        "step_time_s": {
            "median": of.median("step_time_s"),
            "p10": spread[0] if spread else None,
            "p90": spread[1] if spread else None,
        },
        "peak_memory_bytes_per_rank": [plain_number(value) for value in of.memory],
        "traffic": _traffic(of),
        "series": {
            metric: [plain_number(series[step]) for step in of.run.steps]
            for metric, series in of.series.items()
        },
        "against_reference": None
        if verdict is None
        else {
            "agrees": verdict.agrees,
            "sentences": verdict.sentences,
            "differences": _differences(verdict),
        },
    }


def as_json(comparison: Comparison) -> str:
    """The JSON file's text. Non-finite numbers are the strings "nan", "inf", "-inf", as in the record."""
    verdicts = [None, *comparison.verdicts]
    tolerance = comparison.tolerance
    content = {
        "schema": SCHEMA,
        "agrees": comparison.agrees,
        "headline": comparison.headline,
        "reference": comparison.figures[0].run.name,
        "tolerance": {
            "loss_relative": tolerance.of("loss"),
            "grad_norm_relative": tolerance.of("grad_norm"),
            "bitwise": tolerance.bitwise,
        },
        "warmup_steps": comparison.warmup,
        "compared_steps": comparison.steps,
        "warnings": comparison.warnings,
        "runs": [_run(of, v) for of, v in zip(comparison.figures, verdicts, strict=True)],
        "differing_arguments": {a.name: a.values for a in differing_arguments(comparison.figures)},
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _csv_rows(of: Figures, verdict: Verdict | None) -> Iterator[tuple[int, str, Any]]:
    """(step, metric, value) of everything that has a value at a step."""
    for metric, series in of.series.items():
        for step, value in series.items():
            yield step, metric, value
    for metric, found in (verdict.differences if verdict else {}).items():
        for step, value in found.values.items():
            yield step, f"{metric}_relative_difference", value
    for step in of.run.steps:
        yield step, "skipped", int(step in of.skipped)
    for rank, series in enumerate(of.memory_series):
        for step, value in series.items():
            yield step, f"peak_memory_bytes/rank-{rank:04d}", value
    for key, traffic in of.traffic.items():
        for step in of.run.steps:
            yield step, f"bytes/{'/'.join(key)}", traffic.bytes.get(step, 0)
            yield step, f"calls/{'/'.join(key)}", traffic.calls.get(step, 0)


def _exact(value: Any) -> str:
    """Shortest text that reads back as the same number; whole numbers (bytes, tokens) without a point."""
    return repr(int(value)) if isinstance(value, float) and value.is_integer() else repr(value)


def as_csv(comparison: Comparison) -> str:
    """The CSV file's text, in long format; steps without a value for a metric have no row."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "step", "metric", "value"])
    for of, verdict in zip(comparison.figures, [None, *comparison.verdicts], strict=True):
        for step, metric, value in _csv_rows(of, verdict):
            if value is not None:
                writer.writerow([of.run.name, step, metric, _exact(value)])
    return text.getvalue()
