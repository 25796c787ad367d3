"""Who meets whom: ranks, teams, rings and bundles of multi-ring attention as integers. No torch, no groups.

P ranks of a context-parallel group form P/C teams of C ranks. A team gathers its queries, so that each member
sees the rows of all C; keys and values travel in bundles of K ranks' shares, and each member sees a C-th of
the P/K bundles. What meets in rings of R = P/(C K) teams is therefore, with C = K = 1, plain ring attention;
with C = K the scheme of the paper (StarTrail, arXiv 2407.00611); with K = P the gather of all keys; with K =
1 teams without a gather of keys.

A rank's number is C (g R + p) + a: member a of the team at position p of team group g. Bundle b is made of
the shares of numbers b K to b K + K - 1, its owners. Each group of teams has a copy of every bundle: owner m
of a bundle gives its copy to group m, where it starts at position b div C with member b mod C and moves on by
one position per step. Rank numbers are placed on context-parallel ranks by `order`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

ORDERS = ("gpa", "gap", "pga", "pag", "agp", "apg")
"""Axes (g groups of teams, p positions in rings, a members of teams) from the slowest to the fastest over
context-parallel ranks; gpa makes teams of neighbours."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands."""

    group: int
    """g, its group of teams."""
    position: int
    """p, its team's place in the rings of the group."""
    member: int
    """a, its place in the team."""


@dataclass(frozen=True)
class Geometry:
    """A team size and a bundle size on `size` ranks, and what follows from them.

    Raises:
        ValueError: team_size * bundle_size does not divide size, or a size or the order is not one.
    """

    size: int
    """P, context-parallel ranks."""
    team_size: int
    """C, ranks that share their queries."""
    bundle_size: int
    """K, shares of keys and values that travel together."""
    order: str = "gpa"

    def __post_init__(self) -> None:
        sizes = {"ranks": self.size, "team size": self.team_size, "bundle size": self.bundle_size}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} {value!r}: use a whole number, at least 1")
        product = self.team_size * self.bundle_size
        if self.size % product:
            fitting = ", ".join(f"{c}x{k}" for c, k in shapes(self.size))
            raise ValueError(
                f"team size C={self.team_size} times bundle K={self.bundle_size} is C*K={product}, which "
                f"does not divide the P={self.size} context-parallel ranks: choose C and K so that it does "
                f"(CxK of {self.size} ranks: {fitting})"
            )
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order!r}: choose one of {', '.join(ORDERS)}")

    @cached_property
    def ring_length(self) -> int:
        """R, attention steps of a rank."""
        return self.size // (self.team_size * self.bundle_size)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Context-parallel rank of each number; orders that have the same ones are the same."""
        return tuple(self.rank_of(number) for number in range(self.size))

    @property
    def num_teams(self) -> int:
        """T = P / C."""
        return self.size // self.team_size

    @property
    def num_bundles(self) -> int:
        """P / K."""
        return self.size // self.bundle_size

    # --- numbers and ranks ---------------------------------------------------------------------------------

    @cached_property
    def _strides(self) -> tuple[int, int, int]:
        """Distance between neighbours on the axes g, p and a."""
        sizes = {"g": self.bundle_size, "p": self.ring_length, "a": self.team_size}
        stride, found = 1, {}
        for letter in reversed(self.order):
            found[letter] = stride
            stride *= sizes[letter]
        return found["g"], found["p"], found["a"]

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(self.rank_at(*self._split(number)) for number in range(self.size))

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        numbers = [0] * self.size
        for number, rank in enumerate(self._ranks):
            numbers[rank] = number
        return tuple(numbers)

    @cached_property
    def _places(self) -> tuple[Place, ...]:
        return tuple(Place(*self._split(number)) for number in self._numbers)

    def _split(self, number: int) -> tuple[int, int, int]:
        team, member = divmod(number, self.team_size)
        group, position = divmod(team, self.ring_length)
        return group, position, member

    def rank_at(self, group: int, position: int, member: int) -> int:
        """The rank at a place."""
        across, along, inside = self._strides
        return group * across + position * along + member * inside

    def rank_of(self, number: int) -> int:
        """The rank of a number."""
        return self._ranks[number]

    def number_of(self, rank: int) -> int:
        """The number of a rank."""
        return self._numbers[rank]

    def place(self, rank: int) -> Place:
        """Where `rank` stands."""
        return self._places[rank]

    # --- teams, rings and bundles: ascending ranks, which is their order in a process group ----------------

    def team_of(self, rank: int) -> int:
        """The team of `rank`, g R + p."""
        return self.number_of(rank) // self.team_size

    def team(self, team: int) -> tuple[int, ...]:
        """Ranks of a team."""
        start = team * self.team_size
        return tuple(sorted(self._ranks[start : start + self.team_size]))

    def bundle(self, bundle: int) -> tuple[int, ...]:
        """Owners of a bundle."""
        start = bundle * self.bundle_size
        return tuple(sorted(self._ranks[start : start + self.bundle_size]))

    def ring(self, group: int, member: int) -> tuple[int, ...]:
        """Ranks of a ring, by position."""
        return tuple(self.rank_at(group, position, member) for position in range(self.ring_length))

    def rings(self) -> Iterator[tuple[int, int]]:
        """(group, member) of every ring."""
        return ((g, a) for g in range(self.bundle_size) for a in range(self.team_size))

    # --- what moves ----------------------------------------------------------------------------------------

    def bundle_at(self, rank: int, step: int) -> int:
        """The bundle that `rank` holds after `step` hops."""
        place = self.place(rank)
        return (place.position - step) % self.ring_length * self.team_size + place.member

    def holder(self, bundle: int, group: int, step: int = 0) -> int:
        """The rank that holds a group's copy of `bundle` after `step` hops."""
        home, member = divmod(bundle, self.team_size)
        return self.rank_at(group, (home + step) % self.ring_length, member)

    def owner(self, bundle: int, group: int) -> int:
        """The owner of `bundle` that deals with the copy of `group`."""
        return self.rank_of(bundle * self.bundle_size + group)

    def destination(self, rank: int) -> int:
        """Where `rank` sends the bundle that it has gathered with its other owners."""
        bundle, index = divmod(self.number_of(rank), self.bundle_size)
        return self.holder(bundle, index)

    def source(self, rank: int) -> int:
        """Whom `rank` gets its first bundle from."""
        return self.owner(self.bundle_at(rank, 0), self.place(rank).group)

    def ring_peers(self, rank: int, distance: int) -> tuple[int, int]:
        """(position to send to, position to receive from) for a hop over `distance` positions."""
        position = self.place(rank).position
        return (position + distance) % self.ring_length, (position - distance) % self.ring_length


def shapes(size: int) -> list[tuple[int, int]]:
    """All (team size, bundle size) that fit on `size` ranks, plain ring first."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return [(c, k) for c in divisors for k in divisors if size % (c * k) == 0]
