"""PaRO's collectives on grids of forked ranks: values, bits, bytes and sizes."""

import torch

from megatron_ext.paro.collectives import make_collectives
from tests.dist.paro_groups import (
    BLOCK,
    GATHERS,
    SYNCS,
    G,
    I,
    N,
    bytes_sent,
    check_gather,
    equal_on_all,
    floats,
    integers,
    on_grids,
    replicas,
    summands,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@on_grids()
def test_gathers(groups, comm):
    grid = groups.grid()
    for dtype in (*DTYPES, torch.int32):
        whole = integers(0, grid.n * BLOCK, dtype)
        for inter in ["native", "int8"] if comm != "flat" else ["native"]:
            collectives = make_collectives(comm, groups, inter_dtype=inter)
            for have, want in GATHERS:
                check_gather(comm, grid, collectives, whole, have, want)


@on_grids()
def test_sums_of_integers_are_exact(groups, comm):
    grid, collectives = groups.grid(), make_collectives(comm, groups)
    padded = grid.n * BLOCK
    for dtype in (*DTYPES, torch.int32):
        for have, want in SYNCS:
            flat, everyone = summands(integers, grid, have, dtype)
            collectives.sync(flat, have, want)
            expected = sum(everyone)[slice(*grid.range(want, padded))]
            assert torch.equal(flat[grid.within(want, have, padded)], expected), (dtype, have, want)
        flat, _ = summands(integers, grid, N, dtype)
        collectives.scatter_in_group(flat)
        ours = sum(integers(grid.group * grid.m + j, padded, dtype) for j in range(grid.m))
        own = grid.within(I, N, padded)
        assert torch.equal(flat[own], ours[own]), dtype


@on_grids()
def test_sums_of_floats_are_close_repeat_and_agree(groups, comm):
    """Within rounding of the exact sum: of each hop for half types, since they are summed in fp32."""
    grid, collectives = groups.grid(), make_collectives(comm, groups)
    padded = grid.n * BLOCK
    for dtype in DTYPES:
        for have, want in SYNCS:
            flat, everyone = summands(floats, grid, have, dtype)
            again = flat.clone()
            for buffer in (flat, again):
                collectives.sync(buffer, have, want)
            part = flat[grid.within(want, have, padded)]
            assert torch.equal(part, again[grid.within(want, have, padded)]), (dtype, have, want)
            exact = sum(values.double() for values in everyone)
            most = sum(values.double().abs() for values in everyone)  # bounds every partial sum
            unit = torch.finfo(dtype).eps / 2
            roundings = len(everyone) * (most * unit) + 1e-7 * most
            own = slice(*grid.range(want, padded))
            assert ((part.double() - exact[own]).abs() <= roundings[own]).all(), (dtype, have, want)
            if replicas(groups, want):
                assert equal_on_all(part, replicas(groups, want)), (dtype, have, want)


@on_grids((1, 4), (4, 1), comms=["two-phase"])
def test_half_types_are_summed_in_fp32(groups, comm):
    """256 and three ones: bf16 would stay at 256 all the way, fp32 reaches 259, which bf16 rounds to 260."""
    grid = groups.grid()
    flat = torch.full((grid.n * BLOCK,), 256.0 if grid.rank == 0 else 1.0, dtype=torch.bfloat16)
    make_collectives(comm, groups).sync(flat, N, N)
    assert (flat == 260).all(), flat


def expected_bytes(comm, k, m, whole, call, have, want):
    """Independent of the implementation: bytes by (kind, group) for a buffer of `whole` bytes."""
    n, found = k * m, {}

    def add(kind, group, size, p):
        if p > 1:
            key = kind, f"paro-{group}"
            found[key] = found.get(key, 0) + (p - 1) * size

    inter = "send" if comm == "ho-ring" else {"gather": "all_gather", "sum": "all_to_all"}
    for way in (["sum"] if call == "sync" else []) + (["gather"] if call == "gather" or want < G else []):
        start = have if (call, way) != ("sync", "gather") else G
        end = want if way == "gather" else G
        if comm == "flat" and {start, end} == {N, G}:
            add("all_gather" if way == "gather" else "send", "flat", whole // n, n)
            continue
        if G in (start, end) and start is not end:
            add(inter if isinstance(inter, str) else inter[way], "groups", whole // n, k)
        if N in (start, end) and start is not end:
            add("all_gather" if way == "gather" else "all_to_all", "members", whole // m, m)
    return found


@on_grids()
def test_bytes(groups, comm):
    grid, collectives = groups.grid(), make_collectives(comm, groups)
    k, m, padded = grid.k, grid.m, grid.n * BLOCK
    bytes_sent()
    for dtype in (torch.float32, torch.bfloat16):
        whole = padded * dtype.itemsize
        for have, want in GATHERS:
            collectives.gather(torch.zeros(padded // grid.parts(want), dtype=dtype), have, want)
            assert bytes_sent() == expected_bytes(comm, k, m, whole, "gather", have, want), (have, want)
        for have, want in SYNCS:
            collectives.sync(torch.zeros(padded // grid.parts(have), dtype=dtype), have, want)
            assert bytes_sent() == expected_bytes(comm, k, m, whole, "sync", have, want), (have, want)
        collectives.scatter_in_group(torch.zeros(padded, dtype=dtype))
        scatter = {("all_to_all", "paro-members"): (m - 1) * whole // m} if m > 1 else {}
        assert bytes_sent() == scatter


@on_grids((2, 2), (3, 2), (1, 3))
def test_padding(groups, comm):
    """Sizes that no number of ranks divides, less elements than ranks, and none at all."""
    grid, collectives = groups.grid(), make_collectives(comm, groups)
    for numel in (0, 1, 5, 37, 256 * grid.n + 1, 4099):
        padded = grid.padded(numel)
        for have, want in SYNCS[:3]:
            flat = torch.zeros(padded)
            flat[:numel] = integers(grid.rank, numel, torch.float32)
            collectives.sync(flat, have, want)
            expected = torch.zeros(padded)
            expected[:numel] = sum(integers(rank, numel, torch.float32) for rank in range(grid.n))
            own = slice(*grid.range(want, padded))
            assert torch.equal(flat[own], expected[own]), (numel, have, want)
        whole = torch.nn.functional.pad(floats(0, numel, torch.float32), (0, padded - numel))
        for have, want in GATHERS:
            check_gather(comm, grid, collectives, whole, have, want)


@on_grids((2, 2), (3, 2))
def test_not_a_number_arrives_everywhere(groups, comm):
    grid, collectives = groups.grid(), make_collectives(comm, groups)
    padded = grid.n * BLOCK
    for dtype in DTYPES:
        flat, _ = summands(floats, grid, N, dtype)
        if grid.rank == grid.n - 1:
            flat[3], flat[padded - 2], flat[BLOCK] = torch.nan, torch.inf, -torch.inf
        collectives.sync(flat, N, N)
        bad = (~flat.isfinite()).nonzero().flatten().tolist()
        assert bad == [3, BLOCK, padded - 2], (dtype, bad)
        assert flat[3].isnan()
        assert flat[padded - 2] == torch.inf
        assert flat[BLOCK] == -torch.inf
