"""--wallfacer-team-size auto: what it asks the planner for a run, and what it says."""

from argparse import Namespace
from dataclasses import replace

import pytest

from megatron_ext.wallfacer import resolve
from megatron_ext.wallfacer.planner import ranking
from megatron_ext.wallfacer.recompute import Kept
from megatron_ext.wallfacer.tiles import BIDIRECTIONAL, CAUSAL, Mask
from tests.unit.test_wallfacer_rules import arguments


def job(**changes):
    """A job of 16 ranks on 4 nodes, as Megatron's arguments are after validation."""
    validated = {
        "world_size": 16,
        "context_parallel_size": 16,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "num_layers": 4,
        "num_attention_heads": 32,
        "kv_channels": 128,
        "hidden_size": 4096,
        "seq_length": 1 << 15,
        "wallfacer_team_size": "auto",
    }
    args = arguments(**(validated | changes))
    args.data_parallel_size = 1
    return args


@pytest.fixture(autouse=True)
def nodes_of_four(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")


def situation(**changes):
    args = job(**changes)
    return resolve.situation_of_run(args, args, gpu=True)[0]


def test_a_gpt():
    found = situation()
    assert (found.mask, found.layout.split, found.movement) == (CAUSAL, "zigzag", None)
    assert found.kept == Kept(4)
    assert situation(window_size=(64, 0)).mask == Mask(64, 0)
    assert situation(window_size=(64, -1)).mask == Mask(64, 0)


def test_a_diffusion_transformer():
    """It says so by defaults of its script, which Megatron puts into its arguments."""
    from megatron_ext import config
    from megatron_ext.dit.config import DiTConfig
    from megatron_ext.dit.rules import stock_defaults

    defaults = stock_defaults(config.preparse([], [DiTConfig]))
    says = {name: defaults[name] for name in ("token_split", "bidirectional_attention")}
    found = situation(**says)
    assert (found.mask, found.layout.split) == (BIDIRECTIONAL, "contiguous")
    assert situation(**says, window_size=(5, 3)).mask == Mask(5, 3)
    twice, once = (ranking(s)[0].seconds.attention for s in (found, situation()))
    assert twice == pytest.approx(2 * once)


def test_recomputation():
    full = situation(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert full.kept == Kept(0, 4, 1)
    assert ranking(full)[-1].needed < ranking(situation())[-1].needed


def resolved(capsys, **changes):
    """(what was chosen, what was said)."""
    args = job(**changes)
    flags = Namespace(**vars(args))
    resolve.resolve(args, flags)
    names = ("team_size", "kv_bundle", "order", "backward", "movement")
    chosen = {name: getattr(flags, f"wallfacer_{name}") for name in names}
    assert chosen == {name: getattr(args, f"wallfacer_{name}") for name in names}
    return chosen, capsys.readouterr().err


@pytest.fixture
def cpu(monkeypatch):
    """No GPU, and links so slow that teams and bundles pay."""
    import megatron_ext.record

    monkeypatch.setattr(megatron_ext.record, "on_gpu", lambda: True)
    monkeypatch.setattr(resolve, "GPU_NIC", 1e9)


def test_movement_is_chosen(cpu, capsys):
    chosen, text = resolved(capsys, wallfacer_kv_bundle=4)
    assert chosen["movement"] == "direct"
    assert "--wallfacer-kv-bundle 4" in text
    assert "--wallfacer-movement direct" in text
    assert " as a plain ring" not in text  # none was compared
    chosen, text = resolved(capsys, wallfacer_kv_bundle=4, wallfacer_movement="relocate")
    assert chosen["movement"] == "relocate"


def test_memory_is_said(cpu, capsys):
    _, text = resolved(capsys)
    assert "Attention of 4 layers in flight takes about " in text
    assert "GiB of a rank" in text or "MiB of a rank" in text


def test_memory_limit(cpu, capsys):
    free = ranking(situation())
    limit = min(c.needed for c in free)
    chosen, text = resolved(capsys, wallfacer_memory=f"{limit / 2**20 + 1:.3f}MiB")
    smallest = min(free, key=lambda c: c.needed).geometry
    assert (chosen["team_size"], chosen["kv_bundle"]) == (str(smallest.team_size), smallest.bundle_size)
    assert "are allowed." in text
    with pytest.raises(ValueError, match=r"--wallfacer-memory 1MB: no team size .* the least is "):
        resolved(capsys, wallfacer_memory="1MB")


def test_flags_that_the_choice_leaves_nothing_to_do(capsys, cpu, monkeypatch):
    monkeypatch.setattr(resolve, "GPU_NIC", 1e15)
    monkeypatch.setattr(resolve, "GPU_INSIDE", 1e15)
    chosen, text = resolved(capsys, wallfacer_movement="direct", wallfacer_sum_dtype="model")
    assert chosen["team_size"] == "1"
    assert "--wallfacer-team-size auto: --wallfacer-movement direct changes nothing here: with K=1" in text
    assert "--wallfacer-team-size auto: --wallfacer-sum-dtype model changes nothing here: with C=1" in text


def test_number_of_ranks_on_a_node_must_be_known(monkeypatch, cpu):
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    args = job()
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE is not set") as error:
        resolve.resolve(args, Namespace(**vars(args)))
    assert str(error.value).startswith("--wallfacer-team-size auto: ")
    assert "SLURM_NTASKS_PER_NODE" in str(error.value)
    assert str(error.value).endswith("or give --wallfacer-team-size a number.")


def test_candidates_of_given_movement():
    found = ranking(replace(situation(), movement="direct"))
    assert {c.movement for c in found if c.geometry.bundle_size > 1} == {"direct"}
