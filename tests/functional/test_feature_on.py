"""A feature that is on: flag, rule, patch, group, bytes, log and record, with a toy that changes nothing.

The toy sums the inputs of some layers over a group of its own and throws the sum away, so that losses stay
stock's and everything else shows that it ran. docs/adding-a-feature.md explains the parts.
"""

import functools
import sys
from dataclasses import dataclass

from megatron_ext.features import WORKS, Feature, Group
from megatron_ext.layout import megatron_grid
from megatron_ext.patching import Patch
from tests.functional.runs import MODEL, SCRIPT, Run, data, merged, read_record, train
from tests.ranks import run_ranks

WORLD, STEPS = 4, 3
TARGET = "megatron.core.transformer.transformer_layer:TransformerLayer.forward"
LAYOUT = ["--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"]


@dataclass(kw_only=True)
class ToyConfig:
    """The toy's flags."""

    toy_every: int = 0
    """Sum the inputs of every N-th layer; 0 switches the toy off."""


def toy_patches(context) -> list[Patch]:
    def make(original):
        @functools.wraps(original)
        def forward(self, *args, **kwargs):
            from megatron_ext import traffic

            if self.layer_number % context.flags.toy_every == 0:
                seen = kwargs["hidden_states"].detach().clone()
                traffic.all_reduce(seen, group=context.groups["toy"], feature="toy")
            return original(self, *args, **kwargs)

        return forward

    return [Patch(TARGET, make, "wrap", "sum the inputs of layers", "toy")]


def toy_lists() -> list[tuple[int, ...]]:
    return megatron_grid(WORLD, tp=2, pp=2).groups("tp")


def too_rare(args) -> str | None:
    if args.toy_every <= args.num_layers:
        return None
    return f"--toy-every {args.toy_every} is above --num-layers {args.num_layers}: it does nothing. Lower it."


TOY = Feature(
    name="toy",
    title="Toy",
    what="sums what it need not",
    status="ready",
    config=ToyConfig,
    enabled=lambda flags: flags.toy_every > 0,
    rules=(too_rare,),
    patches=toy_patches,
    groups=lambda args: {"toy": Group(toy_lists(), communicator="toy")},
    conflicts={"tp": WORKS, "pp": WORKS, "interleaved": "it counts layers of one chunk. Use plain 1F1B."},
)


def launch_toy(folder, *flags: str, check: bool = True) -> Run:
    args = merged(MODEL, data(), ["--train-iters", str(STEPS)], LAYOUT, list(flags))
    args += ["--ext-report", str(folder / "record")]

    def body() -> None:
        from megatron_ext.launch import main

        sys.exit(main(["--cpu", str(SCRIPT), *args], table=(TOY,)))

    ranks = run_ranks(WORLD, body, check=check)
    return Run(folder, ranks, read_record(folder / "record", WORLD))


def test_feature_runs_and_says_so(tmp_path):
    run = launch_toy(tmp_path / "toy", "--toy-every", "2")
    stock = train(tmp_path / "stock", WORLD, *LAYOUT, steps=STEPS)
    assert run.losses() == stock.losses()
    assert "features on: toy" in run.ranks[0].output
    for rank in range(WORLD):
        start = run.start(rank)
        assert start["features"] == ["toy"]
        (patch,) = [p for p in start["patches"] if p["feature"] == "toy"]
        assert patch["target"] == TARGET
        assert patch["sites"] == [TARGET]
        assert start["groups"]["toy"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        # One layer a stage, 8 microbatches; all-reduce over 2 ranks sends [32, 1, 64] fp32 once.
        for line in run.steps(rank):
            (entry,) = [e for e in line["traffic"] if e["feature"] == "toy"]
            assert entry == {
                "feature": "toy",
                "kind": "all_reduce",
                "group": "toy",
                "bytes": 8 * 32 * 64 * 4,
                "calls": 8,
            }


def test_feature_off_is_not_patched(tmp_path):
    run = launch_toy(tmp_path)
    assert run.start()["features"] == []
    assert all(p["feature"] != "toy" for p in run.start()["patches"])
    assert "toy" not in run.start()["groups"]


def test_rule_and_conflict_of_a_feature_are_reported_together(tmp_path):
    flags = ["--toy-every", "9", "--num-virtual-stages-per-pipeline-rank", "2"]
    run = launch_toy(tmp_path, *flags, check=False)
    text = " ".join(run.ranks[0].output.split())
    assert [r.exit_code for r in run.ranks] == [2] * WORLD
    assert "--toy-every 9 is above --num-layers 4" in text
    assert "Toy is on together with interleaved pipeline: it counts layers of one chunk" in text
