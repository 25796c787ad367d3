"""Rank layouts as pure functions: which ranks form which group. No torch, no process group.

A `Grid` names the process axes of a job from the fastest-varying to the slowest, as Megatron's `order`
strings do. Every tuple of ranks made here is sorted, because `torch.distributed.new_group` sorts ranks: a
member's position in the tuple is its rank in the group.

    grid = megatron_grid(16, tp=2, pp=2)       # axes tp 2, cp 1, dp 4, pp 2
    grid.groups("tp", "pp")                    # Megatron's model-parallel groups
    grid.split("tp", l=1, j=2)                 # sub-axes of one axis, fastest first
    within(grid.groups("cp", "dp"), Grid(member=2, group=2).groups("member"))   # sub-groups of combined axes
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

Groups = list[tuple[int, ...]]

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""Order of the axes without and with `--use-tp-pp-dp-mapping`, as `megatron.training` passes it on."""
TP_PP_DP_ORDER = "tp-cp-ep-pp-dp"

_FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "gtp_remat": "--tensor-parallel-num-weight-shards",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
}
_EXPERT_FLAGS = {
    **_FLAGS,
    "tp": "--expert-tensor-parallel-size",
    "gtp_remat": "--expert-tensor-parallel-num-weight-shards",
}


@dataclass(frozen=True, init=False)
class Grid:
    """Process axes, fastest-varying first: the rank is the mixed-radix number of the coordinates."""

    axes: tuple[tuple[str, int], ...]

    def __init__(self, axes: Mapping[str, int] | Iterable[tuple[str, int]] = (), **more: int) -> None:
        """`Grid(tp=2, dp=4)`, `Grid({"tp": 2, "dp": 4})` and `Grid([("tp", 2), ("dp", 4)])` are the same.

        Raises ValueError for a name used twice or a size that is not a positive integer.
        """
        pairs = (*(axes.items() if isinstance(axes, Mapping) else axes), *more.items())
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(
                f"axis {repeated[0]!r} is named {names.count(repeated[0])} times in {', '.join(names)}: "
                "give each axis a name of its own"
            )
        for name, size in pairs:
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"axis {name!r} has size {size!r}: use a whole number of ranks, at least 1")
        object.__setattr__(self, "axes", tuple(pairs))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, fastest first."""
        return tuple(name for name, _ in self.axes)

    def __getitem__(self, axis: str) -> int:
        """Size of `axis`. Raises ValueError for an unknown axis."""
        self._check(axis)
        return dict(self.axes)[axis]

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinate of `rank` on every axis. Raises ValueError for a rank outside the grid."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not on a grid of {self.size} ranks: use 0 to {self.size - 1}")
        found = {}
        for name, size in self.axes:
            rank, found[name] = divmod(rank, size)
        return found

    def rank(self, **coords: int) -> int:
        """Rank at the given coordinates (axes left out are at 0). Raises ValueError when outside the grid."""
        self._check(*coords)
        for name, at in coords.items():
            if not 0 <= at < self[name]:
                raise ValueError(f"coordinate {name}={at} is not on the axis: use 0 to {self[name] - 1}")
        return sum(coords.get(name, 0) * stride for name, _, stride in self._strides())

    def groups(self, *axes: str) -> Groups:
        """All groups along `axes` combined: ranks that differ only in these coordinates.

        The order in which axes are named does not matter. Groups and members come in Megatron's order (that
        of `RankGenerator.get_ranks`). Raises ValueError for an unknown axis.
        """
        self._check(*axes)
        inside = self._offsets(name for name in self.names if name in axes)
        outside = self._offsets(name for name in self.names if name not in axes)
        return [tuple(base + offset for offset in inside) for base in outside]

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The one of `groups(*axes)` that holds `rank`, without building the others."""
        self._check(*axes)
        own = self.coords(rank)
        base = self.rank(**{name: at for name, at in own.items() if name not in axes})
        return tuple(base + offset for offset in self._offsets(name for name in self.names if name in axes))

    def split(self, axis: str, **parts: int) -> "Grid":
        """The same ranks with `axis` replaced by `parts`, fastest first.

        Raises ValueError when the sizes of the parts do not multiply to the size of the axis.
        """
        size = self[axis]
        if prod(parts.values()) != size:
            shape = " x ".join(f"{name} {part}" for name, part in parts.items())
            raise ValueError(
                f"axis {axis!r} has {size} ranks, but {shape} = {prod(parts.values())}: choose sizes whose "
                f"product is {size}, or make the axis {prod(parts.values())} ranks"
            )
        pairs: list[tuple[str, int]] = []
        for name, length in self.axes:
            pairs += parts.items() if name == axis else [(name, length)]
        return Grid(pairs)

    def _strides(self) -> Iterator[tuple[str, int, int]]:
        stride = 1
        for name, size in self.axes:
            yield name, size, stride
            stride *= size

    def _offsets(self, names: Iterable[str]) -> list[int]:
        wanted = set(names)
        steps = [range(0, size * stride, stride) for name, size, stride in self._strides() if name in wanted]
        # product() varies its last argument fastest, the grid its first.
        return [sum(step) for step in product(*reversed(steps))]

    def _check(self, *axes: str) -> None:
        for axis in axes:
            if axis not in self.names:
                raise ValueError(f"no axis {axis!r} on this grid: its axes are {', '.join(self.names)}")


def megatron_grid(
    world_size: int, *, tp: int = 1, cp: int = 1, pp: int = 1, gtp_remat: int = 1, order: str = DEFAULT_ORDER
) -> Grid:
    """Megatron's layout of everything but experts; `dp` is what the other axes leave of `world_size`.

    The axis `gtp_remat` (generalized tensor parallelism) comes right after `tp`, and is there only when it
    is longer than 1. Raises ValueError when the sizes do not fit the world.
    """
    sizes = {"tp": tp, "gtp_remat": gtp_remat, "cp": cp, "pp": pp}
    return _grid_of(world_size, sizes, order, gtp_after="tp", flags=_FLAGS)


def megatron_expert_grid(
    world_size: int, *, tp: int = 1, ep: int = 1, pp: int = 1, gtp_remat: int = 1, order: str = DEFAULT_ORDER
) -> Grid:
    """Megatron's layout of expert layers: `tp` is the expert tensor-parallel size, and `cp` is part of `dp`.

    The axis `gtp_remat` comes right after `ep`, and is there only when it is longer than 1. Raises ValueError
    when the sizes do not fit the world.
    """
    sizes = {"tp": tp, "gtp_remat": gtp_remat, "ep": ep, "pp": pp}
    return _grid_of(world_size, sizes, order, gtp_after="ep", flags=_EXPERT_FLAGS)


def _grid_of(
    world_size: int, sizes: dict[str, int], order: str, gtp_after: str, flags: Mapping[str, str]
) -> Grid:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{flags[name]} is {size}: use a whole number of ranks, at least 1")
    if sorted(order.split("-")) != ["cp", "dp", "ep", "pp", "tp"]:
        raise ValueError(
            f"axis order {order!r} must name tp, cp, ep, dp and pp once each, as {DEFAULT_ORDER!r} does"
        )
    used = {name: size for name, size in sizes.items() if size > 1}
    copy = prod(used.values())
    if world_size < 1 or world_size % copy:
        shape = " x ".join(f"{name} {size}" for name, size in used.items()) or "one rank"
        flags_used = ", ".join(flags[name] for name in used) or "a positive world size"
        above = max(world_size // copy + 1, 1) * copy
        raise ValueError(
            f"{world_size} ranks cannot hold a whole number of model copies of {shape} = {copy} ranks: "
            f"start a multiple of {copy} ranks (for example {above}), or change {flags_used}"
        )
    lengths = {**sizes, "dp": world_size // copy}
    names = order.split("-")
    if sizes["gtp_remat"] > 1:
        names.insert(names.index(gtp_after) + 1, "gtp_remat")
    return Grid((name, lengths[name]) for name in names if name in lengths)


def within(groups: Iterable[Sequence[int]], places: Sequence[Sequence[int]]) -> Groups:
    """Sub-groups of every group, by place: `places` holds tuples of positions inside a group.

    With n ranks a group, `within(groups, Grid(a=x, b=y).groups("a"))`, x * y = n, splits each group into y
    sub-groups of x neighbours. Works for groups over combined axes, where `Grid.split` cannot reach, and for
    families of groups that are not axes at all (places may overlap, but must leave nobody out). Raises
    ValueError when the places are not those of the whole group, or the group is not sorted.
    """
    covered = {at for place in places for at in place}
    found: Groups = []
    for group in groups:
        if covered != set(range(len(group))):
            raise ValueError(
                f"the group {short_list(group)} has {len(group)} ranks, but the split is one of "
                f"{len(covered)} places: choose sub-group sizes whose product is {len(group)}"
            )
        if any(a >= b for a, b in pairwise(group)):
            raise ValueError(
                f"the group {short_list(group)} is not sorted: torch sorts ranks, so list them sorted"
            )
        found += [tuple(group[at] for at in place) for place in places]
    return found


def members_per_node(groups: Iterable[Sequence[int]], ranks_per_node: int) -> int:
    """How many ranks each group has on each node that it touches. A node is `ranks_per_node` ranks in a row.

    Raises ValueError when that is not one number, so that groups cannot be cut into equal parts by node.
    """
    if ranks_per_node < 1:
        raise ValueError(f"{ranks_per_node} ranks per node: use a whole number of ranks, at least 1")
    counts: dict[int, tuple[int, str]] = {}
    for group in groups:
        on_node: dict[int, int] = {}
        for rank in group:
            on_node[rank // ranks_per_node] = on_node.get(rank // ranks_per_node, 0) + 1
        for node, count in on_node.items():
            counts.setdefault(count, (node, short_list(group)))
    if len(counts) != 1:
        cases = "; ".join(
            f"{count} on node {node} of the group {group}" for count, (node, group) in sorted(counts.items())
        )
        raise ValueError(
            f"with {ranks_per_node} ranks per node the groups do not have the same number of ranks on each "
            f"node ({cases or 'no group'}): choose parallel sizes that divide {ranks_per_node}, or start the "
            "same number of ranks on every node"
        )
    return next(iter(counts))


def split_by_node(groups: Groups, ranks_per_node: int) -> tuple[Groups, Groups]:
    """Cut groups at node borders: (groups inside a node, groups across nodes of the same place on the node).

    Raises ValueError as `members_per_node` does, or when the groups differ in length.
    """
    member = members_per_node(groups, ranks_per_node)
    lengths = sorted({len(group) for group in groups})
    if len(lengths) > 1:
        raise ValueError(f"groups of {lengths} ranks cannot be split alike: pass groups of one length")
    places = Grid(member=member, node=lengths[0] // member)
    return within(groups, places.groups("member")), within(groups, places.groups("node"))


def short_list(group: Sequence[int]) -> str:
    """Ranks for a message, long lists cut short."""
    shown = [str(rank) for rank in group]
    return f"[{', '.join(shown if len(shown) <= 12 else [*shown[:8], f'... {shown[-1]}'])}]"
