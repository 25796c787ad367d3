"""How long an attention call takes: a model, to rank team sizes, bundles and placements by.

All context-parallel ranks do the same phase at the same time. What a rank sends inside its node goes over a
link of its own; what leaves the node goes over a NIC, which neighbouring ranks may share:

    phase       max over ranks of latency x messages + bytes / rate inside
                and over NICs of latency x messages + bytes of its ranks / rate of the NIC
    ring        max(attention of a step, hop) for all steps but the last, then the last one's attention

    forward     queries gathered beside keys gathered and moved, ring, log-sum-exps, outputs summed
    backward    all gathers beside keys gathered and moved, ring,
                gradients of queries summed beside those of keys returned and summed

What runs beside each other shares the links, and keys that are gathered first are moved after that: the
longer of all that is sent as one phase, and of the phases of keys one after the other.

Attention takes 4 B hq d operations for each pair of a query and a key that it sees in the forward pass, and
10 in the backward pass.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_ext.paro.network import NOTHING, Link
from megatron_ext.wallfacer.plan import Plan
from megatron_ext.wallfacer.tiles import BIDIRECTIONAL
from megatron_ext.wallfacer.volume import Cost, Flow, Shape

FORWARD_OPERATIONS, BACKWARD_OPERATIONS = 4, 10
"""Per pair, head and head dimension: two products, and five with those that are computed again."""


@dataclass(frozen=True)
class Links:
    """The network as context-parallel ranks see it."""

    inside: Link = NOTHING
    """Of a rank, to others of its node."""
    nic: Link = NOTHING
    """Of a NIC, to other nodes."""
    ranks_per_node: int = 1
    """Context-parallel ranks on a node; nodes are ranks that follow each other."""
    ranks_per_nic: int = 1
    """Context-parallel ranks that share a NIC."""

    def crosses(self, rank: int, peer: int) -> bool:
        """Whether two ranks are on different nodes."""
        return rank // self.ranks_per_node != peer // self.ranks_per_node


@dataclass(frozen=True)
class Sent:
    """Bytes and messages of one rank by class of link."""

    inside: float = 0.0
    between: float = 0.0
    messages_inside: int = 0
    messages_between: int = 0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def sent(flow: Flow, rank: int, links: Links, hops: int = 1) -> Sent:
    """A flow by class of link: equal shares to all others of a collective's group, or to its peers."""
    peers = [peer for peer in flow.peers if peer != rank]
    if not peers:
        return Sent()
    away = sum(links.crosses(rank, peer) for peer in peers)
    share = flow.bytes / len(peers)
    return Sent(share * (len(peers) - away), share * away, hops * (len(peers) - away), hops * away)


def phase_seconds(by_rank: Sequence[Sent], links: Links) -> float:
    """Time until all ranks have sent what they send."""
    slowest, nics = 0.0, defaultdict(Sent)
    for rank, amount in enumerate(by_rank):
        inside = links.inside
        slowest = max(slowest, amount.messages_inside * inside.latency_s + amount.inside / inside.bytes_per_s)
        if amount.messages_between:
            nics[rank // links.ranks_per_nic] += amount
    for amount in nics.values():
        messages = amount.messages_between / links.ranks_per_nic
        seconds = messages * links.nic.latency_s + amount.between / links.nic.bytes_per_s
        slowest = max(slowest, seconds)
    return slowest


@dataclass(frozen=True)
class Seconds:
    """Predicted for one call on all ranks."""

    forward: float
    backward: float
    attention: float
    """Of both, on the rank with most to compute."""

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward

    @property
    def exposed(self) -> float:
        """What communication adds."""
        return self.total - self.attention


@dataclass(frozen=True)
class Prediction:
    """The model of one call. `rate` is operations per second that a rank reaches, None for no time at all."""

    cost: Cost
    links: Links
    rate: float | None = None
    attached: bool = False
    """Whether attention is part of what is recomputed; see `Cost.backward`."""

    @cached_property
    def forward_flows(self) -> list[list[Flow]]:
        """By rank."""
        return [self.cost.forward(rank) for rank in range(self._size)]

    @cached_property
    def backward_flows(self) -> list[list[Flow]]:
        """By rank."""
        return [self.cost.backward(rank, attached=self.attached) for rank in range(self._size)]

    def bytes(self) -> tuple[list[Sent], list[Sent]]:
        """(forward, backward) by rank."""
        return tuple(
            [
                sum((sent(flow, rank, self.links) for flow in flows), Sent())
                for rank, flows in enumerate(found)
            ]
            for found in (self.forward_flows, self.backward_flows)
        )

    def seconds(self) -> Seconds:
        """Predicted times."""
        areas = step_areas(self.cost.plan)
        forward, backward = FORWARD_OPERATIONS, BACKWARD_OPERATIONS
        f, b = self.forward_flows, self.backward_flows
        placing = ("gather keys", ("relocate keys", "move keys"))
        first = self._beside(f, ("gather queries",), placing)
        ends = self._phase(f, "gather log-sum-exps") + self._phase(f, "sum outputs")
        ahead = first + self._ring(f, areas, forward, ("hops of keys",)) + ends
        hops = ("hops of keys", "hops of queries", "hops of gradients")
        home = ("return gradients", "sum key gradients")
        back = (
            self._beside(b, ("gather queries", "gather gradients", "gather statistics"), placing)
            + self._ring(b, areas, backward, hops)
            + self._beside(b, ("sum query gradients",), home)
        )
        attention = max(self._compute(sum(steps), forward + backward) for steps in areas)
        return Seconds(ahead, back, attention)

    @property
    def _size(self) -> int:
        return self.cost.plan.geometry.size

    def _phase(self, flows: list[list[Flow]], *names: str) -> float:
        return phase_seconds(
            [
                _sum(sent(f, rank, self.links) for f in own if f.what in names)
                for rank, own in enumerate(flows)
            ],
            self.links,
        )

    def _beside(
        self, flows: list[list[Flow]], alone: tuple[str, ...], chain: Sequence[str | tuple[str, ...]]
    ) -> float:
        """Flows of queries beside those of keys, which follow each other."""
        links = [(names,) if isinstance(names, str) else names for names in chain]
        everything = self._phase(flows, *alone, *(name for names in links for name in names))
        return max(everything, sum(self._phase(flows, *names) for names in links))

    def _compute(self, area: float, operations: int) -> float:
        if self.rate is None:
            return 0.0
        return operations * area * pair_size(self.cost.shape) / self.rate

    def _ring(
        self, flows: list[list[Flow]], areas: list[list[float]], operations: int, names: Sequence[str]
    ) -> float:
        """Hops beside attention. Rings run at the same time and share links, so all hop in one beat."""
        count = max(len(steps) for steps in areas)
        beats = max(count - 1, 1)
        per_hop = phase_seconds(
            [
                _sum(_shared(sent(f, rank, self.links), beats) for f in own if f.what in names)
                for rank, own in enumerate(flows)
            ],
            self.links,
        )
        at = [max((steps[i] for steps in areas if i < len(steps)), default=0.0) for i in range(count)]
        computed = [self._compute(area, operations) for area in at]
        if count == 1:
            return computed[0] + per_hop
        return sum(max(each, per_hop) for each in computed[:-1]) + computed[-1]


def _sum(parts: Iterable[Sent]) -> Sent:
    return sum(parts, Sent())


def _shared(amount: Sent, beats: int) -> Sent:
    """One beat's part of what a ring sends; each beat has a message of its own."""
    return Sent(
        amount.inside / beats, amount.between / beats, amount.messages_inside, amount.messages_between
    )


def pair_size(shape: Shape) -> int:
    """Elements that a pair of a query and a key costs a product of: batch, heads and head dimension."""
    return shape.batch * shape.query_heads * shape.head_dim


def step_areas(plan: Plan) -> list[list[float]]:
    """Pairs of queries and keys at each step, by rank. Equal steps are not searched for tiles."""
    geometry, layout = plan.geometry, plan.layout
    whole = len(layout.documents) == 1 and plan.mask.left is None
    pairs = geometry.team_size * geometry.bundle_size * plan.rows**2
    if whole and plan.mask == BIDIRECTIONAL:
        return [[float(pairs)] * geometry.ring_length] * geometry.size
    if whole and plan.mask.right == 0 and layout.split == "zigzag":
        return [[pairs / 2] * geometry.ring_length] * geometry.size
    return [[step.area for step in plan.key_steps(rank)] for rank in range(geometry.size)]
