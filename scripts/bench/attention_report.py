"""Bytes, bounds and the report of the attention benchmark. Pure.

Every rank has a node of its own, so what a rank sends passes its NIC. A bound is the time that the busiest
rank's bytes take at the rate of the link, all else neglected.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from charts import bars

RING = "plain ring"
GATHER = "key gather"


@dataclass(frozen=True)
class Case:
    """One attention call on `ranks` ranks: forward and backward pass, fp32, batch 1."""

    ranks: int
    seq: int
    heads: int
    key_heads: int
    head_dim: int
    causal: bool
    rate: int | None
    """Of each rank's link, bit/s; None where nothing limits."""

    @property
    def query_bytes(self) -> int:
        """Of a rank's queries, or outputs, or their gradients."""
        return self.seq // self.ranks * self.heads * self.head_dim * 4

    @property
    def pair_bytes(self) -> int:
        """Of a rank's keys and values: a message of a plain ring."""
        return 2 * self.seq // self.ranks * self.key_heads * self.head_dim * 4

    def text(self) -> str:
        """In one line."""
        rate = f"{self.rate / 1e6:g} Mbit/s" if self.rate else "no limit"
        mask = "causal" if self.causal else "both directions"
        return (
            f"CP={self.ranks}, N={self.seq}, {self.heads} heads ({self.key_heads} of keys) of "
            f"{self.head_dim}, {mask}, {rate}"
        )


@dataclass(frozen=True)
class Method:
    """What computes it: ours with a team size, a bundle size and a movement, or a baseline or peer."""

    name: str
    shape: tuple[int, int] | None = None
    movement: str = "relocate"

    @classmethod
    def parse(cls, text: str) -> "Method":
        """`4x1` and `4x4-direct` are ours; everything else is the name of another.

        Raises:
            ValueError: a shape that is none.
        """
        sizes, _, movement = text.partition("-")
        c, x, k = sizes.partition("x")
        if not (x and c.isdigit() and k.isdigit()):
            return cls(text)
        if movement not in ("", "relocate", "direct") or 0 in (int(c), int(k)):
            raise ValueError(f"{text!r} is no shape: write team size x bundle, as 4x1 or 4x4-direct")
        movement = movement or "relocate"
        name = f"C={c} K={k}" + (" direct" if movement == "direct" else "")
        return cls(name, (int(c), int(k)), movement)


def bytes_of(case: Case, method: Method, rank: int) -> dict[tuple[str, str], int] | None:
    """Bytes that a rank sends in both passes, by (kind, group); None where nobody knows.

    Ours by its formulas, as they are counted at run time. A plain ring passes keys on P-1 times in each pass,
    and their gradients P times; a gather takes all keys twice and sends their gradients home once.
    """
    others = case.ranks - 1
    if method.name == RING:
        return {("send", "ring"): (2 * others + (case.ranks if others else 0)) * case.pair_bytes}
    if method.name == GATHER:
        pair = others * case.pair_bytes
        return {("all_gather", "all"): 2 * pair, ("all_to_all", "all"): pair}
    if method.shape is None:
        return None
    from megatron_ext.wallfacer.volume import totals

    cost = cost_of(case, method)
    return totals([*cost.forward(rank), *cost.backward(rank)])


def cost_of(case: Case, method: Method):
    """The planner's formulas of one of our shapes."""
    from megatron_ext.wallfacer.geometry import Geometry
    from megatron_ext.wallfacer.options import Options
    from megatron_ext.wallfacer.plan import make_plan
    from megatron_ext.wallfacer.sequence import whole
    from megatron_ext.wallfacer.tiles import BIDIRECTIONAL, CAUSAL
    from megatron_ext.wallfacer.volume import Cost, Shape

    layout = whole(case.seq, "zigzag" if case.causal else "contiguous")
    mask = CAUSAL if case.causal else BIDIRECTIONAL
    plan = make_plan(Geometry(case.ranks, *method.shape), layout, mask)
    shape = Shape(1, case.heads, case.key_heads, case.head_dim, 4)
    return Cost(plan, shape, Options(movement=method.movement))


def busiest(case: Case, method: Method) -> int | None:
    """Bytes of the rank that sends most."""
    found = [bytes_of(case, method, rank) for rank in range(case.ranks)]
    return None if None in found else max(sum(volume.values()) for volume in found)


def steps(case: Case, method: Method) -> int | None:
    """Attention steps of a pass."""
    if method.shape is not None:
        return case.ranks // (method.shape[0] * method.shape[1])
    return {RING: case.ranks, GATHER: 1}.get(method.name)


@dataclass(frozen=True)
class Row:
    """One measured method. `seconds` are the slowest rank's, round by round."""

    case: Case
    method: Method
    seconds: tuple[float, ...]
    ring_seconds: tuple[float, ...] = ()
    """The plain ring's in the same rounds."""
    nic_bytes: float | None = None
    """Sent by the busiest node's NIC, headers and acknowledgements included."""

    @property
    def median(self) -> float:
        """Seconds of a call."""
        return statistics.median(self.seconds)

    def gains(self) -> list[float]:
        """Times as fast as the plain ring, round by round."""
        return [base / own for base, own in zip(self.ring_seconds, self.seconds, strict=False)]

    def bound(self) -> float | None:
        """How much fewer bytes than the plain ring the busiest rank sends: the gain if only links counted."""
        own = busiest(self.case, self.method)
        return busiest(self.case, Method(RING)) / own if own else None

    def link_share(self) -> float | None:
        """Part of the time in which the busiest rank's link must be busy."""
        own = busiest(self.case, self.method)
        if own is None or self.case.rate is None:
            return None
        return own * 8 / self.case.rate / self.median

    def key(self) -> tuple:
        """What a later measurement replaces."""
        return (*asdict(self.case).values(), self.method.name)


@dataclass(frozen=True)
class Compute:
    """Seconds of the plain ring's computation alone, with all its transfers left out."""

    case: Case
    seconds: float

    def share(self, ring: Row) -> float:
        """Part of a plain ring's step that is communication; 0 where all of it hides."""
        return max(0.0, 1 - self.seconds / ring.median)


@dataclass(frozen=True)
class Found:
    """What a run has measured, or several runs into one folder."""

    rows: list[Row]
    compute: list[Compute]
    notes: list[str]
    """Of what could not run, and why."""

    def merged(self, later: "Found") -> "Found":
        """With what was measured later in place of the same cases' and methods'."""
        rows = {row.key(): row for row in (*self.rows, *later.rows)}
        compute = {c.case: c for c in (*self.compute, *later.compute)}
        notes = list(dict.fromkeys((*self.notes, *later.notes)))
        return Found(list(rows.values()), list(compute.values()), notes)


def read(folder: Path) -> Found:
    """What results.json of an earlier run holds, or nothing."""
    path = folder / "results.json"
    if not path.exists():
        return Found([], [], [])
    data = json.loads(path.read_text())

    def method(item: dict) -> Method:
        return Method(**{**item, "shape": tuple(item["shape"]) if item["shape"] else None})

    rows = [
        Row(
            Case(**item["case"]),
            method(item["method"]),
            tuple(item["seconds"]),
            tuple(item["ring_seconds"]),
            item["nic_bytes"],
        )
        for item in data["rows"]
    ]
    compute = [Compute(Case(**item["case"]), item["seconds"]) for item in data["compute"]]
    return Found(rows, compute, data["notes"])


def write(folder: Path, found: Found, setting: dict) -> None:
    """results.json, results.md and results.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"setting": setting, **asdict(found)}
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / "results.md").write_text(markdown(found))
    labels = [
        (f"CP={row.case.ranks} N={row.case.seq}: {row.method.name}", round(row.median, 3))
        for row in found.rows
    ]
    (folder / "results.svg").write_text(bars(labels, "seconds"))


COLUMNS = (
    *("method", "steps", "MiB sent", "NIC MiB", "seconds", "spread", "faster than the ring", "spread"),
    *("bound by bytes", "link busy"),
)


def markdown(found: Found) -> str:
    """A table for each case, with what the plain ring spends its time on."""
    lines = []
    for case in dict.fromkeys(row.case for row in found.rows):
        rows = [row for row in found.rows if row.case == case]
        lines += [f"**{case.text()}**", ""]
        lines += [f"{text}" for text in _about(case, rows, found.compute)]
        lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
        lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
        lines.append("")
    return "\n".join([*lines, *(f"- {note}" for note in found.notes)]).rstrip() + "\n"


def _about(case: Case, rows: Sequence[Row], compute: Sequence[Compute]) -> list[str]:
    text = f"Messages of the plain ring: {case.pair_bytes / 1024:g} KiB."
    ring = next((row for row in rows if row.method.name == RING), None)
    alone = next((c for c in compute if c.case == case), None)
    if ring and alone:
        text += (
            f" Its computation alone takes {alone.seconds:.3f} s of {ring.median:.3f} s: "
            f"{alone.share(ring):.0%} of its step is communication."
        )
    best = best_of(rows)
    if best:
        text += f" Best: {best.method.name}, {statistics.median(best.gains()):.2f} times as fast."
    return [text]


def best_of(rows: Sequence[Row]) -> Row | None:
    """Our shape that gains most over the plain ring."""
    ours = [row for row in rows if row.method.shape and row.ring_seconds]
    return max(ours, key=lambda row: statistics.median(row.gains()), default=None)


def _cells(row: Row) -> list[str]:
    sent, gains = busiest(row.case, row.method), row.gains()
    number = steps(row.case, row.method)
    return [
        row.method.name,
        "" if number is None else str(number),
        _mib(sent),
        _mib(row.nic_bytes),
        f"{row.median:.3f}",
        f"{min(row.seconds):.3f} to {max(row.seconds):.3f}",
        f"{statistics.median(gains):.2f}" if gains else "",
        f"{min(gains):.2f} to {max(gains):.2f}" if gains else "",
        _number(row.bound()),
        "" if row.link_share() is None else f"{row.link_share():.0%}",
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value / 2**20:.2f}"
