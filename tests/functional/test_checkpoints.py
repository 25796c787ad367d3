"""Checkpoints of stock Megatron through the launcher: resuming is exact, layouts interchange."""

import pytest

from tests.functional.runs import LLAMA, assert_close, train

PP, TP = "--pipeline-model-parallel-size", "--tensor-model-parallel-size"
DISTOPT = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
LAYOUTS = {
    "one": (1, []),
    "pp2": (2, [PP, "2"]),
    "tp2-sp": (2, [TP, "2", "--sequence-parallel"]),
    "dp2-distopt": (2, DISTOPT),
    "tp2-sp-distopt": (2, [TP, "2", "--sequence-parallel", *DISTOPT]),
    "pp2-dp2-distopt": (4, [PP, "2", *DISTOPT]),
}
full = pytest.mark.full


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("one", marks=full),
        "pp2",
        pytest.param("tp2-sp", marks=full),
        pytest.param("dp2-distopt", marks=full),
        pytest.param("pp2-dp2-distopt", marks=full),
    ],
)
def test_resume_is_bit_for_bit(tmp_path, name):
    """Stop at step 5, resume to 10: losses and grad norms equal those of 10 steps in one go, with dropout."""
    world, flags = LAYOUTS[name]
    flags = [*flags, "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "5"]
    straight = train(tmp_path / "straight", world, *flags)
    first = train(tmp_path / "first", world, *flags, *save, "--exit-interval", "5")
    second = train(tmp_path / "second", world, *flags, *save, "--load", str(tmp_path / "ckpt"))
    assert sorted(first.losses()) == [1, 2, 3, 4, 5]
    assert sorted(second.losses()) == [6, 7, 8, 9, 10]
    assert first.losses() | second.losses() == straight.losses()
    assert first.grad_norms() | second.grad_norms() == straight.grad_norms()


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("pp2", "tp2-sp"),
        pytest.param("dp2-distopt", "pp2-dp2-distopt", marks=full),
        pytest.param("pp2-dp2-distopt", "tp2-sp-distopt", marks=full),
        pytest.param("tp2-sp-distopt", "dp2-distopt", marks=full),
        pytest.param("one", "pp2", marks=full),
        pytest.param("pp2", "one", marks=full),
    ],
)
def test_layouts_interchange(tmp_path, saved, loaded):
    """Save with one layout, resume with another, optimizer state included: as if nothing had changed.

    Stock interchanges optimizer states between layouts, but not between the distributed optimizer and others.
    Adam's state must have come along: without it the first resumed steps differ by far more than 1e-4.
    """
    model = ["--dist-ckpt-optim-fully-reshardable"] if "distopt" in saved else []
    model = [*model, *LLAMA]
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "5", "--exit-interval", "5"]
    world, flags = LAYOUTS[saved]
    straight = train(tmp_path / "straight", world, *model, *flags)
    train(tmp_path / "first", world, *model, *flags, *save)
    world, flags = LAYOUTS[loaded]
    second = train(
        tmp_path / "second", world, *model, *flags, "--load", str(tmp_path / "ckpt"), "--no-load-rng"
    )
    expected = {step: loss for step, loss in straight.losses().items() if step > 5}
    assert_close(expected, second.losses(), 1e-5)
    norms = {step: norm for step, norm in straight.grad_norms().items() if step > 5}
    assert_close(norms, second.grad_norms(), 1e-4)
