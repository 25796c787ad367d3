"""WallFacer through the real script: context-parallel ranks train like stock on one rank.

Losses of 10 steps to 1e-5 relative, grad norms to 1e-4, every gradient of step 1 within 5e-6 of the largest;
fp32, dropout 0, from one seed checkpoint. The run record proves that it ran: `assert_ran` compares the bytes
of every step and rank with the formulas.
"""

import argparse
import dataclasses
import sys

import pytest
import torch

from megatron_ext.features import FEATURES
from megatron_ext.grads import assemble
from megatron_ext.tools.grads import judge
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.tiles import Mask
from tests.functional.parity import DISTOPT, FULL_RECOMPUTE, OVERLAP, PP, TP
from tests.functional.paro_runs import freeze, script, seed, stock
from tests.functional.runs import LLAMA, MODEL, SCRIPT, Run, assert_close, data, merged, read_record, train
from tests.functional.wallfacer_runs import assert_ran, flags_of, like_stock
from tests.ranks import run_ranks

full = pytest.mark.full
SP = "--sequence-parallel"
SELECTIVE = ["--recompute-granularity", "selective"]
AHEAD = [*DISTOPT, *OVERLAP]
VPP = ["--num-layers-per-virtual-pipeline-stage", "1"]
GPT: list[str] = []

# name: (world, cp, C, K, flags, keywords of assert_ran); RoPE, grouped queries, RMSNorm, SwiGLU, no biases
LAYOUTS = {
    "cp4-ring": (4, 4, 1, 1, [], {}),
    "cp4-2x2": (4, 4, 2, 2, [], {}),
    "cp4-2x1": (4, 4, 2, 1, [], {}),
    "cp4-1x2": (4, 4, 1, 2, [], {}),
    "cp4-4x1": (4, 4, 4, 1, [], {}),
    "cp4-1x4": (4, 4, 1, 4, [], {}),
    "cp2-2x1": (2, 2, 2, 1, [], {}),
    "cp8-2x2": (8, 8, 2, 2, [], {}),
    "cp8-4x2": (8, 8, 4, 2, [], {}),
    "cp8-2x4": (8, 8, 2, 4, [], {}),
    "cp4-recompute": (4, 4, 2, 1, FULL_RECOMPUTE, {"recomputed": True}),
    "cp8-recompute": (8, 8, 2, 2, FULL_RECOMPUTE, {"recomputed": True}),
    "cp4-selective": (4, 4, 2, 2, SELECTIVE, {"recomputed": True}),
    "tp2-cp4-sp": (8, 4, 2, 2, [TP, "2", SP], {"tp": 2}),
    "tp2-cp2-sp-recompute": (4, 2, 2, 1, [TP, "2", SP, *FULL_RECOMPUTE], {"tp": 2, "recomputed": True}),
    "tp2-cp2": (4, 2, 1, 2, [TP, "2"], {"tp": 2}),
    "tp2-cp2-sink": (4, 2, 2, 1, [TP, "2", SP], {"tp": 2}),
    "pp2-cp4": (8, 4, 2, 2, [PP, "2"], {"pp": 2}),
    "pp2-cp2-recompute": (4, 2, 1, 1, [PP, "2", *FULL_RECOMPUTE], {"pp": 2, "recomputed": True}),
    "pp2-cp2-interleaved": (4, 2, 2, 1, [PP, "2", *VPP, *FULL_RECOMPUTE], {"pp": 2, "recomputed": True}),
    "dp2-cp2": (4, 2, 2, 1, AHEAD, {}),
    "dp2-cp2-ddp": (4, 2, 1, 1, ["--overlap-grad-reduce"], {}),
    "dp2-cp4": (8, 4, 2, 2, AHEAD, {}),
    "tp2-pp2-cp2": (8, 2, 2, 1, [TP, "2", SP, PP, "2"], {"tp": 2, "pp": 2}),
    "dp2-pp2-cp2": (8, 2, 1, 2, [PP, "2", *AHEAD], {"pp": 2}),
    "order": (4, 4, 2, 1, ["--wallfacer-order", "gap"], {"order": "gap"}),
    "queries": (4, 4, 2, 1, ["--wallfacer-backward", "queries"], {"options": Options(backward="queries")}),
    "kept": (4, 4, 2, 2, ["--wallfacer-keep", "team"], {"options": Options(keep="team")}),
    "direct": (4, 4, 2, 2, ["--wallfacer-movement", "direct"], {"options": Options(movement="direct")}),
    "chunks": (4, 4, 2, 2, ["--wallfacer-head-chunks", "2"], {"options": Options(head_chunks=2)}),
    "reference": (4, 4, 2, 2, ["--wallfacer-kernel", "reference"], {"options": Options(kernel="reference")}),
}  # fmt: skip
FAST = {
    *("cp4-ring", "cp8-2x2", "cp4-selective", "tp2-cp2-sp-recompute", "dp2-cp2", "pp2-cp2-interleaved"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else [full]) for n in LAYOUTS])
def test_trains_like_one_rank(tmp_path, name):
    world, cp, team, bundle, flags, how = LAYOUTS[name]
    arch = [*LLAMA, *LEARNED] if name.endswith("sink") else LLAMA
    run = like_stock(tmp_path, world, *flags_of(cp, team, bundle), *flags, arch=tuple(arch))
    assert_ran(run, cp, team, bundle, **how)


LEARNED = ["--softmax-type", "learnable"]
# name: (C, K, architecture or what else stock gets, too; keywords of assert_ran)
MODELS = {
    "gpt": (2, 2, GPT, {"key_heads": 4}),
    "one-key-head": (2, 1, [*LLAMA, "--num-query-groups", "1"], {"key_heads": 1}),
    "window": (2, 1, [*LLAMA, "--window-size", "5,0"], {"mask": Mask(5, 0)}),
    "every-other-window": (1, 1, [*LLAMA, "--window-size", "3,0", "--window-attn-skip-freq", "2"], None),
    "off-by-one": (2, 2, [*LLAMA, "--softmax-type", "off-by-one"], {}),
    "sink": (2, 1, [*LLAMA, *LEARNED], {}),
    "scale": (2, 2, [*LLAMA, "--use-mup"], {}),  # 1 / d instead of 1 / sqrt(d)
    "layer-scaling": (1, 2, [*LLAMA, "--apply-query-key-layer-scaling"], {}),
    "qk-norm": (2, 1, [*LLAMA, "--qk-layernorm"], {}),
    "per-token-loss": (2, 1, [*LLAMA, "--calculate-per-token-loss"], {}),
    "two-sequences": (2, 2, [*LLAMA, "--micro-batch-size", "2"], {"micro_batch_size": 2}),
}
FAST_MODELS = {"gpt", "sink"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST_MODELS else [full]) for n in MODELS])
def test_models(tmp_path, name):
    """On four ranks."""
    team, bundle, arch, how = MODELS[name]
    run = like_stock(tmp_path, 4, *flags_of(4, team, bundle), arch=tuple(merged(arch)))
    if how is not None:
        assert_ran(run, 4, team, bundle, **how)


# --- losses of ranks with different numbers of tokens ------------------------------------------------------

UNEQUAL = """
from megatron.core.datasets.gpt_dataset import GPTDataset

getitem = GPTDataset.__getitem__

def __getitem__(self, index):
    sample = getitem(self, index)
    left = 1 + (index or 0) % 3
    sample["loss_mask"][:-left] = 0  # the last tokens are on the first rank, so others have none
    return sample

GPTDataset.__getitem__ = __getitem__
"""


@pytest.mark.parametrize(
    "training",
    [[], pytest.param(["--calculate-per-token-loss"], marks=full)],
    ids=["per sequence", "per token"],
)
def test_unequal_loss_masks(tmp_path, training):
    run = like_stock(tmp_path, 4, *flags_of(4, 2, 2), training=tuple(training), patch=UNEQUAL)
    assert_ran(run, 4, 2, 2)
    other = stock(tuple(LLAMA), tuple(training), seeded=True)
    assert abs(other.losses()[1] - run.losses()[1]) > 1e-3


# --- with our other features -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "world", "flags", "pp"),
    [("vocab-2", 4, [PP, "2"], 2), pytest.param("vocab-1", 8, [PP, "2", TP, "2", SP], 2, marks=full)],
)
def test_vocabulary_parallelism(tmp_path, mode, world, flags, pp):
    run = like_stock(tmp_path, world, *flags_of(2, 2, 1), *flags, "--vocab-parallel", mode)
    assert {"vocab", "wallfacer"} <= set(run.start()["features"])
    assert_ran(run, 2, 2, 1, pp=pp, tp=2 if TP in flags else 1)


@full
def test_vocabulary_parallelism_with_unequal_masks(tmp_path):
    flags = [PP, "2", "--vocab-parallel", "vocab-2"]
    run = like_stock(tmp_path, 4, *flags_of(2, 1, 1), *flags, patch=UNEQUAL)
    assert_ran(run, 2, 1, 1, pp=2)


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("NIG", AHEAD),
        pytest.param("NNG", AHEAD, marks=full),
        pytest.param("IIG", AHEAD, marks=full),
        pytest.param("NIG", FULL_RECOMPUTE, marks=full),
    ],
)
def test_paro(tmp_path, strategy, flags):
    """Its data-parallel ranks are data times context parallelism: 2 groups of 2."""
    ours = ["--paro-strategy", strategy, "--paro-group-size", "2"]
    run = like_stock(tmp_path, 4, *flags_of(2, 2, 1), *ours, *flags)
    assert {"paro", "wallfacer"} <= set(run.start()["features"])
    assert_ran(run, 2, 2, 1, recomputed=flags == FULL_RECOMPUTE)
    assert {line["paro"]["strategy"] for line in run.steps(0)} == {strategy}


# --- recomputation -----------------------------------------------------------------------------------------


def test_recomputation_repeats_nothing(tmp_path):
    """Losses and gradients are bit for bit those without, and so are the bytes (`assert_ran`)."""
    flags = [*LLAMA, *seed(tuple(LLAMA)), *flags_of(4, 2, 2), "--ext-check", "bytes"]
    runs = []
    for name, more in (("with", FULL_RECOMPUTE), ("without", [])):
        folder = tmp_path / name
        runs.append(train(folder, 4, *flags, *more, "--ext-dump-grads", str(folder), steps=3))
    assert runs[0].losses() == runs[1].losses()
    ours, plain = (assemble(run.folder) for run in runs)
    assert ours.keys() == plain.keys()
    assert all(torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(plain[name])) for name in plain)
    assert_ran(runs[0], 4, 2, 2, recomputed=True)
    assert_ran(runs[1], 4, 2, 2)


FIRST_LAYER = [*FULL_RECOMPUTE, "--recompute-method", "block", "--recompute-num-layers", "1"]
BEHIND_THE_FIRST = "'embedding' not in name and 'layers.0.' not in name"


@pytest.mark.parametrize(
    "recompute",
    [SELECTIVE, pytest.param(FIRST_LAYER, marks=full), pytest.param([], marks=full)],
    ids=["selective", "block", "none"],
)
def test_frozen_layers(tmp_path, recompute):
    """The first layer and the embedding are not trained, so the first layer is not recomputed, and has no
    backward pass."""
    run = like_stock(tmp_path, 4, *flags_of(4, 2, 1), *recompute, patch=freeze(BEHIND_THE_FIRST))
    assert_ran(run, 4, 2, 1, recomputed=recompute == SELECTIVE, frozen=1)


def test_trained_layers_behind_frozen_ones_that_are_recomputed(tmp_path):
    """Megatron does not train them, silently."""
    flags = [*LLAMA, *flags_of(2, 2, 1), *FULL_RECOMPUTE]
    run = train(
        tmp_path, 2, *flags, steps=2, check=False, script=script(freeze(BEHIND_THE_FIRST)), timeout=60
    )
    for rank in run.ranks:
        assert rank.exit_code != 0
        assert "step 1: layer 2 is recomputed and trained (" in rank.error


# --- types -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        (["--bf16"], {}),
        pytest.param(
            ["--bf16", "--wallfacer-sum-dtype", "model", "--wallfacer-grad-dtype", "model"],
            {"sum_type": "model", "grad_type": "model"},
            marks=full,
        ),
        pytest.param(["--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "3"], {}, marks=full),
    ],
    ids=["bf16", "bf16-wire", "fp16"],
)
def test_low_precision(tmp_path, precision, options):
    """16 bits agree with stock as far as rounding lets them."""
    common = [*LLAMA, *seed(tuple(LLAMA))]
    stocks = [word for word in precision if "wallfacer" not in word and word != "model"]
    one = train(tmp_path / "one", 1, *common, *stocks, "--ext-dump-grads", str(tmp_path / "one"))
    flags = [*flags_of(4, 2, 2), *precision, "--ext-check", "bytes,replicas"]
    run = train(tmp_path / "wf", 4, *common, *flags, "--ext-dump-grads", str(tmp_path / "wf"))
    assert_close(one.losses(), run.losses(), 2e-3)
    verdict = judge(assemble(one.folder), assemble(run.folder), 2e-2)
    assert verdict.largest > 0
    assert verdict.within, str(verdict)
    assert_ran(run, 4, 2, 2, options=Options(**options), itemsize=2)


# --- runs that do not do what their flags say --------------------------------------------------------------


def doctored(tmp_path, **changes) -> Run:
    """Ten steps with teams of 2 and bundles of 2, in which parts of the feature are others."""
    table = tuple(dataclasses.replace(f, **changes) if f.name == "wallfacer" else f for f in FEATURES)
    args = merged(MODEL, data(), ["--train-iters", "10"], LLAMA, seed(tuple(LLAMA)), flags_of(4, 2, 2))

    def body() -> None:
        from megatron_ext.launch import main

        record = ["--ext-report", str(tmp_path / "record")]
        sys.exit(main(["--cpu", str(SCRIPT), *args, *record], table=table))

    ranks = run_ranks(4, body, check=False)
    return Run(tmp_path, ranks, read_record(tmp_path / "record", 4))


def test_a_run_without_its_attention_stops(tmp_path):
    run = doctored(tmp_path, patches=lambda context: [])
    words = "Context parallelism is only supported by TEDotProductAttention"
    assert any(words in (rank.error or "") for rank in run.ranks)
    assert all(rank.exit_code for rank in run.ranks)


def test_a_run_that_ignores_the_team_size_is_caught(tmp_path):
    """It trains right, as a plain ring, and says what it was told; bytes give it away."""
    (feature,) = (f for f in FEATURES if f.name == "wallfacer")

    def ring(flags):
        return argparse.Namespace(**{**vars(flags), "wallfacer_team_size": "1", "wallfacer_kv_bundle": 1})

    run = doctored(
        tmp_path,
        patches=lambda context: feature.patches(dataclasses.replace(context, flags=ring(context.flags))),
        groups=lambda args: feature.groups(ring(args)),
    )
    assert_close(stock(tuple(LLAMA), seeded=True).losses(), run.losses(), 1e-5)
    with pytest.raises(AssertionError):
        assert_ran(run, 4, 2, 2)


# --- automatic choice --------------------------------------------------------------------------------------


def test_auto(tmp_path):
    """Said in the log and in the record, and what was said is what ran."""
    run = like_stock(tmp_path, 4, *flags_of(4, "auto"))
    said = run.start()["wallfacer"]
    assert said["chosen_by"].startswith("auto (2 GB/s inside")
    text = f"--wallfacer-team-size {said['team_size']} --wallfacer-kv-bundle {said['kv_bundle']}"
    assert f"[megatron_ext] --wallfacer-team-size auto: {text}" in run.output
    options = Options(backward=said["backward"], movement=said["movement"] or "relocate")
    assert_ran(run, 4, said["team_size"], said["kv_bundle"], order=said["order"], options=options)


UNLIKE = """
import os
import megatron_ext.wallfacer.resolve as resolve

chosen = resolve.chosen

def other(candidate):
    found = chosen(candidate)
    if os.environ["RANK"] == "1":
        found["wallfacer_backward"] = {"keys": "queries", "queries": "keys"}[found["wallfacer_backward"]]
    return found

resolve.chosen = other
"""


def test_ranks_that_choose_differently_stop(tmp_path):
    """The groups are the same, and what is sent in them would not be."""
    run = train(tmp_path, 2, *flags_of(2, "auto"), steps=2, check=False, script=script(UNLIKE), timeout=60)
    for rank in run.ranks:
        assert rank.exit_code != 0
        assert "WallFacer is not the same on all ranks, so nothing was trained:" in rank.error
        assert "--wallfacer-backward: " in rank.error
    assert not any(run.steps(rank) for rank in range(2))


# --- checkpoints -------------------------------------------------------------------------------------------


def test_stop_and_resume(tmp_path):
    """Bit for bit; stock on one rank goes on from the same checkpoint, learned sinks included."""
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "3"]
    arch = [*LLAMA, *LEARNED]
    flags = [*arch, *flags_of(4, 2, 1)]
    whole = train(tmp_path / "whole", 4, *flags, *save, steps=6)
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("3")
    load = ["--load", str(tmp_path / "ckpt")]
    rest = train(tmp_path / "rest", 4, *flags, *load, steps=6)
    assert rest.losses() == {step: whole.losses()[step] for step in (4, 5, 6)}
    one = train(tmp_path / "one", 1, *arch, *load, steps=6)
    assert_close(rest.losses(), one.losses(), 1e-5)
