"""The measured memory of a step in real runs: exact where a formula is, and nothing else changes."""

import functools
import sys
from dataclasses import dataclass

import pytest

from megatron_ext.compositions import WORKS
from megatron_ext.features import Feature
from megatron_ext.memory_step import StepMemory
from megatron_ext.patching import Patch
from tests.functional.runs import MODEL, SCRIPT, Run, data, merged, read_record, train
from tests.ranks import run_ranks

STEPS = 3
H, LAYERS, SEQUENCE, VOCAB = 64, 4, 32, 256
LAYER = 12 * H * H + 13 * H  # weights and biases of attention and MLP, two layer norms
EMBEDDING = VOCAB * H + SEQUENCE * H
WHOLE = EMBEDDING + LAYERS * LAYER + 2 * H
ADAM_STEP = 4  # torch's Adam keeps its step in a tensor for each parameter
DISTRIBUTED = ["--use-distributed-optimizer"]


@dataclass(kw_only=True)
class MeasureConfig:
    """A stand-in for the launcher's own flags."""

    measure_step: int = 0
    """Step whose memory is measured; 0 switches it off."""


def measure_patches(context) -> list[Patch]:
    memory = StepMemory(context.flags.measure_step)

    def with_memory(original):
        @functools.wraps(original)
        def write(self, event, **fields):
            measured = memory.take() if event == "step" else None
            return original(self, event, **fields, **({"memory": measured} if measured else {}))

        return write

    record = Patch("megatron_ext.record:RunRecord.write", with_memory, "wrap", "add the memory", "measure")
    return [*memory.patches(), record]


MEASURE = Feature(
    name="measure",
    title="Measure",
    what="puts the memory of a step into the record",
    status="ready",
    config=MeasureConfig,
    enabled=lambda flags: flags.measure_step > 0,
    patches=measure_patches,
    conflicts=dict.fromkeys(("pp", "dp", "distopt", "recompute", "bf16"), WORKS),
)


def measured(folder, world: int, *flags: str) -> Run:
    """A run whose second step is measured."""
    args = merged(MODEL, data(), ["--train-iters", str(STEPS), "--measure-step", "2"], list(flags))
    args += ["--ext-report", str(folder / "record")]

    def body() -> None:
        from megatron_ext.launch import main

        sys.exit(main(["--cpu", str(SCRIPT), *args], table=(MEASURE,)))

    folder.mkdir(parents=True, exist_ok=True)
    return Run(folder, run_ranks(world, body), read_record(folder / "record", world))


def memory_of(run: Run, rank: int) -> dict:
    """The measurement; no other step may have one."""
    (line,) = [line for line in run.steps(rank) if "memory" in line]
    assert line["step"] == 2
    memory = line["memory"]
    parts = {name: size for name, size in memory.items() if name not in ("peak", "category_peaks")}
    assert sum(parts.values()) == memory["peak"]
    assert all(size <= memory["category_peaks"][name] for name, size in parts.items())
    assert memory["activations"] > 0
    assert memory["vocabulary"] == 0  # stock has no such pass
    return memory


def test_pipeline_of_two_holds_what_the_formulas_say_and_trains_the_same(tmp_path):
    flags = ["--pipeline-model-parallel-size", "2"]
    run = measured(tmp_path / "measured", 2, *flags)
    stock = train(tmp_path / "stock", 2, *flags, steps=STEPS)
    assert run.losses() == stock.losses()
    assert run.grad_norms() == stock.grad_norms()
    # Tied embeddings: the last stage has a copy of the embedding's weight.
    sizes = [EMBEDDING + 2 * LAYER, VOCAB * H + 2 * LAYER + 2 * H]
    counts = [2 + 2 * 12, 1 + 2 * 12 + 2]
    for rank, (elements, parameters) in enumerate(zip(sizes, counts, strict=True)):
        memory = memory_of(run, rank)
        assert memory["weights"] == 4 * elements
        assert memory["gradients"] == 4 * elements
        assert memory["optimizer"] == 8 * elements + ADAM_STEP * parameters


@pytest.mark.parametrize(
    ("flags", "weight", "state"),
    [([], 4, 8), (["--bf16"], 2, 12)],
    ids=["fp32", "bf16 with master weights"],
)
def test_distributed_optimizer_shares_its_states(tmp_path, flags, weight, state):
    run = measured(tmp_path, 2, *DISTRIBUTED, *flags)
    memories = [memory_of(run, rank) for rank in range(2)]
    pad = -WHOLE % (2 * 64)  # the buffer ends at a multiple of 128 elements
    for memory in memories:
        assert memory["weights"] == weight * (WHOLE + pad)
        assert memory["gradients"] == 4 * (WHOLE + pad)
        assert memory["optimizer"] <= state * (WHOLE + pad) / 2 + ADAM_STEP * 64
    steps = sum(memory["optimizer"] for memory in memories) - state * WHOLE
    assert 0 < steps <= 2 * 64 * ADAM_STEP
    assert steps % ADAM_STEP == 0


def test_recomputation_shows_in_the_activations(tmp_path):
    full = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    usual = memory_of(measured(tmp_path / "usual", 1), 0)
    recomputed = memory_of(measured(tmp_path / "recomputed", 1, *full), 0)
    assert recomputed["activations"] < 0.6 * usual["activations"]
    assert recomputed["weights"] == usual["weights"] == 4 * WHOLE
