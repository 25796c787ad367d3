import argparse

import pytest

from megatron_ext import rules
from megatron_ext.rules_pipeline import ACCOUNT_FOR
from megatron_ext.rules_sizes import divisors_near, multiples_near
from tests.unit.stock_args import gpt, nothing_given

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
PER_STAGE, CHUNKS = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


def only(**changes):
    """The one problem of a GPT job with these changes."""
    found = rules.run(gpt(**changes), rules.base_rules())
    assert len(found) == 1, found
    return found[0]


def accepts(**changes):
    return rules.run(gpt(**changes), rules.base_rules()) == []


def test_a_sound_job_has_no_problem():
    assert accepts()


@pytest.mark.parametrize(("value", "step", "text"), [(7, 3, "6 or 9"), (2, 3, "3"), (9, 4, "8 or 12")])
def test_multiples_near(value, step, text):
    assert multiples_near(value, step) == text


@pytest.mark.parametrize(("number", "value", "text"), [(12, 5, "4 or 6"), (7, 3, "1 or 7"), (8, 16, "8")])
def test_divisors_near(number, value, text):
    assert divisors_near(number, value) == text


SIZES = {
    "parallel size 0": (
        {TP: 0},
        ["--tensor-model-parallel-size 0", "at least 1", "give 1 to switch it off"],
    ),
    "world size": (
        {TP: 2, PP: 2, "world_size": 6, "global_batch_size": None},
        [
            "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 needs 4 ranks",
            "6 processes were started",
            "Start 4 or 8 processes",
            "--nproc-per-node 4",
            "divides 6",
        ],
    ),
    "world size 1": (
        {TP: 2, CP: 2, "global_batch_size": None},
        [
            "x --context-parallel-size 2 needs 4 ranks",
            "1 process was started",
            "Start 4 processes",
            "1 for each.",
        ],
    ),
    "weight shards": (
        {TP: 2, "tensor_parallel_num_weight_shards": 8, "world_size": 4, "global_batch_size": None},
        ["needs 8 ranks", "weight shards 4 (--tensor-parallel-num-weight-shards)"],
    ),
    "heads": (
        {TP: 3, "world_size": 3, "ffn_hidden_size": 96},
        ["--num-attention-heads 8", "Set --num-attention-heads to 6 or 9", "size to 2 or 4"],
    ),
    "query groups against heads": (
        {"group_query_attention": True, "num_query_groups": 3},
        ["--num-query-groups 3 does not divide --num-attention-heads 8", "Set --num-query-groups to 2 or 4"],
    ),
    "query groups against tp": (
        {
            "group_query_attention": True,
            "num_query_groups": 4,
            "num_attention_heads": 12,
            "hidden_size": 96,
            TP: 6,
            "world_size": 6,
        },
        ["--num-query-groups 4 is neither", "Set --num-query-groups to 3 or 6", "size to 4."],
    ),
    "head size": (
        {"hidden_size": 66},
        ["--hidden-size 66", "Set --hidden-size to 64 or 72", "heads to 6 or 11", "--kv-channels"],
    ),
    "ffn given": (
        {"ffn_hidden_size": 66, TP: 4, "world_size": 4},
        ["--ffn-hidden-size 66", "--tensor-model-parallel-size 4", "Set --ffn-hidden-size to 64 or 68"],
    ),
    "ffn from hidden size": (
        {"swiglu": True, "hidden_size": 48, "num_attention_heads": 24, TP: 3, "world_size": 3},
        ["inner size 128 (from --hidden-size 48)", "Set --ffn-hidden-size to 126 or 129"],
    ),
    "sequence parallel": (
        {"sequence_parallel": True, TP: 4, "world_size": 4, "seq_length": 30},
        ["--seq-length 30", "--sequence-parallel over", "multiple of 4", "Set --seq-length to 28 or 32"],
    ),
    "context parallel": (
        {CP: 4, "world_size": 4, "seq_length": 28},
        ["--context-parallel-size 4 (two chunks a rank)", "multiple of 8", "24 or 32"],
    ),
    "context and sequence parallel": (
        {CP: 2, TP: 4, "sequence_parallel": True, "world_size": 8, "seq_length": 20},
        ["--context-parallel-size 2", "and --sequence-parallel", "multiple of 8", "16 or 24"],
    ),
}


@pytest.mark.parametrize(("changes", "parts"), SIZES.values(), ids=SIZES)
def test_sizes(changes, parts):
    text = only(**changes)
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize(
    "changes",
    [
        {TP: 2, PP: 2, "world_size": 8},
        {"tensor_parallel_num_weight_shards": 4, "world_size": 4},
        {"kv_channels": 16, "hidden_size": 66},
        {"num_query_groups": 3},  # without --group-query-attention stock does not look at it
        {"group_query_attention": True, "num_query_groups": 2, TP: 4, "world_size": 4},
        {"num_experts": 4, "ffn_hidden_size": 66, TP: 4, "world_size": 4},
        {"sequence_parallel": True, "seq_length": 31},  # stock ignores it on one rank
        {"sequence_parallel": True, TP: 4, "world_size": 4, "seq_length": 30, "sft": True},
        {"sequence_parallel": True, TP: 4, "world_size": 4, "seq_length": 30, "decoder_seq_length": 30},
        {"swiglu": True, "hidden_size": 48, TP: 2, "world_size": 2},
    ],
)
def test_sizes_that_stock_accepts(changes):
    assert accepts(**changes)


PIPELINE = {
    "layers": (
        {PP: 3, "world_size": 3},
        [
            "--num-layers 8 cannot be shared out evenly",
            "Set --num-layers to 6 or 9",
            "--pipeline-model-parallel-size to 2 or 4",
            "--pipeline-model-parallel-layout",
        ],
    ),
    "layers with embedding": (
        {PP: 4, "world_size": 4, "account_for_embedding_in_pipeline_split": True},
        ["(+1 for --account-for-embedding-in-pipeline-split)", "Set --num-layers to 7 or 11", "to 3 or 9"],
    ),
    "two ways to interleave": (
        {PP: 2, "world_size": 2, PER_STAGE: 2, CHUNKS: 2},
        ["--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank", "keep one"],
    ),
    "layout and first stage": (
        {PP: 2, "world_size": 2, "pipeline_model_parallel_layout": "Et*4|t*4L", FIRST: 3},
        ["--pipeline-model-parallel-layout places every layer", "--decoder-first-pipeline-num-layers"],
    ),
    "first stage and embedding": (
        {PP: 2, "world_size": 2, FIRST: 3, "account_for_loss_in_pipeline_split": True},
        ["--decoder-first-pipeline-num-layers and --account-for-loss-in-pipeline-split", "remove one"],
    ),
    "layers per virtual stage and first stage": (
        {PP: 2, "world_size": 2, FIRST: 4, PER_STAGE: 2},
        ["cannot be used with --decoder-first", "--num-virtual-stages-per-pipeline-rank"],
    ),
    "virtual stage size": (
        {PP: 2, "world_size": 2, PER_STAGE: 3},
        ["stage 3 does not divide the 4 layers of a stage", "Set it to 2 or 4"],
    ),
    "virtual stage count": (
        {PP: 2, "world_size": 2, CHUNKS: 3},
        ["rank 3 does not divide the 4 layers of a stage", "Set it to 2 or 4"],
    ),
    "virtual stage size 0": ({PP: 2, "world_size": 2, PER_STAGE: 0}, ["stage 0: give at least 1"]),
    "virtual stage count 0": ({PP: 2, "world_size": 2, CHUNKS: 0}, ["rank 0: give at least 1"]),
    "first stage 0": (
        {PP: 2, "world_size": 2, FIRST: 0},
        ["--decoder-first-pipeline-num-layers 0: a stage has at least 1 layer"],
    ),
    "first and last take all": (
        {PP: 3, "world_size": 3, FIRST: 4, LAST: 4},
        ["leave 0 of --num-layers 8 for the 1 other stages", "a positive multiple of 1 layers"],
    ),
    "first and last leave some": (
        {PP: 2, "world_size": 2, FIRST: 3, LAST: 3},
        ["leave 2 of --num-layers 8 for the 0 other stages", "Choose sizes that leave no layer"],
    ),
    "more layers than there are": (
        {PP: 3, "world_size": 3, FIRST: 6, LAST: 4},
        ["leave -2 of --num-layers 8 for the 1 other stages", "a positive multiple of 1 layers"],
    ),
    "first and last are one": (
        {FIRST: 4, LAST: 4},
        [
            "--decoder-last-pipeline-num-layers 4 are one stage at --pipeline-model-parallel-size 1",
            "keep one",
        ],
    ),
    "middle stages": (
        {PP: 3, "world_size": 3, FIRST: 3},
        ["leave 5 of --num-layers 8", "to the 2 other stages", "Choose sizes that leave 4 or 6"],
    ),
    "uneven chunks": (
        {PP: 2, "world_size": 2, FIRST: 3, CHUNKS: 2},
        ["does not divide --decoder-first-pipeline-num-layers 3 and 5 layers on each stage between"],
    ),
    "interleaving without pipeline": (
        {CHUNKS: 2},
        [
            "2 virtual stages",
            "--pipeline-model-parallel-size 2 or more, but it is 1",
            f"remove --{'num-virtual'}",
        ],
    ),
    "interleaving without overlap": (
        {PP: 2, "world_size": 2, PER_STAGE: 2, "overlap_p2p_comm": False},
        ["--pipeline-model-parallel-size 3 or more under --no-overlap-p2p-communication"],
    ),
    "too few microbatches": (
        {PP: 4, "world_size": 4, CHUNKS: 2, "global_batch_size": None},
        ["groups of 4", "--global-batch-size 2 (the default) gives 1", "Set --global-batch-size to 8"],
    ),
    "odd microbatches": (
        {PP: 4, "world_size": 8, CHUNKS: 2, "global_batch_size": 24},
        ["--global-batch-size 24 gives 6", "data-parallel size 2 = 4", "to 16 or 32"],
    ),
    "microbatch group": (
        {PP: 4, "world_size": 4, CHUNKS: 2, "microbatch_group_size_per_vp_stage": 3},
        ["--microbatch-group-size-per-virtual-pipeline-stage 3", "set it to 4 or more"],
    ),
}


@pytest.mark.parametrize(("changes", "parts"), PIPELINE.values(), ids=PIPELINE)
def test_pipeline(changes, parts):
    text = only(**changes)
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize(
    "changes",
    [
        {PP: 3, "world_size": 3, "pipeline_model_parallel_layout": "Et*3|t*3|t*2L"},
        {PP: 3, "world_size": 3, FIRST: 2},
        {PP: 3, "world_size": 3, FIRST: 2, LAST: 4},
        {PP: 5, "world_size": 5, **dict.fromkeys(ACCOUNT_FOR, True)},
        {PP: 2, "world_size": 2, PER_STAGE: 2},
        {PP: 2, "world_size": 2, CHUNKS: 4},
        {PP: 4, "world_size": 4, CHUNKS: 1, "global_batch_size": None},
        {PP: 3, "world_size": 3, "hybrid_layer_pattern": "M-M-|M-M*|M-M*"},
        {PP: 3, "world_size": 3, "hybrid_override_pattern": "M-M-M-M-"},
        {PP: 2, "world_size": 2, CHUNKS: 2, "step_batch_size_schedule": "0:2", "global_batch_size": None},
    ],
)  # fmt: skip
def test_pipelines_that_stock_accepts(changes):
    assert accepts(**changes)


RUN = {
    "batch": (
        {"world_size": 3},
        [
            "--global-batch-size 16",
            "6 = --micro-batch-size 2 x data-parallel size 3 (3 processes)",
            "12 or 18",
        ],
    ),
    "batch with a decrease": (
        {"world_size": 16, "decrease_batch_size_if_needed": True, "eval_global_batch_size": 32},
        ["--global-batch-size 16 is not a multiple of 32", "Set --global-batch-size to 32"],
    ),
    "micro batch 0": ({"micro_batch_size": 0}, ["--micro-batch-size 0", "at least 1"]),
    "global batch 0": ({"global_batch_size": 0}, ["--global-batch-size 0", "at least 1"]),
    "batch schedule": (
        {"step_batch_size_schedule": "0:16"},
        ["--step-batch-size-schedule and --global-batch-size", "keep one"],
    ),
    "evaluation batch": (
        {"eval_global_batch_size": 9},
        ["evaluation batch of 9", "2 = evaluation", "Set --eval-global-batch-size to 8 or 10"],
    ),
    "evaluation micro batch": (
        {"eval_micro_batch_size": 3},
        ["evaluation batch of 16", "micro-batch-size 3", "15 or 18"],
    ),
    "evaluation batch that is not decreased": (
        {"world_size": 3, "decrease_batch_size_if_needed": True},
        ["evaluation batch of 16", "Set --eval-global-batch-size to 12 or 18"],
    ),
    "positions": (
        {"max_position_embeddings": 16},
        ["--max-position-embeddings 16 is below the sequence length 32", "--seq-length to 16 or less"],
    ),
    "save interval": ({"save": "ckpt"}, ["--save ckpt needs --save-interval N"]),
    "two lengths": ({"train_samples": 100}, ["--train-iters 10 and --train-samples 100", "keep one"]),
    "min lr": ({"min_lr": 1e-2}, ["--min-lr 0.01 is above --lr 0.001"]),
    "warm-up": (
        {"lr_warmup_iters": 10},
        ["--lr-warmup-iters 10 does not end before --train-iters 10", "below 10"],
    ),
    "warm-up against decay": (
        {"lr_warmup_iters": 5, "lr_decay_iters": 4},
        ["--lr-warmup-iters 5 does not end before --lr-decay-iters 4"],
    ),
    "warm-up in samples": (
        {"train_iters": None, "train_samples": 100, "lr_warmup_samples": 200},
        ["--lr-warmup-samples 200 does not end before --train-samples 100"],
    ),
    "warm-up fraction": ({"lr_warmup_fraction": 1.0}, ["--lr-warmup-fraction 1", "below 1"]),
    "dumped step": (
        {"ext_dump_grads": "grads", "ext_dump_grads_step": 11},
        ["--ext-dump-grads-step 11 is no step of this run", "1 to 10 (--train-iters)"],
    ),
    "dumped step 0": (
        {"ext_dump_grads": "grads", "ext_dump_grads_step": 0, "train_iters": None, "train_samples": 9},
        ["--ext-dump-grads-step 0", "steps count from 1. Set it within."],
    ),
}


@pytest.mark.parametrize(("changes", "parts"), RUN.values(), ids=RUN)
def test_run(changes, parts):
    text = only(**changes)
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize(
    "changes",
    [
        {"global_batch_size": None, "world_size": 3},
        {"world_size": 3, "decrease_batch_size_if_needed": True, "eval_global_batch_size": 12},
        {"step_batch_size_schedule": "0:16", "global_batch_size": None},
        {"save": "ckpt", "save_interval": 5},
        {"lr_warmup_fraction": 0.1},
        {"lr_warmup_iters": 10, "skip_train": True},
        {"ext_dump_grads": None, "ext_dump_grads_step": 99},
        {"ext_dump_grads": "grads", "ext_dump_grads_step": 10},
        {"seq_length": None, "encoder_seq_length": 32},
        {"num_layers": None, "encoder_num_layers": 8},
        {"num_layers": None, "hybrid_layer_pattern": "M*-"},
    ],
)
def test_runs_that_stock_accepts(changes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert accepts(**changes)


def test_required_options_are_listed_together():
    found = rules.run(nothing_given(), rules.base_rules())
    assert found[0].startswith(
        "Required options are missing: --num-layers, --seq-length, --hidden-size, --num-attention-heads, "
        "--max-position-embeddings, --micro-batch-size, --train-iters (or --train-samples), --lr. "
    )
    assert "--ext-config FILE.yaml" in found[0]
    assert [text.partition(".")[0] for text in found[1:]] == [
        "No data is given",
        "--tokenizer-type is not given",
    ]


def test_learning_rate_is_required_for_training():
    assert "missing: --lr." in only(lr=None)


def test_script_that_does_not_train_needs_no_data_or_length():
    serving = {"train_iters": None, "lr": None, "mock_data": False}
    assert accepts(**serving)
    assert "--train-iters" in only(train_iters=None)


def test_checkpoint_may_hold_the_required_options():
    assert rules.run(nothing_given(use_checkpoint_args=True), rules.base_rules()) == []


def test_all_problems_are_found_at_once():
    found = rules.run(gpt(world_size=3, max_position_embeddings=8, hidden_size=66), rules.base_rules())
    assert [text.split()[0] for text in found] == [
        "--hidden-size",
        "--global-batch-size",
        "--max-position-embeddings",
    ]


def test_script_defaults_stand_where_nothing_is_given():
    args = gpt(tokenizer_type=None)
    assert len(rules.run(args, rules.base_rules())) == 1
    assert rules.run(args, rules.base_rules(), {"tokenizer_type": "NullTokenizer"}) == []
    assert args.tokenizer_type is None, "the caller's arguments must stay as they are"
    assert "--hidden-size 66" in rules.run(gpt(hidden_size=66), rules.base_rules(), {"hidden_size": 64})[0]


def test_no_rule_runs_under_yaml_cfg():
    args = argparse.Namespace(yaml_cfg="job.yaml", model_parallel=None)
    assert rules.run(args, rules.base_rules()) == []
    assert rules.cpu_problems(args, set()) == []


def test_same_text_is_reported_once():
    assert rules.run(gpt(), [lambda args: "same", lambda args: "same", lambda args: None]) == ["same"]


def test_explicit_flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", "--uno", type=int, default=1)
    parser.add_argument("--no-two", dest="two", action="store_false")
    parser.add_argument("--three", nargs="+")
    argv = ["--uno=1", "--three", "a", "one", "--unknown", "--no-two"]
    assert rules.explicit_flags(argv, parser) == {"one", "two", "three"}
    assert rules.explicit_flags([], parser) == set()
