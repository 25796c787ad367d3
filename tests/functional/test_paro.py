"""PaRO through the real script: every strategy, in every layout, trains like stock on one rank.

Losses of 10 steps to 1e-5 relative, grad norms to 1e-5, every gradient of step 1 within 5e-6 of the largest;
fp32, dropout 0. The run record proves that the strategy ran: `assert_ran` compares the bytes of every step
and what each rank keeps with the formulas; replicas are compared bit for bit in every step.
"""

import dataclasses
import sys

import pytest

from megatron_ext.features import FEATURES
from megatron_ext.paro.strategy import NAMES
from tests.functional.parity import FULL_RECOMPUTE, PP, TP
from tests.functional.paro_runs import AHEAD, GROUPS_OF_2, assert_ran, between_groups, like_stock, stock
from tests.functional.runs import LLAMA, MODEL, SCRIPT, Run, assert_close, data, merged, read_record
from tests.ranks import run_ranks

SP = "--sequence-parallel"
full = pytest.mark.full
SELECTIVE = ["--recompute-granularity", "selective"]
KEPT = ["--paro-reshard-after-forward", "off"]
HO_RING, FLAT = ["--paro-comm", "ho-ring"], ["--paro-comm", "flat"]
WITH_OTHERS = ("NNN", "NNG", "NIG", "IIG", "III", "GGG")

# One case of each strategy, with other options that must not change anything; 4 ranks in 2 groups.
EACH = {
    "NNN": [*AHEAD],
    "NNI": [*HO_RING],
    "NII": [*FLAT, "--overlap-grad-reduce"],
    "INI": [*AHEAD, *KEPT],
    "III": [*HO_RING, *AHEAD, *FULL_RECOMPUTE],
    "NNG": [*HO_RING, *AHEAD],
    "NIG": [*FLAT, *AHEAD],
    "NGG": [*AHEAD],
    "ING": [*SELECTIVE],
    "IIG": [*HO_RING, *AHEAD],
    "IGG": [*FLAT, *KEPT],
    "GNG": [*FULL_RECOMPUTE],
    "GIG": [*HO_RING, *KEPT, *FULL_RECOMPUTE],
    "GGG": [*FLAT, *AHEAD, *SELECTIVE],
}
FAST = {"NNI", "NIG", "ING", "GGG"}


def how(flags: list[str]) -> dict:
    """Keywords of `assert_ran` that the flags imply."""
    comm = flags[flags.index("--paro-comm") + 1] if "--paro-comm" in flags else "two-phase"
    return {"comm": comm, "reshard": KEPT[0] not in flags}


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[] if name in FAST else [full]) for name in NAMES]
)
def test_every_strategy(tmp_path, strategy):
    run = like_stock(tmp_path, strategy, 4, *GROUPS_OF_2, *EACH[strategy])
    assert_ran(run, strategy, **how(EACH[strategy]))


@full
@pytest.mark.parametrize(
    ("strategy", "flags"),
    [(name, flags) for name in ("NNN", "NIG", "IIG", "GGG") for flags in ([], HO_RING, FLAT)],
)
def test_every_collective(tmp_path, strategy, flags):
    """All strategies with all collectives: tests/dist/test_paro_engine.py."""
    run = like_stock(tmp_path, strategy, 4, *GROUPS_OF_2, *flags)
    assert_ran(run, strategy, **how(flags))


LAYOUTS = {
    "pp2": [PP, "2", *KEPT],
    "pp2-overlap": [PP, "2", *AHEAD],
    "tp2": [TP, "2", *AHEAD, "--no-align-grad-reduce"],
    "tp2-sp": [TP, "2", SP, *HO_RING],
}
FAST_LAYOUTS = {("IIG", "pp2-overlap")}


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        pytest.param(strategy, layout, marks=[] if (strategy, layout) in FAST_LAYOUTS else [full])
        for strategy in WITH_OTHERS
        for layout in LAYOUTS
    ],
)
def test_beside_model_parallelism(tmp_path, strategy, layout):
    """8 ranks, of which 4 are data-parallel in 2 groups; embeddings are tied."""
    run = like_stock(tmp_path, strategy, 8, *GROUPS_OF_2, *LAYOUTS[layout], seeded=True)
    assert_ran(run, strategy, **how(LAYOUTS[layout]))


INTERLEAVED = [PP, "2", "--num-layers-per-virtual-pipeline-stage", "1"]


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("IIG", [*INTERLEAVED, *AHEAD]),
        ("III", [TP, "2", SP, *AHEAD]),
        *(pytest.param(name, [*INTERLEAVED, *AHEAD], marks=full) for name in WITH_OTHERS if name != "IIG"),
        pytest.param("IIG", INTERLEAVED, marks=full),
        pytest.param("IIG", [*INTERLEAVED, *AHEAD, "--no-align-param-gather"], marks=full),
        pytest.param("IIG", [*INTERLEAVED, *KEPT, *AHEAD, "--no-align-grad-reduce"], marks=full),
        pytest.param("GGG", [*INTERLEAVED, *FULL_RECOMPUTE, *HO_RING], marks=full),
        pytest.param("IIG", [PP, "2", TP, "2", SP, *AHEAD], marks=full),
    ],
)
def test_two_data_parallel_ranks(tmp_path, strategy, flags):
    """In one group. An interleaved pipeline has a wrapper per model chunk; they share lanes and groups."""
    world = 8 if {PP, TP} <= set(flags) else 4
    run = like_stock(tmp_path, strategy, world, *GROUPS_OF_2, *flags, seeded=True)
    assert_ran(run, strategy, k=1, **how(flags))


@pytest.mark.parametrize(
    ("strategy", "flags", "training"),
    [
        ("III", [*AHEAD], ["--calculate-per-token-loss"]),
        pytest.param("NIG", [], ["--decoupled-lr", "3e-3", "--decoupled-min-lr", "1e-4"], marks=full),
        pytest.param("GGG", [*HO_RING], ["--decoupled-lr", "3e-3", "--decoupled-min-lr", "1e-4"], marks=full),
        pytest.param("IIG", [PP, "2", *AHEAD], [], marks=full),
        pytest.param("GNG", [TP, "2", SP, *FULL_RECOMPUTE], [], marks=full),
        pytest.param("NNI", [*AHEAD, TP, "2"], ["--calculate-per-token-loss"], marks=full),
    ],
)
def test_llama(tmp_path, strategy, flags, training):
    """Untied embeddings, grouped-query attention, SwiGLU, RMSNorm, no biases."""
    world = 8 if PP in flags or TP in flags else 4
    run = like_stock(
        *(tmp_path, strategy, world, *GROUPS_OF_2, *flags),
        arch=tuple(LLAMA),
        training=tuple(training),
        seeded=world == 8,
    )
    assert_ran(run, strategy, **how(flags))


@pytest.mark.parametrize(
    ("strategy", "flags", "training"),
    [
        pytest.param("IGG", [*AHEAD], ["--calculate-per-token-loss"], marks=full),
        pytest.param("III", [], ["--calculate-per-token-loss"], marks=full),
        pytest.param("NNN", [*AHEAD], ["--calculate-per-token-loss"], marks=full),
        pytest.param("NIG", [PP, "2", *AHEAD], ["--calculate-per-token-loss"], marks=full),
        pytest.param("IIG", [], ["--optimizer", "sgd"], marks=full),
        pytest.param("ING", [], ["--data-parallel-random-init"], marks=full),
        pytest.param("NNG", [], ["--clip-grad", "0"], marks=full),
        pytest.param("IIG", [PP, "2", "--use-tp-pp-dp-mapping"], [], marks=full),
    ],
)
def test_what_is_trained(tmp_path, strategy, flags, training):
    world = 8 if PP in flags else 4
    run = like_stock(
        *(tmp_path, strategy, world, *GROUPS_OF_2, *flags), training=tuple(training), seeded=world == 8
    )
    assert_ran(run, strategy, states=4 if "sgd" in training else 8)


@pytest.mark.parametrize("strategy", ["NII", "NIG", "III", "IIG", "GGG"])
@full
def test_microbatches_and_bytes_between_groups(tmp_path, strategy):
    """1, 3 and 8 microbatches: without a G in front, no more goes between groups when there are more."""
    seen = {}
    for microbatches in (1, 3, 8):
        batch = ("--global-batch-size", str(4 * microbatches))
        run = like_stock(tmp_path / str(microbatches), strategy, 4, *GROUPS_OF_2, training=batch)
        assert_ran(run, strategy)
        (seen[microbatches],) = between_groups(run)
    grows = 8 if strategy == "GGG" else 1
    assert seen == {1: seen[1], 3: seen[1] * min(grows, 3), 8: seen[1] * grows}


@full
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("strategy", ["NIG", "IIG", "GGG"])
def test_microbatches_of_several_sequences(tmp_path, strategy, size):
    """A global batch of 12 as 3 microbatches of 1 sequence on each rank, and as 1 of 3."""
    batch = ("--global-batch-size", "12", "--micro-batch-size", str(size))
    run = like_stock(tmp_path, strategy, 4, *GROUPS_OF_2, training=batch)
    assert_ran(run, strategy, micro_batch_size=size)


@pytest.mark.parametrize(
    ("strategy", "world", "m"),
    [
        ("IIG", 2, 1),
        *(pytest.param(strategy, 2, m, marks=full) for strategy in WITH_OTHERS for m in (1, 2)),
        *(pytest.param(strategy, 1, 1, marks=full) for strategy in ("NNN", "NIG", "GGG")),
        *(pytest.param("IIG", 4, m, marks=full) for m in (1, 4)),
    ],
)
def test_dimensions_of_one(tmp_path, strategy, world, m):
    """One group, groups of one, or both: a dimension of size 1 sends nothing. All: test_paro_engine.py."""
    run = like_stock(tmp_path, strategy, world, "--paro-group-size", str(m), *AHEAD)
    assert_ran(run, strategy, k=world // m, m=m)
    silent = {"paro-members": m == 1, "paro-groups": m == world}
    for line in run.steps(0):
        for entry in line["traffic"]:
            name = entry["group"].removesuffix("-grads")
            assert entry["feature"] != "paro" or not silent.get(name, world == 1) or entry["bytes"] == 0


def test_a_run_that_ignores_the_flag_is_caught(tmp_path):
    """The doctored feature trains as stock does, so its losses are right; the record gives it away."""
    ignoring = tuple(
        dataclasses.replace(f, patches=lambda context: []) if f.name == "paro" else f for f in FEATURES
    )
    args = merged(MODEL, data(), ["--train-iters", "10", "--paro-strategy", "IIG", *GROUPS_OF_2])

    def body() -> None:
        from megatron_ext.launch import main

        record = ["--ext-report", str(tmp_path / "record")]
        sys.exit(main(["--cpu", str(SCRIPT), *args, *record], table=ignoring))

    run = Run(tmp_path, run_ranks(2, body), read_record(tmp_path / "record", 2))
    assert_close(stock().losses(), run.losses(), 1e-5)
    with pytest.raises(AssertionError, match="the optimizer is not PaRO's"):
        assert_ran(run, "IIG", k=1)
