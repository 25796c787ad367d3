"""`megatron-ext plan paro`: what it prints, and its JSON."""

import json

import pytest

from megatron_ext import cli
from megatron_ext.paro.strategy import NAMES
from megatron_ext.tools import plan
from megatron_ext.tools.plan_paro import main

SIZE = ["--parameters", "65e9", "--num-layers", "80", "--bf16", "--grad-reduce-in-bf16"]
RANKS = ["--data-parallel-size", "32", "--paro-group-size", "8", "--microbatches", "10"]
RATES = ["--rate-inside", "2000gbit", "--rate-between", "80gbit"]
PAPER = [*SIZE, *RANKS, *RATES]


def run(capsys, *argv):
    assert main([*argv]) == 0
    return capsys.readouterr().out


def test_report(capsys):
    text = run(capsys, *PAPER, "--memory", "80GB", "--paro-comm", "two-phase")
    assert text.startswith(
        "65 B parameters, all trained: what a rank holds if they are not split; 2 bytes each"
    )
    assert "32 ranks = 4 groups x 8, 10 microbatches a step, compute left out" in text
    assert "(as given): inside groups 2 Tbit/s, between groups 10 Gbit/s\n" in text
    rows = {
        line.split()[0]: line for line in text.splitlines() if line.split()[:1] and line.split()[0] in NAMES
    }
    assert sorted(rows) == sorted(NAMES)
    assert rows["IIG"].split()[1:6] == ["two-phase", "182", "GiB", "3.10", "TiB"]
    assert rows["IIG"].endswith("take this")
    assert rows["GGG"].endswith("9.08 x as long")
    assert rows["NNN"].endswith("GiB too much")
    assert (
        "Take IIG over two-phase: it is the fastest; it needs 62.0 GiB of 74.5 GiB, in which 4 of 14" in text
    )
    assert text.endswith("  --paro-strategy IIG --paro-comm two-phase --paro-group-size 8\n")


def test_all_kinds_of_communication_by_default(capsys):
    text = run(capsys, *PAPER)
    assert sum(line.split()[:1] == ["IIG"] for line in text.splitlines()) == 3
    assert "over all ranks, flat 80 Gbit/s" in text
    text = run(capsys, *PAPER, "--paro-inter-dtype", "int8")
    assert sum(line.split()[:1] == ["IIG"] for line in text.splitlines()) == 2
    assert "flat" not in text


def test_nothing_fits(capsys):
    text = run(capsys, *PAPER, "--memory", "10GB")
    assert "Take GGG over ho-ring: nothing fits in 9.3 GiB; GGG needs the least" in text


def test_equal_when_nothing_takes_time(capsys):
    one = ["--data-parallel-size", "1", "--paro-group-size", "1", "--microbatches", "1"]
    text = run(capsys, "--parameters", "1e6", *one)
    assert "links of a rank" not in text
    assert "nothing is communicated, so it is the one with the least memory" in text
    assert "equal" in text


def test_json(capsys):
    data = json.loads(run(capsys, *PAPER, "--memory", "80GB", "--json"))
    assert data["recommended"]["strategy"] == "IIG"
    assert data["recommended"]["reason"].startswith("it is the fastest")
    assert data["ranks"] == {"groups": 4, "members": 8}
    assert len(data["candidates"]) == 42
    found = {(c["strategy"], c["comm"]): c for c in data["candidates"]}
    iig = found["IIG", "two-phase"]
    whole = 2 * 65 * 10**9
    assert iig["bytes_between_per_group"] == pytest.approx(2 * whole * 3 / 4)
    assert iig["bytes_inside_per_rank"] == pytest.approx(30 * whole * 7 / 8)
    assert iig["memory"]["weights"] == pytest.approx(whole / 8)
    assert iig["memory"]["persistent"] / 2**30 == pytest.approx(53.0, abs=0.05)
    assert iig["fits"]
    assert not found["NNN", "flat"]["fits"]
    assert iig["compute_s"] == 0
    assert iig["params_s"] < iig["step_s"] < iig["params_s"] + iig["grads_s"]


def test_it_is_a_subject_of_plan(capsys):
    assert plan.main(["paro", *PAPER]) == 0
    assert "Take " in capsys.readouterr().out
    assert plan.main([]) == 2
    assert "Say one of layers, linear3d, paro, wallfacer." in capsys.readouterr().err
    assert "plan" in cli.TOOLS
    assert "probe" in cli.TOOLS


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "--bandwidths" in capsys.readouterr().out
