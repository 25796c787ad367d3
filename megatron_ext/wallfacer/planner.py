"""Which team size, bundle, placement, movement and backward pass to take: all that are valid, by predicted
time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from megatron_ext.wallfacer.cost import Links, Prediction, Seconds, Sent
from megatron_ext.wallfacer.geometry import ORDERS, Geometry, shapes
from megatron_ext.wallfacer.memory import Memory, memory
from megatron_ext.wallfacer.options import Movement, Options
from megatron_ext.wallfacer.plan import make_plan
from megatron_ext.wallfacer.recompute import Kept
from megatron_ext.wallfacer.sequence import Layout
from megatron_ext.wallfacer.tiles import CAUSAL, Mask
from megatron_ext.wallfacer.volume import Cost, Shape, Travels

SAME = 0.01
"""Relative difference of predicted times that counts as none."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """An attention layer on context-parallel ranks, and their network."""

    size: int
    """P, context-parallel ranks."""
    layout: Layout
    shape: Shape
    links: Links
    mask: Mask = CAUSAL
    options: Options = field(default_factory=Options)
    """What candidates have in common, besides `movement`; `backward` auto lets them differ in that, too."""
    rate: float | None = None
    """Operations per second that a rank reaches; None leaves attention's own time out."""
    kept: Kept = field(default_factory=Kept)
    """What a rank keeps at a time."""
    memory_limit: int | None = None
    """Bytes that attention may take; None for no limit."""
    team_size: int | None = None
    """Only candidates of this team size, and so on; None for all."""
    bundle_size: int | None = None
    order: str | None = None
    movement: Movement | None = None
    native_sums: bool = False
    """Whether sums are the library's reduce-scatter (NCCL)."""


@dataclass(frozen=True)
class Candidate:
    """One choice and what it costs."""

    geometry: Geometry
    backward: Travels
    movement: Movement
    seconds: Seconds
    forward_bytes: tuple[Sent, ...]
    """By rank."""
    backward_bytes: tuple[Sent, ...]
    memory: Memory
    needed: int
    """Bytes of a rank: buffers of one layer, and what all layers keep."""
    fits: bool

    @property
    def inside(self) -> float:
        """Bytes that a rank sends inside its node in both passes, mean over the ranks."""
        return self._mean("inside")

    @property
    def between(self) -> float:
        """The same to other nodes."""
        return self._mean("between")

    def choices(self) -> dict[str, str | int]:
        """Flags that it stands for, by destination, without those that change nothing."""
        g = self.geometry
        found: dict[str, str | int] = {
            "wallfacer_team_size": str(g.team_size),
            "wallfacer_kv_bundle": g.bundle_size,
        }
        if g.places != replace(g, order="gpa").places:
            found["wallfacer_order"] = g.order
        if g.ring_length > 1:
            found["wallfacer_backward"] = self.backward
        if g.bundle_size > 1:
            found["wallfacer_movement"] = self.movement
        return found

    @property
    def is_ring(self) -> bool:
        """Whether it is plain ring attention."""
        return self.geometry.team_size == self.geometry.bundle_size == 1

    def _mean(self, name: str) -> float:
        sums = [getattr(each, name) for each in (*self.forward_bytes, *self.backward_bytes)]
        return sum(sums) / self.geometry.size


def geometries(situation: Situation) -> Iterator[Geometry]:
    """All that are valid; of placements that put every rank in the same place, the first."""
    s = situation
    for team, bundle in shapes(s.size):
        if team != (s.team_size or team) or bundle != (s.bundle_size or bundle):
            continue
        seen = set()
        for order in ORDERS if s.order is None else (s.order,):
            geometry = Geometry(s.size, team, bundle, order)
            if geometry.places not in seen:
                seen.add(geometry.places)
                yield geometry


def backwards(situation: Situation, geometry: Geometry) -> Sequence[Travels]:
    """What can travel; in rings of one rank nothing does."""
    if situation.options.backward != "auto":
        return (situation.options.backward,)
    return ("keys",) if geometry.ring_length == 1 else ("keys", "queries")


def movements(situation: Situation, geometry: Geometry) -> Sequence[Movement]:
    """How keys can reach the rings; a bundle of one share starts where it is."""
    if geometry.bundle_size == 1:
        return ("relocate",)
    return ("relocate", "direct") if situation.movement is None else (situation.movement,)


def candidate(
    situation: Situation, geometry: Geometry, backward: Travels, movement: Movement = "relocate"
) -> Candidate:
    """What one choice costs."""
    s = situation
    plan = make_plan(geometry, s.layout, s.mask)
    cost = Cost(plan, s.shape, replace(s.options, backward=backward, movement=movement), s.native_sums)
    prediction = Prediction(cost, s.links, s.rate, s.kept.attached)
    held = memory(cost, _busiest(geometry), attached=s.kept.attached)
    needed = max(held.forward, held.backward) + held.kernel + _kept_bytes(held, s.kept)
    return Candidate(
        geometry,
        backward,
        movement,
        prediction.seconds(),
        *(tuple(each) for each in prediction.bytes()),
        held,
        needed,
        fits=s.memory_limit is None or needed <= s.memory_limit,
    )


def _kept_bytes(held: Memory, kept: Kept) -> int:
    again = min(kept.at_once, kept.recomputed) * (held.saved - held.result)
    return kept.whole * held.saved + kept.recomputed * held.result + again


def _busiest(geometry: Geometry) -> int:
    """A rank that sends its bundle on, if there is one: it needs a buffer more than others."""
    return next((r for r in range(geometry.size) if geometry.destination(r) != r), 0)


@lru_cache(maxsize=8)
def ranking(situation: Situation) -> tuple[Candidate, ...]:
    """All choices, the one to take first.

    Those that fit come first, by predicted time. Of those that are as fast as the fastest (within `SAME`)
    plain ring attention is taken before others, then what sends least to other nodes, then least at all.
    """
    found = [
        candidate(situation, geometry, backward, movement)
        for geometry in geometries(situation)
        for backward in backwards(situation, geometry)
        for movement in movements(situation, geometry)
    ]
    fitting = sorted((c for c in found if c.fits), key=_slowness)
    others = sorted((c for c in found if not c.fits), key=lambda c: (c.needed, _slowness(c)))
    if fitting:
        least = fitting[0].seconds.total
        best = min((c for c in fitting if c.seconds.total <= least * (1 + SAME)), key=_plainness)
        fitting.remove(best)
        fitting.insert(0, best)
    return (*fitting, *others)


def _slowness(c: Candidate) -> tuple:
    return (c.seconds.total, *_plainness(c))


def _plainness(c: Candidate) -> tuple:
    geometry = c.geometry
    return (
        not c.is_ring,
        c.between,
        c.inside,
        c.needed,
        geometry.team_size,
        geometry.bundle_size,
        ORDERS.index(geometry.order),
        c.backward,
        c.movement != "relocate",
    )


def of_each_shape(found: Sequence[Candidate]) -> list[Candidate]:
    """The first of each team size and bundle."""
    best: dict[tuple[int, int], Candidate] = {}
    for c in found:
        best.setdefault((c.geometry.team_size, c.geometry.bundle_size), c)
    return list(best.values())


def reason(found: Sequence[Candidate]) -> str:
    """Why the first of a ranking is to be taken, as a sentence without its full stop."""
    best = found[0]
    if not best.fits:
        return (
            "nothing fits in memory; this needs the least. Use more context-parallel ranks, fewer "
            "microbatches in flight, recomputation or --wallfacer-head-chunks"
        )
    ring = next((c for c in found if c.is_ring and c.fits), None)
    if best.is_ring:
        rival = next((c for c in found if c.fits and not c.is_ring), None)
        return "plain ring attention: " + ("nothing else fits" if rival is None else _ring_words(rival, best))
    if ring is None:
        return "the fastest that was compared"
    words = [f"{_ratio(ring.seconds.total, best.seconds.total)} times as fast as plain ring attention"]
    for what, mine, theirs in (
        ("bytes to other nodes", best.between, ring.between),
        ("bytes inside nodes", best.inside, ring.inside),
        ("memory", best.needed, ring.needed),
    ):
        if theirs and not 0.995 < mine / theirs < 1.005:
            words.append(f"{_ratio(mine, theirs)} times the {what}")
        elif mine and not theirs:
            words.append(f"{what}, where a ring sends none")
    return "; ".join(words)


def _ring_words(rival: Candidate, best: Candidate) -> str:
    g = rival.geometry
    name = f"C={g.team_size} and K={g.bundle_size}"
    if best.seconds.total and rival.seconds.total > best.seconds.total * (1 + SAME):
        return f"the next, {name}, takes {_ratio(rival.seconds.total, best.seconds.total)} times as long"
    return f"nothing is faster by more than {SAME:.0%} ({name} is as fast)"


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}" if b else "any number of"
