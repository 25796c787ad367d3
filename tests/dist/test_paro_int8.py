"""The quantised hop between groups: errors within bounds, replicas equal bit for bit, exact bytes."""

import torch

from megatron_ext.paro.collectives import make_collectives
from megatron_ext.paro.quantise import BLOCK as SCALED
from tests.dist.paro_groups import (
    BLOCK,
    SYNCS,
    G,
    I,
    N,
    bytes_sent,
    equal_on_all,
    floats,
    integers,
    on_grids,
    replicas,
    summands,
)

COMMS = ["two-phase", "ho-ring"]
UPDATES = [(G, N), (G, I), (I, N), (G, G), (N, N)]
PER_BLOCK = BLOCK + 4 * 3  # bytes: 700 values in blocks of 256 have three scales


def largest(values, n):
    """Of each block that shares a scale, for each of its elements; ranks quantise their blocks one by one."""
    rows = values.double().abs().view(n, -1)
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % SCALED)).view(n, -1, SCALED)
    most = padded.amax(dim=2, keepdim=True).expand_as(padded).reshape(n, -1)
    return most[:, : rows.shape[1]].reshape(-1)


@on_grids(comms=COMMS)
def test_sums(groups, comm):
    """Each of the k - 1 hops adds half a step at most, and the gather of the sums another."""
    grid = groups.grid()
    collectives = make_collectives(comm, groups, inter_dtype="int8")
    padded = grid.n * BLOCK
    for dtype in (torch.float32, torch.bfloat16):
        for have, want in SYNCS:
            flat, everyone = summands(floats, grid, have, dtype)
            again = flat.clone()
            for buffer in (flat, again):
                collectives.sync(buffer, have, want)
            own, inside = slice(*grid.range(want, padded)), grid.within(want, have, padded)
            part = flat[inside]
            assert torch.equal(part, again[inside])
            exact = sum(values.double() for values in everyone)
            most = sum(values.double().abs() for values in everyone)
            steps = (grid.k - 1 + (want is not G)) if grid.k > 1 else 0
            bound = 1.02 * steps * largest(most, grid.n) / 254
            bound += grid.n * most * torch.finfo(dtype).eps
            error = (part.double() - exact[own]).abs()
            assert (error <= bound[own]).all(), (dtype, have, want)
            if grid.k > 1:
                assert error.max() > most[own].max() * 1e-5, "nothing was quantised"
            if replicas(groups, want):
                assert equal_on_all(part, replicas(groups, want)), (dtype, have, want)


@on_grids(comms=COMMS)
def test_updates(groups, comm):
    """Differences from the old values are quantised; every rank, the owner included, ends with the same."""
    grid = groups.grid()
    collectives = make_collectives(comm, groups, inter_dtype="int8")
    padded = grid.n * BLOCK
    for dtype in (torch.float32, torch.bfloat16):
        for have, want in UPDATES:
            old = floats(0, padded, dtype)
            new = old.float() + 0.01 * floats(1, padded, torch.float32)
            own = slice(*grid.range(want, padded))
            flat = old[own].clone()
            collectives.gather_update(flat, have, want, new[slice(*grid.range(have, padded))])
            quantised = grid.k > 1 and have is G and want is not G
            bound = 1.001 * largest(new - old.float(), grid.n) / 254 if quantised else torch.zeros(padded)
            bound = bound + new.abs() * torch.finfo(dtype).eps
            error = (flat.double() - new[own].double()).abs()
            assert (error <= bound[own]).all(), (dtype, have, want)
            if not quantised:
                assert torch.equal(flat, new[own].to(dtype))
            elif dtype is torch.float32:
                assert (flat != new[own]).any(), "nothing was quantised"
            if replicas(groups, want):
                assert equal_on_all(flat, replicas(groups, want)), (dtype, have, want)


@on_grids((2, 2), comms=["flat", *COMMS])
def test_native_updates_are_exact(groups, comm):
    grid, collectives = groups.grid(), make_collectives(comm, groups)
    padded = grid.n * BLOCK
    new = floats(1, padded, torch.float32)
    for have, want in UPDATES:
        flat = torch.zeros(padded // grid.parts(want), dtype=torch.bfloat16)
        collectives.gather_update(flat, have, want, new[slice(*grid.range(have, padded))])
        assert torch.equal(flat, new[slice(*grid.range(want, padded))].bfloat16()), (have, want)


@on_grids((2, 2), comms=COMMS)
def test_what_an_update_leaves_out_comes_with_the_next(groups, comm):
    """Masters go on exactly, so that the error stays that of one update and does not add up."""
    grid = groups.grid()
    collectives = make_collectives(comm, groups, inter_dtype="int8")
    padded = grid.n * BLOCK
    masters = floats(0, padded, torch.float32)
    flat = masters.clone()
    errors = []
    for step in range(30):
        masters = masters + 0.01 * floats(7 + step, padded, torch.float32)
        collectives.gather_update(flat, G, N, masters[slice(*grid.range(G, padded))])
        errors.append((flat - masters).abs().max().item())
    assert 0 < errors[-1] < 2 * errors[0]
    collectives.gather_update(flat, G, N, masters[slice(*grid.range(G, padded))])
    assert (flat - masters).abs().max().item() < errors[-1] / 50


@on_grids(comms=COMMS)
def test_bytes(groups, comm):
    """One byte per element and four per 256 between groups; full size inside, and for parameters."""
    grid = groups.grid()
    k, m, padded = grid.k, grid.m, grid.n * BLOCK
    collectives = make_collectives(comm, groups, inter_dtype="int8")
    kinds = (
        {"gather": "send", "sum": "send"}
        if comm == "ho-ring"
        else {"gather": "all_gather", "sum": "all_to_all"}
    )
    hop, inside = (k - 1) * PER_BLOCK, (m - 1) * padded // m * 4

    bytes_sent()
    for have, want in SYNCS:
        collectives.sync(torch.ones(padded // grid.parts(have)), have, want)
        expected = {}
        for way in ["sum"] + ["gather"] * (want is not G):
            expected[kinds[way], "paro-groups"] = expected.get((kinds[way], "paro-groups"), 0) + hop
        if have is N:
            expected["all_to_all", "paro-members"] = inside
        if want is N:
            expected["all_gather", "paro-members"] = inside
        assert bytes_sent() == {key: amount for key, amount in expected.items() if amount}, (have, want)
    for have, want in [(G, N), (G, I)]:
        collectives.gather_update(
            torch.ones(padded // grid.parts(want)), have, want, torch.ones(padded // grid.n)
        )
        expected = {
            (kinds["gather"], "paro-groups"): hop,
            ("all_gather", "paro-members"): inside * (want is N),
        }
        assert bytes_sent() == {key: amount for key, amount in expected.items() if amount}, (have, want)
        collectives.gather(torch.ones(padded // grid.parts(want)), have, want)
        full = {**expected, (kinds["gather"], "paro-groups"): (k - 1) * BLOCK * 4}
        assert bytes_sent() == {key: amount for key, amount in full.items() if amount}, (have, want)


@on_grids((2, 2), (3, 2), comms=COMMS)
def test_what_is_not_finite_is_not_hidden(groups, comm):
    """It arrives everywhere, in sums and in updates, from whichever rank; other blocks stay as they are."""
    grid = groups.grid()
    collectives = make_collectives(comm, groups, inter_dtype="int8")
    padded = grid.n * BLOCK
    for culprit in range(grid.n):
        for bad in (torch.nan, torch.inf, -torch.inf):
            flat = integers(grid.rank, padded, torch.float32)
            if grid.rank == culprit:
                flat[BLOCK + 300] = bad
            collectives.sync(flat, N, N)
            assert not flat[BLOCK + 300].isfinite(), (culprit, bad)
            assert flat[: BLOCK + 256].isfinite().all()
            assert flat[BLOCK + 512 :].isfinite().all()
            flat = torch.zeros(padded)
            new = torch.ones(BLOCK)
            if grid.rank == culprit:
                new[3] = bad
            collectives.gather_update(flat, G, N, new)
            at = grid.of(culprit, grid.k, grid.m).block * BLOCK + 3
            assert not flat[at].isfinite(), (culprit, bad)
            assert flat.isfinite().sum() >= padded - SCALED
            assert equal_on_all(flat.isfinite(), groups.flat)


@on_grids((3, 2), comms=COMMS)
def test_one_element_per_rank(groups, comm):
    grid = groups.grid()
    collectives = make_collectives(comm, groups, inter_dtype="int8")
    flat = torch.full((grid.n,), 127.0)
    collectives.sync(flat, N, N)
    assert (flat - 127.0 * grid.n).abs().max() < 1e-3
    collectives.sync(flat[:0], N, N)
