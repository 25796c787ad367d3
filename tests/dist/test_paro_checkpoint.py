"""Checkpoints of PaRO's engine, save and load through Megatron's `dist_checkpointing`.

What is loaded equals what was saved bit for bit: weights, master weights and optimizer states, under every
strategy and any number of ranks. Everything that a checkpoint should replace is NaN before it is loaded.
"""

import functools
import time
import weakref
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
    """Train every strategy on data of its own, save it, and note what was saved and what a step makes."""
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
    key = "master"
    return all((one[name][key] - other[name][key]).abs().max() <= limit for name in one if key in one[name])


@pytest.mark.parametrize("names", [COVERING, pytest.param(NAMES, marks=full)], ids=["covering", "all"])
def test_every_strategy_loads_every_other(tmp_path, names):
    world(4, save_all, tmp_path, 2, names)
    world(4, load_all, tmp_path, 2, names, names)


@pytest.mark.parametrize(
    ("saved", "loaded"),  # ranks, members of a group
    [
        ((2, 2), (4, 1)),
        pytest.param((2, 1), (4, 2), marks=full),
        pytest.param((4, 2), (4, 1), marks=full),
        pytest.param((4, 2), (2, 1), marks=full),
        pytest.param((4, 4), (1, 1), marks=full),
        pytest.param((1, 1), (4, 2), marks=full),
        pytest.param((4, 2), (3, 3), marks=full),  # parameters are padded otherwise
    ],
)
def test_other_numbers_of_ranks_and_groups(tmp_path, saved, loaded):
    world(saved[0], save_all, tmp_path, saved[1], ("IIG", "GGG"))
    world(loaded[0], load_all, tmp_path, loaded[1], ("IIG", "GGG"), ("NIG", "III", "GGG"))


@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": torch.bfloat16, "tied": False},
        pytest.param({"dtype": torch.bfloat16, "reshardable": True}, marks=full),
        pytest.param({"reshardable": True, "tied": False}, marks=full),
        pytest.param({"optimizer": "sgd"}, marks=full),
        pytest.param({"frozen": ("embedding", "layers.0")}, marks=full),
    ],
    ids=lambda kind: "-".join(str(value) for value in kind.values()),
)
def test_every_kind_of_states(tmp_path, kind):
    names = ("NNN", "NIG", "IIG")
    world(4, save_all, tmp_path, 2, names, **kind)
    kind = {key: value for key, value in kind.items() if key != "reshardable"}
    world(4, load_all, tmp_path, 2, names, names, **kind)


def load_other_updates(folder, source: str, inter_dtype: str) -> None:
    engine = Engine("IIG", 2, inter_dtype=inter_dtype)
    _, saved, _ = torch.load(folder / f"{source}.pt")
    engine.spoil()
    engine.load(folder / source)
    for name, kept in engine.snapshot().items():
        assert kept["weight"].equal(saved[name]["weight"]), name
        assert kept["exp_avg"].equal(saved[name]["exp_avg"]), name
        # Exact masters stay if both runs have them; else they are the weights that all ranks have.
        exact = inter_dtype == "int8"
        assert kept["master"].equal(saved[name]["master" if exact else "weight"]), name
    engine.step(0)


@full
@pytest.mark.parametrize(("saved", "loaded"), [("int8", "int8"), ("int8", "native"), ("native", "int8")])
def test_master_weights_of_8_bit_updates(tmp_path, saved, loaded):
    """fp32 weights have exact masters apart where updates are quantised, and only there."""
    world(4, save_all, tmp_path, 2, ("NIG",), inter_dtype=saved)
    if saved == "int8":
        _, kept, _ = torch.load(tmp_path / "NIG.pt")
        assert not all(found["master"].equal(found["weight"]) for found in kept.values())
    world(4, load_other_updates, tmp_path, "NIG", loaded)


def watch_memory(folder) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    engine = Engine("GGG", 2, tied=False)
    engine.step(0)
    exact, buffers, most = engine.chunk.setup.exact, [], [0]

    def in_use() -> int:
        alive = {id(flat): flat for flat in (ref() for ref in buffers) if flat is not None}
        return sum(flat.untyped_storage().size() for flat in alive.values())

    def watched(method):
        def call(flat, *args):
            buffers.append(weakref.ref(flat))
            deadline = time.monotonic() + 5
            # A thread of gloo may hold the last buffer a little longer than the call that used it.
            while (size := in_use()) > flat.untyped_storage().size() and time.monotonic() < deadline:
                time.sleep(0.01)
            most[0] = max(most[0], size)
            return method(flat, *args)

        return call

    exact.gather, exact.sync = watched(exact.gather), watched(exact.sync)
    units, params = engine.chunk.units, [p for unit in engine.chunk.units for p in unit.params]
    numel, largest = sum(p.numel() for p in params), max(p.numel() for p in params)
    state = engine.state_dict()
    for part, copies in ((state["model"], 1), (state["optimizer"]["paro"], 2)):
        kinds = (ShardedTensor, ShardedTensorFactory)
        held = [entry.data.numel() for entry in part.values() if isinstance(entry, kinds)]
        assert 0 < sum(held) <= copies * (numel / 4 + largest)
    del state
    engine.save(folder)
    engine.load(folder)
    assert len(buffers) >= 3 * 3 * len(units)
    assert most[0] == 4 * max(unit.padded for unit in units)
    assert not any(unit.gathered for unit in units)


def test_one_unit_is_whole_at_a_time(tmp_path):
    """Besides, a rank holds its share: a fourth of the parameters and of every state."""
    world(4, watch_memory, tmp_path / "ckpt")


def load_into_frozen(folder) -> None:
    engine = Engine("NIG", 2, frozen=("layers.0",))
    with pytest.raises(ValueError, match=r"frozen in some layers only\. Load it with --no-load-optim"):
        engine.load(folder / "NIG")


@full
def test_states_of_all_layers_into_some(tmp_path):
    world(4, save_all, tmp_path, 2, ("NIG",))
    world(4, load_into_frozen, tmp_path)


def load_missing_group(folder) -> None:
    engine = Engine("NIG", 2)
    groups = engine.optimizer.optimizer.param_groups
    groups.append({**groups[0], "lr_mult": 2.0, "params": []})
    with pytest.raises(ValueError, match="has 2 parameter groups, and this run has 3"):
        engine.load(folder / "NIG")


@full
def test_other_parameter_groups_are_refused(tmp_path):
    world(4, save_all, tmp_path, 2, ("NIG",))
    world(4, load_missing_group, tmp_path)
