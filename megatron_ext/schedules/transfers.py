"""How the transfers of a timeline relate to its passes: which of their time was hidden, and which held a rank
up."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_ext.schedules.action import COLLECTIVES, P2P, Action, needs, roots
from megatron_ext.schedules.build import Schedule
from megatron_ext.schedules.placement import Placement
from megatron_ext.schedules.simulate import Span, Timeline


def moving_since(timeline: Timeline) -> dict[tuple[int, Action], float]:
    """When the data of each (rank, transfer) could start to move: before that, the rank waits for another.

    A collective moves once all ranks have come to it, but to a rank that receives a broadcast once its sender
    has; a point-to-point transfer once both sides have. Never later than the transfer's own end.
    """
    place = timeline.program.schedule.place
    launched: dict[tuple, dict[int, Span]] = defaultdict(dict)
    for span in timeline.spans:
        if span.lane != "compute":
            launched[transfer(span, place)][span.rank] = span
    found = {}
    for spans in launched.values():
        for rank, span in spans.items():
            others = _others(span.action, rank, place, spans)
            since = max([span.start, *(other.start for other in others)])
            found[rank, span.action] = min(since, span.end)
    return found


def transfer(span: Span, place: Placement) -> tuple:
    """What names one transfer on all its ranks."""
    action = span.action
    edge = place.edge(action.kind, span.rank, action.chunk) if action.kind in P2P else None
    return (action,) if edge is None else (action.kind[1], action.microbatch, edge)


def _others(action: Action, rank: int, place: Placement, spans: dict[int, Span]) -> list[Span]:
    """Spans of the same transfer that must have begun: the other end's, all ranks', or the sender's."""
    if action.kind in P2P:
        return [span for other, span in spans.items() if other != rank]
    sources = roots(action.kind, place)
    ranks = range(place.p) if sources is None or rank in sources else sources
    return [spans[other] for other in ranks if other in spans]


@dataclass(frozen=True)
class Share:
    """Time of vocabulary collectives, in rank-seconds: `early` until the other ranks came, `moved` from then
    on.

    Of `moved`: `hidden` ran beside a pass of the same rank; `exposed` held the rank up; the rest passed while
    the rank waited for something else.
    """

    early: float = 0.0
    moved: float = 0.0
    hidden: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: "Share") -> "Share":
        return Share(
            self.early + other.early,
            self.moved + other.moved,
            self.hidden + other.hidden,
            self.exposed + other.exposed,
        )


def vocabulary_shares(timeline: Timeline, waits: tuple[Span, ...] | None = None) -> dict[str, Share]:
    """The share of each kind of vocabulary collective, summed over ranks.

    `waits` are the measured ones; without them, a pass that starts later than its predecessor ended has
    waited. Without overlap every transfer that is not hidden is exposed, since its launch holds the rank.
    """
    schedule, overlap = timeline.program.schedule, timeline.program.overlap
    waits = gaps(timeline) if waits is None else waits
    since = moving_since(timeline)
    totals: dict[str, Share] = {kind: Share() for kind in COLLECTIVES}
    for rank in range(schedule.p):
        passes = _stretches(s for s in timeline.spans if s.lane == "compute" and s.rank == rank)
        held = _stretches(s for s in waits if s.rank == rank and _needs_vocabulary(s.action, rank, schedule))
        for span in timeline.spans:
            if span.lane != "comm" or span.rank != rank:
                continue
            start, end = since[rank, span.action], span.end
            hidden = _covered(start, end, passes)
            exposed = _covered(start, end, held) if overlap else end - start - hidden
            totals[span.action.kind] += Share(start - span.start, end - start, hidden, exposed)
    return {kind: share for kind, share in totals.items() if share.moved or share.early}


def gaps(timeline: Timeline) -> tuple[Span, ...]:
    """Idle time before each pass, as spans of lane "wait"."""
    free = [0.0] * timeline.program.schedule.p
    found = []
    for span in sorted(timeline.spans, key=lambda span: (span.start, span.end)):
        if span.lane != "compute":
            continue
        if span.start > free[span.rank]:
            found.append(Span(span.rank, "wait", span.action, free[span.rank], span.start))
        free[span.rank] = max(free[span.rank], span.end)
    return tuple(found)


def _needs_vocabulary(action: Action, rank: int, schedule: Schedule) -> bool:
    return any(need.kind in COLLECTIVES for need in needs(action, rank, schedule.place, schedule.vocab))


def _stretches(spans: Iterable[Span]) -> list[tuple[float, float]]:
    return sorted((span.start, span.end) for span in spans)


def _covered(start: float, end: float, stretches: list[tuple[float, float]]) -> float:
    """Time from `start` to `end` that lies in the stretches, which are in order and do not overlap each
    other."""
    total = 0.0
    for at in range(max(0, bisect_right(stretches, (start,)) - 1), len(stretches)):
        a, b = stretches[at]
        if a >= end:
            break
        total += max(0.0, min(end, b) - max(start, a))
    return total
