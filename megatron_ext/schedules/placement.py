"""Where the stages of a pipeline live: every rank holds one or more chunks of layers, and each is a stage.

line   one chunk per rank: rank r is stage r
loop   several chunks: chunk c of rank r is stage c p + r, and data travels in circles (interleaved)
vee    two chunks: rank r holds stages r and 2 p - 1 - r, so data turns round on the last rank, and the
       first and the last stage are both on rank 0 (Qi et al., arXiv 2405.15362)
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

WAYS = ("next", "previous", "wrap")


class Place(NamedTuple):
    """A chunk of a rank."""

    rank: int
    chunk: int


class Edge(NamedTuple):
    """A transfer between two stages: `stage` is the lower one."""

    stage: int
    source: int
    target: int

    @property
    def way(self) -> str:
        """Along the ranks ("next"), against them ("previous"), or between the ends of a loop ("wrap")."""
        if abs(self.target - self.source) != 1 and self.source != self.target:
            return "wrap"
        return "next" if self.target > self.source else "previous"


@dataclass(frozen=True)
class Placement:
    """The stages of `p` ranks with `chunks` chunks each."""

    p: int
    chunks: int = 1
    vee: bool = False

    def __post_init__(self) -> None:
        assert not self.vee or self.chunks == 2, "a V has two chunks per rank"

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.p * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Number of a chunk in the order of the layers."""
        if self.vee and chunk == 1:
            return 2 * self.p - 1 - rank
        return chunk * self.p + rank

    def where(self, stage: int) -> Place:
        """The chunk that is a stage."""
        return self._places[stage]

    @cached_property
    def _places(self) -> tuple[Place, ...]:
        found = []
        for stage in range(self.stages):
            chunk, rank = divmod(stage, self.p)
            found.append(Place(self.p - 1 - rank if self.vee and chunk == 1 else rank, chunk))
        return tuple(found)

    @property
    def first(self) -> Place:
        """Where the first layers are: chunk 0 of rank 0."""
        return self.where(0)

    @property
    def last(self) -> Place:
        """Where the last layers and the loss are."""
        return self.where(self.stages - 1)

    def before(self, rank: int, chunk: int) -> Place | None:
        """The chunk whose output this one takes, None for the first."""
        stage = self.stage(rank, chunk)
        return self.where(stage - 1) if stage else None

    def after(self, rank: int, chunk: int) -> Place | None:
        """The chunk that takes this one's output, None for the last."""
        stage = self.stage(rank, chunk)
        return self.where(stage + 1) if stage + 1 < self.stages else None

    def edge(self, kind: str, rank: int, chunk: int) -> Edge | None:
        """What "SF", "RF", "SB" or "RB" of a chunk moves over; None where the other stage is on this rank, or
        there is none."""
        upwards = kind in ("SF", "RB")
        other = self.after(rank, chunk) if upwards else self.before(rank, chunk)
        if other is None or other.rank == rank:
            return None
        stage = self.stage(rank, chunk)
        ends = (rank, other.rank) if kind[0] == "S" else (other.rank, rank)
        return Edge(stage if upwards else stage - 1, *ends)

    def ways(self, direction: str) -> tuple[str, ...]:
        """The ways that activations ("F") or gradients ("B") go, in the order of `WAYS`."""
        kind = "S" + direction
        places = (self.where(stage) for stage in range(self.stages))
        edges = (self.edge(kind, *place) for place in places)
        found = {edge.way for edge in edges if edge}
        return tuple(way for way in WAYS if way in found)
