"""How long an optimizer step takes under a strategy: a model, to rank strategies by.

A pass over p ranks takes (p - 1) (latency + part / bandwidth). The passes of a call follow each other, except
in HO-Ring, where those over the members (t for a block of each member) run beside the hops between groups (e
for one):

    gather    f_0 = t,      f_r = max(f_(r-1), r e) + t       for r < k
    reduce    h_0 = t + e,  h_r = max(h_(r-1), (r + 1) t) + e for r < k - 1, and at the end max(h_(k-2), k t)

Parameter gathers are one lane, gradient reductions another. Without overlap, lanes and compute add up. With
it a pass over u layers is a pipeline: the slowest of the three takes all its time, of the others one layer's
share stays visible; and nothing is faster than what both lanes send over the links that they share. Then

    step = (s - 1) (forward + backward) + first forward, behind the update of parameters
           + last backward, before the sum over the groups + optimizer
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_ext.paro.network import NOTHING, Link, Network
from megatron_ext.paro.passes import Call, UnitSize, calls
from megatron_ext.paro.strategy import Level, Strategy
from megatron_ext.paro.volume import Hop, Wire, hops, part_bytes, peers


@dataclass(frozen=True)
class Compute:
    """Seconds of compute on one rank."""

    forward: float = 0.0
    """One microbatch."""
    backward: float = 0.0
    optimizer: float = 0.0
    """Updating all trainable parameters; a rank updates its part of them."""


@dataclass(frozen=True)
class Step:
    """Predicted seconds of a step."""

    total: float
    compute: float
    params: float
    """Of parameter gathers, overlapped or not."""
    grads: float
    """Of gradient reductions, overlapped or not."""

    @property
    def exposed(self) -> float:
        """What communication adds to the step."""
        return self.total - self.compute


@dataclass
class _Load:
    """Communication of one phase, in seconds: by lane, and by the links that they keep busy."""

    params: float = 0.0
    grads: float = 0.0
    inside: float = 0.0
    between: float = 0.0

    def plus(self, other: "_Load") -> "_Load":
        return _Load(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def hop_seconds(unit: UnitSize, call: Call, hop: Hop, wire: Wire, network: Network) -> float:
    """Time of one pass of a call."""
    count = peers(hop, wire)
    if not count:
        return 0.0
    part = part_bytes(unit, call.content, hop, wire)
    return network.link(hop.scope, hop.action).seconds(part, count)


def call_seconds(unit: UnitSize, call: Call, wire: Wire, network: Network) -> float:
    """Time of one call on one unit."""
    found = hops(call, wire.comm)
    total, index = 0.0, 0
    while index < len(found):
        pair = found[index : index + 2]
        if wire.comm == "ho-ring" and _overlapping(pair):
            total += _ring_seconds(unit, call, pair, wire, network)
            index += 2
        else:
            total += hop_seconds(unit, call, found[index], wire, network)
            index += 1
    return total


def _overlapping(pair: list[Hop]) -> bool:
    return len(pair) == 2 and pair[0].action == pair[1].action and pair[0].scope != pair[1].scope


def _ring_seconds(unit: UnitSize, call: Call, pair: list[Hop], wire: Wire, network: Network) -> float:
    """A gather or a reduce over groups and members at once."""
    of = {hop.scope: hop for hop in pair}
    inside = Link(0.0, 1.0) if wire.m == 1 else network.link("members", pair[0].action)
    t = inside.seconds(part_bytes(unit, call.content, of["members"], wire) / wire.k, wire.m - 1)
    link = network.link("groups", pair[0].action) if wire.k > 1 else NOTHING
    e = link.seconds(part_bytes(unit, call.content, of["groups"], wire))
    return ho_ring_gather(wire.k, t, e) if pair[0].action == "gather" else ho_ring_reduce(wire.k, t, e)


def ho_ring_gather(k: int, t: float, e: float) -> float:
    """All-gather over k groups: t seconds inside a group per round, e for a hop between groups."""
    end = t
    for round_ in range(1, k):
        end = max(end, round_ * e) + t
    return end


def ho_ring_reduce(k: int, t: float, e: float) -> float:
    """Reduce-scatter over k groups, with the same t and e."""
    hop = 0.0
    for round_ in range(k - 1):
        hop = max(hop, (round_ + 1) * t) + e
    return max(hop, k * t)


def step_seconds(
    strategy: Strategy,
    units: Iterable[UnitSize],
    wire: Wire,
    network: Network,
    microbatches: int,
    compute: Compute,
    *,
    overlap_params: bool = True,
    overlap_grads: bool = True,
    reshard_after_forward: bool = True,
) -> Step:
    """The modelled time of a training step."""
    loads = {phase: _Load() for phase in ("forward", "backward", "boundary", "update")}
    units = list(units)
    for unit in units:
        for call in calls(strategy, unit, 1, reshard_after_forward=reshard_after_forward):
            loads[call.phase] = loads[call.phase].plus(_load(unit, call, wire, network))
    depth = len({unit.layer for unit in units})
    beside = (overlap_params, overlap_grads)
    forward, backward = compute.forward, compute.backward
    update = compute.optimizer / {Level.N: 1, Level.I: wire.m, Level.G: wire.n}[strategy.optimizer]
    total = (
        (microbatches - 1)
        * (
            _phase(forward, loads["forward"], depth, beside)
            + _phase(backward, loads["backward"], depth, beside)
        )
        + _phase(forward, loads["update"].plus(loads["forward"]), depth, beside)
        + _phase(backward, loads["backward"].plus(loads["boundary"]), depth, beside)
        + update
    )
    passes = [loads["forward"], loads["backward"]] * microbatches + [loads["boundary"], loads["update"]]
    return Step(
        total,
        microbatches * (forward + backward) + update,
        sum(load.params for load in passes),
        sum(load.grads for load in passes),
    )


def _load(unit: UnitSize, call: Call, wire: Wire, network: Network) -> _Load:
    seconds = call_seconds(unit, call, wire, network)
    load = _Load(grads=seconds) if call.content == "grads" else _Load(params=seconds)
    for hop in hops(call, wire.comm):
        busy = hop_seconds(unit, call, hop, wire, network)
        if hop.scope == "members" or wire.k == 1:
            load.inside += busy
        else:
            load.between += busy
    return load


def _phase(compute: float, load: _Load, depth: int, beside: tuple[bool, bool]) -> float:
    """A pass over `depth` layers, each of which is gathered, computed and reduced."""
    lanes = (load.params, load.grads)
    pipelined = [compute, *(lane for lane, overlaps in zip(lanes, beside, strict=True) if overlaps)]
    slowest = max(pipelined)
    pipeline = slowest + (sum(pipelined) - slowest) / depth
    serial = sum(lane for lane, overlaps in zip(lanes, beside, strict=True) if not overlaps)
    return max(pipeline + serial, load.inside, load.between)
