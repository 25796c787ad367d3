"""Do runs agree? Each run's losses and gradient norms against the first run's, step by step."""

import math
from dataclasses import dataclass

from megatron_ext.tools.compare_read import RecordError, step_range
from megatron_ext.tools.compare_stats import Figures, Replicas, Series, relative_difference
from megatron_ext.tools.compare_units import human_difference, human_loss


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that still count as agreement; `bitwise` allows none at all."""

    loss: float = 1e-5
    grad_norm: float = 1e-4
    bitwise: bool = False

    def of(self, metric: str) -> float:
        if self.bitwise:
            return 0.0
        return self.grad_norm if metric == "grad_norm" else self.loss


@dataclass(frozen=True)
class Difference:
    """One metric of one run against the reference, over the common steps.

    `values`: step -> relative difference, for the steps where both sides have a value.
    `both_nan`, `both_infinite`: steps where both are NaN, or the same infinity. Equal, but both runs have
    diverged there, which is no agreement.
    `one_sided`: steps where exactly one side has no value, or is NaN, or is infinite; these never agree.
    """

    metric: str
    tolerance: float
    values: dict[int, float]
    both_nan: list[int]
    both_infinite: list[int]
    one_sided: list[int]

    @property
    def diverged(self) -> list[int]:
        """Steps where neither side has a finite value, and the values are the same."""
        return sorted(self.both_nan + self.both_infinite)

    @property
    def largest(self) -> float | None:
        return max(self.values.values(), default=None)

    @property
    def step(self) -> int | None:
        """The first step with the largest difference."""
        return max(self.values, key=self.values.__getitem__, default=None)

    @property
    def compared(self) -> bool:
        return bool(self.values or self.one_sided)

    @property
    def bitwise(self) -> bool:
        return self.largest == 0 and not self.one_sided and not self.diverged

    @property
    def agrees(self) -> bool:
        return not self.one_sided and not self.diverged and (self.largest or 0.0) <= self.tolerance


@dataclass(frozen=True)
class Verdict:
    """One run against the reference: per-metric differences and sentences that state the outcome."""

    name: str
    differences: dict[str, Difference]
    sentences: list[str]
    agrees: bool


@dataclass(frozen=True)
class Comparison:
    """All runs (the first is the reference), the steps they have in common, and the outcome."""

    figures: list[Figures]
    steps: list[int]
    tolerance: Tolerance
    warmup: int
    verdicts: list[Verdict]
    warnings: list[str]
    agrees: bool
    headline: str


def difference(
    metric: str, reference: Series, other: Series, steps: list[int], tolerance: float
) -> Difference:
    """Compare one metric over `steps`. A step where neither side has a value is not compared."""
    values: dict[int, float] = {}
    both_nan, both_infinite, one_sided = [], [], []
    for step in steps:
        ours, theirs = other.get(step), reference.get(step)
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None:
            one_sided.append(step)
            continue
        values[step] = relative_difference(theirs, ours)
        if math.isnan(ours) and math.isnan(theirs):
            both_nan.append(step)
        elif not (math.isfinite(ours) and math.isfinite(theirs)):
            (both_infinite if ours == theirs else one_sided).append(step)
    return Difference(metric, tolerance, values, both_nan, both_infinite, one_sided)


def noun(metric: str) -> str:
    """The metric in words, plural."""
    return {"loss": "losses", "grad_norm": "gradient norms"}.get(metric, f'"{metric}" values')


def sentence(found: Difference, reference: Series, other: Series, bitwise: bool) -> str:
    """The outcome of one metric, e.g. "losses agree to within 3.1e-07 relative (tolerance 1e-05)"."""
    what = noun(found.metric)
    if not found.compared:
        return f"{what} are on neither side, so they are not compared"
    asked = "bit for bit" if bitwise else f"tolerance {found.tolerance:g}"
    if found.agrees:
        if found.largest == 0:
            return f"{what} agree bit for bit"
        return f"{what} agree to within {human_difference(found.largest)} relative ({asked})"
    if found.one_sided:
        step = found.one_sided[0]
        sides = [
            human_loss(value) if value is not None else "none" for value in (reference[step], other[step])
        ]
        return (
            f"{what} do NOT agree: only one side has a usable value at step {step_range(found.one_sided)} "
            f"(at step {step} the reference has {sides[0]}, this run {sides[1]})"
        )
    if found.diverged:
        return (
            f"{what} do NOT agree: both runs are NaN or infinite at step "
            f"{step_range(found.diverged)}, so both have diverged"
        )
    return (
        f"{what} do NOT agree: they differ by up to {human_difference(found.largest)} relative, at step "
        f"{found.step} ({asked}); first beyond it at step {_first_beyond(found)}"
    )


def _first_beyond(found: Difference) -> int:
    return next(step for step, value in found.values.items() if value > found.tolerance)


def _named_losses(of: Figures) -> dict[str, Series]:
    """Every loss that the run recorded by name: "losses/NAME" -> its series.

    Where a run has one loss only, its figures hold it as "loss" alone.
    """
    lines = (record.steps[step] for record in of.run.ranks for step in of.run.steps)
    names = dict.fromkeys(f"losses/{name}" for line in lines for name in line.get("losses") or {})
    return {name: of.series.get(name, of.series["loss"]) for name in names}


def _metrics(reference: Figures, other: Figures) -> dict[str, tuple[Series, Series]]:
    """What is judged: metric -> (the reference's series, the other's); empty where a side has none at all."""
    theirs, ours = _named_losses(reference), _named_losses(other)
    if theirs.keys() == ours.keys() and len(ours) == 1:  # "loss" is the same again
        theirs, ours = {}, {}
    return {
        "loss": (reference.series["loss"], other.series["loss"]),
        **{name: (theirs.get(name, {}), ours.get(name, {})) for name in theirs | ours},
        "grad_norm": (reference.series["grad_norm"], other.series["grad_norm"]),
    }


def _judge(reference: Figures, other: Figures, steps: list[int], tolerance: Tolerance) -> Verdict:
    differences, sentences = {}, []
    for metric, (theirs, ours) in _metrics(reference, other).items():
        one_sided = _recorded(ours, steps) != _recorded(theirs, steps)
        only = f"only {(other if _recorded(ours, steps) else reference).run.name} recorded them"
        if one_sided and metric == "grad_norm" and not tolerance.bitwise:
            sentences.append(f"{noun(metric)} are NOT compared: {only}")
            continue
        found = difference(metric, theirs, ours, steps, tolerance.of(metric))
        differences[metric] = found
        if one_sided:
            sentences.append(f"{noun(metric)} do NOT agree: {only}")
        else:
            sentences.append(sentence(found, theirs, ours, tolerance.bitwise))
    if not differences["loss"].compared:
        raise RecordError(
            f"{other.run.name} and {reference.run.name} have no loss at any of their common steps "
            f"{step_range(steps)}, so they cannot be compared. Train for more steps."
        )
    return Verdict(other.run.name, differences, sentences, all(d.agrees for d in differences.values()))


def _recorded(series: Series, steps: list[int]) -> bool:
    return any(series.get(step) is not None for step in steps)


def _common_steps(figures: list[Figures]) -> list[int]:
    common = set.intersection(*(set(of.run.steps) for of in figures))
    if not common:
        listed = "; ".join(f"{of.run.name} has {step_range(of.run.steps)}" for of in figures)
        raise RecordError(f"The runs have no step in common: {listed}. Compare runs over the same steps.")
    return sorted(common)


def _warnings(figures: list[Figures], steps: list[int], verdicts: list[Verdict]) -> list[str]:
    found = [f"{of.run.name}: {note}" for of in figures for note in of.run.notes]
    if any(len(of.run.steps) != len(steps) for of in figures):
        listed = ", ".join(f"{of.run.name} {step_range(of.run.steps)}" for of in figures)
        found.append(f"the runs have different steps ({listed}); compared: {step_range(steps)}")
    for verdict in verdicts:
        for of in verdict.differences.values():
            if of.diverged:
                both = f"both {verdict.name} and {figures[0].run.name}"
                found.append(
                    f"{noun(of.metric)} of {both} are NaN or infinite at "
                    f"step {step_range(of.diverged)}: training has diverged, so nothing there can be compared"
                )
    for of in figures:
        for copy in of.replicas:
            first, second = copy.ranks
            found.append(
                f"{of.run.name}: ranks {first} and {second} recorded different {copy.metric} at step "
                f"{copy.step} ({human_difference(copy.difference)} relative); it should be equal on all "
                f"ranks that own it; rank {first}'s is used"
            )
        if not of.timed:
            found.append(f"{of.run.name}: no step is left after warm-up, so no rates; use a smaller --warmup")
    return found


def _torn(figures: list[Figures], tolerance: Tolerance) -> list[str]:
    """Names of runs whose own ranks differ by more than is allowed between runs."""

    def counts(copy: Replicas) -> bool:
        judged = copy.metric in ("loss", "grad_norm") or copy.metric.startswith("losses/")
        return judged and copy.difference > tolerance.of(copy.metric)

    return [of.run.name for of in figures if any(counts(copy) for copy in of.replicas)]


def _headline(verdicts: list[Verdict], torn: list[str], reference: str, tolerance: Tolerance) -> str:
    wrong = [verdict.name for verdict in verdicts if not verdict.agrees]
    if torn:
        return f"NOT comparable: ranks of {', '.join(torn)} disagree among themselves"
    if wrong:
        asked = "bit for bit" if tolerance.bitwise else "within tolerance"
        diverged = [v.name for v in verdicts if any(of.diverged for of in v.differences.values())]
        both = f"; BOTH sides have diverged (NaN or infinite): {', '.join(diverged)}" if diverged else ""
        return f"NOT in agreement with {reference} {asked}: {', '.join(wrong)}{both}"
    if all(verdict.differences["loss"].bitwise for verdict in verdicts):
        return "Losses agree bit for bit"
    largest = max(verdict.differences["loss"].largest or 0.0 for verdict in verdicts)
    return f"Losses agree to within {human_difference(largest)} relative (tolerance {tolerance.loss:g})"


def compare(figures: list[Figures], tolerance: Tolerance, warmup: int) -> Comparison:
    """Compare each run with the first over the steps that all have. Raises RecordError if there are none."""
    steps = _common_steps(figures)
    verdicts = [_judge(figures[0], other, steps, tolerance) for other in figures[1:]]
    torn = _torn(figures, tolerance)
    return Comparison(
        figures=figures,
        steps=steps,
        tolerance=tolerance,
        warmup=warmup,
        verdicts=verdicts,
        warnings=_warnings(figures, steps, verdicts),
        agrees=not torn and all(verdict.agrees for verdict in verdicts),
        headline=_headline(verdicts, torn, figures[0].run.name, tolerance),
    )
