"""Where the shards of a flat buffer lie: nested blocks over a grid of k groups of m members. Pure arithmetic.

A buffer is padded to a multiple of n = k * m and cut into n equal blocks. Data-parallel rank i * m + j
(member j of group i) holds

    N   all blocks
    I   blocks j*k .. j*k + k - 1    slice j of m, equal on all groups
    G   block  j*k + i               inside its own I slice

so that gathering G shards over groups gives the I slice, gathering those over members gives the buffer, and
neither needs to move blocks around.
"""

from dataclasses import dataclass

from megatron_ext.paro.strategy import Level


@dataclass(frozen=True)
class Grid:
    """Data-parallel ranks as k groups of m members, and the place of this rank in it."""

    k: int
    m: int
    group: int
    """Index i of this rank's group."""
    member: int
    """Index j of this rank in its group."""

    def __post_init__(self) -> None:
        assert 0 <= self.group < self.k, self
        assert 0 <= self.member < self.m, self

    @classmethod
    def of(cls, rank: int, k: int, m: int) -> "Grid":
        """Grid of the data-parallel rank `rank`, counted group by group."""
        return cls(k, m, *divmod(rank, m))

    @property
    def n(self) -> int:
        """Data-parallel ranks."""
        return self.k * self.m

    @property
    def rank(self) -> int:
        """Data-parallel rank."""
        return self.group * self.m + self.member

    @property
    def block(self) -> int:
        """Number of the block that this rank holds at level G; not its rank."""
        return self.member * self.k + self.group

    def parts(self, level: Level) -> int:
        """Into how many parts a level cuts a buffer."""
        return (1, self.m, self.n)[level]

    def padded(self, numel: int) -> int:
        """Elements of a buffer with room for `numel`: the next multiple of n."""
        return -(-numel // self.n) * self.n

    def range(self, level: Level, padded: int) -> tuple[int, int]:
        """First and behind-last element that this rank holds of a buffer of `padded` elements."""
        assert padded % self.n == 0, f"{padded} elements are not a multiple of {self.n} ranks"
        part = (0, self.member, self.block)[level]
        size = padded // self.parts(level)
        return part * size, (part + 1) * size

    def within(self, level: Level, outer: Level, padded: int) -> slice:
        """This rank's part at `level` as a slice of its part at the coarser `outer`."""
        assert level >= outer, (level, outer)
        begin, end = self.range(level, padded)
        start = self.range(outer, padded)[0]
        return slice(begin - start, end - start)
