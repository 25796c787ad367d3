"""For the tests of PaRO's collectives: groups of a grid, values that every rank can compute, and checks.

Pieces are made tiny, so that a block of some hundred elements travels in several of them.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.ledger import ledger
from megatron_ext.paro import wires
from megatron_ext.paro.collectives import HybridGroups
from megatron_ext.paro.strategy import Level
from tests.ranks import run_ranks

GRIDS = [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2), (2, 3), (2, 4)]
COMMS = ["flat", "two-phase", "ho-ring"]
N, I, G = Level  # noqa: E741
GATHERS = [(G, N), (G, I), (I, N), (N, N), (I, I), (G, G)]
SYNCS = [(N, N), (N, I), (N, G), (I, I), (I, G)]
BLOCK = 700  # elements of a rank: several pieces, the last of them short, and no multiple of 256


def on_grids(*grids, comms=COMMS):
    """Decorator: run the test body (groups, comm) in forked ranks of every grid, for all kinds in turn."""

    def decorate(body):
        @pytest.mark.parametrize("grid", grids or GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")
        def test(grid):
            run_ranks(grid[0] * grid[1], partial(in_rank, body, grid, comms), timeout=240)

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


def in_rank(body, grid, comms):
    """What a rank does."""
    wires.SMALLEST_PIECE = 512
    dist.init_process_group("gloo")
    groups = hybrid_groups(*grid)
    for comm in comms:
        try:
            body(groups, comm)
        except BaseException as error:
            error.add_note(f"collectives: {comm}")
            raise
    dist.barrier()
    dist.destroy_process_group()


def hybrid_groups(k: int, m: int, ending: str = "") -> HybridGroups:
    """This rank's groups of k x m ranks; a collective call."""
    n, rank = k * m, dist.get_rank()
    assert dist.get_world_size() == n

    def own(name: str, lists: list[list[int]]):
        made = [dist.new_group(ranks, group_desc=name + ending) for ranks in lists]
        return next(group for group, ranks in zip(made, lists, strict=True) if rank in ranks)

    return HybridGroups(
        members=own("paro-members", [list(range(i * m, i * m + m)) for i in range(k)]),
        groups=own("paro-groups", [list(range(j, n, m)) for j in range(m)]),
        flat=own("paro-flat", [list(range(n))]),
    )


def integers(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small ones, whose sums every type holds exactly."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


def floats(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Normally distributed, of very different size along the buffer."""
    generator = torch.Generator().manual_seed(200 + rank)
    return (torch.randn(numel, generator=generator) * (1 + torch.arange(numel) % 7) ** 2).to(dtype)


def equal_on_all(tensor: Tensor, group) -> bool:
    """Whether `tensor` is the same on all ranks of a group, bit for bit."""
    bits = tensor.contiguous().view(torch.uint8)
    all_bits = bits.new_empty(group.size() * bits.numel())
    dist.all_gather_into_tensor(all_bits, bits, group=group)
    return bool((all_bits.view(group.size(), -1) == bits).all())


def bytes_sent():
    """By (kind, group), since the last call; calls that send nothing are left out."""
    return {(r["kind"], r["group"]): r["bytes"] for r in ledger().drain() if r["bytes"]}


def check_gather(comm, grid, collectives, whole, have, want):
    padded = whole.numel()
    expected = whole[slice(*grid.range(want, padded))]
    flat = torch.full_like(expected, -77)
    own = grid.within(have, want, padded)
    flat[own] = expected[own]
    collectives.gather(flat, have, want)
    assert torch.equal(flat, expected), (comm, whole.dtype, have, want)


def replicas(groups, level):
    """The ranks that hold equal parts at a level."""
    return {N: groups.flat, I: groups.groups}.get(level)


def summands(values, grid, have, dtype):
    """By rank, or by group if they are summed over the members already; what this rank has, and all."""
    count, own = (grid.n, grid.rank) if have is N else (grid.k, grid.group)
    everyone = [values(index, grid.n * BLOCK, dtype) for index in range(count)]
    return everyone[own][slice(*grid.range(have, grid.n * BLOCK))].clone(), everyone
