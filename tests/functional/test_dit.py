"""The diffusion transformer: every layout trains like one rank, resumes exactly, and draws what it learnt.

Losses of 6 steps to 1e-5 relative, grad norms to 1e-4, every gradient of step 1 within 5e-6 of the largest,
from a checkpoint that was trained for some steps: at the start AdaLN-Zero lets no gradient through to the
layers.
"""

import json

import numpy as np
import pytest
from PIL import Image

from megatron_ext.grads import assemble
from megatron_ext.tools.grads import judge
from megatron_ext.wallfacer.tiles import Mask
from tests.functional.dit_runs import assert_context_parallel, train
from tests.functional.runs import REPO, Run, assert_close, launch
from tests.functional.wallfacer_runs import flags_of
from tests.ranks import run_ranks

TP = ["--tensor-model-parallel-size", "2"]
SP = [*TP, "--sequence-parallel"]
PP = ["--pipeline-model-parallel-size", "2"]
VPP = ["--num-layers-per-virtual-pipeline-stage", "1"]
DISTOPT = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
WINDOW, SEEN = ["--window-size", "3,1"], Mask(3, 1)
full = pytest.mark.full

# name: world, flags, a kind of communication that this layout cannot do without
LAYOUTS = {
    "tp2-sp": (2, SP, "reduce_scatter"),
    "pp2": (2, PP, "send"),
    "dp2-distopt": (2, DISTOPT, "reduce_scatter"),
    "tp2": (2, TP, "all_reduce"),
    "pp2-interleaved": (2, [*PP, *VPP], "send"),
    "pp2-dp2-distopt": (4, [*PP, *DISTOPT], "reduce_scatter"),
    "tp2-sp-pp2": (4, [*SP, *PP], "send"),
    "tp2-sp-recompute": (2, [*SP, *RECOMPUTE], "reduce_scatter"),
}
# Context parallelism: world, ranks, team, bundle, flags, keywords of assert_context_parallel
CONTEXT = {
    "cp2-ring": (2, 2, 1, 1, [], {}),
    "cp2-2x1": (2, 2, 2, 1, [], {}),
    "cp4-2x1": (4, 4, 2, 1, [], {}),
    "cp4-2x2-recompute": (4, 4, 2, 2, RECOMPUTE, {"recomputed": True}),
    "tp2-cp2": (4, 2, 1, 2, TP, {"tp": 2}),
    "tp2-sp-cp2": (4, 2, 2, 1, SP, {"tp": 2}),
    "pp2-cp2": (4, 2, 2, 1, PP, {"pp": 2}),
    "pp2-cp4-interleaved": (8, 4, 2, 2, [*PP, *VPP], {"pp": 2}),
    "dp2-cp2-distopt": (4, 2, 2, 1, DISTOPT, {}),
    "tp2-sp-pp2-cp2": (8, 2, 1, 1, [*SP, *PP], {"tp": 2, "pp": 2}),
    "pp2-dp2-cp2-distopt": (8, 2, 2, 1, [*PP, *DISTOPT], {"pp": 2}),
    "cp4-window": (4, 4, 1, 1, WINDOW, {"mask": SEEN}),
    "cp2-window": (2, 2, 2, 1, WINDOW, {"mask": SEEN}),
    "cp4-2x2-window-recompute": (4, 4, 2, 2, [*WINDOW, *RECOMPUTE], {"mask": SEEN, "recomputed": True}),
}
LAYOUTS |= {
    name: (world, [*flags_of(cp, team, bundle), *flags], "all_gather" if team * bundle > 1 else "send")
    for name, (world, cp, team, bundle, flags, _) in CONTEXT.items()
}
SUBSET = {"tp2-sp-cp2", "pp2-dp2-distopt", "cp4-2x2-recompute", "cp4-window"}
STEPS, SAVED = 6, 4  # of a run, and the step of a checkpoint to resume from
RESUMED = {"tp2-sp-cp2", "pp2", "tp2-sp", "dp2-cp2-distopt"}
CASES = [pytest.param(name, marks=[] if name in SUBSET else [full]) for name in LAYOUTS]
DRAW = "--dit-samples samples --dit-samples-per-class 2 --dit-sample-steps 3".split()


@pytest.fixture(scope="module")
def seed(tmp_path_factory) -> list[str]:
    """Flags that load a checkpoint whose gates are open."""
    folder = tmp_path_factory.mktemp("seed")
    save = ["--save", str(folder / "seed"), "--save-interval", "20", "--no-save-optim", "--no-save-rng"]
    train(folder, 1, "--lr", "1e-2", *save, steps=20)
    return ["--load", str(folder / "seed"), "--finetune", "--no-load-optim", "--no-load-rng"]


@pytest.fixture(scope="module")
def trained(seed, tmp_path_factory):
    """Name of a layout, or "one" and "one-window", to its run; made at first use."""
    made: dict[str, Run] = {}

    def get(name: str) -> Run:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            world, flags, _ = LAYOUTS.get(name, (1, WINDOW if "window" in name else [], None))
            checks = "replicas,bytes" if name in CONTEXT else "replicas"
            more = ["--ext-check", checks, "--ext-dump-grads", str(folder), *DRAW]
            if name in RESUMED:
                more += ["--save", str(folder / "ckpt"), "--save-interval", str(SAVED)]
            made[name] = train(folder, world, *seed, *flags, *more, steps=STEPS)
        return made[name]

    return get


def one_rank(name: str) -> str:
    """What a layout must be like."""
    return "one-window" if "window" in name else "one"


@pytest.mark.parametrize("name", CASES)
def test_layout_trains_like_one_rank(trained, name):
    one, run = trained(one_rank(name)), trained(name)
    assert_close(one.losses(), run.losses(), 1e-5)
    assert_close(one.grad_norms(), run.grad_norms(), 1e-4)
    verdict = judge(assemble(one.folder), assemble(run.folder), 5e-6)
    assert verdict.within, str(verdict)
    assert len(run.losses()) == STEPS
    assert run.traffic(LAYOUTS[name][2]) > 0
    if name in CONTEXT:
        _, cp, team, bundle, _, how = CONTEXT[name]
        assert_context_parallel(run, cp, team, bundle, **how)


def test_a_window_changes_the_model(trained):
    """Otherwise those with one would compare nothing of it."""
    plain, windowed = trained("one").losses(), trained("one-window").losses()
    assert abs(plain[1] - windowed[1]) > 1e-3 * plain[1]


def test_gradients_reach_every_weight(trained):
    """Otherwise the comparison above would say nothing."""
    gradients = assemble(trained("one").folder)
    assert any(name.startswith("conditioner.") for name in gradients)
    assert any("linear_qkv" in name for name in gradients)
    largest = max(value.abs().max() for value in gradients.values())
    small = {name: float(value.abs().max() / largest) for name, value in gradients.items()}
    assert min(small.values()) > 1e-3, small


@pytest.mark.parametrize("name", CASES)
def test_layout_draws_the_same_samples(trained, name):
    one, run = (Image.open(trained(n).folder / "samples" / "samples.png") for n in (one_rank(name), name))
    assert one.size == (2 * 10 * 4, 10 * 10 * 4)  # 10 classes x 2 samples of 8 x 8 pixels with a border, x 4
    difference = np.asarray(one).astype(int) - np.asarray(run).astype(int)
    assert abs(difference).max() <= 2
    assert np.asarray(one).std() > 10


@pytest.mark.parametrize(
    ("saved", "loaded", "exact"),
    [
        ("tp2-sp-cp2", "tp2-sp-cp2", True),
        pytest.param("dp2-cp2-distopt", "dp2-cp2-distopt", True, marks=full),
        pytest.param("pp2", "tp2-sp-cp2", False, marks=full),
        pytest.param("tp2-sp", "pp2-interleaved", False, marks=full),
    ],
)
def test_resume(trained, tmp_path, saved, loaded, exact):
    """The last steps from a checkpoint, optimizer included, in the same layout or in another."""
    straight = trained(saved)
    world, flags, _ = LAYOUTS[loaded]
    load = ["--load", str(straight.folder / "ckpt"), "--ckpt-step", str(SAVED)]
    load += [] if exact else ["--no-load-rng"]
    losses = train(tmp_path, world, *flags, *load, steps=STEPS).losses()
    expected = {step: loss for step, loss in straight.losses().items() if step > SAVED}
    assert_close(expected, losses, 0.0 if exact else 1e-5)


def test_sequence_that_is_not_the_picture_is_refused(tmp_path):
    sizes = ["--seq-length", "17", "--max-position-embeddings", "17"]
    run = train(tmp_path, 1, *sizes, "--dit-evaluate", "--dit-data", "random", check=False)
    assert run.ranks[0].exit_code == 2
    assert "2 problems, nothing was started" in run.output
    assert "--seq-length 17, but the picture is 16 tokens" in run.output
    assert "--dit-evaluate judges samples by the real digits" in run.output


@full
def test_videos_of_random_values(tmp_path):
    """3-D patches, several channels; noise prediction on the cosine path; validation."""
    flags = "--dit-data random --dit-frames 4 --dit-frame-patch 2 --dit-channels 3 --dit-num-classes 3"
    flags += " --dit-path cosine --dit-prediction noise --eval-iters 1"
    one = train(tmp_path / "one", 1, *flags.split(), *DRAW, steps=4)
    two = train(tmp_path / "two", 2, *flags.split(), *DISTOPT, steps=4)
    assert_close(one.losses(), two.losses(), 1e-5)
    assert "validation" in one.output
    picture = Image.open(tmp_path / "one" / "samples" / "samples.png")
    assert picture.mode == "RGB"
    assert picture.size == (2 * 4 * 10 * 4, 3 * 10 * 4)


@full
def test_other_layers_and_types(tmp_path):
    """Gated MLPs, grouped queries, norms of queries and keys; and bf16, as close as it can be."""
    flags = "--lr 1e-2 --swiglu --group-query-attention --num-query-groups 2 --qk-layernorm".split()
    one = train(tmp_path / "one", 1, *flags, steps=8)
    layout = flags_of(4, 2, 1)  # which has the initial weights of one rank
    assert_close(one.losses(), train(tmp_path / "four", 4, *flags, *layout, steps=8).losses(), 1e-4)
    half = train(tmp_path / "half", 4, *flags, *layout, "--bf16", steps=8)
    first = {step: half.losses()[step] for step in range(1, 5)}  # a large step blows rounding up after that
    assert_close({step: one.losses()[step] for step in first}, first, 5e-3)
    assert half.losses() != one.losses()
    assert half.losses()[8] < 0.95 * half.losses()[1]
    assert one.losses()[8] < 0.9 * one.losses()[1]


@full
def test_samples_look_like_their_class(tmp_path):
    """The command of configs/dit-digits-cpu.yaml: at least 70 % of its samples are taken for their class."""
    config = ["--cpu", "--ext-config", str(REPO / "configs" / "dit-digits-cpu.yaml")]
    flags = ["--dit-samples", str(tmp_path), "--dit-samples-per-class", "20", "--dit-evaluate"]
    argv = [*config, str(REPO / "pretrain_dit.py"), *flags]
    run_ranks(2, lambda: launch(argv), timeout=1500)
    verdict = json.loads((tmp_path / "samples.json").read_text())
    assert verdict["on_real_digits"] > 0.95
    assert verdict["num_samples"] == 200
    assert verdict["on_samples"] >= 0.7
