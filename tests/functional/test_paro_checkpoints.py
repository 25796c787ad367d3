"""Checkpoints of PaRO: exact resumption, every strategy and layout loads every other's, and stock's both ways."""

import pytest

from tests.functional.runs import LLAMA, Run, assert_close, train
from tests.functional.test_stock_parity import DISTOPT, PP, TP
from tests.functional.test_vocab_checkpoints import after

full = pytest.mark.full


def paro(strategy: str, members: int = 2, *flags: str) -> list[str]:
    return ["--paro-strategy", strategy, "--paro-group-size", str(members), *flags]


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("IIG", []),
        ("NIG", []),
        ("GGG", ["--bf16"]),
    ],
)
def test_resume_is_bit_for_bit(tmp_path, strategy, flags):
    """Stop at step 5, resume to 10: losses and grad norms equal those of 10 steps in one go, with dropout."""
    flags = [*paro(strategy), *flags, "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "5"]
    straight = train(tmp_path / "straight", 4, *flags)
    train(tmp_path / "first", 4, *flags, *save, "--exit-interval", "5")
    second = train(tmp_path / "second", 4, *flags, "--load", str(tmp_path / "ckpt"))
    assert sorted(second.losses()) == [6, 7, 8, 9, 10]
    assert second.losses() == after(5, straight.losses())
    assert second.grad_norms() == after(5, straight.grad_norms())
