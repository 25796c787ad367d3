"""PaRO's engine against torch alone: every strategy x collectives x overlap, on many grids of ranks.

10 Adam steps with clipping on a tiny GPT: losses and grad norms to 1e-5 relative, parameters to 1e-5. Bytes
are the formulas'. Overlap changes no bit, and replicas are equal bit for bit.
"""

import functools
import itertools

import pytest
import torch

from megatron_ext.checks import check_replicas
from megatron_ext.paro.check import compare, expected_bytes, sent_bytes
from megatron_ext.paro.strategy import NAMES
from megatron_ext.paro.volume import COMMS
from tests.dist.paro_engine import Engine, megatron, plain
from tests.ranks import run_ranks

full = pytest.mark.full
STEPS = 10


def in_ranks(world: int, body, *args) -> None:
    def rank() -> None:
        with megatron():
            body(*args)

    run_ranks(world, rank, timeout=900)


def train(strategy: str, members: int, microbatches: int, *, check: bool = True, **kind) -> dict:
    """The parameters after training like torch alone; `check` compares bytes, which must wait for updates."""
    seen, weights = reference()
    engine = Engine(strategy, members, **kind)
    for step in range(STEPS):
        before = sent_bytes()
        loss, norm = engine.step(step, microbatches, wait=check)
        assert loss == pytest.approx(seen[step][0], rel=1e-5), (strategy, kind, step)
        assert norm == pytest.approx(seen[step][1], rel=1e-5), (strategy, kind, step)
        if check:
            expected = expected_bytes([engine.chunk], microbatches, updated=True)
            compare(before, sent_bytes(), expected, step=step, chunk=engine.chunk)
    assert check_replicas([engine.chunk], STEPS) > 0 or engine.chunk.setup.grid.n == 1
    found = {name: kept["weight"] for name, kept in engine.snapshot().items()}
    assert found.keys() == weights.keys()
    for name, value in found.items():
        assert (value - weights[name]).abs().max() <= 1e-5, (strategy, kind, name)
    return found


@functools.cache
def reference():
    """Torch's run, made once on every rank."""
    return plain(STEPS)


def all_alike(strategies, members: int, microbatches: int, comms) -> None:
    """Every strategy and kind of collectives, without overlap, with it, and with it while nothing waits."""
    for strategy, comm in itertools.product(strategies, comms):
        kind = {"comm": comm}
        off = train(strategy, members, microbatches, **kind)
        for check in (True, False):
            on = train(strategy, members, microbatches, overlap=True, check=check, **kind)
            assert all(torch.equal(off[name], on[name]) for name in off), (strategy, comm)


@pytest.mark.parametrize(
    ("strategies", "comms"),
    [
        (("NIG", "IIG", "GGG"), ("ho-ring",)),
        *(pytest.param(NAMES, (comm,), marks=full, id=f"all-{comm}") for comm in COMMS),
    ],
)
def test_every_strategy_and_collective(strategies, comms):
    """4 ranks in 2 groups, 3 microbatches."""
    in_ranks(4, all_alike, strategies, 2, 3, comms)


@full
@pytest.mark.parametrize(
    ("world", "members"), [(1, 1), (2, 1), (2, 2), (3, 3), (3, 1), (4, 1), (4, 4), (6, 3), (6, 2)]
)
def test_every_grid(world, members):
    """Dimensions of one and of three, several microbatches."""
    in_ranks(world, all_alike, NAMES, members, 3 if world == 4 else 2, ("two-phase",))


def kept_alike(strategies) -> None:
    for strategy in strategies:
        off = train(strategy, 2, 3)
        on = train(strategy, 2, 3, reshard=False, overlap=True)
        assert all(torch.equal(off[name], on[name]) for name in off), strategy


@full
def test_parameters_that_are_kept():
    """Split parameters that stay whole between forward and backward."""
    in_ranks(4, kept_alike, [name for name in NAMES if name[0] != "N"])


def accumulated_alike(strategies) -> None:
    for strategy in strategies:
        for microbatches in (1, 3):
            train(strategy, 2, microbatches)


@full
def test_accumulation():
    """3 samples as one microbatch and as three train alike."""
    in_ranks(4, accumulated_alike, NAMES)
