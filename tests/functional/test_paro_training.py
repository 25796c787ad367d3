"""PaRO through the real script: frozen parameters, 16 bits, and what goes wrong."""

import re

import pytest

from megatron_ext.grads import assemble
from megatron_ext.tools.grads import judge
from tests.functional.paro_runs import AHEAD, GROUPS_OF_2, assert_ran, freeze, like_stock, script, stock
from tests.functional.runs import assert_close, train

full = pytest.mark.full
COVERING = ("NNN", "NNI", "NIG", "IIG", "ING", "GGG")

PARTIAL = freeze("'layers.2' in name or 'layers.3' in name or 'final_layernorm' in name")
"""The upper layers are trained: no backward pass reaches what lies below."""
LORA = freeze("name.endswith('linear_proj.bias')")
"""A tiny part of every layer is trained: a 340th of the parameters."""


@pytest.mark.parametrize(
    ("strategy", "patch"),
    [
        ("IIG", PARTIAL),
        ("GGG", LORA),
        *(pytest.param(name, PARTIAL, marks=full) for name in COVERING if name != "IIG"),
        *(pytest.param(name, LORA, marks=full) for name in COVERING if name != "GGG"),
    ],
    ids=lambda value: {PARTIAL: "partial", LORA: "lora"}.get(value),
)
def test_frozen_parameters(tmp_path, strategy, patch):
    """They cost no gradient, master or moment, and no gather where no backward pass comes."""
    run = like_stock(tmp_path, strategy, 4, *GROUPS_OF_2, *AHEAD, patch=patch)
    assert_ran(run, strategy)
    ours = run.steps(0)[-1]["paro"]
    frozen = [unit for unit in ours["units"] if unit["name"].endswith(".frozen")]
    trained = [unit for unit in ours["units"] if not unit["name"].endswith(".frozen")]
    assert all(unit["grad_bytes"] == 0 and unit["owned"] == 0 for unit in frozen)
    assert all(unit["grad_bytes"] == 4 for unit in trained)
    assert sum(unit["numel"] for unit in frozen) > sum(unit["numel"] for unit in trained)
    assert ours["bytes"]["grads"] <= sum(4 * unit["padded"] for unit in trained)
    assert ours["bytes"]["optimizer"] <= sum(8 * unit["padded"] for unit in trained)
    untouched = {unit["name"] for unit in ours["units"] if not unit["backward"]}
    assert untouched == (
        {f"decoder.layers.{number}.frozen" for number in (0, 1)} if patch == PARTIAL else set()
    )


@pytest.mark.parametrize(
    ("strategy", "patch", "overlap"),
    [
        ("GGG", LORA, []),
        pytest.param("GGG", LORA, AHEAD, marks=full),
        pytest.param("IIG", PARTIAL, AHEAD, marks=full),
        pytest.param("ING", LORA, AHEAD, marks=full),
    ],
    ids=lambda value: {PARTIAL: "partial", LORA: "lora"}.get(value) if isinstance(value, str) else None,
)
def test_frozen_layers_are_released_one_by_one(tmp_path, strategy, patch, overlap):
    """At the peak, one whole layer exists beside what lies outside of layers, or two with overlap."""
    flags = [*GROUPS_OF_2, *overlap, "--paro-strategy", strategy, "--ext-memory"]
    run = train(tmp_path, 4, *flags, steps=3, script=script(patch))
    (measured,) = [line["memory"] for line in run.steps(0) if "memory" in line]
    ours = run.steps(0)[-1]["paro"]
    whole = {unit["name"].removesuffix(".frozen"): 0 for unit in ours["units"]}
    for unit in ours["units"]:
        whole[unit["name"].removesuffix(".frozen")] += 4 * unit["padded"]
    layer = max(whole[name] for name in whole if name != "root")
    expected = ours["bytes"]["params"] + whole["root"] + layer * (2 if overlap else 1)
    assert measured["category_peaks"]["weights"] == expected


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


SCALARS = """
import torch
from megatron.core.models.gpt.gpt_model import GPTModel

init, forward = GPTModel.__init__, GPTModel.forward

def __init__(self, *args, **kwargs):
    init(self, *args, **kwargs)
    for param in self.parameters():
        param.requires_grad_(ALL)
    self.scale = torch.nn.Parameter(torch.ones(1))
    self.shift = torch.nn.Parameter(torch.zeros(1))

GPTModel.__init__ = __init__
GPTModel.forward = lambda self, *a, **k: forward(self, *a, **k) * self.scale + 0.1 * self.shift.sin()
"""


@pytest.mark.parametrize("everything", [True, False], ids=["beside-others", "alone"])
@pytest.mark.parametrize(
    "strategy", [pytest.param(n, marks=full) for n in ("NNN", "NIG", "IIG", "III", "GGG")]
)
def test_parameters_of_one_element_on_8_ranks(tmp_path, strategy, everything):
    """Alone, most ranks update nothing at all."""
    patch = SCALARS.replace("ALL", str(everything))
    run = like_stock(tmp_path, strategy, 8, "--paro-group-size", "4", *AHEAD, patch=patch)
    assert_ran(run, strategy, k=2, m=4)
    owned = [sum(unit["owned"] for unit in run.steps(rank)[0]["paro"]["units"]) for rank in range(8)]
    assert everything or strategy == "NNN" or min(owned) == 0


FUSED = """
import megatron.core.tensor_parallel.layers as layers
from megatron.core.transformer.transformer_config import TransformerConfig

class Kernels:
    @staticmethod
    def wgrad_gemm_accum_fp32(inputs, grads, main_grad):
        main_grad.add_(grads.t() @ inputs)

layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = Kernels, True
post_init = TransformerConfig.__post_init__

def __post_init__(self):
    post_init(self)
    self.gradient_accumulation_fusion = True

TransformerConfig.__post_init__ = __post_init__
"""


@pytest.mark.parametrize("strategy", ["IIG", *(pytest.param(n, marks=full) for n in ("NNN", "NGG", "GGG"))])
def test_weight_gradients_that_kernels_add(tmp_path, strategy):
    """As fused kernels do on a GPU: into the buffer, past autograd, tied embeddings on both ways."""
    run = like_stock(tmp_path, strategy, 4, *GROUPS_OF_2, *AHEAD, patch=FUSED)
    assert_close(stock().losses(), run.losses(), 1e-5)
    assert_ran(run, strategy)


PRECISIONS = {
    "bf16": ["--bf16"],
    "bf16-grads": ["--bf16", "--grad-reduce-in-bf16"],
    "fp16": ["--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "3"],
    "fp16-fp32-grads": [
        *("--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "3"),
        "--accumulate-allreduce-grads-in-fp32",
    ],
}


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        pytest.param(s, p, marks=[] if (s, p) in {("IIG", "fp16"), ("III", "bf16")} else full)
        for s in ("NNI", "III", "IIG")
        for p in PRECISIONS
    ],
)
def test_low_precision(tmp_path, strategy, precision):
    """16 bits agree with stock as far as rounding lets them; fp16 scales the loss dynamically."""
    training = tuple(PRECISIONS[precision])
    reference = stock((), training)
    flags = [*training, *GROUPS_OF_2, *AHEAD, "--paro-strategy", strategy, "--ext-check", "bytes,replicas"]
    run = train(tmp_path, 4, *flags, "--ext-dump-grads", str(tmp_path))
    assert_close(reference.losses(), run.losses(), 2e-3)
    assert_close(reference.grad_norms(), run.grad_norms(), 5e-2)
    verdict = judge(assemble(reference.folder), assemble(run.folder), 2e-2)
    assert verdict.largest > 0
    assert verdict.within, str(verdict)
    assert_ran(run, strategy)
    units = run.steps(0)[0]["paro"]["units"]
    sixteen = precision in ("bf16-grads", "fp16")
    assert {unit["param_bytes"] for unit in units} == {2}
    assert {unit["grad_bytes"] for unit in units} == {2 if sixteen else 4}
    scales = [line["loss_scale"] for line in run.steps(0)]
    assert scales == [line["loss_scale"] for line in reference.steps(0)]
    assert scales[-1] > scales[0] or "fp16" not in precision


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


@pytest.mark.parametrize("strategy", ["IIG", *(pytest.param(n, marks=full) for n in ("NNN", "NGG"))])
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
        assert sorted(run.losses()) == [1, 2, 3]
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
