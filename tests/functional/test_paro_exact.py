"""PaRO: overlap changes nothing, runs repeat, bit for bit; and what evaluation, memory and logs say."""

import re

import pytest
import torch

from megatron_ext.paro.memory import GRADS_BEHIND, PARAMS_AHEAD
from megatron_ext.paro.strategy import NAMES, Level, Strategy
from megatron_ext.tools.memory import main as memory_tool
from tests.functional.parity import FULL_RECOMPUTE, PP, TP
from tests.functional.paro_runs import AHEAD, GROUPS_OF_2, assert_ran, script, seed, stock
from tests.functional.runs import Run, assert_close, train

full = pytest.mark.full
NO_CHECK = "--no-check-for-nan-in-loss-and-grad"

# Every rank writes all parameters after the last step.
KEEP = """
import contextlib, os, torch
import megatron.training.training as training
from megatron_ext.hooks import whole_parameters

stock = training.train_step

def train_step(forward_step_func, data_iterator, model, *args, **kwargs):
    result = stock(forward_step_func, data_iterator, model, *args, **kwargs)
    if kwargs["iteration"] == 9:
        with contextlib.ExitStack() as stack:
            for chunk in model:
                stack.enter_context(whole_parameters(chunk))
            kept = [param.detach().clone() for chunk in model for param in chunk.parameters()]
            torch.save(kept, f"parameters-{os.environ['RANK']}.pt")
    return result

training.train_step = train_step
"""


def final(run: Run) -> list[list]:
    """The parameters of every rank after the last step."""
    return [torch.load(run.folder / f"parameters-{rank}.pt") for rank in range(len(run.lines))]


def assert_same(one: Run, other: Run) -> None:
    """Losses, grad norms and parameters are equal bit for bit."""
    assert len(one.losses()) == 10
    assert one.losses() == other.losses()
    assert one.grad_norms() == other.grad_norms()
    for ours, theirs in zip(final(one), final(other), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


EXACT = {
    "": (4, []),
    "ho-ring": (4, ["--paro-comm", "ho-ring"]),
    "flat": (4, ["--paro-comm", "flat"]),
    "int8": (4, ["--paro-inter-dtype", "int8"]),
    "kept": (4, ["--paro-reshard-after-forward", "off"]),
    "recompute": (4, FULL_RECOMPUTE),
    "bf16": (4, ["--bf16"]),
    "pp2": (4, [PP, "2"]),
    "tp2-sp": (4, [TP, "2", "--sequence-parallel"]),
    "unchecked": (4, [NO_CHECK]),
}
FAST = {("IIG", "ho-ring")}


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        pytest.param(strategy, name, marks=[] if (strategy, name) in FAST else full)
        for strategy in NAMES
        for name in EXACT
        if name == "" or strategy in ("NIG", "IIG") or (name == "ho-ring" and strategy in ("NNN", "GGG"))
    ],
)
def test_overlap_changes_nothing(tmp_path, strategy, name):
    """With overlap, twice, and without: on a lane of their own, collectives compute the same."""
    world, flags = EXACT[name]
    start = seed() if PP in flags or TP in flags else []
    flags = [*start, *flags, *GROUPS_OF_2, "--paro-strategy", strategy]
    off = train(tmp_path / "off", world, *flags, script=script(KEEP))
    for attempt in range(1 if name else 2):
        on = train(tmp_path / f"on-{attempt}", world, *flags, *AHEAD, script=script(KEEP))
        assert_same(off, on)


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("GGG", [*AHEAD, "--paro-reshard-after-forward", "off"]),
        *(pytest.param(name, AHEAD, marks=full) for name in ("NNN", "IIG")),
        pytest.param("IIG", [PP, "2", *AHEAD], marks=full),
        pytest.param("IIG", [*FULL_RECOMPUTE], marks=full),
    ],
)
def test_evaluation(tmp_path, strategy, flags):
    """Validation losses are stock's, to 1e-6 as printed, and steps afterwards send what they should."""
    evaluated = ["--eval-iters", "2", "--eval-interval", "5", "--split", "80,20,0"]
    runs = [
        train(tmp_path / "stock", 1, *seed(), *evaluated),
        train(
            *(tmp_path / "paro", 4 if PP in flags else 2, *seed(), *evaluated, *GROUPS_OF_2, *flags),
            *("--paro-strategy", strategy, "--ext-check", "bytes"),
        ),
    ]
    pattern = re.compile(r"validation loss at (.*) \| lm loss value: (\S+) ")
    losses, ours = ({place: float(loss) for place, loss in pattern.findall(run.output)} for run in runs)
    assert len(losses) == 3
    assert ours == pytest.approx(losses, rel=1e-6)
    reshard = "--paro-reshard-after-forward" not in flags
    assert_ran(runs[1], strategy, k=1, reshard=reshard, evaluated={6: 2 * 8 // 2})


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("IIG", AHEAD),
        *(pytest.param(name, AHEAD, marks=full) for name in ("NNN", "NNG", "NIG", "ING", "III", "GGG")),
        *(pytest.param(name, [], marks=full) for name in ("NIG", "GGG")),
        pytest.param("GGG", [*AHEAD, *FULL_RECOMPUTE], marks=full),
        pytest.param("GGG", [*AHEAD, "--bf16"], marks=full),
        pytest.param("IIG", [*AHEAD, "--paro-reshard-after-forward", "off"], marks=full),
        pytest.param("NIG", [*AHEAD, "--paro-inter-dtype", "int8"], marks=full),
    ],
)
def test_measured_memory(tmp_path, capsys, strategy, flags):
    """Whole layers exist while they are used: at most one more than the one in use, and two gradients."""
    run = train(tmp_path, 4, *GROUPS_OF_2, *flags, "--paro-strategy", strategy, "--ext-memory", steps=3)
    levels = Strategy.parse(strategy)
    for rank in range(4):
        (measured,) = [line["memory"] for line in run.steps(rank) if "memory" in line]
        ours = run.steps(rank)[-1]["paro"]
        peaks = measured["category_peaks"]
        layers = 4 if "off" in flags else 1 + PARAMS_AHEAD * (AHEAD[0] in flags)
        whole = in_use(ours["units"], "param_bytes", layers)
        assert peaks["weights"] == ours["bytes"]["params"] + whole * (levels.params is not Level.N)
        waiting = in_use(ours["units"], "grad_bytes", 1 + GRADS_BEHIND)
        most = ours["bytes"]["grads"] + waiting * (levels.grads is not Level.N)
        assert peaks["gradients"] <= most
        assert levels.grads is not Level.N or peaks["gradients"] == most
        assert peaks["optimizer"] >= ours["bytes"]["optimizer"]
        assert "PaRO" in run.start(rank)["no_planned_memory"]
    assert memory_tool([str(run.folder / "record")]) == 0
    assert "activations" in capsys.readouterr().out


def in_use(units: list[dict], entry: str, layers: int) -> int:
    """Bytes of all that lies outside of layers, and of some layers."""
    outside = sum(unit["padded"] * unit[entry] for unit in units if unit["name"].startswith("root"))
    sizes = [unit["padded"] * unit[entry] for unit in units if not unit["name"].startswith("root")]
    return outside + sum(sorted(sizes)[-layers:])


@full
@pytest.mark.parametrize("strategy", ["NNN", "NNI", "NIG"])
def test_logged_statistics(tmp_path, strategy):
    """Zero gradients and the parameters' norm are counted as stock counts them.

    Rows of tokens that do not occur have zero gradients, thousands; a few sums more are zero by chance.
    """
    flags = ["--log-num-zeros-in-grad", "--log-params-norm", "--untie-embeddings-and-output-weights"]
    one = train(tmp_path / "stock", 1, *flags)
    run = train(tmp_path / "paro", 4, *GROUPS_OF_2, "--paro-strategy", strategy, *flags)
    zeros, ours = (re.findall(r"num zeros: (\S+)", each.output) for each in (one, run))
    assert len(zeros) == 10
    assert [float(count) for count in ours] == pytest.approx([float(count) for count in zeros], abs=20)
    assert min(map(float, zeros)) > 1000
    norms, ours = (re.findall(r"params norm: (\S+)", each.output) for each in (one, run))
    assert len(norms) == 10
    assert [float(norm) for norm in ours] == pytest.approx([float(norm) for norm in norms], rel=1e-4)


@full
@pytest.mark.parametrize(("strategy", "comm"), [("IIG", "two-phase"), ("NIG", "ho-ring")])
def test_quantised_between_groups(tmp_path, strategy, comm):
    """200 steps with int8 between groups end within 1 % of the loss without; replicas stay equal."""
    flags = [*GROUPS_OF_2, "--paro-strategy", strategy, "--paro-comm", comm, "--ext-check", "bytes,replicas"]
    runs = {
        dtype: train(tmp_path / dtype, 4, *flags, "--paro-inter-dtype", dtype, steps=200, timeout=900)
        for dtype in ("native", "int8")
    }
    assert_ran(runs["int8"], strategy, comm=comm, inter_dtype="int8")
    native, quantised = (run.losses() for run in runs.values())
    assert native[200] < 0.7 * native[1]
    assert quantised[200] == pytest.approx(native[200], rel=0.01)
    assert quantised != native


@pytest.mark.parametrize(
    ("strategy", "world", "flags"),
    [
        ("NIG", 4, AHEAD),
        pytest.param("NNG", 4, [], marks=full),
        pytest.param("NNG", 4, AHEAD, marks=full),
        pytest.param("NIG", 4, [], marks=full),
        pytest.param("NII", 8, AHEAD, marks=full),
        pytest.param("NGG", 8, AHEAD, marks=full),
        pytest.param("NIG", 8, [*AHEAD, "--bf16"], marks=full),
        pytest.param("NIG", 8, [*AHEAD, "--paro-comm", "ho-ring", "--calculate-per-token-loss"], marks=full),
    ],
)
def test_vocabulary_parallelism(tmp_path, strategy, world, flags):
    """Vocabulary shards get gradients all through a step; both features' bytes are checked."""
    seeded = [*seed(), *flags, "--paro-strategy", strategy, *GROUPS_OF_2]
    training = tuple(flag for flag in flags if flag in ("--bf16", "--calculate-per-token-loss"))
    reference = stock((), training, seeded=True)
    run = train(
        *(tmp_path, world, *seeded, PP, "2", "--vocab-parallel", "vocab-2"),
        *("--ext-check", "bytes,replicas"),
    )
    tolerance = 2e-3 if "--bf16" in flags else 1e-5
    assert_close(reference.losses(), run.losses(), tolerance)
    assert_close(reference.grad_norms(), run.grad_norms(), 5e-2 if "--bf16" in flags else 1e-5)
    assert_ran(run, strategy, k=world // 4, comm="ho-ring" if "ho-ring" in flags else "two-phase")
    for rank in range(world):
        assert run.start(rank)["features"] == ["vocab", "paro"]
        assert any(unit["late"] for unit in run.steps(rank)[0]["paro"]["units"])
