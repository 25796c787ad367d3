"""Stock Megatron through the launcher on CPU: every layout trains like one rank, from one seed checkpoint.

Losses of 10 steps to 1e-5 relative, grad norms to 1e-4, every gradient of step 1 within 5e-6 of the largest;
fp32, dropout 0. The record proves that the layout ran (groups, and bytes above zero of the kind it needs).
"""

import functools

import pytest

from tests.functional.parity import DISTOPT, FULL_RECOMPUTE, OVERLAP, PP, TP, assert_gradients, assert_parity
from tests.functional.runs import LLAMA, Run, assert_close, seed_checkpoint, train

full = pytest.mark.full

# name: world, flags, a kind of communication that this layout cannot do without (None: one rank)
LAYOUTS = {
    "pp2": (2, [PP, "2"], "send"),
    "pp4": (4, [PP, "4"], "send"),
    "pp2-interleaved": (2, [PP, "2", "--num-layers-per-virtual-pipeline-stage", "1"], "send"),
    "tp2": (2, [TP, "2"], "all_reduce"),
    "tp2-sp": (2, [TP, "2", "--sequence-parallel"], "reduce_scatter"),
    "dp2": (2, [], "all_reduce"),
    "dp2-overlap": (2, ["--overlap-grad-reduce"], "all_reduce"),
    "dp2-distopt": (2, DISTOPT, "reduce_scatter"),
    "dp2-distopt-overlap": (2, DISTOPT + OVERLAP, "reduce_scatter"),
    "dp4-instances2": (4, [*DISTOPT, "--num-distributed-optimizer-instances", "2"], "reduce_scatter"),
    "dp4-instances2-overlap": (
        4,
        [*DISTOPT, *OVERLAP, "--num-distributed-optimizer-instances", "2"],
        "reduce_scatter",
    ),
    "recompute-full": (1, FULL_RECOMPUTE, None),
    "recompute-selective": (1, ["--recompute-granularity", "selective"], None),
    "tp2-sp-recompute-full": (2, [TP, "2", "--sequence-parallel", *FULL_RECOMPUTE], "reduce_scatter"),
    "tp2-sp-pp2": (4, [TP, "2", "--sequence-parallel", PP, "2"], "send"),
    "pp2-dp2-distopt-overlap": (4, [PP, "2", *DISTOPT, *OVERLAP], "reduce_scatter"),
}
COVERING = {
    "gpt": {
        *("pp4", "pp2-interleaved", "tp2-sp-recompute-full", "dp2-distopt-overlap", "dp4-instances2-overlap"),
    },
    "llama": {"tp2-sp", "pp2-dp2-distopt-overlap"},
}
ARCHITECTURES = {"gpt": [], "llama": LLAMA}
CASES = [
    pytest.param(arch, name, id=f"{arch}-{name}", marks=[] if name in COVERING[arch] else [full])
    for arch in ARCHITECTURES
    for name in LAYOUTS
]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """architecture -> (seed flags, reference run on one rank), made at first use."""
    made: dict[str, tuple[list[str], Run]] = {}

    def get(arch: str) -> tuple[list[str], Run]:
        if arch not in made:
            folder = tmp_path_factory.mktemp(arch)
            seed = seed_checkpoint(folder / "make-seed", *ARCHITECTURES[arch])
            run = train(
                folder / "one", 1, *ARCHITECTURES[arch], *seed, "--ext-dump-grads", str(folder / "one")
            )
            made[arch] = seed, run
        return made[arch]

    return get


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_layout_trains_like_one_rank(references, tmp_path, arch, name):
    seed, reference = references(arch)
    world, flags, kind = LAYOUTS[name]
    check = ["--ext-check", "replicas"] if world > 1 else []
    run = train(
        tmp_path, world, *ARCHITECTURES[arch], *seed, *flags, *check, "--ext-dump-grads", str(tmp_path)
    )
    assert_parity(reference, run)
    assert run.start()["features"] == []
    if kind:
        assert run.traffic(kind) > 0


@pytest.fixture(scope="module")
def low_precision_references(references, tmp_path_factory):
    """precision flags -> run on one rank, made at first use."""
    seed, _ = references("gpt")

    @functools.cache
    def get(precision: tuple[str, ...]) -> Run:
        folder = tmp_path_factory.mktemp("low")
        return train(folder, 1, *seed, *precision, "--ext-dump-grads", str(folder))

    return get


@pytest.mark.parametrize(
    ("precision", "rtol"),
    [(["--bf16"], 2e-3), (["--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "3"], 2e-3)],
    ids=["bf16", "fp16"],
)
@pytest.mark.parametrize(
    "name",
    [
        "dp2-distopt-overlap",
        pytest.param("pp2", marks=full),
        pytest.param("tp2-sp", marks=full),
        pytest.param("pp4", marks=full),
    ],
)
def test_low_precision(references, low_precision_references, tmp_path, precision, rtol, name):
    """Layouts agree in bf16 and fp16 as far as rounding lets them; fp16 scales the loss dynamically."""
    seed, _ = references("gpt")
    world, flags, _ = LAYOUTS[name]
    one = low_precision_references(tuple(precision))
    run = train(tmp_path / name, world, *seed, *precision, *flags, "--ext-dump-grads", str(tmp_path / name))
    assert_close(one.losses(), run.losses(), rtol)
    assert_close(one.grad_norms(), run.grad_norms(), 5e-2)
    assert_gradients(one, run, 2e-2)
    scales = [line["loss_scale"] for line in run.steps(0)]
    assert scales == [line["loss_scale"] for line in one.steps(0)]
    if "--fp16" in precision:
        assert scales[0] == 1024.0
        assert scales[-1] > scales[0]  # three good steps double it


def test_fp16_skips_a_step_that_overflows(references, tmp_path):
    seed, _ = references("gpt")
    scale = ["--fp16", "--initial-loss-scale", str(2**40), "--hysteresis", "1"]
    run = train(tmp_path, 1, *seed, *scale, steps=3)
    assert [line["skipped"] for line in run.steps(0)] == [True] * 3
    assert [line["loss_scale"] for line in run.steps(0)] == [2.0**39, 2.0**38, 2.0**37]  # after the step
    assert [line["grad_norm"] for line in run.steps(0)] == [None] * 3


@pytest.mark.parametrize("overlap", [[], pytest.param(OVERLAP, marks=full)], ids=["plain", "overlap"])
def test_megatron_fsdp(references, tmp_path, overlap):
    """Megatron-FSDP trains on CPU, too (it is a baseline for sharding).

    It cannot load torch_dist checkpoints, so both sides start from the same random weights (data parallelism
    does not change them).
    """
    fsdp = (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"
    )
    one = train(tmp_path / "one", 1)
    run = train(tmp_path / "fsdp", 2, *fsdp.split(), *DISTOPT, *overlap)
    assert_close(one.losses(), run.losses(), 1e-5)
    assert_close(one.grad_norms(), run.grad_norms(), 1e-4)
    assert run.traffic("all_gather") > 0


def test_tensorboard(tmp_path):
    """TensorBoard has the loss that the record has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(tmp_path, 2, PP, "2", "--tensorboard-dir", str(tmp_path / "tb"), steps=4)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert "lm loss" in events.Tags()["scalars"]
    assert events.Scalars("lm loss")[-1].step == 4
    assert events.Scalars("lm loss")[0].value == pytest.approx(run.losses()[1], rel=1e-6)
