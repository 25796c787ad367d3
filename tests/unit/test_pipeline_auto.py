"""--pipeline-schedule auto: its limit counts everything that passes leave for later ones."""

from argparse import Namespace
from dataclasses import replace

import pytest

from megatron_ext.pipeline.auto import default_limit, measure_of, planned, resolve
from megatron_ext.schedules.build import build
from megatron_ext.schedules.lower import lower
from megatron_ext.schedules.search import activations
from megatron_ext.vocab import memory_layers as layers
from tests.unit.test_memory_model import SMALL, megatron_args

D = replace(SMALL, layers=8, pipeline=4, stage_layers=(2, 2, 2, 2), tied=True, positions=0)
M = 16


def held(d, pipeline: str, vocab: str = "off") -> float:
    return planned(replace(d, vocab_mode=vocab))(lower(build(4, M, pipeline=pipeline, vocab=vocab)))


def unit(d) -> int:
    """What a microbatch keeps on the rank that keeps most: the last one, with the final norm."""
    mask, final = d.micro_batch * d.seq_length**2, layers.norm_kept(d) + layers.hidden_bytes(d)
    return 2 * layers.layer_kept(d) + mask + final


def softmax(d) -> float:
    return 4 * d.tokens * d.vocab / unit(d)


def test_without_vocabulary_it_is_about_the_activations():
    d = replace(D, vocab=128)
    assert 0.94 * 4 < held(d, "1f1b") <= 4
    assert held(d, "v-half") == pytest.approx(3, rel=0.1)  # p + 2 chunks, some of which wait for W only
    assert held(d, "v-min") < held(d, "v-half") < held(d, "v-zb")


def test_softmax_of_the_last_stage_counts():
    """In 1F1B beside one microbatch on the last rank; in a V on rank 0, beside all that it holds."""
    d = replace(D, vocab=16384)
    assert 2.5 < softmax(d) < 4
    assert held(d, "1f1b") == pytest.approx(1 + softmax(d), rel=0.02)
    assert held(d, "v-zb") >= held(replace(D, vocab=128), "v-zb") + 0.9 * softmax(d)


@pytest.mark.parametrize(("vocab", "waiting"), [("vocab-2", 1), ("vocab-1", 2)])
def test_vocabulary_passes_count(vocab, waiting):
    """Rank 0 of 1F1B holds p + barriers microbatches, and the softmax of its shard."""
    d = replace(D, vocab=16384)
    assert held(d, "1f1b", vocab) > (4 + waiting) * 0.94 + softmax(d) / 4


def test_gradients_that_wait_for_w_count():
    """With full recomputation a microbatch keeps little, and what B leaves for W is many times as much."""
    d = replace(D, recompute="full", vocab=128)
    program = lower(build(4, M, pipeline="zb-h1"))
    assert activations(program) == 4
    left = layers.left_for_weights(d, 2) / max(layers.stage_kept(d, rank) for rank in range(4))
    assert planned(d)(program) > left > 4


def flags(**changed) -> Namespace:
    plain = {
        "pipeline_schedule": "auto",
        "pipeline_memory_limit": None,
        "pipeline_costs": None,
        "vocab_parallel": "off",
        "vocab_costs": None,
    }
    return Namespace(**plain | changed)


def arguments(**changed) -> Namespace:
    sizes = {
        "num_layers": 8,
        "pipeline_model_parallel_size": 4,
        "global_batch_size": 16 * 4,
        "vocab_size": 4096,
        "make_vocab_size_divisible_by": 128,
        "rank": 0,
    }
    return megatron_args(**sizes | changed)


def test_large_logits_move_the_choice(capsys, monkeypatch):
    """The same limit of activations: with a large vocabulary fewer of them fit beside the softmax."""
    monkeypatch.setattr("megatron_ext.record.on_gpu", lambda: False)
    chosen = {}
    for vocab in (128, 8192):
        its = flags(pipeline_memory_limit=4.6)
        resolve(arguments(padded_vocab_size=vocab), its)
        chosen[vocab] = its.pipeline_recipe
        assert (
            "activations, what B leaves for W, and what vocabulary passes keep all count"
            in capsys.readouterr().out
        )
    assert chosen[128] != chosen[8192]
    d = replace(D, tied=False, positions=128)
    for vocab, recipe in chosen.items():
        assert planned(replace(d, vocab=vocab))(lower(recipe.build(4, M, "off", costs()))) <= 4.6
    assert planned(replace(d, vocab=8192))(lower(chosen[128].build(4, M, "off", costs()))) > 4.6


def costs():
    from megatron_ext.schedules.costs import Costs

    return Costs()


def test_default_limit_is_what_1f1b_holds():
    assert default_limit(4, M, "off", activations) == 4
    assert default_limit(4, M, "vocab-2", activations) == 5
    measure = planned(D)
    assert default_limit(4, M, "off", measure) == max(4.0, measure(lower(build(4, M))))


def test_an_unknown_vocabulary_is_said():
    args = arguments(padded_vocab_size=None, vocab_size=None)
    measure, counted = measure_of(args, flags(), gpu=False)
    assert measure is activations
    assert "only activations count" in counted
    assert "--vocab-size" in counted
    _, counted = measure_of(arguments(padded_vocab_size=None), flags(), gpu=False)
    assert "all count" in counted
    _, counted = measure_of(arguments(num_experts=8), flags(), gpu=False)
    assert "mixture of experts" in counted
