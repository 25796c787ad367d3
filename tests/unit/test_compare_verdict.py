"""Which runs agree: exit codes, the sentences that say so, and tolerances."""

import json
import math

import pytest

from megatron_ext.tools.compare import main
from tests.unit.compare_records import end, loss_at, start, step, write_rank, write_run


def scaled_loss(factor, only=None):
    def change(rank, number):
        return {} if only and number not in only else {"loss": loss_at(number) * factor}

    return change


def nan_from(first):
    return lambda rank, number: {"loss": math.nan} if number >= first else {}


@pytest.fixture
def compared(tmp_path, capsys):
    """compared(a, b, *flags) -> (exit code, standard output, standard error, compare.json or None)."""

    def run(*arguments):
        code = main([*map(str, arguments), "--output", str(tmp_path / "out")])
        out, err = capsys.readouterr()
        path = tmp_path / "out" / "compare.json"
        return code, out, err, json.loads(path.read_text()) if path.exists() else None

    return run


def test_equal_runs_agree_bit_for_bit(tmp_path, compared):
    code, out, _, result = compared(write_run(tmp_path / "a"), write_run(tmp_path / "b"))
    assert code == 0
    assert "b against a: losses agree bit for bit" in out
    assert "b against a: gradient norms agree bit for bit" in out
    assert out.splitlines()[-2] == "AGREE: Losses agree bit for bit"
    assert "WARNING" not in out
    assert result["agrees"] is True
    assert result["runs"][1]["against_reference"]["differences"]["loss"]["bit_for_bit"] is True


def test_within_tolerance(tmp_path, compared):
    b = write_run(tmp_path / "b", change=scaled_loss(1 + 3.1e-7, only=[3]))
    code, out, _, result = compared(write_run(tmp_path / "a"), b)
    assert code == 0
    assert "losses agree to within 3.1e-07 relative (tolerance 1e-05)" in out
    found = result["runs"][1]["against_reference"]["differences"]["loss"]
    assert (found["step"], found["agrees"], found["bit_for_bit"]) == (3, True, False)
    assert found["largest_relative_difference"] == pytest.approx(3.1e-7, rel=1e-6)


def test_beyond_tolerance(tmp_path, compared):
    b = write_run(tmp_path / "b", change=scaled_loss(1.002, only=[2, 4]))
    code, out, _, result = compared(write_run(tmp_path / "a"), b)
    assert code == 1
    assert "losses do NOT agree: they differ by up to 2.0e-03 relative" in out
    assert "first beyond it at step 2" in out
    assert out.splitlines()[-2].startswith("DISAGREE: NOT in agreement with a within tolerance: b")
    assert result["agrees"] is False


def test_tolerance_is_a_flag(tmp_path, compared):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", change=scaled_loss(1.002))
    assert compared(a, b, "--loss-rtol", "3e-3")[0] == 0
    assert compared(a, b, "--loss-rtol", "1e-3")[0] == 1


def test_bitwise_allows_no_difference(tmp_path, compared):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", change=lambda rank, n: {"loss": math.nextafter(loss_at(n), 0)})
    assert compared(a, b)[0] == 0
    code, out, _, _ = compared(a, b, "--bitwise")
    assert code == 1
    assert "losses do NOT agree" in out
    assert "(bit for bit)" in out


def test_gradient_norm_counts(tmp_path, compared):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", change=lambda rank, n: {"grad_norm": (1 + 1 / n) * 1.001})
    code, out, _, _ = compared(a, b)
    assert code == 1
    assert "losses agree bit for bit" in out
    assert "gradient norms do NOT agree: they differ by up to 1.0e-03 relative" in out
    assert compared(a, b, "--grad-norm-rtol", "1e-2")[0] == 0


@pytest.mark.parametrize("without", ["a", "b"])
def test_gradient_norm_on_one_side(tmp_path, compared, without):
    """Said, but no disagreement within tolerances; bit for bit, it is one."""
    for name in "ab":
        absent = {"grad_norm": None} if name == without else {}
        write_run(tmp_path / name, change=lambda rank, n, absent=absent: absent)
    has = "b" if without == "a" else "a"
    code, out, _, _ = compared(tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert f"b against a: gradient norms are NOT compared: only {has} recorded them" in out
    code, out, _, result = compared(tmp_path / "a", tmp_path / "b", "--bitwise")
    assert code == 1
    assert f"b against a: gradient norms do NOT agree: only {has} recorded them" in out
    assert result["runs"][1]["against_reference"]["differences"]["grad_norm"]["one_sided_steps"] == [
        1, 2, 3, 4, 5,
    ]  # fmt: skip


def test_steps_that_both_skip_have_no_gradient_norm(tmp_path, compared):
    """fp16: the overflow of the first steps leaves no gradient norm, on either side."""
    skip = {"grad_norm": None, "skipped": True}
    a, b = (write_run(tmp_path / name, change=lambda r, n: skip if n < 3 else {}) for name in "ab")
    assert compared(a, b, "--bitwise")[0] == 0
    c, d = (write_run(tmp_path / name, change=lambda r, n: skip) for name in "cd")
    code, out, _, _ = compared(c, d, "--bitwise")
    assert code == 0
    assert "gradient norms are on neither side" in out


def recorded_losses(*names):
    return lambda rank, n: {"losses": {name: loss_at(n) for name in names}}


@pytest.mark.parametrize("flags", [(), ("--bitwise",)])
@pytest.mark.parametrize(
    ("first", "second", "lonely"),
    [
        (["lm loss"], ["lm loss", "mtp loss"], {"mtp loss": "b"}),
        (["lm loss", "aux", "mtp loss"], ["lm loss", "aux"], {"mtp loss": "a"}),
        (["lm loss"], ["mlm loss"], {"lm loss": "a", "mlm loss": "b"}),
        ([], ["lm loss"], {"lm loss": "b"}),
    ],
)
def test_named_loss_on_one_side_disagrees(tmp_path, compared, flags, first, second, lonely):
    a = write_run(tmp_path / "a", change=recorded_losses(*first))
    b = write_run(tmp_path / "b", change=recorded_losses(*second))
    code, out, _, _ = compared(a, b, *flags)
    assert code == 1
    said = [line for line in out.splitlines() if "recorded them" in line]
    assert said == [
        f'b against a: "losses/{name}" values do NOT agree: only {run} recorded them'
        for name, run in lonely.items()
    ]
    assert "b against a: losses agree bit for bit" in out


def test_only_loss_of_one_run_is_compared_by_name_with_one_of_several(tmp_path, compared):
    a = write_run(tmp_path / "a", change=recorded_losses("lm loss"))
    b = write_run(tmp_path / "b", change=recorded_losses("lm loss", "mtp loss"))
    assert '"losses/lm loss" values agree bit for bit' in compared(a, b)[1]


def test_every_named_loss_counts(tmp_path, compared):
    def losses(factor):
        return lambda rank, n: {"losses": {"lm loss": loss_at(n), "mtp loss": factor * n}}

    a = write_run(tmp_path / "a", change=losses(1.0))
    b = write_run(tmp_path / "b", change=losses(1.1))
    code, out, _, _ = compared(a, b)
    assert code == 1
    assert '"losses/mtp loss" values do NOT agree: they differ by up to 1.0e-01' in out
    assert '"losses/lm loss" values agree bit for bit' in out


@pytest.mark.parametrize("flags", [(), ("--bitwise",), ("--loss-rtol", "1e9")])
def test_runs_that_both_diverged_do_not_agree(tmp_path, compared, flags):
    a, b = (write_run(tmp_path / name, change=nan_from(4)) for name in "ab")
    code, out, _, result = compared(a, b, *flags)
    assert code == 1
    assert "WARNING: losses of both b and a are NaN or infinite at step 4-5: training has diverged" in out
    assert "losses do NOT agree: both runs are NaN or infinite at step 4-5, so both have diverged" in out
    assert out.splitlines()[-2].startswith("DISAGREE: NOT in agreement with a")
    assert out.splitlines()[-2].endswith(": b; BOTH sides have diverged (NaN or infinite): b")
    assert result["agrees"] is False
    assert result["runs"][1]["series"]["loss"][3:] == ["nan", "nan"]
    assert "b,5,loss,nan" in (tmp_path / "out" / "compare.csv").read_text().splitlines()
    assert '<div class="banner bad"><strong>✕ NOT in agr' in (tmp_path / "out/compare.html").read_text()


@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_any_metric_that_diverged_on_both_sides_disagrees(tmp_path, compared, metric, value):
    a, b = (write_run(tmp_path / n, change=lambda r, n: {metric: value} if n == 5 else {}) for n in "ab")
    code, out, _, _ = compared(a, b)
    assert code == 1
    assert "do NOT agree: both runs are NaN or infinite at step 5, so both have diverged" in out


@pytest.mark.parametrize("bad", ["a", "b"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_on_one_side_disagrees(tmp_path, compared, bad, value):
    for name in "ab":
        write_run(
            tmp_path / name, change=lambda r, n, hit=name == bad: {"loss": value} if hit and n > 3 else {}
        )
    code, out, _, result = compared(tmp_path / "a", tmp_path / "b", "--loss-rtol", "1e9")
    assert code == 1
    assert "losses do NOT agree: only one side has a usable value at step 4-5" in out
    assert result["runs"][1]["against_reference"]["differences"]["loss"]["one_sided_steps"] == [4, 5]


def test_skipped_steps_without_a_loss(tmp_path, compared):
    def skip(rank, number):
        return {"loss": None, "losses": {}, "grad_norm": None, "skipped": True} if number == 1 else {}

    a, b, plain = (
        write_run(tmp_path / "a", change=skip),
        write_run(tmp_path / "b", change=skip),
        tmp_path / "c",
    )
    code, out, _, _ = compared(a, b)
    assert code == 0
    assert "1 (step 1)" in next(line for line in out.splitlines() if line.startswith("skipped steps"))
    code, out, _, _ = compared(a, write_run(plain))
    assert code == 1
    assert "only one side has a usable value at step 1 (at step 1 the reference has none, this run 10" in out


def test_common_steps_of_runs_of_different_length(tmp_path, compared):
    a = write_run(tmp_path / "a", steps=range(1, 11))
    b = write_run(tmp_path / "b", steps=range(4, 8))
    code, out, _, result = compared(a, b)
    assert code == 0
    assert "WARNING: the runs have different steps (a 1-10, b 4-7); compared: 4-7" in out
    assert result["compared_steps"] == [4, 5, 6, 7]


def test_no_common_step(tmp_path, compared):
    a, b = write_run(tmp_path / "a", steps=[1, 2]), write_run(tmp_path / "b", steps=[3, 4])
    code, _, err, result = compared(a, b)
    assert code == 2
    assert "no step in common: a has 1-2; b has 3-4" in err
    assert result is None


def test_no_loss_at_common_steps(tmp_path, compared):
    a = write_run(tmp_path / "a", steps=[1, 2], change=lambda r, n: {"loss": None} if n == 2 else {})
    b = write_run(tmp_path / "b", steps=[2, 3], change=lambda r, n: {"loss": None} if n == 2 else {})
    code, _, err, _ = compared(a, b)
    assert code == 2
    assert "have no loss at any of their common steps 2" in err


def test_loss_comes_from_the_rank_that_owns_it(tmp_path, compared):
    b = write_run(
        tmp_path / "b", world_size=4, change=lambda rank, n: {} if rank == 3 else {"loss": None, "losses": {}}
    )
    code, out, _, result = compared(write_run(tmp_path / "a"), b)
    assert code == 0
    assert "losses agree bit for bit" in out
    assert result["runs"][1]["world_size"] == 4


def test_owners_that_differ_a_little_are_named(tmp_path, compared):
    def change(rank, number):
        return {"loss": loss_at(number) * (1 + 1e-7 * (rank == 1) * (number == 2))}

    code, out, _, _ = compared(
        write_run(tmp_path / "a"), write_run(tmp_path / "b", world_size=2, change=change)
    )
    assert code == 0
    assert "WARNING: b: ranks 0 and 1 recorded different loss at step 2 (1.0e-07 relative)" in out


def test_owners_that_differ_much_are_no_agreement(tmp_path, compared):
    def change(rank, number):
        return {"loss": loss_at(number) * (1.1 if rank == 1 else 1)}

    code, out, _, _ = compared(
        write_run(tmp_path / "a"), write_run(tmp_path / "b", world_size=2, change=change)
    )
    assert code == 1
    assert "NOT comparable: ranks of b disagree among themselves" in out


def test_ranks_may_differ_in_what_is_not_judged(tmp_path, compared):
    b = write_run(tmp_path / "b", world_size=2, change=lambda rank, n: {"loss_scale": 1.0 + rank})
    code, out, _, _ = compared(write_run(tmp_path / "a"), b)
    assert code == 0
    assert "b: ranks 0 and 1 recorded different loss_scale" in out


def test_three_runs_are_each_judged(tmp_path, compared):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    c = write_run(tmp_path / "c", change=scaled_loss(1.5))
    code, out, _, result = compared(a, b, c)
    assert code == 1
    assert "b against a: losses agree bit for bit" in out
    assert "c against a: losses do NOT agree" in out
    assert [run["against_reference"] and run["against_reference"]["agrees"] for run in result["runs"]] == [
        None,
        True,
        False,
    ]


def test_zero_reference_and_a_change(tmp_path, compared):
    a = write_run(tmp_path / "a", change=lambda r, n: {"loss": 0.0})
    b = write_run(tmp_path / "b", change=lambda r, n: {"loss": 1e-30 if n == 2 else 0.0})
    code, _, _, result = compared(a, b)
    assert code == 1
    found = result["runs"][1]["against_reference"]["differences"]["loss"]
    assert (found["largest_relative_difference"], found["step"]) == ("inf", 2)


def test_resumed_run_equals_an_uninterrupted_one(tmp_path, compared):
    whole = write_run(tmp_path / "whole", steps=range(1, 11))
    for rank in range(2):
        bad = [step(7, loss=99.0), step(8, loss=99.0)]
        first = [start(rank, 2), *(step(n) for n in range(1, 7)), *bad]
        write_rank(tmp_path / "resumed", rank, first)
        write_rank(tmp_path / "resumed", rank, [start(rank, 2), *(step(n) for n in range(6, 11)), end(10)])
    code, out, _, result = compared(whole, tmp_path / "resumed", "--bitwise")
    assert code == 0
    assert "resumed at step 6; the earlier attempt's steps 6-8 are superseded" in out
    assert result["runs"][1]["steps"] == list(range(1, 11))
    # Each start has its own warm-up.
    assert result["runs"][1]["timed_steps"] == [3, 4, 5, 8, 9, 10]
