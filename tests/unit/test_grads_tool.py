"""`megatron-ext grads`: what counts as within tolerance, on small dumps that the tests write."""

import math

import pytest
import torch

from megatron_ext.grads import step_folder
from megatron_ext.tools.grads import judge, main

FLOAT32 = torch.float32


def write_dump(folder, **gradients):
    """A dump of one rank: name -> list of values."""
    target = step_folder(folder, 1)
    target.mkdir(parents=True)
    shards = [(name, (len(v),), (0,), torch.tensor(v, dtype=FLOAT32)) for name, v in gradients.items()]
    torch.save({"world_size": 1, "dump": "one", "shards": shards}, target / "rank-0000.pt")
    return str(folder)


@pytest.fixture
def compared(tmp_path, capsys):
    """compared(reference, other, *flags) -> (exit code, standard output, standard error)."""

    def run(a, b, *flags):
        code = main([write_dump(tmp_path / "a", **a), write_dump(tmp_path / "b", **b), *flags])
        return code, *capsys.readouterr()

    return run


def test_tolerance_is_relative_to_the_largest_gradient(compared):
    a, b = {"big": [-4.0, 1.0], "small": [1e-3]}, {"big": [-4.0, 1.0], "small": [1.5e-3]}
    code, out, _ = compared(a, b, "--tolerance", "2e-4")
    assert code == 0
    assert out.splitlines()[0].split() == [
        "5.000e-04",
        "of",
        "1.000e-03",
        "small",
    ]  # the worst ratio is first
    assert "2 gradients; largest difference 5.000e-04 (small) = 1.250e-04 of the largest gradient 4.0" in out
    assert out.endswith("; within 0.0002\n")


def test_beyond_tolerance(compared):
    code, out, _ = compared({"x": [4.0], "y": [1.0]}, {"x": [4.0], "y": [1.1]})
    assert code == 1
    assert out.endswith("NOT within 5e-06\n")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sides", ["a", "b", "ab"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_finite_is_never_within(compared, value, sides, place):
    """On one side or both, and wherever the parameter stands among the others."""
    names = ["first", "second", "third"]
    bad = {names[place]: [1.0, value]}
    good = {name: [1.0, 2.0] for name in names}
    a, b = (good | bad if side in sides else good for side in "ab")
    code, out, _ = compared(a, b, "--tolerance", "inf")
    assert code == 1
    assert out.splitlines()[0].endswith(names[place])
    assert out.endswith(f"NOT within inf: NaN or infinity in 1 of them: {names[place]}\n")


def test_verdict_names_all_that_is_not_finite():
    a = {"x": torch.tensor([3.0]), "y": torch.tensor([math.inf]), "z": torch.tensor([1.0])}
    b = {"x": torch.tensor([3.0]), "y": torch.tensor([1.0]), "z": torch.tensor([math.nan])}
    verdict = judge(a, b, 1.0)
    assert not verdict.within
    assert verdict.not_finite == ["y", "z"]
    assert (verdict.worst_name, verdict.worst, verdict.largest) == ("y", math.inf, 3.0)


def test_long_list_of_names_is_cut(compared):
    gradients = {f"w{i:02d}": [math.nan] for i in range(12)}
    code, out, _ = compared(gradients, gradients)
    assert code == 1
    assert "NaN or infinity in 12 of them: w00, w01" in out
    assert out.endswith("w09 and 2 more\n")


def test_worst_gradient_is_named():
    a = {"x": torch.tensor([1.0, 8.0]), "y": torch.tensor([0.25])}
    b = {"x": torch.tensor([1.0, 7.0]), "y": torch.tensor([0.5])}
    verdict = judge(a, b, 0.125)
    assert (verdict.worst_name, verdict.worst, verdict.largest, verdict.within) == ("x", 1.0, 8.0, True)
    assert [row[0] for row in verdict.rows] == ["y", "x"]
    assert not judge(a, b, 0.124).within


def test_empty_dump(compared):
    code, out, err = compared({}, {})
    assert (code, out) == (2, "")
    assert "hold no gradient, so there is nothing to compare" in err


def test_other_parameters_or_shapes(compared, tmp_path, capsys):
    code, _, err = compared({"x": [1.0]}, {"y": [1.0]})
    assert code == 2
    assert "parameters differ: only in the first ['x'], only in the second ['y']" in err
    assert main([str(tmp_path / "a"), write_dump(tmp_path / "c", x=[1.0, 2.0])]) == 2
    assert "x: shapes (1,) and (2,) differ" in capsys.readouterr().err
