"""Costs of passes and transfers: what simulation, lowering and list scheduling are given. Seconds, or any
unit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import inf
from pathlib import Path

_FIELD_OF = {
    "F": "forward",
    "B": "backward",
    "W": "weight",
    "S": "output_s",
    "U": "output_u",
    "T": "output_t",
    "L": "loss",
    "IF": "input_forward",
    "IB": "input_backward",
}
COMM_KINDS = ("p2p", "e", "g", "C0", "C1", "C2", "C3", "G")
PerRank = float | tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Time of each pass, one number for all ranks or one per rank, and of each transfer.

    Forward and backward are those of all layers of a rank: a pass of one of its chunks takes a part of them.
    The defaults are the units of the static order: a backward pass takes twice a forward pass, and everything
    else nothing.
    """

    forward: PerRank = 1.0
    backward: PerRank = 2.0
    output_s: PerRank = 0.0
    output_u: PerRank = 0.0
    output_t: PerRank = 0.0
    loss: PerRank = 0.0
    input_forward: PerRank = 0.0
    input_backward: PerRank = 0.0
    comm: Mapping[str, float] = field(default_factory=dict)
    """By kind: p2p, e, g, C0, C1, C2, C3, G; 0 where not given."""
    weight: PerRank | None = None
    """The part of `backward` that weight gradients take, where a schedule splits it; None: half of it."""

    def of(self, kind: str, rank: int, chunks: int = 1, split: bool = False) -> float:
        """Time of a pass on a rank: of one of `chunks` chunks, B without W where the schedule is `split`."""
        if kind == "W":
            return self._weight(rank) / chunks
        value = getattr(self, _FIELD_OF[kind])
        value = value[rank] if isinstance(value, tuple) else value
        if kind == "B":
            return (value - self._weight(rank) if split else value) / chunks
        return value / chunks if kind == "F" else value

    def mean(self, kind: str) -> float:
        """Time of a pass of all chunks, averaged over ranks; of B with W."""
        value = getattr(self, _FIELD_OF[kind])
        if value is None:
            return self.mean("B") / 2
        return sum(value) / len(value) if isinstance(value, tuple) else value

    def _weight(self, rank: int) -> float:
        value = self.backward if self.weight is None else self.weight
        value = value[rank] if isinstance(value, tuple) else value
        return value / 2 if self.weight is None else value

    def transfer(self, kind: str) -> float:
        """Time of a collective, or of a point-to-point transfer ("p2p")."""
        return self.comm.get(kind, 0.0)

    def check(self, p: int) -> None:
        """Raises ValueError when these are not the costs of `p` ranks, or not times."""
        for name in _FIELD_OF.values():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, tuple) and len(value) != p:
                raise ValueError(
                    f"{name} has {len(value)} values, but there are {p} pipeline ranks: give one number "
                    "per rank, or one for all"
                )
            _check_times(name, value if isinstance(value, tuple) else (value,))
        if self.mean("F") <= 0 or self.mean("B") <= 0:
            raise ValueError("forward and backward must take time")
        if any(self.of("W", rank) > self.of("B", rank) for rank in range(p)):
            raise ValueError("weight is the part of backward that weight gradients take: it cannot be more")
        unknown = sorted(set(self.comm) - set(COMM_KINDS))
        if unknown:
            raise ValueError(f"comm has {unknown}: its kinds are {', '.join(COMM_KINDS)}")
        for kind, value in self.comm.items():
            _check_times(f"comm of {kind}", (value,))

    def to_json(self) -> str:
        """As a JSON object that `from_json` reads."""
        return json.dumps(asdict(self) | {"comm": dict(self.comm)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Costs":
        """Raises ValueError for anything but an object with these fields."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is no JSON: {error}") from None
        known = {f.name for f in fields(cls)}
        if not isinstance(data, dict) or not set(data) <= known:
            raise ValueError(f"costs are a JSON object with some of the fields {', '.join(sorted(known))}")
        comm = data.pop("comm", {})
        if not isinstance(comm, dict) or not all(map(_is_number, comm.values())):
            raise ValueError("comm must be an object of numbers by kind")
        values = {
            name: _per_rank(name, value) for name, value in data.items() if (name, value) != ("weight", None)
        }
        return cls(**values, comm={kind: float(value) for kind, value in comm.items()})

    @classmethod
    def read(cls, path: str | Path) -> "Costs":
        """From a file. Raises ValueError as `from_json` does."""
        return cls.from_json(Path(path).read_text())


def _check_times(name: str, values: Sequence[float]) -> None:
    for value in values:
        if not 0 <= value < inf:
            raise ValueError(f"{name} is {value}: a time is finite and not negative")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _per_rank(name: str, value: float | Sequence[float]) -> PerRank:
    if _is_number(value):
        return float(value)
    if isinstance(value, list) and value and all(map(_is_number, value)):
        return tuple(float(v) for v in value)
    raise ValueError(f"{name} must be a number, or a list with one number per rank")
