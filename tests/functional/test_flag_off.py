"""With none of our features, a run through the launcher is stock Megatron, bit for bit."""

import functools

import pytest

from megatron_ext.cli import main
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
    dropout = "--hidden-dropout" in flags
    bare = run_ranks(world, functools.partial(bare_stock.run, str(SCRIPT), args, dropout), timeout=150)
    run = train(tmp_path, world, *flags)
    losses = [loss for loss, _ in bare[-1].value]
    norms = [norm for _, norm in bare[-1].value]
    assert losses == list(run.losses().values())
    assert norms == [line["grad_norm"] for line in run.steps(world - 1)]
    assert len(losses) == 10
    assert run.start()["features"] == []
    allowed = {"launcher", "record", "workaround"}
    assert {patch["feature"] for patch in run.start()["patches"]} == allowed


def test_launcher_without_any_flag_of_ours(tmp_path):
    """Not even the record: then nothing but the parser, the rules and the workarounds is patched."""
    args = merged(MODEL, data(), ["--train-iters", "5", "--eval-interval", "100"])
    (bare,) = run_ranks(1, functools.partial(bare_stock.run, str(SCRIPT), args), timeout=150)
    seen = []

    def body():
        import megatron.training.training as training

        stock_step = training.train_step

        def train_step(*args, **kwargs):
            result = stock_step(*args, **kwargs)
            seen.append((result[0]["lm loss"].item(), float(result[5])))
            return result

        training.train_step = train_step
        main(["--cpu", str(SCRIPT), *args])
        assert training.train_step is train_step
        return seen

    (launched,) = run_ranks(1, body, timeout=150)
    assert launched.value == bare.value
    assert len(launched.value) == 5
