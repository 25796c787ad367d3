"""PaRO through the real script: gradients that are not finite, ranks that die, and what is refused."""

import re

import pytest

from tests.functional.paro_runs import AHEAD, GROUPS_OF_2, assert_ran, script
from tests.functional.runs import train

full = pytest.mark.full

TOGGLE = """
import megatron.training.training as training

stock = training.train_step

def train_step(forward_step_func, data_iterator, model, *args, **kwargs):
    if kwargs["iteration"] == 2:
        next(p for n, p in model[0].named_parameters() if n.endswith("layers.1.mlp.linear_fc1.bias")
            ).requires_grad_(False)
    return stock(forward_step_func, data_iterator, model, *args, **kwargs)

training.train_step = train_step
"""


def test_parameters_that_are_frozen_later_are_refused(tmp_path):
    run = train(
        tmp_path, 2, "--paro-strategy", "III", steps=4, script=script(TOGGLE), check=False, timeout=100
    )
    assert sorted(run.losses()) == [1, 2]
    for rank in run.ranks:
        assert rank.exit_code == 1
        assert (
            "decoder.layers.1.mlp.linear_fc1.bias became frozen after the model was wrapped. PaRO lays out "
            "its buffers once: freeze or unfreeze parameters in the model provider, before training starts."
        ) in rank.error


POISON = """
import os, torch
import megatron.core.models.gpt.gpt_model as gpt
from megatron.training import get_args

forward = gpt.GPTModel.forward

def poisoned(self, *args, **kwargs):
    output = forward(self, *args, **kwargs)
    if os.environ["RANK"] == "1" and get_args().curr_iteration == 2:
        output.register_hook(lambda grad: grad * float("nan"))
    return output

gpt.GPTModel.forward = poisoned
"""


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("III", AHEAD),
        *(pytest.param(name, AHEAD, marks=full) for name in ("NNN", "NNI", "NIG", "IIG", "GGG")),
        pytest.param("NNN", [], marks=full),
        pytest.param("IIG", [*AHEAD, "--paro-inter-dtype", "int8"], marks=full),
        pytest.param("NNI", ["--paro-inter-dtype", "int8"], marks=full),
    ],
)
def test_one_rank_without_finite_gradients(tmp_path, strategy, flags):
    """All ranks skip the same step, whatever the optimizer's level, and send no update in it."""
    fp16 = ["--fp16", "--initial-loss-scale", "1024", "--hysteresis", "1"]
    run = train(
        *(tmp_path, 4, *fp16, *GROUPS_OF_2, *flags, "--paro-strategy", strategy),
        *("--ext-check", "bytes,replicas"),
        script=script(POISON),
        steps=5,
    )
    for rank in range(4):
        assert [line["skipped"] for line in run.steps(rank)] == [False, False, True, False, False]
        assert [line["loss_scale"] for line in run.steps(rank)] == [1024, 1024, 512, 512, 512]
        norms = [line["grad_norm"] for line in run.steps(rank)]
        assert norms[2] is None
        assert all(norm > 0 for norm in norms[:2] + norms[3:])
    assert_ran(run, strategy, inter_dtype="int8" if "int8" in flags else "native")


@full
@pytest.mark.parametrize("strategy", ["NNN", "NGG", "IIG"])
def test_gradients_that_are_not_finite_in_fp32(tmp_path, strategy):
    """The rank that has them says so, as stock's wrapper does, and the job ends."""
    flags = [*GROUPS_OF_2, *AHEAD, "--paro-strategy", strategy, "--rerun-mode", "disabled"]
    run = train(tmp_path, 4, *flags, script=script(POISON), check=False, timeout=100)
    assert re.search("found NaN in local grad norm of .* in backward pass", run.ranks[1].error)
    assert all(rank.exit_code != 0 for rank in run.ranks)
    assert sorted(run.losses()) == [1, 2]


@full
@pytest.mark.parametrize("strategy", ["NNN", "IIG"])
def test_gradients_that_are_not_finite_are_looked_into(tmp_path, strategy):
    """By default, stock repeats the step, saves what it has and ends with a code of its own."""
    ours = [*GROUPS_OF_2, *AHEAD, "--paro-strategy", strategy, "--ext-check", "bytes"]
    codes = {}
    for name, flags in {"stock": [], "paro": ours}.items():
        save = ["--save", str(tmp_path / f"{name}-saved"), "--save-interval", "100"]
        run = train(tmp_path / name, 4, *save, *flags, script=script(POISON), check=False)
        codes[name] = [rank.exit_code for rank in run.ranks]
        assert sorted(run.losses()) == [1, 2]
    assert codes["paro"] == codes["stock"]
    assert min(codes["stock"]) > 1


DIE = """
import os
import megatron.training.training as training

stock = training.train_step

def train_step(*args, **kwargs):
    if kwargs["iteration"] == 2 and os.environ["RANK"] == "2":
        os._exit(9)
    return stock(*args, **kwargs)

training.train_step = train_step
"""


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("IIG", [*AHEAD, "--paro-comm", "ho-ring"]),
        pytest.param("NNN", [], marks=full),
        pytest.param("GGG", [*AHEAD, "--paro-comm", "flat"], marks=full),
    ],
)
def test_a_rank_that_dies_ends_the_job(tmp_path, strategy, flags):
    """The others do not wait for it, in no lane: they fail with the error of their communication."""
    run = train(
        *(tmp_path, 4, *GROUPS_OF_2, *flags, "--paro-strategy", strategy),
        script=script(DIE),
        check=False,
        timeout=100,
    )
    assert [rank.exit_code for rank in run.ranks] == [1, 1, 9, 1]
    for rank in (0, 1, 3):
        assert re.search("[Cc]onnection|closed by|reset by|timed out", run.ranks[rank].error)
    assert sorted(run.losses()) == [1, 2]


LAZY = """
from megatron_ext.paro.param_flow import ParamFlow

ParamFlow.update = lambda self, units: self.release(units)
"""


def test_bytes_are_checked_in_every_step(tmp_path):
    """An engine that sends no updates is found in the first step, by its bytes."""
    flags = ["--paro-strategy", "NIG", "--ext-check", "bytes"]
    run = train(tmp_path, 2, *flags, steps=2, script=script(LAZY), check=False)
    for rank in run.ranks:
        assert re.search(
            r"--ext-check bytes, step 1: data-parallel rank \d has sent other numbers of bytes than "
            r"--paro-strategy NIG should.\n  all_gather over paro-members: 0 bytes sent, \d+ by the formula",
            rank.error,
        )
    assert run.losses() == {}


def test_bad_input_is_refused_before_anything_starts(tmp_path):
    """Exit 2 on every rank, with the rule, before any process group."""
    for flags, message in (
        (["--paro-strategy", "GNI"], "GNI splits parameters (G) more finely than optimizer states (I)"),
        (["--paro-strategy", "IIG", "--paro-group-size", "3"], "cannot be cut into groups of 3"),
    ):
        run = train(tmp_path, 2, *flags, steps=1, check=False)
        assert [rank.exit_code for rank in run.ranks] == [2, 2]
        assert message in " ".join(run.ranks[0].output.split())
        assert run.lines == [[], []]
