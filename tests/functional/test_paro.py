"""PaRO through the real script: losses, gradients, bytes and memory of every strategy against stock.

Every case starts from one seed checkpoint: losses of 10 steps to 1e-5 relative, grad norms to 1e-5, every
gradient of step 1 within 5e-6 of the largest; fp32, dropout 0. The run record proves that the strategy ran:
`assert_ran` compares the bytes of every step and what each rank keeps with the formulas.
"""

import dataclasses
import functools
import sys

import pytest

from megatron_ext.features import FEATURES
from megatron_ext.paro.memory import memory
from megatron_ext.paro.passes import UnitSize
from megatron_ext.paro.strategy import NAMES, Strategy
from megatron_ext.paro.volume import Wire, step_bytes
from tests.functional.runs import (
    LLAMA,
    MODEL,
    SCRIPT,
    Run,
    assert_close,
    data,
    merged,
    read_record,
    seed_checkpoint,
    train,
)
from tests.functional.test_stock_parity import DISTOPT, FULL_RECOMPUTE, OVERLAP, PP, TP, assert_gradients
from tests.ranks import run_ranks

SP = "--sequence-parallel"
full = pytest.mark.full
GROUP = ["--paro-group-size", "2"]
AHEAD = [*DISTOPT, *OVERLAP]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """(architecture, training flags) -> (seed flags, stock run on one rank), made at first use."""

    @functools.cache
    def seed(arch: tuple[str, ...]) -> list[str]:
        return seed_checkpoint(tmp_path_factory.mktemp("seed"), *arch)

    @functools.cache
    def reference(arch: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> tuple[list[str], Run]:
        folder = tmp_path_factory.mktemp("one")
        dump = ["--ext-dump-grads", str(folder)]
        return seed(arch), train(folder, 1, *arch, *seed(arch), *flags, *dump)

    return reference


def launch(references, tmp_path, strategy: str, world: int, *flags: str, arch=(), training=()) -> tuple:
    """A stock run and one with the strategy, whose losses, norms and gradients agree."""
    seed, stock = references(tuple(arch), tuple(training))
    run = train(
        tmp_path,
        world,
        *(*arch, *seed, *training, *flags, "--paro-strategy", strategy),
        *("--ext-check", "replicas", "--ext-dump-grads", str(tmp_path)),
    )
    assert len(run.losses()) == 10
    assert_close(stock.losses(), run.losses(), 1e-5)
    assert_close(stock.grad_norms(), run.grad_norms(), 1e-5)
    assert_gradients(stock, run)
    return stock, run


def assert_ran(run: Run, strategy: str, *, comm: str = "two-phase", reshard: bool = True, k=2, m=2) -> None:
    """The record shows the strategy, and bytes and memory of every rank that equal the formulas."""
    levels, wire = Strategy.parse(strategy), Wire(k, m, comm)
    for rank in range(len(run.lines)):
        assert "paro" in run.start(rank)["features"]
        for line in run.steps(rank)[2:]:  # gradients are dumped in step 1
            ours = line["paro"]
            assert (ours["strategy"], ours["groups"], ours["members"]) == (strategy, k, m)
            units = [unit_size(unit) for unit in ours["units"]]
            microbatches = line["tokens"] // 32 // (k * m)
            expected = step_bytes(levels, units, wire, microbatches, reshard_after_forward=reshard)
            assert sent(line) == expected, (rank, line["step"])
            assert expected
            kept = memory(levels, units, wire)
            assert ours["bytes"] == {
                "params": kept.weights,
                "grads": kept.gradients,
                "optimizer": kept.optimizer,
            }


def unit_size(unit: dict) -> UnitSize:
    layer = "" if unit["name"].startswith("root") else unit["name"]
    trainable = unit["grad_bytes"] > 0
    return UnitSize(
        unit["padded"], unit["param_bytes"], unit["grad_bytes"] or 4, trainable, layer, unit["late"]
    )


def sent(line: dict) -> dict:
    """Bytes by (kind, group) of a step."""
    return {
        (entry["kind"], entry["group"]): entry["bytes"]
        for entry in line["traffic"]
        if entry["feature"] == "paro" and entry["bytes"]
    }


COVERING = ("NNN", "NIG", "IIG", "III", "GGG", "ING", "IGG")


@pytest.mark.parametrize("strategy", NAMES)
def test_trains_like_stock(references, tmp_path, strategy):
    _, run = launch(references, tmp_path, strategy, 4, *GROUP)
    assert_ran(run, strategy)
