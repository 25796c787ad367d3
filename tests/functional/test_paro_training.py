"""PaRO through the real script: frozen and tiny parameters, fused kernels, 16 bits."""

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
        *(pytest.param(name, PARTIAL, marks=full) for name in COVERING if name != "IIG"),
        *(pytest.param(name, LORA, marks=full) for name in COVERING),
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
        pytest.param(s, p, marks=[] if (s, p) == ("IIG", "fp16") else full)
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
