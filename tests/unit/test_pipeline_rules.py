"""What pipeline schedules refuse: every message says what is set, why it cannot work, and what to set."""

import pytest

from megatron_ext import rules
from megatron_ext.paro.config import ParoConfig
from megatron_ext.pipeline.config import PipelineConfig
from megatron_ext.pipeline.rules import RULES, flags_need_auto
from megatron_ext.rules_training import traced_step_has_a_schedule
from megatron_ext.vocab.config import VocabConfig
from megatron_ext.vocab.rules import interleaving_has_our_schedule
from tests.unit.stock_args import Job

EVERY = (*RULES, flags_need_auto)


# 8 layers on 2 stages with the local layers.
JOB = Job(
    EVERY,
    {"pipeline_model_parallel_size": 2, "world_size": 2, "transformer_impl": "local"},
    vars(PipelineConfig(pipeline_schedule="v-half")) | vars(VocabConfig()) | vars(ParoConfig()),
)


def arguments(schedule: str = "v-half", **changes):
    return JOB.arguments(pipeline_schedule=schedule, **changes)


@pytest.mark.parametrize(
    ("schedule", "changes", "words"),
    [
        ("zb-h1", {"pipeline_model_parallel_size": 1}, ["--pipeline-model-parallel-size is 1", "at least 2"]),
        ("v-half", {"num_layers": 6}, ["--num-layers 6", "multiple of 4"]),
        (
            "v-zb",
            {"num_virtual_stages_per_pipeline_rank": 2},
            ["decides the number of chunks", "interleaved"],
        ),
        (
            "zb-h1",
            {"transformer_impl": "transformer_engine"},
            ["weight gradients", "--transformer-impl local"],
        ),
        (
            "auto",
            {"transformer_impl": "transformer_engine"},
            ["weight gradients", "--transformer-impl local"],
        ),
        ("zb-h1", {"delay_wgrad_compute": True}, ["--delay-wgrad-compute", "remove it"]),
        ("v-half", {"vocab_parallel": "interlaced"}, ["interlaced runs only in 1F1B", "vocab-2"]),
        ("v-min", {"decoder_first_pipeline_num_layers": 2}, ["both chunks of all ranks", "Remove"]),
        ("v-half", {"paro_strategy": "GGG"}, ["splits parameters", "NNG"]),
        ("v-half", {"fine_grained_activation_offloading": True}, ["--fine-grained-activation-offloading"]),
        ("v-half", {"pipeline_memory_limit": 4.0}, ["there is no search", "auto"]),
        ("stock", {"pipeline_memory_limit": 4.0}, ["--pipeline-schedule is stock", "auto"]),
        ("interleaved", {}, ["--num-virtual-stages-per-pipeline-rank 2"]),
        ("auto", {"pipeline_memory_limit": 0.5}, ["--pipeline-memory-limit is 0.5", "1 or more"]),
        (
            "auto",
            {"pipeline_costs": "/nowhere/c.json"},
            ["--pipeline-costs /nowhere/c.json", "trace --measured"],
        ),
    ],
)
def test_what_is_refused(schedule, changes, words):
    on = [flags_need_auto] if schedule == "stock" else EVERY
    found = rules.run(arguments(schedule, **changes), on)
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "v-half", "v-min", "v-zb", "auto"])
def test_what_is_accepted(schedule):
    assert rules.run(arguments(schedule), EVERY) == []
    assert rules.run(arguments(schedule, vocab_parallel="vocab-2", paro_strategy="NNG"), EVERY) == []


def test_interleaved_with_chunks_is_accepted():
    assert rules.run(arguments("interleaved", num_virtual_stages_per_pipeline_rank=2), EVERY) == []
    assert rules.run(arguments("1f1b", transformer_impl="transformer_engine"), EVERY) == []


def test_steps_of_our_schedules_can_be_traced():
    trace = {"ext_trace": "runs/trace", "ext_trace_step": 3, "train_iters": 10}
    text = traced_step_has_a_schedule(arguments("stock", **trace))
    assert "--pipeline-schedule 1f1b" in text
    for schedule in ("1f1b", "v-half"):
        assert traced_step_has_a_schedule(arguments(schedule, **trace)) is None
    assert traced_step_has_a_schedule(arguments("stock", vocab_parallel="vocab-2", **trace)) is None


def test_vocabulary_passes_need_our_interleaving():
    chunks = {"num_virtual_stages_per_pipeline_rank": 2, "vocab_parallel": "vocab-2"}
    text = interleaving_has_our_schedule(arguments("stock", **chunks))
    assert "2 virtual stages" in text
    assert "--pipeline-schedule interleaved" in text
    assert interleaving_has_our_schedule(arguments("interleaved", **chunks)) is None
