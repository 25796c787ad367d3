"""validate_simulator.py: its bounds against 40 measured runs, and that nothing measured leaks in."""

import importlib.util
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.schedules.build import build
from megatron_ext.schedules.costs import Costs
from megatron_ext.vocab.memory_layers import layer_kept

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "validate_simulator.py"
MEAN_TIME, WORST_TIME, MEAN_MEMORY = 1.0, 2.2, 5.0  # percent


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("validate_simulator", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def runs(script):
    return list(script.read(script.DATA))


def test_bounds_on_all_runs(script, capsys):
    assert script.main([]) == 0
    header, *rows, memory, time = capsys.readouterr().out.splitlines()
    assert len(rows) == 40
    assert header.split() == [
        "method",
        "seq",
        "vocab",
        "ms",
        "simulated",
        "error",
        "MiB",
        "modelled",
        "error",
    ]
    mean, worst = map(float, re.fullmatch(r"mean (\S+) % worst (\S+) %", time).groups())
    assert mean <= MEAN_TIME
    assert worst <= WORST_TIME
    assert float(re.fullmatch(r"memory: mean (\S+) % worst \S+ %", memory)[1]) <= MEAN_MEMORY
    # The summary is that of the rows printed.
    columns = [row.split() for row in rows]
    errors = [100 * abs(float(row[4]) / float(row[3]) - 1) for row in columns]
    assert mean == pytest.approx(sum(errors) / 40, abs=0.01)
    assert worst == pytest.approx(max(errors), abs=0.01)


@pytest.mark.parametrize("method", ["baseline", "vocab-2", "interlaced"])
def test_results_follow_from_pass_times_alone(script, runs, method):
    run = next(run for run in runs if run.method == method)
    time, peak = script.simulated_time(run), script.modelled_peak(run)
    doctored = replace(run, iteration=1.0, peak=1.0)
    assert script.simulated_time(doctored) == time
    assert script.modelled_peak(doctored) == peak
    twice = {
        name: tuple(2 * v for v in value)
        for name, value in vars(run.costs).items()
        if isinstance(value, tuple)
    }
    assert script.simulated_time(replace(run, costs=Costs(**twice))) == pytest.approx(2 * time)


def test_authors_prediction_is_34_shb_a_layer(script, runs):
    """Their column for rank 0, in 10^6 bytes, counts L + 2 layers over p stages, times what is in flight."""
    import csv

    with script.DATA.open() as file:
        predicted = [float(row["predicted_activation_mb_rank0"]) for row in csv.DictReader(file)]
    for run, theirs in zip(runs, predicted, strict=True):
        d = script.description(run)
        statistics = 4 * d.tokens * (2 * 2 + d.heads)
        layers = (script.LAYERS + 2) / script.RANKS
        in_flight = build(script.RANKS, 16, vocab=run.mode).in_flight(0)
        assert in_flight * layers * (layer_kept(d) - statistics) / 1e6 == pytest.approx(theirs, abs=0.1)


def test_own_copy_of_the_table(script, runs):
    assert len(runs) == 40
    assert {run.method for run in runs} == set(script.MODES)
    assert all(sum(run.stage_layers) == 32 for run in runs)


def test_bad_tables(script, tmp_path, capsys):
    table = tmp_path / "t.csv"
    assert script.main([str(table)]) == 2
    assert "No such file" in capsys.readouterr().err
    table.write_text("method,seq_length\nbaseline,2048\n")
    assert script.main([str(table)]) == 2
    assert "line 2: KeyError" in capsys.readouterr().err
    table.write_text("method\n")
    assert script.main([str(table)]) == 2
    assert "there are no runs in it" in capsys.readouterr().err
    shutil.copy(script.DATA, table)
    table.write_text(table.read_text().replace("interlaced,2048,64000,4", "interlaced,2048,many,4"))
    assert script.main([str(table)]) == 2
    assert "line 16: ValueError invalid literal" in capsys.readouterr().err
