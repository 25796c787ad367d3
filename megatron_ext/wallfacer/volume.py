"""Bytes that a rank sends in an attention call, exactly, as `megatron_ext.traffic` counts them. No torch.

Per rank, with n rows, batch B, hq query and hk key heads of dimension d:

    q = B n hq d e       kv = 2 B n hk d e        elements of e bytes (er in sums of outputs, eg of gradients)
    s = 4 B n hq         statistics of rows (8 for fp64)

Forward pass

    gather queries         (C-1) q                 team
    gather log-sum-exps    (C-1) C s               team-sums
    sum outputs            (C-1) q er/e            team-sums
    gather keys            (K-1) kv                bundle         not if moved directly
    relocate               K kv                    move           nothing for a rank that keeps its bundle
      or move directly     K kv                    move           less what a rank keeps
    ring                   (R-1) K kv              ring

Backward pass: gathers, relocation as before unless they are kept, and

    gather gradients       (C-1) q                 team
    gather statistics      (C-1) s, or (C-1) q     team           dot products, or outputs
    return                 K kv eg/e               move-grads     nothing for a rank that returns to itself
    sum of keys            (K-1) kv eg/e           bundle-sums    not if moved directly
    sum of queries         (C-1) q eg/e            team-sums
    keys travel            (R-1) K kv              ring
                           (R-1) K kv eg/e         ring-grads
    queries travel         (R-1) C (2 q + 2 s)     ring           or 3 q + s with outputs
                           R C q eg/e              ring-grads     nothing for R = 1

Where steps are left out (sliding windows, documents), fewer transfers than R-1 and R are made.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_ext.wallfacer.groups import PREFIX
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

Travels = Literal["keys", "queries"]
Volume = dict[tuple[str, str], int]
"""Bytes by (kind, group name)."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a call on one rank."""

    batch: int
    query_heads: int
    key_heads: int
    head_dim: int
    itemsize: int = 2
    """Bytes of an element of activations; sums take 4, or 8 for fp64."""

    @classmethod
    def of(cls, q: "Tensor", k: "Tensor") -> "Shape":
        """Of a call's inputs."""
        return cls(q.shape[1], q.shape[2], k.shape[2], q.shape[3], q.dtype.itemsize)

    @property
    def wide(self) -> int:
        """Bytes of an element of sums."""
        return max(4, self.itemsize)


@dataclass(frozen=True)
class Flow:
    """One of the lines above, for one rank."""

    what: str
    kind: str
    """As `megatron_ext.traffic` counts it."""
    group: str
    bytes: int
    """Sent by this rank."""
    peers: tuple[int, ...]
    """Context-parallel ranks: those of the collective's group, or those that it sends to, equal shares
    each."""


@dataclass(frozen=True)
class Cost:
    """Flows of calls of one plan and shape; `native_sums` where NCCL sums fp32 (comm.sums_natively)."""

    plan: Plan
    shape: Shape
    options: Options
    native_sums: bool = False

    def travels(self) -> Travels:
        """What goes round in the backward pass: what was chosen, or what sends less. The same on all
        ranks."""
        if self.options.backward != "auto":
            return self.options.backward
        if self.plan.geometry.ring_length == 1:
            return "keys"
        return min(("keys", "queries"), key=self._ring_bytes_of_all)

    def sends_dots(self) -> bool:
        """Whether the backward pass sends dot products instead of outputs."""
        geometry = self.plan.geometry
        alone = geometry.team_size == 1 and (self.travels() == "keys" or geometry.ring_length == 1)
        return self.options.statistics == "delta" and not alone

    def forward(self, rank: int) -> list[Flow]:
        """Of the forward pass."""
        geometry, member = self.plan.geometry, self.plan.geometry.place(rank)
        team = geometry.team(geometry.team_of(rank))
        others = geometry.team_size - 1
        hops, _ = self.plan.transfers(member.group, member.member, "keys")
        flows = [
            Flow("gather queries", "all_gather", "team", others * self._query, team),
            *self._placing(rank),
            self._hops(rank, "hops of keys", "ring", hops * geometry.bundle_size * self._keys),
            Flow(
                "gather log-sum-exps",
                "all_gather",
                "team-sums",
                others * geometry.team_size * self._statistics,
                team,
            ),
            self._sum("sum outputs", "team-sums", others * self._as(self._query, "sum"), team, "sum"),
        ]
        return [flow for flow in flows if flow.bytes]

    def backward(self, rank: int, *, attached: bool = False) -> list[Flow]:
        """Of the backward pass; `attached` where the result came from `Rings.attach`, which keeps nothing."""
        geometry, place = self.plan.geometry, self.plan.geometry.place(rank)
        team, own = geometry.team(geometry.team_of(rank)), geometry.bundle(self._own_bundle(rank))
        others, keys_too = geometry.team_size - 1, self.travels() == "keys"
        query = self._query
        kept = self.options.keep == "team" and not attached
        travelling, followed = self.plan.transfers(place.group, place.member, self.travels())
        statistics = self._statistics if self.sends_dots() else query
        if keys_too:
            load, grads = geometry.bundle_size * self._keys, geometry.bundle_size * self._keys
        else:
            load = geometry.team_size * (2 * query + self._statistics + statistics)
            grads = geometry.team_size * query
        flows = [
            Flow("gather queries", "all_gather", "team", 0 if kept else others * query, team),
            Flow("gather gradients", "all_gather", "team", others * query, team),
            Flow("gather statistics", "all_gather", "team", others * statistics, team),
            *([] if kept else self._placing(rank)),
            self._hops(rank, f"hops of {self.travels()}", "ring", travelling * load),
            self._hops(rank, "hops of gradients", "ring-grads", followed * self._as(grads, "grad")),
            self._return(rank, travelled=keys_too),
            self._sum("sum query gradients", "team-sums", others * self._as(query, "grad"), team, "grad"),
        ]
        if not self._direct:
            amount = (geometry.bundle_size - 1) * self._as(self._keys, "grad")
            flows.append(self._sum("sum key gradients", "bundle-sums", amount, own, "grad"))
        return [flow for flow in flows if flow.bytes]

    # --- parts ---------------------------------------------------------------------------------------------

    @property
    def _query(self) -> int:
        return self.shape.batch * self.plan.rows * self.shape.query_heads * self._head

    @property
    def _keys(self) -> int:
        return 2 * self.shape.batch * self.plan.rows * self.shape.key_heads * self._head

    @property
    def _head(self) -> int:
        return self.shape.head_dim * self.shape.itemsize

    @property
    def _statistics(self) -> int:
        return self.shape.batch * self.plan.rows * self.shape.query_heads * self.shape.wide

    @property
    def _direct(self) -> bool:
        return self.options.movement == "direct" and self.plan.geometry.bundle_size > 1

    def _itemsize(self, what: Literal["sum", "grad"]) -> int:
        chosen = self.options.sum_type if what == "sum" else self.options.grad_type
        return self.shape.wide if chosen == "fp32" else self.shape.itemsize

    def _as(self, amount: int, what: Literal["sum", "grad"]) -> int:
        return amount // self.shape.itemsize * self._itemsize(what)

    def _own_bundle(self, rank: int) -> int:
        return self.plan.geometry.number_of(rank) // self.plan.geometry.bundle_size

    def _sum(
        self, what: str, group: str, amount: int, ranks: tuple[int, ...], wire: Literal["sum", "grad"]
    ) -> Flow:
        native = self.native_sums and self._itemsize(wire) == self.shape.wide
        return Flow(what, "reduce_scatter" if native else "all_to_all", group, amount, ranks)

    def _hops(self, rank: int, what: str, group: str, amount: int) -> Flow:
        place = self.plan.geometry.place(rank)
        ring = self.plan.geometry.ring(place.group, place.member)
        return Flow(what, "send", group, amount, (ring[(place.position + 1) % len(ring)],))

    def _placing(self, rank: int) -> list[Flow]:
        geometry, size = self.plan.geometry, self.plan.geometry.bundle_size
        if size == 1:
            return []
        if self._direct:
            holders = [geometry.holder(self._own_bundle(rank), group) for group in range(size)]
            return [self._moved("move keys", "move", self._keys, holders, rank)]
        owners = geometry.bundle(self._own_bundle(rank))
        return [
            Flow("gather keys", "all_gather", "bundle", (size - 1) * self._keys, owners),
            self._moved("relocate keys", "move", size * self._keys, [geometry.destination(rank)], rank),
        ]

    def _return(self, rank: int, travelled: bool) -> Flow:
        geometry, place = self.plan.geometry, self.plan.geometry.place(rank)
        hops = self.plan.last_hop(place.group, place.member) if travelled else 0
        bundle, share = geometry.bundle_at(rank, hops), self._as(self._keys, "grad")
        if self._direct:
            return self._moved("return gradients", "move-grads", share, geometry.bundle(bundle), rank)
        owner = geometry.owner(bundle, place.group)
        return self._moved("return gradients", "move-grads", geometry.bundle_size * share, [owner], rank)

    @staticmethod
    def _moved(what: str, group: str, parcel: int, targets: Iterable[int], rank: int) -> Flow:
        peers = tuple(target for target in targets if target != rank)
        return Flow(what, "send", group, parcel * len(peers), peers)

    def _ring_bytes_of_all(self, travels: Travels) -> int:
        """Sent by all ranks in their rings if `travels` does."""
        geometry = self.plan.geometry
        if travels == "keys":
            load = grads = geometry.bundle_size * self._keys
        else:
            third = self._statistics if self.options.statistics == "delta" else self._query
            load = geometry.team_size * (2 * self._query + self._statistics + third)
            grads = geometry.team_size * self._query
        moved = [self.plan.transfers(group, member, travels) for group, member in geometry.rings()]
        return sum(a * load + b * self._as(grads, "grad") for a, b in moved)


def totals(flows: Iterable[Flow]) -> Volume:
    """Bytes by (kind, group name), as the run record has them."""
    found: Counter[tuple[str, str]] = Counter()
    for flow in flows:
        found[flow.kind, PREFIX + flow.group] += flow.bytes
    return dict(found)
