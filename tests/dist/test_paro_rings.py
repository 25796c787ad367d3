"""HO-Ring as a plain function, the order of NCCL's transfers, both directions at once, and dead peers."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

from megatron_ext.ledger import ledger
from megatron_ext.paro import collectives_flat, collectives_ho_ring
from megatron_ext.paro.blocks import Grid
from megatron_ext.paro.collectives import make_collectives
from megatron_ext.paro.collectives_flat import flat_ring_all_gather, flat_ring_reduce_scatter
from megatron_ext.paro.collectives_ho_ring import (
    ho_ring_all_gather,
    ho_ring_all_reduce,
    ho_ring_reduce_scatter,
)
from megatron_ext.paro.ring import Hops
from tests.dist.paro_groups import (
    BLOCK,
    COMMS,
    GATHERS,
    SYNCS,
    G,
    N,
    bytes_sent,
    check_gather,
    hybrid_groups,
    integers,
    on_grids,
    summands,
)
from tests.ranks import run_ranks


@on_grids(comms=["plain functions"])
def test_plain_functions(groups, comm):
    """HO-Ring without an engine, and the flat ring that it is compared with."""
    grid = groups.grid()
    padded = grid.n * BLOCK
    bytes_sent()
    everyone = [integers(rank, padded, torch.float32) for rank in range(grid.n)]
    own = slice(*grid.range(G, padded))
    for reduce_scatter in (ho_ring_reduce_scatter, flat_ring_reduce_scatter):
        flat = everyone[grid.rank].clone()
        reduce_scatter(flat, groups, feature="mine")
        assert torch.equal(flat[own], sum(everyone)[own]), reduce_scatter
    for all_gather in (ho_ring_all_gather, flat_ring_all_gather):
        flat = torch.zeros(padded)
        flat[own] = everyone[0][own]
        all_gather(flat, groups, feature="mine")
        assert torch.equal(flat, everyone[0]), all_gather
    flat = everyone[grid.rank].clone()
    ho_ring_all_reduce(flat, groups)
    assert torch.equal(flat, sum(everyone))
    features = {row["feature"] for row in ledger().drain() if row["bytes"]}
    assert features == ({"mine", "paro"} if grid.n > 1 else set())


@on_grids((4, 1), (3, 2), (2, 3), comms=["flat", "ho-ring"])
def test_paired_transfers(groups, comm):
    """The order in which NCCL's transfers start, over gloo: a send and the receive of its number together."""
    paired = lambda group, feature, paired: Hops(group, feature, paired=True)  # noqa: E731
    collectives_ho_ring.Hops = collectives_flat.Hops = paired
    grid, collectives = groups.grid(), make_collectives(comm, groups)
    whole = integers(0, grid.n * BLOCK, torch.float32)
    for have, want in GATHERS:
        check_gather(comm, grid, collectives, whole, have, want)
    for have, want in SYNCS:
        flat, everyone = summands(integers, grid, have, torch.float32)
        collectives.sync(flat, have, want)
        expected = sum(everyone)[slice(*grid.range(want, whole.numel()))]
        assert torch.equal(flat[grid.within(want, have, whole.numel())], expected)


@on_grids((2, 2))
def test_gathers_and_sums_at_once(groups, comm):
    """Over communicators of their own, from two threads, as in a backward pass."""
    grid = groups.grid()
    whole, padded = integers(0, grid.n * BLOCK, torch.float32), grid.n * BLOCK
    params = make_collectives(comm, groups)
    grads = make_collectives(comm, hybrid_groups(grid.k, grid.m, "-grads"))
    errors = []

    def gather():
        try:
            for _ in range(20):
                check_gather(comm, grid, params, whole, G, N)
        except BaseException as error:
            errors.append(error)
            raise

    beside = threading.Thread(target=gather)
    beside.start()
    for _ in range(20):
        flat, everyone = summands(integers, grid, N, torch.float32)
        grads.sync(flat, N, G)
        own = slice(*grid.range(G, padded))
        assert torch.equal(flat[own], sum(everyone)[own])
    beside.join()
    assert errors == []
    params.close()
    grads.close()


@pytest.mark.parametrize("call", ["gather", "sync"])
@pytest.mark.parametrize("comm", COMMS)
def test_a_dead_peer_is_an_error(comm, call):
    """Every other rank raises, those too that never talk to it, and none waits for ever."""

    def body():
        dist.init_process_group("gloo")
        groups = hybrid_groups(2, 2)
        collectives, flat = make_collectives(comm, groups), torch.zeros(4 * BLOCK)
        arguments = (flat, G, N) if call == "gather" else (flat, N, N)
        getattr(collectives, call)(*arguments)
        if dist.get_rank() == 3:
            os._exit(7)
        try:
            for _ in range(3):  # the first may still do with what has been sent before
                getattr(collectives, call)(*arguments)
        except RuntimeError as error:
            return str(error)

    results = run_ranks(4, body, timeout=60, check=False)
    assert results[3].exit_code == 7
    for result in results[:3]:
        assert result.exit_code == 0, result.stacks
        assert "onnection" in result.value, result.value


def test_wrong_names():
    groups = None
    with pytest.raises(
        ValueError, match="'ring' names no collectives: choose one of flat, two-phase, ho-ring"
    ):
        make_collectives("ring", groups)
    with pytest.raises(ValueError, match=r"'int4' is no type for the hop .*choose one of native, int8"):
        make_collectives("two-phase", groups, inter_dtype="int4")
    with pytest.raises(
        ValueError, match=r"int8 between groups with flat .*choose two-phase or ho-ring, or nat"
    ):
        make_collectives("flat", groups, inter_dtype="int8")


@on_grids(comms=["any"])
def test_grid_of_the_groups(groups, comm):
    k, m = groups.groups.size(), groups.members.size()
    assert groups.grid() == Grid.of(dist.get_rank(), k, m)
