"""What recomputed layers keep, from the flags of a run."""

import pytest

from megatron_ext.wallfacer.recompute import Kept, kept, kept_of_run
from tests.unit.stock_args import gpt


def test_without_recomputation():
    assert kept(8, 3) == Kept(24)
    assert not kept(8).attached


def test_uniform_and_block():
    assert kept(8, 3, granularity="full", method="uniform", number=2) == Kept(0, 24, 2)
    assert kept(8, 3, granularity="full", method="uniform", number=20) == Kept(0, 24, 8)
    assert kept(8, 3, granularity="full", method="block", number=2) == Kept(18, 6, 1)
    assert kept(8, granularity="full").attached
    assert not kept(8, granularity="full", method="block", number=2).attached
    assert kept(8, granularity="full", method="block", number=8).attached


def test_selective():
    assert kept(8, granularity="selective") == Kept(8, attention_again=True)
    assert kept(8, granularity="selective", modules=["mlp", "core_attn"]).attached
    assert kept(8, granularity="selective", modules=["mlp"]) == Kept(8)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 24),
        ({"pipeline_model_parallel_size": 4}, 6 * 4),
        ({"pipeline_model_parallel_size": 4, "global_batch_size": 2}, 6 * 2),
        ({"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3}, 4 * (2 + 2 * 2 + 1)),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 4},
            4 * (2 + 2 * 2 + 1),
        ),
    ],
)
def test_of_a_run(changes, count):
    sizes = {"num_layers": 24, "micro_batch_size": 1, "global_batch_size": 64, "data_parallel_size": 1}
    args = gpt()
    for name, value in (sizes | changes).items():
        setattr(args, name, value)
    assert kept_of_run(args) == Kept(count)
    args.recompute_activations = True
    assert kept_of_run(args) == Kept(count, attention_again=True)
    args.recompute_granularity = "full"
    assert kept_of_run(args).recomputed == count
