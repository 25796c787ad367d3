"""The collectives' benchmark: its models and bounds against known numbers, and its report."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture(scope="module")
def report():
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location("collectives_report", BENCH / "collectives_report.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCH))
        del sys.modules["collectives_report"]


def case(report, k, m, op="all-gather", size=32 * 2**20, rate=10**8, intra_rate=None):
    return report.Case(k, m, op, size, rate, intra_rate)


@pytest.mark.parametrize(
    ("k", "m", "gain"), [(2, 2, 1 / 3), (4, 2, 1 / 7), (2, 4, 3 / 7), (2, 8, 7 / 15), (1, 4, 0), (4, 1, 0)]
)
def test_possible_gain(report, k, m, gain):
    assert case(report, k, m).possible_gain() == pytest.approx(gain)


@pytest.mark.parametrize(
    ("n", "flat", "ring"), [(16, 93.8, 51.8), (32, 96.9, 75.9), (64, 98.4, 87.9), (128, 99.2, 94.0)]
)
def test_times_of_a_gigabyte_on_servers_of_eight(report, n, flat, ring):
    """80 Gbit/s between servers, 2000 Gbit/s for each rank inside: milliseconds worked out by hand."""
    of = case(report, n // 8, 8, size=10**9, rate=80 * 10**9, intra_rate=8 * 2000 * 10**9)
    assert 1e3 * of.modelled("flat ring") == pytest.approx(flat, abs=0.06)
    assert 1e3 * of.modelled("HO-Ring") == pytest.approx(ring, abs=0.06)


def test_bytes_and_times_where_only_the_nic_counts(report):
    """8 MiB blocks on a 2x2 grid at 100 Mbit/s."""
    seconds = 8 * 2**20 * 8 / 1e8
    expected = {"gloo": 6, "flat ring": 3, "two-phase": 2, "two-phase rings": 2, "HO-Ring": 2}
    of = case(report, 2, 2, "reduce-scatter")
    for method, blocks in expected.items():
        assert of.nic_bytes(method) == blocks * 8 * 2**20
        assert of.modelled(method) == pytest.approx(blocks * seconds)
    assert of.bound() == pytest.approx(2 * seconds)
    assert case(report, 2, 2).modelled("gloo") == pytest.approx(3 * seconds)
    both = case(report, 2, 2, "all-reduce")
    assert [both.nic_bytes(method) / 2**23 for method in report.METHODS] == [6, 6, 4, 4, 4, 4]
    assert both.modelled("HO-Ring") == pytest.approx(4 * seconds)
    assert case(report, 2, 2, rate=None).modelled("HO-Ring") is None


def test_times_with_a_limit_inside(report):
    """Twice as fast inside: a block takes its two sharers 2 units between, and 1 for each of 2 x 2 inside."""
    of = case(report, 2, 2, intra_rate=2 * 10**8)
    unit = 8 * 2**20 * 8 / 1e8
    assert of.modelled("two-phase") == pytest.approx(4 * unit)
    assert of.modelled("HO-Ring") == pytest.approx(3 * unit)
    assert of.bound() == pytest.approx(2 * unit)
    for pieces in (2, 4, 16):
        assert of.modelled("HO-Ring", pieces) == pytest.approx((2 + 1 / pieces) * unit)


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-reduce"])
@pytest.mark.parametrize("intra_rate", [None, 10**8, 4 * 10**8])
def test_whole_blocks_are_the_planners_model(report, op, intra_rate):
    from megatron_ext.paro.cost import ho_ring_gather, ho_ring_reduce

    of = case(report, 4, 2, op, intra_rate=intra_rate)
    between = of.size / 8 / (1e8 / 8 / 2)
    inside = of.size / 8 / (intra_rate / 8 / 2) if intra_rate else 0.0
    gather, reduce = ho_ring_gather(4, inside, between), ho_ring_reduce(4, inside, between)
    expected = {"all-gather": gather, "reduce-scatter": reduce, "all-reduce": gather + reduce}[op]
    assert of.modelled("HO-Ring uncut") == pytest.approx(expected)


def rows(report, **seconds):
    names = dict(zip(("gloo", "flat", "two", "rings", "ho", "uncut"), report.METHODS, strict=True))
    of = case(report, 2, 2)
    return [report.Row(of, names[key], value, value, value, 2.0**24) for key, value in seconds.items()]


def test_report(report, tmp_path):
    found = rows(report, gloo=2.2, flat=2.0, two=1.6, rings=1.5, ho=1.4)
    report.write(tmp_path, found, {"rounds": "5"})
    text = (tmp_path / "results.md").read_text()
    assert "| 2x2 100 | 32 | all-gather | HO-Ring | 1.400 |" in text
    assert "30.0% less time than the flat ring, 90% of the 33.3% that its bytes allow" in text
    assert "0.93 of the better two-phase; 0.64 of gloo's own; 1.04 of its model with 1 pieces" in text
    assert "36.5%" in text
    assert (tmp_path / "results.svg").read_text().count("<rect") == 1 + len(found)


def test_slower_is_not_called_less(report, tmp_path):
    report.write(tmp_path, rows(report, flat=1.0, ho=1.5), {})
    assert "50.0% more time than the flat ring" in (tmp_path / "results.md").read_text()


def test_a_later_run_replaces_what_it_measures_again(report, tmp_path):
    report.write(tmp_path, rows(report, flat=2.0, ho=1.4), {})
    merged = report.merged(tmp_path, rows(report, ho=1.3))
    assert {row.method: row.seconds for row in merged} == {"flat ring": 2.0, "HO-Ring": 1.3}
    report.write(tmp_path, merged, {})
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == 2
