"""Bytes that a rank sends in one optimizer step, exactly, by (kind, group) as `megatron_ext.traffic` counts.

n = k groups x m members; S bytes of a whole (padded) buffer. Every rank sends the same:

    pass over the members    (m - 1) S / m         pass over the groups    (k - 1) S / n
    pass over all, flat      (n - 1) S / n

One NIC per group sends m times what each of its ranks sends to other groups, so a pass over the groups costs
it (k - 1) S / k. Of a flat ring in rank order one member's link leaves the group: (n - 1) S / n.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megatron_ext.paro.passes import Call, Content, UnitSize, calls, evaluation_calls
from megatron_ext.paro.strategy import Level, Strategy

Comm = Literal["flat", "two-phase", "ho-ring"]
InterDtype = Literal["native", "int8"]
Backend = Literal["gloo", "nccl"]
Volume = dict[tuple[str, str], int]
"""Bytes by (kind, group)."""

COMMS: tuple[Comm, ...] = ("flat", "two-phase", "ho-ring")
QUANT_BLOCK, SCALE_BYTES = 256, 4
"""Elements that share a scale in the quantised hop, and the scale's bytes."""


@dataclass(frozen=True)
class Hop:
    """One pass of a buffer over the ranks of a scope."""

    action: Literal["gather", "reduce"]
    scope: Literal["members", "groups", "flat"]


@dataclass(frozen=True)
class Wire:
    """How collectives run."""

    k: int
    """Groups."""
    m: int
    """Members of each."""
    comm: Comm = "two-phase"
    inter_dtype: InterDtype = "native"
    backend: Backend = "gloo"

    @property
    def n(self) -> int:
        """Data-parallel ranks."""
        return self.k * self.m


def hops(call: Call, comm: Comm) -> list[Hop]:
    """The passes of a call, in order."""
    have, want = call.have, call.want
    whole = {have, want} == {Level.N, Level.G}
    if call.operation == "gather":
        if whole and comm == "flat":
            return [Hop("gather", "flat")]
        over_groups = [Hop("gather", "groups")] if have is Level.G else []
        return over_groups + ([Hop("gather", "members")] if want is Level.N else [])
    if call.operation == "scatter":
        return [Hop("reduce", "members")]
    over_all = have is Level.N and comm == "flat"
    if over_all and want is Level.N:
        return [Hop("reduce", "flat"), Hop("gather", "flat")]
    if over_all:
        found = [Hop("reduce", "flat")]
    else:
        found = [Hop("reduce", "members")] if have is Level.N else []
        found.append(Hop("reduce", "groups"))
    if want is not Level.G:
        found.append(Hop("gather", "groups"))
    return found + ([Hop("gather", "members")] if want is Level.N else [])


def part_bytes(unit: UnitSize, content: Content, hop: Hop, wire: Wire) -> int:
    """Bytes that a rank sends to each peer of a pass (over a ring: in each of its rounds)."""
    if hop.scope == "members":
        return unit.nbytes(content) // wire.m
    block = unit.padded // wire.n
    if hop.scope == "groups" and content != "params" and wire.inter_dtype == "int8":
        return block + SCALE_BYTES * -(-block // QUANT_BLOCK)
    return unit.nbytes(content) // wire.n


def peers(hop: Hop, wire: Wire) -> int:
    """How many parts a rank sends in a pass."""
    return {"members": wire.m, "groups": wire.k, "flat": wire.n}[hop.scope] - 1


def step_bytes(
    strategy: Strategy,
    units: Iterable[UnitSize],
    wire: Wire,
    microbatches: int,
    *,
    reshard_after_forward: bool = True,
    updated: bool = True,
) -> Volume:
    """Bytes that each rank sends in a training step; passes over a single rank are left out.

    `updated` is false for a step that the optimizer skips, because of an infinite gradient say.
    """
    total: Counter[tuple[str, str]] = Counter()
    for unit in units:
        found = calls(strategy, unit, microbatches, reshard_after_forward=reshard_after_forward)
        _add(total, unit, [call for call in found if updated or call.content != "update"], wire)
    return dict(total)


def evaluation_bytes(strategy: Strategy, units: Iterable[UnitSize], wire: Wire, microbatches: int) -> Volume:
    """Bytes that each rank sends in `microbatches` forward passes of an evaluation."""
    total: Counter[tuple[str, str]] = Counter()
    for unit in units:
        _add(total, unit, evaluation_calls(strategy, microbatches), wire)
    return dict(total)


def _add(total: Counter[tuple[str, str]], unit: UnitSize, found: list[Call], wire: Wire) -> None:
    for call in found:
        for hop in hops(call, wire.comm):
            amount = peers(hop, wire) * part_bytes(unit, call.content, hop, wire)
            if amount:
                group = f"paro-{hop.scope}" + ("-grads" if call.content == "grads" else "")
                total[_kind(unit, hop, wire), group] += call.times * amount


def sums_natively(unit: UnitSize, wire: Wire) -> bool:
    """Whether gradients are summed by the library: NCCL, in a type that needs no wider one."""
    return wire.backend == "nccl" and unit.grad_itemsize >= 4


def _kind(unit: UnitSize, hop: Hop, wire: Wire) -> str:
    """The kind that the transfers of a pass are counted as."""
    if hop.scope == "groups" and wire.comm == "ho-ring":
        return "send"
    if hop.action == "gather":
        return "all_gather"
    if sums_natively(unit, wire) and not (hop.scope == "groups" and wire.inter_dtype == "int8"):
        return "reduce_scatter"
    return "send" if hop.scope == "flat" else "all_to_all"


@dataclass(frozen=True)
class Totals:
    """Where the bytes of a step go."""

    inside: Fraction
    """Sent within its group by a rank; the mean over the ranks, who differ in a flat ring."""
    between: int
    """Sent to other groups by all ranks of a group."""


def totals(volume: Volume, wire: Wire) -> Totals:
    """Inside and between groups, of the bytes that every rank sends by (kind, group)."""
    inside, between = Fraction(0), 0
    for (_, group), amount in volume.items():
        scope = group.removesuffix("-grads").removeprefix("paro-")
        if scope == "groups":
            between += wire.m * amount
        elif scope == "members" or wire.k == 1:
            inside += amount
        else:
            between += amount
            inside += Fraction(amount * (wire.m - 1), wire.m)
    return Totals(inside, between)
