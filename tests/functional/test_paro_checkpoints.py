"""Checkpoints of PaRO through the real script: exact resumption, and stock's checkpoints in both directions.

Which states are loaded bit for bit under which strategy is shown in tests/dist/test_paro_checkpoint.py.
"""

import signal

import pytest

from tests.functional.parity import DISTOPT, OVERLAP, PP, TP
from tests.functional.runs import LLAMA, SCRIPT, Run, assert_close, train
from tests.functional.test_vocab_checkpoints import after

full = pytest.mark.full
BY_PARAMETER = "--dist-ckpt-optim-fully-reshardable"
VOCAB = ["--vocab-parallel", "vocab-2"]
SP = "--sequence-parallel"
PRECISE = ["--disable-bias-linear"]  # a bias of keys has no gradient but rounding errors, which Adam enlarges
AHEAD = [*DISTOPT, *OVERLAP]
FP16 = ["--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "3"]
VPP = [PP, "2", "--num-layers-per-virtual-pipeline-stage", "1"]


def paro(strategy: str, members: int = 2) -> list[str]:
    return ["--paro-strategy", strategy, "--paro-group-size", str(members)]


LAYOUTS = {
    "stock": (1, []),
    "stock-dp2": (2, []),
    "stock-distopt": (2, DISTOPT),
    "stock-pp2": (2, [PP, "2"]),
    **{name: (4, paro(name)) for name in ("NNN", "NIG", "IIG", "III", "GGG")},
    "NIG-tp2": (4, [*paro("NIG", 1), TP, "2", SP]),
    "IIG-tp2": (4, [*paro("IIG"), TP, "2", SP]),
    "IIG-pp2": (4, [*paro("IIG"), PP, "2"]),
    "GGG-pp2": (4, [*paro("GGG", 1), PP, "2"]),
    "III-vpp": (4, [*paro("III"), *VPP]),
    "NIG-vocab": (4, [*paro("NIG"), PP, "2", *VOCAB]),
}


def run(folder, layout: str, *flags: str, check: bool = True, **options) -> Run:
    world, own = LAYOUTS[layout]
    return train(folder, world, *own, *flags, check=check, **options)


def losses_and_norms(run: Run) -> tuple[dict, dict]:
    return run.losses(), run.grad_norms()


def assert_paro(run: Run) -> None:
    """A run whose flag was ignored proves nothing."""
    assert "paro" in run.start()["features"]


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("NIG", ["--bf16", *AHEAD]),
        *(
            pytest.param(*case, marks=full)
            for case in [
                ("NNN", []),
                ("NIG", []),
                ("IIG", []),
                ("III", LLAMA),
                ("GGG", [*LLAMA, "--bf16", *AHEAD]),
                ("IIG", ["--bf16", "--paro-comm", "ho-ring"]),
                ("IIG", ["--paro-comm", "flat", "--paro-reshard-after-forward", "off"]),
                ("IIG", FP16),
                ("NIG", ["--paro-inter-dtype", "int8"]),
                ("IIG", ["--paro-inter-dtype", "int8", "--bf16"]),
                ("IIG", ["--optimizer", "sgd"]),
                ("IIG", ["--ckpt-fully-parallel-load", "--ckpt-assume-constant-structure"]),
                ("IIG", [BY_PARAMETER]),
                ("GGG", ["--bf16", BY_PARAMETER]),
                ("IIG-tp2", LLAMA),
                ("GGG-pp2", []),
                ("III-vpp", []),
                ("NIG-vocab", []),
            ]
        ),
    ],
)
def test_resume_is_bit_for_bit(tmp_path, layout, flags):
    """Stop at step 5, resume to 10: losses and grad norms equal those of 10 steps in one go, with dropout."""
    flags = [*flags, "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "5"]
    straight = run(tmp_path / "straight", layout, *flags, *save)
    second = run(tmp_path / "second", layout, *flags, "--load", str(tmp_path / "ckpt"), "--ckpt-step", "5")
    assert_paro(second)
    assert sorted(second.losses()) == [6, 7, 8, 9, 10]
    assert second.losses() == after(5, straight.losses())
    assert second.grad_norms() == after(5, straight.grad_norms())
    scales = [{line["step"]: line["loss_scale"] for line in run.steps(0)} for run in (straight, second)]
    assert scales[1] == after(5, scales[0])


@full
def test_saving_changes_nothing(tmp_path):
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "2"]
    plain = run(tmp_path / "plain", "IIG", *AHEAD)
    saving = run(tmp_path / "saving", "IIG", *AHEAD, *save)
    assert losses_and_norms(saving) == losses_and_norms(plain)


@pytest.mark.parametrize(
    ("stock", "ours", "flags"),
    [
        ("stock-dp2", "IIG", []),
        *(
            pytest.param(*case, marks=full)
            for case in [
                ("stock-dp2", "NNN", []),
                ("stock-dp2", "GGG", LLAMA),
                ("stock-distopt", "NIG", [BY_PARAMETER]),
                ("stock-distopt", "GGG", [*LLAMA, BY_PARAMETER]),
                ("stock", "IIG-tp2", LLAMA),
                ("stock-pp2", "IIG-pp2", []),
                ("stock", "GGG-pp2", [*LLAMA, "--decoupled-lr", "5e-4"]),
                ("stock-pp2", "NIG-vocab", []),
                ("stock-dp2", "NIG-vocab", LLAMA),
                ("stock-dp2", "III-vpp", []),
            ]
        ),
    ],
)
def test_stock_and_back(tmp_path, stock, ours, flags):
    """Stock trains 2 steps, ours 2 more, stock the last 2: as if nothing had changed.

    Without Adam's states, of which stock's DDP and its distributed optimizer have two formats, the steps
    after a change would differ by far more than 1e-5.
    """
    flags = [*flags, *PRECISE]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    save = ["--save-interval", "2"]
    straight = run(tmp_path / "a", stock, *flags, "--save", first, *save, steps=6)
    resume = ["--load", first, "--ckpt-step", "2", "--save", second, *save, "--no-load-rng"]
    middle = run(tmp_path / "b", ours, *flags, *resume, steps=6)
    assert_paro(middle)
    assert sorted(middle.losses()) == [3, 4, 5, 6]
    assert_close(after(2, straight.losses()), middle.losses(), 1e-5)
    assert_close(after(2, straight.grad_norms()), middle.grad_norms(), 1e-4)
    last = run(tmp_path / "c", stock, *flags, "--load", second, "--ckpt-step", "4", "--no-load-rng", steps=6)
    assert sorted(last.losses()) == [5, 6]
    assert_close(after(4, straight.losses()), last.losses(), 1e-5)
    assert_close(after(4, straight.grad_norms()), last.grad_norms(), 1e-4)


@pytest.mark.parametrize(
    ("saved", "loaded", "flags"),
    [
        ("IIG-tp2", "GGG-pp2", []),
        *(
            pytest.param(*case, marks=full)
            for case in [
                ("GGG-pp2", "NIG-tp2", LLAMA),
                ("NIG-vocab", "IIG-tp2", LLAMA),
                ("GGG", "NIG-vocab", []),
                ("III-vpp", "IIG-pp2", []),
                ("NIG-tp2", "III-vpp", LLAMA),
            ]
        ),
    ],
)
def test_layouts_interchange(tmp_path, saved, loaded, flags):
    """Other strategies, group sizes, and sizes of tensor and pipeline parallelism, tied and untied."""
    flags = [*flags, *PRECISE]
    ckpt = str(tmp_path / "ckpt")
    straight = run(tmp_path / "a", saved, *flags, "--save", ckpt, "--save-interval", "2", steps=4)
    second = run(tmp_path / "b", loaded, *flags, "--load", ckpt, "--ckpt-step", "2", "--no-load-rng", steps=4)
    assert sorted(second.losses()) == [3, 4]
    assert_close(after(2, straight.losses()), second.losses(), 1e-5)
    assert_close(after(2, straight.grad_norms()), second.grad_norms(), 1e-4)


@full
@pytest.mark.parametrize(
    ("saving", "loading", "rtol"),
    [
        ([], ["--no-load-optim"], 1e-5),
        (["--bf16"], ["--bf16", "--no-load-optim"], 2e-3),
        ([], ["--finetune"], 1e-5),
        (["--bf16"], ["--bf16", "--finetune"], 2e-3),
        (["--no-save-optim"], ["--no-load-optim"], 1e-5),
        ([], ["--no-load-rng"], 1e-5),
        (["--no-save-rng"], ["--no-load-rng"], 1e-5),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("loaded", ["NIG", "IIG"])
def test_what_is_left_out_is_left_out(tmp_path, saving, loading, rtol, loaded):
    """Options for parts of checkpoints do what they do in stock."""
    ckpt, flags = str(tmp_path / "ckpt"), ["--save-interval", "2", "--exit-interval", "2"]
    run(tmp_path / "a", "IIG", *PRECISE, "--save", ckpt, *flags, *saving, steps=5)
    stock = run(tmp_path / "b", "stock-dp2", *PRECISE, "--load", ckpt, *loading, steps=5)
    ours = run(tmp_path / "c", loaded, *PRECISE, "--load", ckpt, *loading, steps=5)
    assert_paro(ours)
    assert_close(stock.losses(), ours.losses(), rtol)
    assert_close(stock.grad_norms(), ours.grad_norms(), 10 * rtol)


@full
def test_momentum_of_stock(tmp_path):
    """Stock saves SGD's states, though it cannot load them."""
    flags = ["--optimizer", "sgd", *PRECISE]
    ckpt = str(tmp_path / "ckpt")
    straight = run(tmp_path / "a", "stock-dp2", *flags, "--save", ckpt, "--save-interval", "3", steps=6)
    second = run(tmp_path / "b", "IIG", *flags, "--load", ckpt, "--ckpt-step", "3", "--no-load-rng", steps=6)
    assert_close(after(3, straight.losses()), second.losses(), 1e-5)
    assert_close(after(3, straight.grad_norms()), second.grad_norms(), 1e-4)


def test_buffers_of_the_distributed_optimizer_are_refused(tmp_path):
    ckpt, save = str(tmp_path / "ckpt"), ["--save-interval", "1", "--exit-interval", "1"]
    run(tmp_path / "a", "stock-distopt", "--save", ckpt, *save)
    resume = ["--load", ckpt, "--no-load-rng"]
    refused = run(tmp_path / "b", "NIG", *resume, steps=2, check=False)
    assert not refused.losses()
    for rank in refused.ranks:
        assert "optimizer states as the distributed optimizer's dp_reshardable buffers" in rank.error
        assert "--dist-ckpt-optim-fully-reshardable (a run that goes on from this one can" in rank.error
        assert "or load it with --no-load-optim" in rank.error
    weights = run(tmp_path / "c", "NIG", *resume, "--no-load-optim", steps=2)
    assert sorted(weights.losses()) == [2]


@full
def test_stock_rewrites_buffers_by_parameter(tmp_path):
    """What the refusal says to do: one step of stock with the flag, and ours goes on."""
    buffers, named = str(tmp_path / "buffers"), str(tmp_path / "named")
    straight = run(
        tmp_path / "a", "stock-distopt", *PRECISE, "--save", buffers, "--save-interval", "2", steps=6
    )
    resume = ["--load", buffers, "--ckpt-step", "2", "--no-load-rng"]
    save = ["--save", named, "--save-interval", "1", "--exit-interval", "1", BY_PARAMETER]
    run(tmp_path / "b", "stock-distopt", *PRECISE, *resume, *save, steps=6)
    ours = run(tmp_path / "c", "NIG", *PRECISE, "--load", named, "--no-load-rng", BY_PARAMETER, steps=6)
    assert_paro(ours)
    assert sorted(ours.losses()) == [4, 5, 6]
    assert_close(after(3, straight.losses()), ours.losses(), 1e-5)
    assert_close(after(3, straight.grad_norms()), ours.grad_norms(), 1e-4)


def test_checkpoints_that_are_written_beside_training(tmp_path):
    """Parts of split parameters are copies in host memory, so the steps that follow do not change them."""
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "3", "--async-save"]
    straight = run(tmp_path / "a", "IIG", *AHEAD, *save, steps=6)
    resume = ["--load", str(tmp_path / "ckpt"), "--ckpt-step", "3"]
    second = run(tmp_path / "b", "IIG", *AHEAD, *resume, steps=6)
    assert after(3, straight.losses()) == second.losses()
    assert after(3, straight.grad_norms()) == second.grad_norms()


KILLED = """
import os, runpy, signal, sys
from {module} import {name} as original
import {module} as module

calls = []
def function(*args, **kwargs):
    result = original(*args, **kwargs)
    calls.append(1)
    if len(calls) == {call} and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return result

module.{name} = function
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        ("megatron_ext.paro.checkpoint", "save", 2),  # of the second checkpoint; nothing is written
        # All files are written; the others wait for this rank.
        pytest.param("megatron.core.dist_checkpointing", "save", 2, marks=full),
    ],
)
def test_a_rank_dies_while_saving(tmp_path, module, name, call):
    """The checkpoint before stays the latest one, and a run resumes from it and saves again."""
    ckpt = tmp_path / "ckpt"
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(module=module, name=name, call=call, script=str(SCRIPT)))
    save = ["--save", str(ckpt), "--save-interval", "1"]
    dead = run(tmp_path / "a", "IIG", *save, steps=3, script=script, check=False)
    assert dead.ranks[1].exit_code == -signal.SIGKILL
    assert (ckpt / "iter_0000002").exists() == module.startswith("megatron.core")
    assert (ckpt / "latest_checkpointed_iteration.txt").read_text() == "1"
    second = run(tmp_path / "b", "IIG", *save, "--load", str(ckpt), steps=3)
    assert sorted(second.losses()) == [2, 3]
    assert (ckpt / "latest_checkpointed_iteration.txt").read_text() == "3"
