"""With none of our features, a run through the launcher is stock Megatron, bit for bit."""

import functools

import pytest

from tests.functional import bare_stock
from tests.functional.runs import LLAMA, MODEL, SCRIPT, data, merged, train
from tests.ranks import run_ranks

PP, TP = "--pipeline-model-parallel-size", "--tensor-model-parallel-size"


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, []),
        (1, [*LLAMA, "--bf16", "--hidden-dropout", "0.1"]),
        (2, [PP, "2"]),
        (2, [TP, "2"]),
        (2, ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]),
    ],
    ids=["one", "llama-bf16-dropout", "pp2", "tp2", "dp2-distopt"],
)
def test_launcher_equals_bare_stock(tmp_path, world, flags):
    args = merged(MODEL, data(), ["--train-iters", "10", "--eval-interval", "100"], flags)
    bare = run_ranks(world, functools.partial(bare_stock.run, str(SCRIPT), args), timeout=150)
    run = train(tmp_path, world, *flags)
    losses = [loss for loss, _ in bare[-1].value]
    norms = [norm for _, norm in bare[-1].value]
    assert losses == list(run.losses().values())
    assert norms == [line["grad_norm"] for line in run.steps(world - 1)]
    assert len(losses) == 10
    assert run.start()["features"] == []
    allowed = {"launcher", "record", "workaround"}
    assert {patch["feature"] for patch in run.start()["patches"]} == allowed
