"""Which strategy to take: those that fit in memory, ranked by their predicted step time."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_ext.paro.cost import Compute, Step, step_seconds
from megatron_ext.paro.memory import ADAM_STATES, Memory, memory
from megatron_ext.paro.network import Network
from megatron_ext.paro.passes import UnitSize
from megatron_ext.paro.strategy import STRATEGIES, Strategy
from megatron_ext.paro.volume import COMMS, Comm, Totals, Wire, step_bytes, totals

SAME = 0.01
"""Relative difference of predicted step times that counts as none."""
ROUNDING = 1e-9
GIB = 1 << 30
COMM_ORDER: tuple[Comm, ...] = ("two-phase", "ho-ring", "flat")
"""Which kind to take of equals."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A model on one rank, its data-parallel ranks and their network."""

    units: tuple[UnitSize, ...]
    wire: Wire
    """Its `comm` counts where one is asked for."""
    microbatches: int
    network: Network
    strategies: tuple[Strategy, ...] = STRATEGIES
    """Those to choose from."""
    compute: Compute = field(default_factory=Compute)
    overlap_params: bool = True
    """Whether parameter gathers run beside compute."""
    overlap_grads: bool = True
    """Whether gradient reductions do."""
    reshard_after_forward: bool = True
    state_itemsize: int = ADAM_STATES
    memory_limit: int | None = None
    """Bytes of a rank; None for no limit."""
    other_bytes: int = 0
    """Of a rank's memory for everything else: activations, the library's own."""


@dataclass(frozen=True)
class Candidate:
    """A strategy over a kind of communication, and what it costs."""

    strategy: Strategy
    comm: Comm
    bytes: Totals
    memory: Memory
    step: Step
    needed: int
    """Bytes of a rank's memory, with those for everything else."""
    fits: bool

    @property
    def communication(self) -> float:
        """Seconds of all transfers of a step, hidden behind compute or not."""
        return self.step.params + self.step.grads


def candidate(situation: Situation, strategy: Strategy, comm: Comm) -> Candidate:
    """What a strategy costs."""
    s = situation
    wire = replace(s.wire, comm=comm)
    reshard = {"reshard_after_forward": s.reshard_after_forward}
    volume = step_bytes(strategy, s.units, wire, s.microbatches, **reshard)
    held = memory(strategy, s.units, wire, state_itemsize=s.state_itemsize, **reshard)
    step = step_seconds(
        strategy,
        s.units,
        wire,
        s.network,
        s.microbatches,
        s.compute,
        overlap_params=s.overlap_params,
        overlap_grads=s.overlap_grads,
        **reshard,
    )
    needed = held.total + s.other_bytes
    fits = s.memory_limit is None or needed <= s.memory_limit
    return Candidate(strategy, comm, totals(volume, wire), held, step, needed, fits)


def ranking(situation: Situation, comms: Sequence[Comm] = COMMS) -> list[Candidate]:
    """All strategies over the given kinds of communication, the one to take first.

    Those that fit come first, by predicted time; but of those that are as fast as the fastest (within `SAME`)
    the one to take is that with the least communication, since what overlap hides it may fail to hide; of
    equals that with the least memory. Those that do not fit follow by what they need.
    """
    found = [candidate(situation, strategy, comm) for strategy in situation.strategies for comm in comms]
    fitting = sorted((c for c in found if c.fits), key=lambda c: (c.step.total, *_plainness(c)))
    others = sorted((c for c in found if not c.fits), key=_plainness)
    if fitting:
        best = _best(fitting)
        fitting.remove(best)
        fitting.insert(0, best)
    return fitting + others


def _best(fitting: list[Candidate]) -> Candidate:
    fastest = [c for c in fitting if _same(c.step.total, fitting[0].step.total)]
    least = min(c.communication for c in fastest)
    return min((c for c in fastest if _same(c.communication, least, ROUNDING)), key=_plainness)


def _same(time: float, least: float, tolerance: float = SAME) -> bool:
    return time <= least * (1 + tolerance)


def _plainness(c: Candidate) -> tuple:
    """Memory, then the fewest letters I (with groups of one, N or G means the same), then two-phase."""
    return (c.needed, str(c.strategy).count("I"), COMM_ORDER.index(c.comm))


def choose(situation: Situation) -> tuple[str, str]:
    """The strategy to take with the situation's communication, and the reason in words."""
    found = ranking(situation, [situation.wire.comm])
    return str(found[0].strategy), reason(situation, found)


def reason(situation: Situation, found: list[Candidate]) -> str:
    """Why the first candidate of a ranking is to be taken, as a sentence without its full stop."""
    best, limit = found[0], situation.memory_limit
    if not best.fits:
        return (
            f"nothing fits in {gib(limit)}; {best.strategy} needs the least, {gib(best.needed)}: use more "
            "ranks, tensor or pipeline parallelism, or recompute activations"
        )
    fitting = [c for c in found if c.fits]
    words = [_merit(best, fitting)]
    if limit is not None:
        words.append(f"it needs {gib(best.needed)} of {gib(limit)}, in which {_how_many(fitting, found)} fit")
    rival = next((c for c in fitting[1:] if c.strategy != best.strategy), None)
    if rival is not None and (factors := _against(best, rival)):
        words.append(f"the next, {rival.strategy}, takes {factors}")
    return "; ".join(words)


def _how_many(fitting: list[Candidate], found: list[Candidate]) -> str:
    names = {str(c.strategy) for c in fitting}
    everyone = {str(c.strategy) for c in found}
    return f"{len(names)} of {len(everyone)} strategies"


def _merit(best: Candidate, fitting: list[Candidate]) -> str:
    if not best.communication:
        return "nothing is communicated, so it is the one with the least memory"
    rivals = [c for c in fitting[1:] if _same(c.step.total, fitting[0].step.total)]
    if not any(c.strategy != best.strategy for c in rivals):
        return "it is the fastest"
    if all(_same(c.communication, best.communication, ROUNDING) for c in rivals):
        return "it is among the fastest the one with the least memory"
    return "it is among the fastest the one that communicates least"


def _against(best: Candidate, rival: Candidate) -> str:
    """What a rival costs, as factors of what the best one does."""
    factors = []
    for what, mine, theirs in (
        ("the time", best.step.total, rival.step.total),
        ("the bytes between groups", best.bytes.between, rival.bytes.between),
        ("the bytes inside", float(best.bytes.inside), float(rival.bytes.inside)),
        ("the memory", best.needed, rival.needed),
    ):
        if mine and not 0.995 < theirs / mine < 1.005:
            factors.append(f"{theirs / mine:.2f} times {what}")
    return ", ".join(factors)


def gib(size: int) -> str:
    """Bytes in GiB."""
    return f"{size / GIB:.1f} GiB"
