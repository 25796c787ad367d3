"""Bytes that collectives really send, against the formula, for all strategies and kinds of communication."""

import collections
import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_ext import traffic
from megatron_ext.paro.collectives import HybridGroups, make_collectives
from megatron_ext.paro.passes import UnitSize, calls, evaluation_calls
from megatron_ext.paro.strategy import STRATEGIES
from megatron_ext.paro.volume import COMMS, Wire, evaluation_bytes, step_bytes
from tests.ranks import ranks

DTYPES = {2: torch.bfloat16, 4: torch.float32}


def make_groups(k: int, m: int, suffix: str) -> HybridGroups:
    lists = {
        "members": [range(first, first + m) for first in range(0, k * m, m)],
        "groups": [range(member, k * m, m) for member in range(m)],
        "flat": [range(k * m)],
    }
    found = {}
    for name, rank_lists in lists.items():
        for each in rank_lists:
            group = dist.new_group(list(each), group_desc=f"paro-{name}{suffix}")
            if dist.get_rank() in each:
                found[name] = group
    return HybridGroups(**found)


class Caller:
    """Makes calls on zeros, each kind once, and knows what they sent."""

    def __init__(self, wire, groups):
        how = {"inter_dtype": wire.inter_dtype}
        self.params, self.grads = (make_collectives(wire.comm, groups[name], **how) for name in groups)
        self.known = {}

    def sent(self, found):
        """Bytes by (kind, group) of calls on units."""
        total = collections.Counter()
        for unit, call in found:
            kind = unit, replace(call, times=1, phase="forward")
            if kind not in self.known:
                self.make(unit, call)
                self.known[kind] = drained()
            for key, amount in self.known[kind].items():
                total[key] += call.times * amount
        return dict(total)

    def make(self, unit, call):
        grid = self.params.grid
        dtype = DTYPES[unit.grad_itemsize if call.content == "grads" else unit.itemsize]
        flat = torch.zeros(unit.padded // grid.parts(min(call.have, call.want)), dtype=dtype)
        if call.operation == "scatter":
            self.grads.scatter_in_group(flat)
        elif call.operation == "sync":
            self.grads.sync(flat, call.have, call.want)
        elif call.content == "update":
            new = torch.zeros(unit.padded // grid.parts(call.have))
            self.params.gather_update(flat, call.have, call.want, new)
        else:
            self.params.gather(flat, call.have, call.want)


def drained():
    rows = [row for row in traffic.ledger().drain() if row["feature"] == "paro" and row["bytes"]]
    return {(row["kind"], row["group"]): row["bytes"] for row in rows}


WIRES = [*((comm, "native") for comm in COMMS), ("two-phase", "int8"), ("ho-ring", "int8")]
GRIDS = [(2, 2), (3, 2), (2, 3), (1, 3), (3, 1)]


@pytest.mark.parametrize(("k", "m"), GRIDS)
def test_bytes_are_those_of_the_formula(k, m):
    n = k * m

    @ranks(n)
    def body():
        groups = {suffix: make_groups(k, m, suffix) for suffix in ("", "-grads")}
        units = [
            UnitSize(700 * n, 2, 4),
            UnitSize(64 * n, 4, 4, layer="0"),
            UnitSize(64 * n, 2, 2, layer="1"),
            UnitSize(30 * n, 2, trainable=False, layer="1"),
            UnitSize(n, 4, 4, late=True),
        ]
        traffic.ledger().drain()
        for comm, inter_dtype in WIRES:
            wire = Wire(k, m, comm, inter_dtype)
            caller = Caller(wire, groups)
            for strategy, reshard in itertools.product(STRATEGIES, (True, False)):
                how = {"reshard_after_forward": reshard}
                found = [(unit, call) for unit in units for call in calls(strategy, unit, 2, **how)]
                expected = step_bytes(strategy, units, wire, 2, **how)
                assert caller.sent(found) == expected, (str(strategy), wire)
                found = [(unit, call) for unit in units for call in evaluation_calls(strategy, 3)]
                assert caller.sent(found) == evaluation_bytes(strategy, units, wire, 3)
            assert len(caller.known) > 40
            caller.params.close()
            caller.grads.close()

    body()
