"""Collectives over a grid of k groups of m members, on flat buffers in the nested layout of blocks.py.

    flat        one collective over all n ranks, as if all links were equal
    two-phase   one collective per level, so that each byte crosses between groups once
    ho-ring     two-phase's bytes, with both levels at once: while blocks spread inside a group, the next ones
                cross between groups (hierarchical overlapping ring)

What is split over the members of a group only (level I) goes over `members` or `groups` alone in all three.

Every call works in place and blocks the calling thread (gloo) or orders itself on the current stream (CUDA).
Sums are taken in one fixed order, in fp32 where the buffer is bf16 or fp16, so that runs repeat bit for bit.
Every value is computed by one rank and then copied, so that replicas are equal bit for bit.

Bytes that a rank sends, S being the bytes of the whole buffer, counted under these kinds of `traffic`:

                            between groups                          inside a group
    gather    two-phase     all_gather (k-1)/n S    paro-groups     all_gather (m-1)/m S    paro-members
              ho-ring       send       (k-1)/n S    paro-groups     all_gather (m-1)/m S    paro-members
              flat                  all_gather (n-1)/n S over paro-flat
    sum       two-phase     all_to_all (k-1)/n S                    all_to_all (m-1)/m S
              ho-ring       send       (k-1)/n S                    all_to_all (m-1)/m S
              flat                  send (n-1)/n S over paro-flat

On NCCL, sums that need no wider type for accumulation use reduce_scatter instead of all_to_all, and of flat's
send. A sum over all that every rank needs is a sum and a gather. A dimension of size 1 sends nothing.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.paro.blocks import Grid
from megatron_ext.paro.strategy import Level

Comm = Literal["flat", "two-phase", "ho-ring"]
InterDtype = Literal["native", "int8"]


@dataclass(frozen=True)
class HybridGroups:
    """This rank's process groups. Nothing else may communicate over them at the same time."""

    members: ProcessGroup
    """The m ranks of its group; group rank = member."""
    groups: ProcessGroup
    """The k ranks that are the same member of each group; group rank = group."""
    flat: ProcessGroup | None = None
    """All n ranks, group by group; only flat collectives need it."""

    def grid(self) -> Grid:
        """This rank's place."""
        grid = Grid(self.groups.size(), self.members.size(), self.groups.rank(), self.members.rank())
        assert self.flat is None or (self.flat.size(), self.flat.rank()) == (grid.n, grid.rank), grid
        return grid


@dataclass(frozen=True)
class Quantised:
    """What a gather over the groups sends as int8, and how it is put in place, on the owner too."""

    values: Tensor
    """This rank's values `[block]`, of any float type."""
    add: bool
    """Whether they are differences from what the buffers hold, else the values themselves."""


class Collectives:
    """The calls of a rank; every rank makes the same ones in the same order. `make_collectives` makes one.

    `flat` is always a contiguous 1-D tensor, a view of the buffer's part at the coarser of the two levels.
    """

    def __init__(self, groups: HybridGroups, *, inter_dtype: InterDtype = "native", feature: str = "paro"):
        self.groups = groups
        self.grid = groups.grid()
        self.feature = feature
        self._int8 = inter_dtype == "int8" and self.grid.k > 1

    def gather(self, flat: Tensor, have: Level, want: Level) -> None:
        """Fill this rank's `want` part `flat`, whose `have` part is valid, from the other ranks. Exact."""
        self._gather(flat, have, want, None)

    def gather_update(self, flat: Tensor, have: Level, want: Level, new: Tensor) -> None:
        """Give all ranks the new values of the parts that each of them has updated.

        Args:
            flat: this rank's `want` part; it holds the old values everywhere, equal on all ranks.
            have: level of the part that this rank has updated.
            new: that part's new values, of any float type (fp32 masters, say).

        Natively this is `gather` of `new` in the type of `flat`. With int8, the hop between groups carries
        the differences from the old values, and every rank, the owner included, adds what arrives: `flat` is
        equal on all ranks, bit for bit, and off by up to 1/254 of the largest difference in a block of 256.
        What one update leaves out is part of the next difference if `new` comes from masters of its own.
        """
        if self._int8 and have is Level.G and want is not Level.G:
            old = flat[self.grid.within(have, want, self._numel(flat, want))]
            self._gather(flat, have, want, Quantised(new.float() - old.float(), add=True))
            return
        flat[self.grid.within(have, want, self._numel(flat, want))].copy_(new)
        self._gather(flat, have, want, None)

    def scatter_in_group(self, flat: Tensor) -> None:
        """Sum a whole buffer over the members of the group into each one's I part. The rest is scratch."""
        if flat.numel():
            self._sum_members(flat)

    def sync(self, flat: Tensor, have: Level, want: Level) -> None:
        """Sum over all ranks into this rank's `want` part. The rest of `flat` is scratch afterwards.

        Args:
            flat: a whole buffer (`have` is N), or the I part of one that is summed over the members already.
            want: at least as fine as `have`.

        With int8, the hop between groups is quantised, of the sums too if `want` is not G.
        """
        assert have <= want, (have, want)
        assert have is not Level.G
        numel = self._numel(flat, have)
        if not numel:
            return
        if have is Level.N:
            self._sum_all(flat)
        else:
            self._sum_groups(flat)
        if want is Level.G:
            return
        coded = None
        if self._int8:
            coded = Quantised(flat[self.grid.within(Level.G, have, numel)], add=False)
        self._gather(flat[self.grid.within(want, have, numel)], Level.G, want, coded)

    def close(self) -> None:
        """Nothing is called any more. The process groups stay."""

    # --- what differs ---------------------------------------------------------------------------------------

    def _gather_members(self, flat: Tensor) -> None:
        """I to N, over the members."""
        raise NotImplementedError

    def _gather_groups(self, part: Tensor, coded: Quantised | None) -> None:
        """G to I, over the groups."""
        raise NotImplementedError

    def _gather_all(self, flat: Tensor, coded: Quantised | None) -> None:
        """G to N."""
        raise NotImplementedError

    def _sum_members(self, flat: Tensor) -> None:
        """N to I, over the members."""
        raise NotImplementedError

    def _sum_groups(self, part: Tensor) -> None:
        """I to G, over the groups."""
        raise NotImplementedError

    def _sum_all(self, flat: Tensor) -> None:
        """N to G."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------------------

    def _gather(self, flat: Tensor, have: Level, want: Level, coded: Quantised | None) -> None:
        assert have >= want, (have, want)
        if not self._numel(flat, want) or have is want:
            return
        if want is Level.I:
            self._gather_groups(flat, coded)
        elif have is Level.I:
            self._gather_members(flat)
        else:
            self._gather_all(flat, coded)

    def _numel(self, flat: Tensor, level: Level) -> int:
        """Elements of the whole buffer whose part at `level` is `flat`."""
        assert flat.dim() == 1, flat.shape
        assert flat.is_contiguous(), flat.stride()
        return flat.numel() * self.grid.parts(level)


def make_collectives(
    comm: Comm, groups: HybridGroups, *, inter_dtype: InterDtype = "native", feature: str = "paro"
) -> Collectives:
    """The collectives that `comm` names, over this rank's groups; bytes are counted under `feature`.

    Raises:
        ValueError: an unknown name, or int8 between groups with flat collectives.
    """
    from megatron_ext.paro.collectives_flat import FlatCollectives
    from megatron_ext.paro.collectives_ho_ring import HoRingCollectives
    from megatron_ext.paro.collectives_two_phase import TwoPhaseCollectives

    classes = {"flat": FlatCollectives, "two-phase": TwoPhaseCollectives, "ho-ring": HoRingCollectives}
    if comm not in classes:
        raise ValueError(f"{comm!r} names no collectives: choose one of {', '.join(classes)}")
    if inter_dtype not in get_args(InterDtype):
        raise ValueError(
            f"{inter_dtype!r} is no type for the hop between groups: choose one of "
            f"{', '.join(get_args(InterDtype))}"
        )
    if comm == "flat" and inter_dtype == "int8":
        raise ValueError(
            "int8 between groups with flat collectives: these have no hop of their own between groups that "
            "could be quantised; choose two-phase or ho-ring, or native"
        )
    return classes[comm](groups, inter_dtype=inter_dtype, feature=feature)
