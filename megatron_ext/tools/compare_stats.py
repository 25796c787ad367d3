"""From the records of one run to its figures: series over steps, step time, memory, traffic."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.tools.compare_read import RankRecord, RecordError, Run, as_number, rank_list

Series = dict[int, float | None]
"""Step -> value. None: no rank recorded one at that step (a skipped step has no loss, for example)."""

TrafficKey = tuple[str, str, str]
"""(feature, kind of communication, group)."""


@dataclass
class Traffic:
    """Bytes and calls of one (feature, kind, group), summed over ranks, per step."""

    bytes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    calls: dict[int, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(frozen=True)
class Replicas:
    """Where ranks of one run, which all hold the same value, differ most: a broken run."""

    metric: str
    difference: float
    step: int
    ranks: tuple[int, int]


@dataclass
class Figures:
    """All that is shown of one run. Times in seconds, memory and traffic in bytes.

    `series` has "loss" and, where there are several, one "losses/NAME" each, "grad_norm", "learning_rate",
    "loss_scale" (each from the ranks that own it), "tokens" of the global batch, "step_time_s" of the
    slowest rank, and "tokens_per_s".
    `timed` are the steps after warm-up: rates, times and bytes per step are taken over these.
    """

    run: Run
    series: dict[str, Series]
    replicas: list[Replicas]
    timed: list[int]
    memory: list[float | None]
    memory_series: list[Series]
    traffic: dict[TrafficKey, Traffic]
    skipped: list[int]

    @property
    def final_loss(self) -> tuple[int, float] | None:
        """(step, loss) of the last step that has a loss."""
        owned = [(step, loss) for step, loss in self.series["loss"].items() if loss is not None]
        return owned[-1] if owned else None

    def timed_values(self, metric: str) -> list[float]:
        values = (self.series[metric][step] for step in self.timed)
        return [value for value in values if value is not None and math.isfinite(value)]

    def median(self, metric: str) -> float | None:
        values = self.timed_values(metric)
        return statistics.median(values) if values else None

    def spread(self, metric: str) -> tuple[float, float] | None:
        """(10th, 90th) percentile over the steps after warm-up."""
        values = self.timed_values(metric)
        if len(values) < 2:
            return (values[0], values[0]) if values else None
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return tenths[0], tenths[-1]

    def bytes_per_step(self, key: TrafficKey) -> float | None:
        """Mean bytes over the steps after warm-up, all ranks together; None if no step was timed."""
        return self._per_step(self.traffic[key].bytes) if key in self.traffic else self._per_step({})

    def calls_per_step(self, key: TrafficKey) -> float | None:
        return self._per_step(self.traffic[key].calls)

    def _per_step(self, counts: dict[int, int]) -> float | None:
        if not self.timed:
            return None
        total = sum(counts.get(step, 0) for step in self.timed)
        whole, rest = divmod(total, len(self.timed))
        return total / len(self.timed) if rest else whole

    def total_bytes_per_step(self) -> float | None:
        if not self.timed:
            return None
        return sum(self.bytes_per_step(key) or 0 for key in self.traffic)


def relative_difference(reference: float, value: float) -> float:
    """|value - reference| / |reference|; 0 for equal values and for two NaN, inf for one NaN or one inf."""
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return 0.0
    if not (math.isfinite(value) and math.isfinite(reference)) or reference == 0:
        return math.inf
    return abs(value - reference) / abs(reference)


def _where(record: RankRecord, step: int, key: str) -> str:
    return f"{record.path}, step {step}: `{key}`"


def _owned(run: Run, metric: str, read: Callable[[dict[str, Any]], Any], replicas: list[Replicas]) -> Series:
    """The metric from the lowest rank that owns it. Other owners must hold the same; else `replicas` says."""
    series: Series = {}
    worst: Replicas | None = None
    for step in run.steps:
        owner, held = -1, None
        for record in run.ranks:
            value = as_number(read(record.steps[step]), _where(record, step, metric))
            if value is None:
                continue
            if held is None:
                owner, held = record.rank, value
                continue
            difference = relative_difference(held, value)
            if difference > (worst.difference if worst else 0.0):
                worst = Replicas(metric, difference, step, (owner, record.rank))
        series[step] = held
    if worst:
        replicas.append(worst)
    return series


def _loss_names(run: Run) -> list[str]:
    """Names of the separate losses, if there is more than one (else `loss` says it all)."""
    names = {name: None for record in run.ranks for step in run.steps for name in _losses(record.steps[step])}
    return list(names) if len(names) > 1 else []


def _losses(line: dict[str, Any]) -> dict[str, Any]:
    return line.get("losses") or {}


def _highest(run: Run, key: str) -> Series:
    """Step -> the largest value over ranks."""
    series: Series = {}
    for step in run.steps:
        values = [as_number(r.steps[step].get(key), _where(r, step, key)) for r in run.ranks]
        series[step] = max((value for value in values if value is not None), default=None)
    return series


def _traffic(run: Run) -> dict[TrafficKey, Traffic]:
    found: dict[TrafficKey, Traffic] = defaultdict(Traffic)
    for record in run.ranks:
        for step in run.steps:
            for item in record.steps[step].get("traffic") or []:
                try:
                    key = (str(item["feature"]), str(item["kind"]), str(item["group"]))
                    found[key].bytes[step] += int(item["bytes"])
                    found[key].calls[step] += int(item["calls"])
                except (KeyError, TypeError, ValueError) as error:
                    raise RecordError(
                        f"{_where(record, step, 'traffic')} has the entry {item!r}; each needs feature, "
                        "kind, group, bytes and calls."
                    ) from error
    return dict(sorted(found.items()))


def figures(run: Run, warmup: int) -> Figures:
    """Work out a run's figures. `warmup`: steps after each (re)start that timing and traffic leave out.

    Raises RecordError for a damaged value, and for a run without a single loss.
    """
    replicas: list[Replicas] = []
    series = {"loss": _owned(run, "loss", lambda line: line.get("loss"), replicas)}
    for name in _loss_names(run):
        metric = f"losses/{name}"
        series[metric] = _owned(run, metric, lambda line, name=name: _losses(line).get(name), replicas)
    for key in ("grad_norm", "learning_rate", "loss_scale", "tokens"):
        series[key] = _owned(run, key, lambda line, key=key: line.get(key), replicas)
    if all(loss is None for loss in series["loss"].values()):
        raise RecordError(
            f"{run.folder} holds no loss: none of {rank_list([r.rank for r in run.ranks])} recorded one in "
            f"{len(run.steps)} steps. The ranks of the last pipeline stage record it; check that they ran."
        )
    series["step_time_s"] = _highest(run, "step_time_s")
    series["tokens_per_s"] = {
        step: tokens / seconds if (seconds := series["step_time_s"][step]) and tokens is not None else None
        for step, tokens in series["tokens"].items()
    }
    memory_series = [
        {step: as_number(r.steps[step].get("peak_memory_bytes"), _where(r, step, "peak_memory_bytes"))
         for step in run.steps}
        for r in run.ranks
    ]  # fmt: skip
    return Figures(
        run=run,
        series=series,
        replicas=replicas,
        timed=[step for step in run.steps if all(r.age[step] >= warmup for r in run.ranks)],
        memory=[max((v for v in of.values() if v is not None), default=None) for of in memory_series],
        memory_series=memory_series,
        traffic=_traffic(run),
        skipped=[step for step in run.steps if any(r.steps[step].get("skipped") for r in run.ranks)],
    )
