"""Pipeline schedules through the real script: losses, gradients, bytes and held chunks against stock.

Every case starts from one seed checkpoint: losses of 10 steps to 1e-5 relative, grad norms to 1e-4, every
gradient of step 1 within 5e-6 of the largest; fp32, dropout 0. That the schedule ran is read from what the
run says about itself (`assert_ran`): chunk activations held, computed here from the publications' formulas,
and bytes of every step against the placement's formulas. The whole matrix has each schedule in each
vocabulary mode (`each`), and whatever else a run may have in some of them.
"""

import functools
import re

import pytest

from megatron_ext.grads import assemble
from megatron_ext.tools.grads import judge
from tests.functional.parity import DISTOPT, FULL_RECOMPUTE, OVERLAP, PP, TP, assert_parity
from tests.functional.runs import LLAMA, Run, assert_close, seed_checkpoint, train
from tests.functional.test_vocab_parallel import SP, references, training_flags  # noqa: F401  (a fixture)

full = pytest.mark.full
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "v-half", "v-min", "v-zb")
MODES = ("off", "vocab-1", "vocab-2")
BARRIERS = {"off": 0, "vocab-2": 1, "vocab-1": 2}
EIGHT = ["--num-layers", "8"]

# name: (architecture flags, world, p, t, layout flags); 8 layers, so that a V of 4 ranks has one a chunk.
CASES = {
    "pp2": (EIGHT, 2, 2, 1, []),
    "pp2-untied": ([*LLAMA, *EIGHT], 2, 2, 1, []),
    "pp4": (EIGHT, 4, 4, 1, []),
    "pp4-untied": ([*LLAMA, *EIGHT], 4, 4, 1, []),
    "tp2-sp": ([*LLAMA, *EIGHT], 4, 2, 2, [SP]),
    "tp2-sp-tied": (EIGHT, 4, 2, 2, [SP]),
    "dp2": (EIGHT, 4, 2, 1, ["--overlap-grad-reduce", "--no-align-grad-reduce"]),
    "dp2-distopt": ([*LLAMA, *EIGHT], 4, 2, 1, [*DISTOPT, *OVERLAP]),
    "dp2-distopt-tied": (EIGHT, 4, 2, 1, [*DISTOPT, *OVERLAP]),
    "dp2-unaligned": (EIGHT, 4, 2, 1, [*DISTOPT, *OVERLAP, "--no-align-grad-reduce"]),
    "paro": (EIGHT, 4, 2, 1, ["--paro-strategy", "NNG"]),
    "recompute": (EIGHT, 2, 2, 1, FULL_RECOMPUTE),
    "selective": (EIGHT, 2, 2, 1, ["--recompute-granularity", "selective"]),
    "per-token-loss": (EIGHT, 2, 2, 1, ["--calculate-per-token-loss"]),
    "pp8": ([*LLAMA, "--num-layers", "16"], 8, 8, 1, ["--global-batch-size", "16"]),
    "one": (EIGHT, 4, 4, 1, ["--global-batch-size", "1"]),
    "many": ([*LLAMA, *EIGHT], 4, 4, 1, ["--global-batch-size", "20"]),
}
UNTIED_FIRST = ("1f1b", "zb-h1", "v-min")
"""Of every second schedule the run of 4 ranks is the untied one, of the others those of 2 ranks."""
COVERING = {
    ("v-half", "off", "pp2"),
    ("v-half", "off", "dp2"),
    ("v-half", "vocab-2", "pp4"),
    ("v-half", "vocab-2", "tp2-sp"),
    ("v-half", "vocab-2", "dp2-distopt"),
    ("v-half", "vocab-2", "one"),
    ("zb-h1", "off", "recompute"),
    ("zb-h1", "vocab-2", "dp2-unaligned"),
    ("v-min", "vocab-1", "pp4-untied"),
    ("v-zb", "vocab-1", "paro"),
    ("interleaved", "vocab-2", "pp4"),
}
SPECIAL = {
    ("v-half", "off", "pp8"),
    ("v-half", "vocab-1", "pp8"),
    ("v-half", "vocab-2", "pp8"),
    ("v-half", "vocab-2", "pp2-untied"),
    ("v-half", "off", "pp2-untied"),
    ("zb-h1", "off", "pp2"),
    ("v-half", "off", "dp2-unaligned"),
    ("interleaved", "off", "dp2"),
    ("zb-h1", "vocab-1", "paro"),
    ("v-half", "vocab-2", "recompute"),
    ("v-zb", "off", "selective"),
    ("v-half", "vocab-2", "per-token-loss"),
    ("zb-h1", "off", "per-token-loss"),
    ("v-min", "off", "one"),
    ("v-half", "vocab-2", "many"),
    ("v-zb", "vocab-1", "many"),
}


def each(schedule: str, mode: str) -> list[tuple[str, str, str]]:
    """Cases of a schedule and mode: p = 2 and 4, tied and untied, TP, DP with the distributed optimizer."""
    first = schedule in UNTIED_FIRST
    names = ("pp4-untied", "tp2-sp-tied", "dp2-distopt-tied") if first else ("pp4", "tp2-sp", "dp2-distopt")
    return [(schedule, mode, name) for name in names]


MATRIX = dict.fromkeys(
    [
        *sorted(COVERING),
        *(case for schedule in SCHEDULES for mode in MODES for case in each(schedule, mode)),
        *sorted(SPECIAL),
    ]
)
PARAMS = [pytest.param(*case, id="-".join(case), marks=[] if case in COVERING else [full]) for case in MATRIX]


def schedule_flags(schedule: str, mode: str) -> list[str]:
    """How a user asks for it."""
    flags = ["--pipeline-schedule", schedule]
    flags += ["--num-virtual-stages-per-pipeline-rank", "2"] if schedule == "interleaved" else []
    return [*flags, *(["--vocab-parallel", mode] if mode != "off" else [])]


def launch(references, tmp_path, schedule: str, mode: str, name: str) -> tuple[Run, Run]:  # noqa: F811
    arch, world, p, t, flags = CASES[name]
    seed, stock = references(tuple(arch), training_flags(flags))
    run = train(
        tmp_path,
        world,
        *(*arch, *seed, PP, str(p), TP, str(t), *flags, *schedule_flags(schedule, mode)),
        *("--ext-check", "bytes,replicas", "--ext-dump-grads", str(tmp_path)),
    )
    return stock, run


@pytest.mark.parametrize(("schedule", "mode", "name"), PARAMS)
def test_trains_like_stock(references, tmp_path, schedule, mode, name):  # noqa: F811
    stock, run = launch(references, tmp_path, schedule, mode, name)
    assert_parity(stock, run)
    _, world, p, t, flags = CASES[name]
    batch = int(flags[flags.index("--global-batch-size") + 1]) if "--global-batch-size" in flags else 8
    assert_ran(run, schedule, mode, world, p, batch * p * t // world)


@full
@pytest.mark.parametrize("mode", MODES)
def test_sixteen_ranks_hold_what_the_schedule_says(tmp_path, mode):
    """p + 2, p + 4 or p + 6 chunk activations on every one of 16 ranks."""
    flags = ["--num-layers", "32", "--global-batch-size", "32", PP, "16", *schedule_flags("v-half", mode)]
    run = train(tmp_path, 16, *flags, steps=2, timeout=400)
    assert_ran(run, "v-half", mode, 16, 16, 32)


def most_held(schedule: str, mode: str, p: int, rank: int) -> tuple[int, int]:
    """(least, most) chunk activations that a rank holds at its peak, for many microbatches."""
    k = BARRIERS[mode]
    exact = {
        "1f1b": p - rank + k,
        "interleaved": p + p - rank + k,
        "v-half": p + 2 + 2 * k,
    }
    if schedule in exact:
        return exact[schedule], exact[schedule]
    return {"zb-h1": (1, p + k), "v-min": (1, 2 * p // 3 + 3 + 2 * k), "v-zb": (1, 2 * p + 2 * k)}[schedule]


def assert_ran(run: Run, schedule: str, mode: str, world: int, p: int, m: int) -> None:
    """Every rank says what it ran, and bytes between stages are those of the placement."""
    pattern = (
        r"pipeline schedule (\S+) with vocabulary (\S+), rank (\d+) of (\d+): (\d+) microbatches, "
        r"(\d+) activations of (\d) chunks? held at most(?:, (\d+) weight gradients)?"
    )
    found = re.findall(pattern, run.output)
    assert len(found) == world
    for name, vocab, rank, size, microbatches, held, chunks, weights in found:
        assert (name, vocab, int(size), int(microbatches)) == (schedule, mode, p, m)
        assert int(chunks) == (1 if schedule in ("1f1b", "zb-h1") else 2)
        least, most = most_held(schedule, mode, p, int(rank))
        full_pipeline = m >= 2 * p
        assert min(least if full_pipeline else 1, m) <= int(held) <= min(most, m * int(chunks))
        # Every linear layer of the rank, four a transformer layer, for every microbatch.
        assert bool(weights) == (schedule not in ("1f1b", "interleaved"))
        argv = run.start()["argv"]
        layers = int(argv[argv.index("--num-layers") + 1])
        assert not weights or int(weights) >= 4 * (layers // p) * m
    feature = "pipeline" if mode == "off" else "vocab"
    for rank in range(world):
        assert run.start(rank)["features"][0] == "pipeline"
        stage = run.start(rank)["coords"]["pp"]
        for line in run.steps(rank)[1:]:
            sent = {
                entry["group"]: entry["bytes"]
                for entry in line["traffic"]
                if entry["feature"] == feature and entry["kind"] == "send"
            }
            assert {name: count // sends_size(run, rank) for name, count in sent.items()} == sends(
                schedule, p, stage, m
            )


def sends_size(run: Run, rank: int) -> int:
    """Bytes of one activation: 32 tokens of 64 numbers in fp32, split with sequence parallelism."""
    return 32 * 64 * 4 // (2 if SP in run.start(rank)["argv"] else 1)


def sends(schedule: str, p: int, rank: int, m: int) -> dict[str, int]:
    """Activations and gradients that a rank sends, by group."""
    last = rank == p - 1
    forward, backward = "pipeline-forward", "pipeline-backward"
    if schedule in ("1f1b", "zb-h1"):
        found = {forward: 0 if last else m, backward: 0 if rank == 0 else m}
    elif schedule == "interleaved":
        wrap = "previous" if p == 2 else "wrap"
        back_wrap = "next" if p == 2 else "wrap"
        found = {
            forward: 0 if last else 2 * m,
            backward: 0 if rank == 0 else 2 * m,
            f"{forward}-{wrap}": m if last else 0,
            f"{backward}-{back_wrap}": m if rank == 0 else 0,
        }
    else:
        found = {
            forward: 0 if last else m,
            f"{forward}-previous": 0 if rank == 0 else m,
            f"{backward}-next": 0 if last else m,
            backward: 0 if rank == 0 else m,
        }
    return {name: count for name, count in found.items() if count}


# --- checkpoints and resuming -------------------------------------------------------------------------------

BY_PARAMETER = "--dist-ckpt-optim-fully-reshardable"
KINDS = {
    "stock": (1, []),
    "stock-pp2": (2, [PP, "2"]),
    "stock-dp2": (2, []),
    "v-half": (2, [PP, "2", *schedule_flags("v-half", "off")]),
    "v-half-vocab": (2, [PP, "2", *schedule_flags("v-half", "vocab-2")]),
    "v-half-pp4": (4, [PP, "4", *schedule_flags("v-half", "off")]),
    "v-half-dp2": (4, [PP, "2", *schedule_flags("v-half", "off")]),
    "zb-h1": (2, [PP, "2", *schedule_flags("zb-h1", "off")]),
    "interleaved-vocab": (2, [PP, "2", *schedule_flags("interleaved", "vocab-1")]),
}


def after(step: int, values: dict[int, float]) -> dict[int, float]:
    return {at: value for at, value in values.items() if at > step}


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory):
    """(kind, flags) -> (run of 10 steps, folder of its checkpoint at step 5), made at first use."""

    @functools.cache
    def make(kind: str, flags: tuple[str, ...]) -> tuple[Run, str]:
        folder = tmp_path_factory.mktemp("saved")
        world, layout = KINDS[kind]
        save = ["--save", str(folder / "ckpt"), "--save-interval", "5"]
        return train(folder / "run", world, *flags, *layout, *save), str(folder / "ckpt")

    return make


@pytest.mark.parametrize(
    ("saved", "loaded", "flags"),
    [
        ("v-half", "stock", EIGHT),
        *(
            pytest.param(*case, marks=full)
            for case in [
                ("stock", "v-half-vocab", EIGHT),
                ("v-half-vocab", "stock-pp2", [*LLAMA, *EIGHT]),
                ("stock-pp2", "v-half", [*LLAMA, *EIGHT]),
                ("v-half", "v-half-pp4", EIGHT),
                ("zb-h1", "v-half", EIGHT),
                ("interleaved-vocab", "zb-h1", [*LLAMA, *EIGHT]),
                ("stock-dp2", "v-half-dp2", [*EIGHT, *DISTOPT, BY_PARAMETER]),
                ("v-half-dp2", "stock-dp2", [*EIGHT, *DISTOPT, BY_PARAMETER]),
            ]
        ),
    ],
)
def test_checkpoints_interchange(saved_runs, tmp_path, saved, loaded, flags):
    """Save in one pipeline, resume in another, optimizer state included: as if nothing had changed."""
    straight, ckpt = saved_runs(saved, tuple(flags))
    world, layout = KINDS[loaded]
    second = train(
        tmp_path / "b", world, *flags, *layout, "--load", ckpt, "--ckpt-step", "5", "--no-load-rng"
    )
    losses = after(5, straight.losses())
    assert sorted(losses) == [6, 7, 8, 9, 10]
    assert_close({6: losses[6]}, {6: second.losses()[6]}, 1e-6)
    assert_close(losses, second.losses(), 1e-5)
    assert_close(after(5, straight.grad_norms()), second.grad_norms(), 1e-4)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("v-half-vocab", EIGHT),
        pytest.param("v-half-dp2", [*EIGHT, *DISTOPT, *OVERLAP], marks=full),
        pytest.param("zb-h1", [*LLAMA, *EIGHT], marks=full),
        pytest.param("interleaved-vocab", EIGHT, marks=full),
    ],
)
def test_resume_is_bit_for_bit(tmp_path, kind, flags):
    """Stop at step 5, resume to 10: losses and grad norms equal those of 10 steps in one go, with dropout."""
    world, layout = KINDS[kind]
    flags = [*flags, *layout, "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    ckpt = str(tmp_path / "ckpt")
    straight = train(tmp_path / "a", world, *flags, "--save", ckpt, "--save-interval", "5")
    second = train(tmp_path / "b", world, *flags, "--load", ckpt, "--ckpt-step", "5")
    assert sorted(second.losses()) == [6, 7, 8, 9, 10]
    assert second.losses() == after(5, straight.losses())
    assert second.grad_norms() == after(5, straight.grad_norms())


@full
@pytest.mark.parametrize("other", ["v-half-dp2", "stock-pp2-dp2"])
def test_flat_buffers_of_another_placement_are_refused(tmp_path, other):
    """Both hold buffers of the same sizes; under one name they would be read with other layers' states."""
    layouts = {
        "v-half-dp2": schedule_flags("v-half", "off"),
        "stock-pp2-dp2": ["--num-virtual-stages-per-pipeline-rank", "2"],
    }
    saved, loaded = (layouts[other], next(v for k, v in layouts.items() if k != other))
    common = [*LLAMA, *EIGHT, PP, "2", *DISTOPT]
    ckpt = str(tmp_path / "ckpt")
    train(tmp_path / "a", 4, *common, *saved, "--save", ckpt, "--save-interval", "3", steps=3)
    run = train(tmp_path / "b", 4, *common, *loaded, "--load", ckpt, steps=4, check=False)
    assert all(r.exit_code != 0 for r in run.ranks)
    if other == "stock-pp2-dp2":
        assert "--dist-ckpt-optim-fully-reshardable" in "".join(str(r.error) for r in run.ranks)


# --- evaluation, 16 bits, auto, memory ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "mode"),
    [
        ("v-half", "off"),
        pytest.param("v-half", "vocab-2", marks=full),
        pytest.param("interleaved", "vocab-2", marks=full),
        pytest.param("zb-h1", "off", marks=full),
    ],
)
def test_evaluation(tmp_path, schedule, mode):
    """Validation losses are stock's, to 1e-6 as printed; in a V they come from rank 0."""
    seed = seed_checkpoint(tmp_path, *EIGHT)
    flags = [*EIGHT, *seed, PP, "2", "--eval-iters", "2", "--eval-interval", "5", "--split", "80,20,0"]
    runs = [train(tmp_path / "stock", 2, *flags)]
    runs.append(train(tmp_path / "ours", 2, *flags, *schedule_flags(schedule, mode)))
    pattern = re.compile(r"validation loss at (.*) \| lm loss value: (\S+) ")
    stock, ours = ({place: float(loss) for place, loss in pattern.findall(run.output)} for run in runs)
    assert len(stock) == 3
    assert ours == pytest.approx(stock, rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "mode", "precision"),
    [
        ("v-half", "vocab-2", ["--bf16"]),
        pytest.param("v-half", "off", ["--bf16"], marks=full),
        pytest.param("zb-h1", "vocab-1", ["--bf16"], marks=full),
        pytest.param("interleaved", "off", ["--bf16"], marks=full),
        pytest.param(
            "v-half",
            "off",
            ["--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "3"],
            marks=full,
        ),
    ],
)
def test_low_precision(references, tmp_path, schedule, mode, precision):  # noqa: F811
    """16 bits agree with stock as far as rounding lets them."""
    seed, _ = references(tuple(EIGHT), ())
    common = [*EIGHT, *seed, PP, "2", *precision]
    stock = train(tmp_path / "stock", 2, *common, "--ext-dump-grads", str(tmp_path / "stock"))
    flags = [*schedule_flags(schedule, mode), "--ext-check", "bytes"]
    run = train(tmp_path / "ours", 2, *common, *flags, "--ext-dump-grads", str(tmp_path / "ours"))
    assert_close(stock.losses(), run.losses(), 2e-3)
    verdict = judge(assemble(stock.folder), assemble(run.folder), 2e-2)
    assert verdict.largest > 0
    assert verdict.within, str(verdict)


def test_auto_chooses_within_the_limit(references, tmp_path):  # noqa: F811
    """It says what it weighed, runs what it chose, and trains like stock."""
    seed, stock = references(tuple(EIGHT), ())
    limit = ["--pipeline-schedule", "auto", "--pipeline-memory-limit", "2", "--vocab-parallel", "off"]
    run = train(tmp_path, 2, *EIGHT, *seed, PP, "2", *limit, "--ext-check", "bytes")
    assert_close(stock.losses(), run.losses(), 1e-5)
    assert "schedules of 2 pipeline ranks and 8 microbatches that hold at most 2 microbatches" in run.output
    chosen = re.search(r"--pipeline-schedule auto: ([\w-]+)", run.output)[1]
    ran = re.findall(r"pipeline schedule (\S+) with .*, (\d+) activations of (\d) chunk", run.output)
    assert len(ran) == 2
    for name, held, chunks in ran:
        assert name == chosen
        assert int(held) <= 2 * int(chunks)


def planned_and_measured(run: Run, world: int, within: float = 0.1) -> tuple[list[int], list[int]]:
    """Peaks of all ranks, after comparing the plan's categories with the measured ones."""
    planned, measured = [], []
    for rank in range(world):
        plan = run.start(rank)["planned_memory"]
        (found,) = [line["memory"] for line in run.steps(rank) if "memory" in line]
        assert found["weights"] == plan["weights"]
        assert found["gradients"] == plan["gradients"]
        assert found["category_peaks"]["activations"] == pytest.approx(plan["activations"], rel=within)
        planned.append(sum(plan.values()))
        measured.append(found["peak"])
    return planned, measured


LARGE = ["--vocab-size", "32767", "--seq-length", "64", "--max-position-embeddings", "64", "--ext-memory"]


def test_memory_of_a_v_is_balanced(tmp_path):
    """Planned and measured peaks: with vocab-2 they differ by less than 2 % over the ranks of V-Half."""
    flags = [*LLAMA, *EIGHT, *LARGE, PP, "4", *schedule_flags("v-half", "vocab-2")]
    run = train(tmp_path, 4, *flags, "--global-batch-size", "16", steps=3)
    planned, measured = planned_and_measured(run, 4)
    assert max(planned) / min(planned) < 1.02, planned
    assert max(measured) / min(measured) < 1.02, measured


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("zb-h1", [*LLAMA, *EIGHT]),
        pytest.param("v-half", [*LLAMA, *EIGHT], marks=full),
        pytest.param("v-zb", EIGHT, marks=full),
        pytest.param("interleaved", EIGHT, marks=full),
    ],
)
def test_no_gradients_of_logits_wait_for_w(tmp_path, schedule, flags):
    """Without vocabulary parallelism the last stage holds one softmax at a time, as the plan says.

    A gradient of logits is as large as a softmax; the plan has no place for those that would wait for W.
    """
    run = train(tmp_path, 2, *flags, *LARGE, PP, "2", *schedule_flags(schedule, "off"), steps=2)
    planned_and_measured(run, 2, within=0.05)
