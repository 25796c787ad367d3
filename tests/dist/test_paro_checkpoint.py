"""Checkpoints of PaRO's engine, save and load through Megatron's `dist_checkpointing`.

What is loaded equals what was saved bit for bit: weights, master weights and optimizer states, under every
strategy and any number of ranks. Everything that a checkpoint should replace is NaN before it is loaded.
"""

import functools
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist

from megatron_ext.paro.strategy import NAMES
from tests.dist.paro_engine import Engine, megatron
from tests.ranks import run_ranks

full = pytest.mark.full
COVERING = ("NNN", "III", "NIG", "IIG", "GGG")


def world(ranks: int, body, *args, **kwargs) -> None:
    run_ranks(ranks, functools.partial(_in_rank, body, args, kwargs), timeout=600)


def _in_rank(body, args, kwargs) -> None:
    with megatron():
        body(*args, **kwargs)


def save_all(folder, members: int, strategies: Iterable[str], reshardable: bool = False, **kind) -> None:
    """Train every strategy on data of its own, save it, and note what was saved and what a step makes of it."""
    for number, strategy in enumerate(strategies):
        engine = Engine(strategy, members, seed=number, **kind)
        for step in range(2):
            engine.step(100 * number + step)
        saved = engine.snapshot()
        engine.save(folder / strategy, reshardable=reshardable)
        assert same(engine.snapshot(), saved), f"saving {strategy} changed something"
        engine.step(100 * number + 2)
        after = engine.snapshot()
        if dist.get_rank() == 0:
            torch.save((number, saved, after), folder / f"{strategy}.pt")


def load_all(folder, members: int, sources: Iterable[str], targets: Iterable[str], **kind) -> None:
    """Load every source into every target, and take the step that the source took."""
    for target in targets:
        engine = Engine(target, members, seed=1000, **kind)
        for source in sources:
            number, saved, after = torch.load(folder / f"{source}.pt")
            engine.spoil()
            engine.load(folder / source)
            assert same(engine.snapshot(), saved), f"{source} to {target}"
            engine.step(100 * number + 2)
            assert close(engine.snapshot(), after), f"a step after {source} to {target}"


def same(one: dict, other: dict) -> bool:
    assert one.keys() == other.keys()
    return all(
        one[name].keys() == other[name].keys()
        and all(one[name][key].equal(other[name][key]) for key in one[name])
        for name in one
    )


def close(one: dict, other: dict, limit: float = 1e-6) -> bool:
    """Master weights after a step; sums over other groups are taken in another order."""
    return all((one[name]["master"] - other[name]["master"]).abs().max() <= limit for name in one)


@pytest.mark.parametrize("names", [COVERING, pytest.param(NAMES, marks=full)], ids=["covering", "all"])
def test_every_strategy_loads_every_other(tmp_path, names):
    world(4, save_all, tmp_path, 2, names)
    world(4, load_all, tmp_path, 2, names, names)
