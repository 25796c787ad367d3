"""What every rank computes and passes on at each step, from a geometry, a layout and a mask. No torch.

Steps are numbered by hops from where a bundle starts. Steps at which no rank of a ring has anything to
compute (a sliding window, short documents) are left out: the next hop goes further.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from megatron_ext.wallfacer.geometry import Geometry
from megatron_ext.wallfacer.sequence import Layout, Rows, gathered
from megatron_ext.wallfacer.tiles import BIDIRECTIONAL, Mask, Tile, marked_fresh, meets, tiles

IMBALANCE = 1.1
"""Largest work of a rank over the mean, from which a layout is called unbalanced."""


@dataclass(frozen=True)
class Step:
    """One attention step of a rank."""

    hop: int
    """Hops that what travels has made before."""
    team: int
    """Whose queries are used."""
    bundle: int
    """Whose keys."""
    tiles: tuple[Tile, ...]

    @property
    def area(self) -> float:
        """Pairs of queries and keys."""
        return sum(tile.area for tile in self.tiles)


@dataclass(frozen=True, eq=False)
class Plan:
    """All steps of all ranks, computed when asked for. `make_plan` keeps the latest.

    Raises:
        ValueError: the layout does not divide over the ranks.
    """

    geometry: Geometry
    layout: Layout
    mask: Mask
    _found: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.layout.rows(self.geometry.size)

    @property
    def rows(self) -> int:
        """Tokens of a rank."""
        return self.layout.length // self.geometry.size

    def queries(self, team: int) -> Rows:
        """Rows of a team's gathered queries."""
        return self._once(("team", team), lambda: self._gathered(self.geometry.team(team)))

    def keys(self, bundle: int) -> Rows:
        """Rows of a bundle."""
        return self._once(("bundle", bundle), lambda: self._gathered(self.geometry.bundle(bundle)))

    def tiles(self, team: int, bundle: int) -> tuple[Tile, ...]:
        """What a team's rows see of a bundle."""
        return self._once(
            ("tiles", team, bundle),
            lambda: tiles(self.queries(team).runs, self.keys(bundle).runs, self.mask),
        )

    def key_hops(self, group: int, member: int) -> tuple[int, ...]:
        """Steps of a ring when keys travel: hops after which some rank of it has something to compute."""
        return self._once(("hops", group, member), lambda: self._find_hops(group, member))

    def query_hops(self, group: int, member: int) -> tuple[int, ...]:
        """Steps of a ring when queries travel and keys stay."""
        length = self.geometry.ring_length
        return tuple(sorted(-hop % length for hop in self.key_hops(group, member)))

    def last_hop(self, group: int, member: int) -> int:
        """How far bundles of a ring have come at its last step."""
        return (0, *self.key_hops(group, member))[-1]

    def transfers(self, group: int, member: int, travels: str) -> tuple[int, int]:
        """Hops that each rank of a ring makes when "keys" or "queries" travel: (of those, of their
        gradients).

        Gradients of queries go home along the ring; those of keys are returned otherwise.
        """
        hops = self.key_hops(group, member) if travels == "keys" else self.query_hops(group, member)
        if not hops:
            return 0, 0
        home = travels == "queries" and bool(-hops[-1] % self.geometry.ring_length)
        return len(hops) - 1 + bool(hops[0]), len(hops) - 1 + home

    def key_steps(self, rank: int) -> tuple[Step, ...]:
        """Steps of a rank when keys travel: the forward pass, and one of the two backward passes."""
        return self._once(("keys travel", rank), lambda: self._find_key_steps(rank))

    def query_steps(self, rank: int) -> tuple[Step, ...]:
        """Steps of a rank when queries travel: the other backward pass."""
        return self._once(("queries travel", rank), lambda: self._find_query_steps(rank))

    # --- balance -------------------------------------------------------------------------------------------

    def work(self) -> list[float]:
        """Pairs of queries and keys that each rank computes."""
        return [sum(step.area for step in self.key_steps(rank)) for rank in range(self.geometry.size)]

    def warning(self) -> str | None:
        """What to tell a user whose ranks do not have the same to compute, None if they do."""
        work = self.work()
        mean = sum(work) / len(work)
        if max(work) <= IMBALANCE * mean:
            return None
        advice = "documents or a window of other lengths"
        if self.layout.split == "contiguous":
            advice = "the zigzag split, which is balanced under a causal mask"
        return (
            f"attention is not balanced over context-parallel ranks: {max(work) / mean:.2f} times the mean "
            f"on rank {work.index(max(work))}, {min(work) / mean:.2f} times on rank {work.index(min(work))} "
            f"({self.layout.split} split, mask left={self.mask.left} right={self.mask.right}). All wait for "
            f"the slowest: use {advice}"
        )

    # --- searches ------------------------------------------------------------------------------------------

    def _once[T](self, key: Hashable, find: Callable[[], T]) -> T:
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]

    def _gathered(self, ranks: tuple[int, ...]) -> Rows:
        return gathered(self.layout, ranks, self.geometry.size)

    def _find_key_steps(self, rank: int) -> tuple[Step, ...]:
        place, team = self.geometry.place(rank), self.geometry.team_of(rank)
        hops = self.key_hops(place.group, place.member)
        bundles = [self.geometry.bundle_at(rank, hop) for hop in hops]
        marked = marked_fresh([self.tiles(team, bundle) for bundle in bundles])
        return tuple(Step(h, team, b, t) for h, b, t in zip(hops, bundles, marked, strict=True))

    def _find_query_steps(self, rank: int) -> tuple[Step, ...]:
        place, bundle = self.geometry.place(rank), self.geometry.bundle_at(rank, 0)
        length = self.geometry.ring_length
        found = []
        for hop in self.query_hops(place.group, place.member):
            team = place.group * length + (place.position - hop) % length
            found.append(Step(hop, team, bundle, self.tiles(team, bundle)))
        return tuple(found)

    def _find_hops(self, group: int, member: int) -> tuple[int, ...]:
        length = self.geometry.ring_length
        if not self._may_skip:
            return tuple(range(length))
        ring = self.geometry.ring(group, member)
        return tuple(hop for hop in range(length) if any(self._meets(rank, hop) for rank in ring))

    @property
    def _may_skip(self) -> bool:
        """Whether there can be steps without work: not where every share meets every other's."""
        if self.mask.left is not None or self.layout.split != "zigzag":
            return self.mask != BIDIRECTIONAL or len(self.layout.documents) > 1
        if self.layout.apart:
            return all(document.filled < document.end for document in self.layout.documents)
        return len(self.layout.documents) > 1

    def _meets(self, rank: int, hop: int) -> bool:
        queries = self.queries(self.geometry.team_of(rank)).runs
        return meets(queries, self.keys(self.geometry.bundle_at(rank, hop)).runs, self.mask)


@lru_cache(maxsize=32)
def make_plan(geometry: Geometry, layout: Layout, mask: Mask) -> Plan:
    """The plan of these, the same object for the same."""
    return Plan(geometry, layout, mask)
