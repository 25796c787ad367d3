"""Latency and bandwidth inside and between groups, as measured or as given, and the file that holds them.

A collective over p ranks in which each sends p - 1 parts of c bytes takes (p - 1) (latency + c / bandwidth).
Bandwidths are those of one rank while all ranks of the world do the same, so that what a NIC gives its ranks
is shared as in training.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

Scope = Literal["members", "groups", "flat"]
Action = Literal["gather", "reduce"]
SCOPES: tuple[Scope, ...] = ("members", "groups", "flat")
ACTIONS: tuple[Action, ...] = ("gather", "reduce")
SCHEMA = 1


@dataclass(frozen=True)
class Link:
    """What a rank's transfers to one peer after the other take."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, part: float, count: int = 1) -> float:
        """Time of `count` parts of `part` bytes, one after the other."""
        return count * (self.latency_s + part / self.bytes_per_s)


NOTHING = Link(0.0, inf)
"""A group of one rank: nothing is sent."""


@dataclass(frozen=True)
class Sample:
    """One measured collective: parts of `part` bytes to `peers` other ranks."""

    part: int
    peers: int
    seconds: float


@dataclass(frozen=True)
class Network:
    """Links by scope and action."""

    links: Mapping[tuple[Scope, Action], Link]
    groups: int = 0
    """Groups of the world in which they were measured; 0 if they are given."""
    members: int = 0
    backend: str | None = None
    """Of torch.distributed, when they are measured."""
    samples: Mapping[tuple[Scope, Action], Sequence[Sample]] = field(default_factory=dict)

    def link(self, scope: Scope, action: Action) -> Link:
        """The link of a pass."""
        return self.links[scope, action]

    def covers(self, scope: Scope) -> bool:
        """Whether a scope of more than one rank was measured or given."""
        return all((scope, action) in self.links for action in ACTIONS)

    def missing(self, k: int, m: int) -> list[str]:
        """What a plan for k groups of m needs to know of the network and does not, in words."""
        needed: dict[Scope, bool] = {"members": m > 1, "groups": k > 1, "flat": k * m > 1}
        words = {"members": "inside groups", "groups": "between groups", "flat": "over all ranks"}
        return [words[scope] for scope, used in needed.items() if used and not self.covers(scope)]

    @classmethod
    def given(
        cls,
        inside: Link,
        nic: Link,
        *,
        members: int,
        ranks_per_nic: int,
        rails: bool = False,
    ) -> "Network":
        """From the rate inside a group and that of a NIC, which `ranks_per_nic` members share.

        A flat ring leaves a group over one member's link; `rails`: over all NICs of the group, since the
        library runs a ring over each (NCCL).
        """
        share = Link(nic.latency_s, nic.bytes_per_s / ranks_per_nic)
        nics = members / ranks_per_nic if rails else 1
        slowest = min(inside.bytes_per_s, nic.bytes_per_s * nics)
        flat = Link(max(inside.latency_s, nic.latency_s), slowest)
        of = {"members": inside, "groups": share, "flat": flat}
        return cls({(scope, action): of[scope] for scope in SCOPES for action in ACTIONS})

    @classmethod
    def measured(
        cls,
        samples: Mapping[tuple[Scope, Action], Sequence[Sample]],
        groups: int,
        members: int,
        backend: str,
    ) -> "Network":
        """Links fitted to measurements of several sizes."""
        return cls({key: fit(found) for key, found in samples.items()}, groups, members, backend, samples)

    def to_json(self) -> str:
        """As a JSON object that `from_json` reads."""
        links: dict[str, Any] = {}
        for (scope, action), link in self.links.items():
            measured = [asdict(sample) for sample in self.samples.get((scope, action), ())]
            links.setdefault(scope, {})[action] = asdict(link) | {"samples": measured}
        world = {"groups": self.groups, "members": self.members, "backend": self.backend}
        found = {"schema": SCHEMA, **world, "links": links}
        return json.dumps(found, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Network":
        """Raises ValueError for anything but what `to_json` writes."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is no JSON: {error}") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"this is not a bandwidth file of schema {SCHEMA}")
        try:
            links = {
                (scope, action): _link(scope, action, data["links"][scope][action])
                for scope in SCOPES
                for action in ACTIONS
                if scope in data["links"]
            }
            world = int(data["groups"]), int(data["members"]), data["backend"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it lacks entries ({error})") from None
        return cls(links, *world)

    @classmethod
    def read(cls, path: str | Path) -> "Network":
        """From a file. Raises ValueError as `from_json` does, OSError when it cannot be read."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def fit(samples: Sequence[Sample]) -> Link:
    """Latency and bandwidth by least squares over samples of at least two sizes.

    Where a line through them would need a negative latency (small messages that a switch's buffer swallows),
    the largest sample alone gives the bandwidth, and latency is 0.

    Raises:
        ValueError: all samples have one size.
    """
    points = [(sample.part, sample.seconds / sample.peers) for sample in samples]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        raise ValueError("latency and bandwidth cannot be told apart from messages of one size: measure two")
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    latency = mean_y - slope * mean_x
    if slope <= 0 or latency < 0:
        x, y = max(points)
        return Link(0.0, x / y)
    return Link(latency, 1 / slope)


def _link(scope: str, action: str, data: Mapping[str, Any]) -> Link:
    latency, rate = data["latency_s"], data["bytes_per_s"]
    for value in (latency, rate):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < inf:
            raise ValueError(f"{action} over {scope} has {value!r} where a number of 0 or more is expected")
    if not rate:
        raise ValueError(f"{action} over {scope} has a bandwidth of 0 bytes per second")
    return Link(float(latency), float(rate))
