"""Oracle for schedules: golden strings, and the closed form of the published 1F1B generator.

Nothing here uses the builder. `S4` stands for the slot "T(3), then S(4)" with the passes that exist, so S0 is
S(0) alone and, with 8 microbatches, S8 is T(7) alone. The orders are those of the published implementation of
vocabulary parallelism (Yeung et al., arXiv 2411.05288), made for forward passes that take 1 and backward
passes that take 2.
"""

BARRIERS = {"vocab-2": 1, "vocab-1": 2}

# The lists of 4 ranks with 8 microbatches, one paragraph per rank.
GOLDEN_ROWS = {
    "vocab-2": """
IF0 IF1 F0 IF2 F1 IF3 F2 IF4 F3 S0 F4 S1 S2 S3 IF5 B0 F5 S4 IF6 B1 F6 S5 IF7 IB0 B2 F7 S6 IB1 B3 S7 IB2 B4
IB3 B5 IB4 B6 IB5 B7 IB6 IB7 S8

IF0 IF1 IF2 F0 IF3 F1 IF4 F2 S0 F3 S1 S2 B0 S3 IF5 F4 B1 S4 IF6 F5 B2 S5 IF7 IB0 F6 B3 S6 IB1 F7 B4 S7 IB2
B5 IB3 B6 IB4 B7 IB5 IB6 IB7 S8

IF0 IF1 IF2 IF3 F0 IF4 F1 S0 F2 S1 B0 S2 F3 B1 S3 IF5 F4 B2 S4 IF6 F5 B3 S5 IF7 IB0 F6 B4 S6 IB1 F7 B5 S7
IB2 B6 IB3 B7 IB4 IB5 IB6 IB7 S8

IF0 IF1 IF2 IF3 IF4 F0 S0 F1 B0 S1 F2 B1 S2 F3 B2 S3 IF5 F4 B3 S4 IF6 F5 B4 S5 IF7 IB0 F6 B5 S6 IB1 F7 B6
S7 IB2 B7 IB3 IB4 IB5 IB6 IB7 S8
""",
    "vocab-1": """
IF0 IF1 F0 IF2 F1 IF3 F2 IF4 F3 S0 IF5 F4 S1 F5 S2 S3 S4 IF6 B0 F6 S5 IF7 B1 F7 S6 IB0 B2 S7 IB1 B3 S8 IB2
B4 IB3 B5 IB4 B6 IB5 B7 IB6 IB7

IF0 IF1 IF2 F0 IF3 F1 IF4 F2 S0 IF5 F3 S1 F4 S2 S3 B0 S4 IF6 F5 B1 S5 IF7 F6 B2 S6 IB0 F7 B3 S7 IB1 B4 S8
IB2 B5 IB3 B6 IB4 B7 IB5 IB6 IB7

IF0 IF1 IF2 IF3 F0 IF4 F1 S0 IF5 F2 S1 F3 S2 B0 S3 F4 B1 S4 IF6 F5 B2 S5 IF7 F6 B3 S6 IB0 F7 B4 S7 IB1 B5
S8 IB2 B6 IB3 B7 IB4 IB5 IB6 IB7

IF0 IF1 IF2 IF3 IF4 F0 S0 IF5 F1 S1 F2 B0 S2 F3 B1 S3 F4 B2 S4 IF6 F5 B3 S5 IF7 F6 B4 S6 IB0 F7 B5 S7 IB1
B6 S8 IB2 B7 IB3 IB4 IB5 IB6 IB7
""",
}

# Their collectives. C0(j) carries X(j) and, from j = 1 on, the gradient g of the losses of j - 1 for T(j-1).
GOLDEN_COLLECTIVES = {
    "vocab-2": """
e(0) e(1) e(2) e(3) e(4) C0(0) C1(0) C0(1) C1(1) C0(2) C1(2) C0(3) e(5) C1(3) C0(4) e(6) C1(4) g(0) C0(5)
e(7) C1(5) g(1) C0(6) C1(6) g(2) C0(7) C1(7) g(3) g(4) g(5) g(6) g(7) C0(8)
""",
    "vocab-1": """
e(0) e(1) e(2) e(3) e(4) C0(0) C1(0) e(5) C0(1) C1(1) C2(0) C0(2) C1(2) C2(1) C0(3) C1(3) C2(2) C0(4) e(6)
C1(4) C2(3) C0(5) e(7) C1(5) C2(4) g(0) C0(6) C1(6) C2(5) g(1) C0(7) C1(7) C2(6) g(2) C0(8) C2(7) g(3) g(4)
g(5) g(6) g(7)
""",
}


def golden_rows(vocab: str) -> list[list[str]]:
    """One list of words per rank."""
    return [paragraph.split() for paragraph in GOLDEN_ROWS[vocab].strip().split("\n\n")]


def slot_classes(p: int, f: float = 1.0, b: float = 2.0) -> list[str]:
    """By rank: whether a steady-state slot comes before the forward pass (BSF) or after it (BFS)."""
    classes, offset = ["BSF"], 0.0
    while len(classes) < p:
        if offset - f >= -b:
            offset -= f
            classes.append("BSF")
            continue
        classes.append("BFS")
        offset += b - f
        if len(classes) < p:
            classes.append("BSF")
    return classes[::-1]


def extra_slots(p: int) -> list[int]:
    """By rank: slots between the warm-up and the first backward pass."""
    classes = slot_classes(p)
    extra = [0]
    for later in range(p - 1, 0, -1):
        same = classes[later] == "BFS" and classes[later - 1] == "BSF"
        extra.append(extra[-1] + (0 if same else 1))
    return extra[::-1]


class _Row:
    """The list of one rank while it is written."""

    def __init__(self, m: int, first_if: int, first_ib: int):
        self.m, self.first_if, self.first_ib = m, first_if, first_ib
        self.words: list[str] = []
        self.next = {"IF": 0, "IB": 0}

    def add(self, kind: str, i: int) -> None:
        self.words.append(f"{kind}{i}")

    def input(self, kind: str) -> None:
        """The next IF or IB, if one is left."""
        if self.next[kind] < self.m:
            self.add(kind, self.next[kind])
            self.next[kind] += 1

    def slot(self, j: int, backward: bool = True) -> None:
        """Slot j and the input passes that hang on it."""
        self.add("S", j)
        if j >= self.first_if:
            self.input("IF")
        if backward and j >= self.first_ib:
            self.input("IB")


def closed_form_row(p: int, m: int, rank: int, vocab: str) -> list[str]:
    """The list of one rank. Only for m >= p + k with k barriers, and p >= 2."""
    k = BARRIERS[vocab]
    assert p >= 2
    assert m >= p + k
    extra, early_slot = extra_slots(p), slot_classes(p)[rank] == "BSF"
    last_slot = m if k == 2 else m - 1
    row = _Row(m, extra[0] + k - 1, extra[0] + k + 1)
    for _ in range(rank + 1):
        row.input("IF")
    for i in range(p - rank):
        row.input("IF")
        row.add("F", i)
    row.add("S", 0)
    if k == 2:
        row.input("IF")
    row.add("F", p - rank)
    if k == 2:
        row.add("S", 1)
        row.add("F", p - rank + 1)
    ahead, j = p - rank + k, k
    for _ in range(extra[rank]):
        if j <= last_slot:
            row.slot(j, backward=False)
            j += 1
    done = 0
    while ahead < m:
        row.add("B", done)
        done += 1
        if not early_slot:
            row.add("F", ahead)
        row.slot(j)
        if early_slot:
            row.add("F", ahead)
        j, ahead = j + 1, ahead + 1
    while done < m:
        with_input = j >= row.first_ib
        row.add("B", done)
        done += 1
        if j <= last_slot:
            row.add("S", j)
            j += 1
        if with_input:
            row.input("IB")
    while row.next["IB"] < m:
        row.input("IB")
    if k == 1:
        row.add("S", m)
    return row.words


def closed_form_collectives(p: int, m: int, vocab: str) -> list[str]:
    """The order of the collectives on all ranks; the same conditions as for the lists."""
    k = BARRIERS[vocab]
    first_if = extra_slots(p)[0] + k - 1
    first_ib = extra_slots(p)[0] + k + 1
    out = [f"e({i})" for i in range(p + 1)]
    embedded, returned = p + 1, 0
    for j in range((m if k == 2 else m - 1) + 1):
        if j >= first_ib and returned < m:
            out.append(f"g({returned})")
            returned += 1
        out.append(f"C0({j})")
        if j >= first_if and embedded < m:
            out.append(f"e({embedded})")
            embedded += 1
        if j < m:
            out.append(f"C1({j})")
        if k == 2 and j > 0:
            out.append(f"C2({j - 1})")
        if k == 2 and j == 0 and embedded < m:
            out.append(f"e({embedded})")
            embedded += 1
    out += [f"g({i})" for i in range(returned, m)]
    return out if k == 2 else [*out, f"C0({m})"]


def stock_row(p: int, m: int, rank: int) -> list[str]:
    """Megatron's 1F1B: warm-up, one forward and one backward alternating, cool-down."""
    warmup = min(p - rank - 1, m)
    row = [f"F{i}" for i in range(warmup)]
    for i in range(m - warmup):
        row += [f"F{warmup + i}", f"B{i}"]
    return row + [f"B{i}" for i in range(m - warmup, m)]


def in_slots(words: list[str], m: int) -> list[str]:
    """A list in the notation of the oracle: L dropped, and "T(j-1) S(j)" as one slot."""
    out: list[str] = []
    left = [word for word in words if word[0] != "L"]
    while left:
        word = left.pop(0)
        if word[0] != "T":
            out.append(word)
            continue
        slot = int(word[1:]) + 1
        assert slot == m or left.pop(0) == f"S{slot}", f"{word} is not followed by S{slot}"
        out.append(f"S{slot}")
    return out


def with_gradients_in_c0(words: list[str], m: int) -> list[str]:
    """Collectives in the notation of the oracle: g travels with the next C0, the last one as C0(m)."""
    return [
        f"C0({m})" if word == f"G({m - 1})" else word
        for word in words
        if word[:2] != "G(" or word == f"G({m - 1})"
    ]
