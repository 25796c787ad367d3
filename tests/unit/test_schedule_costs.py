"""Costs: reading, writing, and what is refused."""

import json

import pytest

from megatron_ext.schedules.build import build
from megatron_ext.schedules.costs import COMM_KINDS, Costs
from megatron_ext.schedules.lower import lower
from megatron_ext.schedules.simulate import simulate


def test_defaults_are_the_static_units():
    costs = Costs()
    assert [costs.of(kind, 3) for kind in ("F", "B", "S", "U", "T", "L", "IF", "IB")] == [
        1,
        2,
        0,
        0,
        0,
        0,
        0,
        0,
    ]
    assert [costs.transfer(kind) for kind in COMM_KINDS] == [0] * len(COMM_KINDS)


def test_per_rank_and_for_all():
    costs = Costs(forward=(1.0, 2.0), backward=3.0, comm={"C1": 0.25})
    assert (costs.of("F", 0), costs.of("F", 1), costs.of("B", 1)) == (1.0, 2.0, 3.0)
    assert (costs.mean("F"), costs.mean("B")) == (1.5, 3.0)
    assert (costs.transfer("C1"), costs.transfer("C0")) == (0.25, 0.0)


def test_round_trip(tmp_path):
    costs = Costs((1.0, 2.0), 3.0, 0.1, 0.2, (0.3, 0.4), 0.5, 0.6, 0.7, {"p2p": 0.01, "G": 0.02})
    assert Costs.from_json(costs.to_json()) == costs
    path = tmp_path / "costs.json"
    path.write_text(costs.to_json())
    assert Costs.read(path) == Costs.read(str(path)) == costs


def test_file_with_some_fields():
    costs = Costs.from_json('{"forward": 2, "output_s": [0.5, 1], "comm": {"e": 1}}')
    assert costs == Costs(forward=2.0, output_s=(0.5, 1.0), comm={"e": 1.0})
    assert Costs.from_json("{}") == Costs()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is no JSON: "),
        ("", "this is no JSON: "),
        ("[1, 2]", "costs are a JSON object with some of the fields backward, comm, forward, "),
        ("3", "costs are a JSON object with some of the fields backward, "),
        ('{"forwards": 1}', "costs are a JSON object with some of the fields backward, "),
        ('{"comm": [1]}', "comm must be an object of numbers by kind"),
        ('{"comm": {"C1": "fast"}}', "comm must be an object of numbers by kind"),
        ('{"forward": "fast"}', "forward must be a number, or a list with one number per rank"),
        ('{"backward": []}', "backward must be a number, or a list with one number per rank"),
        ('{"loss": [1, null]}', "loss must be a number, or a list with one number per rank"),
        ('{"output_t": null}', "output_t must be a number, or a list with one number per rank"),
    ],
)
def test_json_that_is_refused(text, message):
    with pytest.raises(ValueError, match="^" + message):
        Costs.from_json(text)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (
            Costs(forward=(1.0, 1.0, 1.0)),
            "forward has 3 values, but there are 2 pipeline ranks: give one number per rank, or one for all",
        ),
        (Costs(output_s=-0.1), "output_s is -0.1: a time is finite and not negative"),
        (Costs(backward=(1.0, -2.0)), "backward is -2.0: a time is finite and not negative"),
        (Costs(loss=float("nan")), "loss is nan: a time is finite and not negative"),
        (Costs(forward=0.0), "forward and backward must take time"),
        (Costs(backward=(0.0, 0.0)), "forward and backward must take time"),
        (Costs(comm={"C9": 1.0, "SF": 1.0}), r"comm has \['C9', 'SF'\]: its kinds are p2p, e, g, C0, C1"),
    ],
)
def test_values_that_are_refused(costs, message):
    with pytest.raises(ValueError, match="^" + message):
        costs.check(2)
    with pytest.raises(ValueError, match="^" + message):
        build(2, 2, costs=costs)
    with pytest.raises(ValueError, match="^" + message):
        simulate(lower(build(2, 2)), costs)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"comm": {"C1": -1.0}}, "comm of C1 is -1.0: a time is finite and not negative"),
        ({"comm": {"p2p": float("nan")}}, "comm of p2p is nan: a time is finite and not negative"),
        ({"comm": {"p2p": float("inf")}}, "comm of p2p is inf: a time is finite and not negative"),
        ({"forward": [1, float("inf")]}, "forward is inf: a time is finite and not negative"),
        ({"forward": True}, "forward must be a number, or a list with one number per rank"),
        ({"loss": [1, False]}, "loss must be a number, or a list with one number per rank"),
        ({"comm": {"e": False}}, "comm must be an object of numbers by kind"),
    ],
)
def test_files_with_values_that_are_no_times(values, message):
    """Python's JSON reads NaN and Infinity, and its booleans are numbers."""
    with pytest.raises(ValueError, match="^" + message):
        Costs.from_json(json.dumps(values)).check(2)
