"""Models, bounds and the report of the collectives' benchmark. Pure.

One NIC of rate B per node, shared by its m ranks; a node's inside of rate R, shared as well (none: no limit).
S is the buffer, n = k m. All times neglect latency.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

from charts import bars

OPS = ("all-gather", "reduce-scatter", "all-reduce")
METHODS = ("gloo", "flat ring", "two-phase", "two-phase rings", "HO-Ring", "HO-Ring uncut")
"""The last one sends whole blocks, so that what arrives last is spread when nothing else is left to do."""
PAPER = 0.365
"""Less time than a ring that the paper reports for its collectives on up to 128 GPUs."""


@dataclass(frozen=True)
class Case:
    """A collective on a grid; size in bytes, rates in bit/s, None where nothing limits."""

    k: int
    m: int
    op: str
    size: int
    rate: int | None
    intra_rate: int | None

    @property
    def n(self) -> int:
        return self.k * self.m

    @property
    def passes(self) -> int:
        """Times that a byte travels: once to be gathered or summed, twice for both."""
        return 2 if self.op == "all-reduce" else 1

    def nic_bytes(self, method: str) -> float:
        """Bytes that a node's NIC must send."""
        if self.k == 1:
            return 0.0
        if method in ("gloo", "flat ring"):
            twice = 2 if method == "gloo" and self.op == "reduce-scatter" else self.passes
            return twice * (self.n - 1) / self.n * self.size
        return self.passes * (self.k - 1) / self.k * self.size

    def modelled(self, method: str, pieces: int = 1) -> float | None:
        """Seconds, None without a rate; HO-Ring's blocks are cut into `pieces`."""
        if self.rate is None:
            return None
        outer, inner = self.rate / 8, (self.intra_rate or inf) / 8
        block = self.size / self.n
        if method in ("gloo", "flat ring"):
            hop = min(outer if self.k > 1 else inf, inner / max(1, self.m - 1))
            twice = 2 if method == "gloo" and self.op == "reduce-scatter" else self.passes
            return twice * (self.n - 1) * block / hop
        between = block / (outer / self.m)
        inside = (self.m - 1) * block / (inner / self.m)
        if not method.startswith("HO-Ring"):
            return self.passes * ((self.k - 1) * between + self.k * inside)
        gather = ring_gather(self.k, pieces, inside / pieces, between / pieces)
        reduce = ring_sum(self.k, pieces, inside / pieces, between / pieces)
        return {"all-gather": gather, "reduce-scatter": reduce, "all-reduce": gather + reduce}[self.op]

    def bound(self) -> float | None:
        """Seconds that the bytes of a hierarchical algorithm take on the busiest link."""
        if self.rate is None:
            return None
        inside = (self.m - 1) * self.size * 8 / (self.intra_rate or inf)
        return self.passes * max((self.k - 1) / self.k * self.size * 8 / self.rate, inside)

    def possible_gain(self) -> float:
        """Part of a flat ring's time that can be saved where only the links between nodes count."""
        return 1 - self.nic_bytes("HO-Ring") / self.nic_bytes("flat ring") if self.k > 1 else 0.0


def ring_gather(k: int, pieces: int, inside: float, between: float) -> float:
    """All-gather: a piece is spread (`inside` seconds) behind the one before it and when it is there."""
    end = 0.0
    for number in range(k * pieces):
        arrived = max(0, number + 1 - pieces) * between
        end = max(end, arrived) + inside
    return end


def ring_sum(k: int, pieces: int, inside: float, between: float) -> float:
    """Reduce-scatter: a piece leaves (`between` seconds) behind the one before it and its sum inside."""
    end = 0.0
    for number in range((k - 1) * pieces):
        end = max(end, (number + 1) * inside) + between
    return max(end, k * pieces * inside)


@dataclass(frozen=True)
class Row:
    """One measured method; `seconds` is the median over rounds of the slowest rank."""

    case: Case
    method: str
    seconds: float
    least: float
    most: float
    nic_bytes: float | None
    """Bytes that the busiest node's NIC sent, headers included."""
    pieces: int = 1
    """Into how many a block was cut, where HO-Ring cuts it."""

    def modelled(self) -> float | None:
        """Seconds of the model, of the pieces that there were."""
        return self.case.modelled(self.method, self.pieces)

    def key(self) -> tuple:
        return (*asdict(self.case).values(), self.method)


def merged(folder: Path, rows: Sequence[Row]) -> list[Row]:
    """What results.json of an earlier run holds, with the new rows in place of those of the same case."""
    path = folder / "results.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    found = {row.key(): row for row in (Row(**{**item, "case": Case(**item["case"])}) for item in old)}
    found |= {row.key(): row for row in rows}
    return list(found.values())


def write(folder: Path, rows: Sequence[Row], setting: dict) -> None:
    """results.json, results.md and results.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"setting": setting, "rows": [asdict(row) for row in rows]}, indent=1)
    (folder / "results.json").write_text(text + "\n")
    (folder / "results.md").write_text(markdown(rows))
    labels = [(f"{place(row.case)} {row.case.op}: {row.method}", round(row.seconds, 3)) for row in rows]
    (folder / "results.svg").write_text(bars(labels, "seconds"))


def place(case: Case) -> str:
    """Grid and links."""
    rate = f" {case.rate / 1e6:g}" if case.rate else ""
    return f"{case.k}x{case.m}{rate}" + (f"/{case.intra_rate / 1e6:g}" if case.intra_rate else "")


COLUMNS = (
    *("grid, Mbit/s", "MiB", "collective", "method", "seconds", "spread", "model", "time bound"),
    *("NIC MiB", "NIC formula", "over flat ring", "over two-phase"),
)


def markdown(rows: Sequence[Row]) -> str:
    """The table of all methods, and what HO-Ring gains next to what is possible."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    seconds = {row.key(): row.seconds for row in rows}
    for row in rows:
        case = row.case
        cells = [place(case), f"{case.size / 2**20:g}", case.op, row.method, f"{row.seconds:.3f}"]
        cells += [
            f"{row.least:.2f} to {row.most:.2f}",
            _number(row.modelled()),
            _number(case.bound()),
        ]
        cells += [_mib(row.nic_bytes), _mib(case.nic_bytes(row.method))]
        for base in ("flat ring", "two-phase"):
            other = seconds.get((*row.key()[:-1], base))
            cells.append(f"{row.seconds / other:.3f}" if other else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *gains(rows)]) + "\n"


def gains(rows: Sequence[Row]) -> list[str]:
    """HO-Ring against the flat ring, two-phase, gloo and its model, one line per case."""
    seconds = {row.key(): row.seconds for row in rows}
    lines = []
    for row in rows:
        if row.method != "HO-Ring":
            continue
        of = {name: seconds.get((*row.key()[:-1], name)) for name in METHODS}
        parts = []
        if of["flat ring"]:
            gain, possible = 1 - row.seconds / of["flat ring"], row.case.possible_gain()
            words = "less" if gain >= 0 else "more"
            parts.append(f"{abs(gain):.1%} {words} time than the flat ring")
            if possible and row.case.rate and not row.case.intra_rate:
                parts[0] += f", {gain / possible:.0%} of the {possible:.1%} that its bytes allow"
        two_phase = [of[name] for name in METHODS[2:4] if of[name]]
        if two_phase:
            parts.append(f"{row.seconds / min(two_phase):.2f} of the better two-phase")
        if of["gloo"]:
            parts.append(f"{row.seconds / of['gloo']:.2f} of gloo's own")
        if row.modelled():
            parts.append(f"{row.seconds / row.modelled():.2f} of its model with {row.pieces} pieces a block")
            parts.append(f"{row.seconds / row.case.modelled('HO-Ring'):.2f} of that with whole blocks")
        unit = " Mbit/s" if row.case.rate else ""
        head = f"- HO-Ring {row.case.op}, {place(row.case)}{unit}, {row.case.size / 2**20:g} MiB: "
        lines.append(head + "; ".join(parts))
    if lines:
        lines.append(f"- The paper reports {PAPER:.1%} less time than a ring, on other hardware.")
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value / 2**20:.2f}"
