"""A second checker of programs, independent of ours: every launch blocks until all its ranks have come to it.

It knows programs as lists of words ("F3", "C1(3)") and has its own table of who needs what, from the
dependencies of one microbatch:

    IF(all) -e-> F(0) ... F(p-1) -C0-> S(all) -C1-> ... -> B(p-1) ... B(0) -g-> IB(all)
"""

import re

COLLECTIVE = re.compile(r"(e|g|G|C[0-3])\((\d+)\)")
TRANSFER = re.compile(r"([SR])([FB])\((\d+)\)")
PASS = re.compile(r"(IF|IB|F|B|S|U|T|L)(\d+)")

# The pass whose output a collective carries, by mode, and the ranks that hold it ("all" or an index).
SENT = {
    "vocab-1": {"C1": ("S", "all"), "C2": ("T", "all")},
    "interlaced": {"C1": ("S", "all"), "C2": ("T", "all")},
    "vocab-2": {"C1": ("S", "all")},
    "naive": {"C1": ("S", "all"), "C2": ("U", "all"), "C3": ("T", "all")},
}
INPUT_AND_HIDDEN = {"e": ("IF", "all"), "C0": ("F", -1), "G": ("L", -1), "g": ("B", 0)}
BEFORE_LAST_BACKWARD = {
    "off": (),
    "vocab-1": ("C2",),
    "interlaced": ("C2",),
    "vocab-2": ("C1", "L"),
    "naive": ("C3",),
}


class Violation(AssertionError):
    """Data used before it is there, or ranks that wait for each other for ever."""


def run(rows, vocab):
    """Execute lists of words of all ranks; returns how many collectives and transfers took place.

    Raises:
        Violation: ranks are stuck, or something runs without its inputs.
    """
    return _Run([list(row) for row in rows], vocab).run()


class _Run:
    def __init__(self, rows, vocab):
        self.rows, self.vocab, self.p = rows, vocab, len(rows)
        self.at = [0] * self.p
        self.done = [set() for _ in rows]  # words that have ended on a rank
        self.events = 0

    def run(self):
        while any(self._advance(rank) for rank in range(self.p)):
            pass
        stuck = [f"rank {r} at {self._word(r)}" for r in range(self.p) if self._word(r)]
        if stuck:
            raise Violation("stuck: " + ", ".join(stuck))
        return self.events

    def _word(self, rank):
        row = self.rows[rank]
        return row[self.at[rank]] if self.at[rank] < len(row) else ""

    def _advance(self, rank):
        """Let a rank go on as far as it can by itself; whether it has moved."""
        moved = False
        while word := self._word(rank):
            ranks = self._partners(rank, word)
            if ranks is None:
                return moved
            for other in ranks:
                self.done[other].add(self._word(other))
                self.at[other] += 1
            moved = True
        return moved

    def _partners(self, rank, word):
        """The ranks that go on together now, or None when somebody has not come yet."""
        if match := PASS.fullmatch(word):
            self._require(rank, word, self._inputs(rank, match[1], match[2]))
            return [rank]
        if match := TRANSFER.fullmatch(word):
            return self._pair(rank, *match.groups())
        match = COLLECTIVE.fullmatch(word)
        if match is None:
            raise Violation(f"unknown word {word}")
        if any(self._word(other) != word for other in range(self.p)):
            return None
        kind, owner = (INPUT_AND_HIDDEN | SENT[self.vocab])[match[1]]
        for holder in range(self.p) if owner == "all" else [owner % self.p]:
            self._require(holder, word, [f"{kind}{match[2]}"])
        self.events += 1
        return list(range(self.p))

    def _pair(self, rank, side, direction, i):
        step = 1 if (side == "S") == (direction == "F") else -1
        peer, other = rank + step, ("R" if side == "S" else "S")
        if not 0 <= peer < self.p:
            raise Violation(f"rank {rank}: {side}{direction}({i}) has no partner")
        if self._word(peer) != f"{other}{direction}({i})":
            return None
        sender = rank if side == "S" else peer
        self._require(sender, f"S{direction}({i})", [f"{direction}{i}"])
        self.events += 1
        return [rank, peer]

    def _inputs(self, rank, kind, i):
        statistics = "C2" if self.vocab == "naive" else "C1"
        if kind == "F":
            first = [] if self.vocab == "off" else [f"e({i})"]
            return first if rank == 0 else [f"RF({i})"]
        if kind == "B":
            last = [f"{k}{i}" if k == "L" else f"{k}({i})" for k in BEFORE_LAST_BACKWARD[self.vocab]]
            return [f"F{i}", *(last if rank == self.p - 1 else [f"RB({i})"])]
        table = {
            "IF": [],
            "IB": [f"g({i})"],
            "S": [f"C0({i})"],
            "U": [f"C1({i})", f"S{i}"],
            "L": [f"{statistics}({i})"],
            "T": [f"{statistics}({i})", f"G({i})", f"S{i}"],
        }
        return table[kind]

    def _require(self, rank, word, inputs):
        missing = [need for need in inputs if need not in self.done[rank]]
        if missing:
            raise Violation(f"rank {rank}: {word} without {', '.join(missing)}")
