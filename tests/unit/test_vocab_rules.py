"""Every rule of vocabulary parallelism, with its message."""

import math

import pytest

from megatron_ext.schedules.costs import Costs
from megatron_ext.vocab.config import VocabConfig
from megatron_ext.vocab.rules import RULES, flags_need_the_mode
from tests.unit.stock_args import Job

# Options that only these rules read.
OTHERS = {
    "defer_embedding_wgrad_compute": False,
    "init_model_with_meta_device": False,
    "log_straggler": False,
    "logits_save_dir": None,
    "make_vocab_size_divisible_by": 128,
}


# Vocabulary parallelism on 4 stages.
JOB = Job(
    RULES,
    {"pipeline_model_parallel_size": 4, "world_size": 4},
    vars(VocabConfig(vocab_parallel="vocab-2")) | OTHERS,
)
arguments, problems, only = JOB.arguments, JOB.problems, JOB.only


@pytest.mark.parametrize("mode", ["naive", "vocab-1", "vocab-2", "interlaced"])
def test_a_usual_job(mode):
    assert problems(vocab_parallel=mode) == []


def test_all_problems_at_once():
    found = problems(sft=True, vocab_chunk_size=0, init_model_with_meta_device=True)
    assert [text.split()[0] for text in found] == [
        "--init-model-with-meta-device",
        "--sft",
        "--vocab-chunk-size",
    ]


def test_context_parallel_with_local_attention():
    assert only(context_parallel_size=2, transformer_impl="local") == (
        "--vocab-parallel vocab-2 with --context-parallel-size 2: --transformer-impl local has no "
        "context-parallel attention. Use --transformer-impl transformer_engine or --cp-comm-type wallfacer, "
        "or --context-parallel-size 1."
    )
    assert problems(context_parallel_size=2, transformer_impl="transformer_engine") == []
    assert problems(context_parallel_size=1, transformer_impl="local") == []


def test_deferred_embedding_gradients():
    assert only(defer_embedding_wgrad_compute=True, vocab_parallel="vocab-1") == (
        "--defer-embedding-wgrad-compute moves the output layer's weight gradient to the end of the step; "
        "--vocab-parallel vocab-1 has a pass of its own for it (T). Remove --defer-embedding-wgrad-compute."
    )


def test_meta_device():
    assert only(init_model_with_meta_device=True) == (
        "--init-model-with-meta-device builds weights without values, but --vocab-parallel vocab-2 shares "
        "out the values that stock initialises. Remove it."
    )


@pytest.mark.parametrize(("option", "flag"), [("sft", "--sft")])
def test_microbatches_of_different_lengths(option, flag):
    assert only(**{option: True}) == (
        f"{flag} gives microbatches of different lengths, but --vocab-parallel vocab-2 needs one shape "
        f"[micro-batch-size, seq-length] on all stages. Remove {flag}."
    )


def test_too_few_rows():
    assert only(vocab_size=3, make_vocab_size_divisible_by=1) == (
        "--vocab-size 3 is 3 rows with padding, too few for 1 x 4 ranks. Raise "
        "--make-vocab-size-divisible-by to at least 4, or drop --vocab-parallel."
    )
    assert "is 6 rows with padding, too few for 2 x 4 ranks" in only(
        vocab_size=5, make_vocab_size_divisible_by=1, tensor_model_parallel_size=2, world_size=8
    )


@pytest.mark.parametrize(
    ("vocabulary", "divisor", "tp"), [(3, 4, 1), (4, 1, 1), (1, 4, 2), (8, 1, 2), (256, 128, 2)]
)
def test_enough_rows(vocabulary, divisor, tp):
    assert (
        problems(
            vocab_size=vocabulary,
            make_vocab_size_divisible_by=divisor,
            tensor_model_parallel_size=tp,
            world_size=4 * tp,
        )
        == []
    )


def test_advice_for_too_few_rows_works():
    """What the message says to set is accepted."""
    for vocabulary, tp in ((1, 1), (3, 1), (5, 2)):
        sizes = {"vocab_size": vocabulary, "tensor_model_parallel_size": tp, "world_size": 4 * tp}
        assert len(problems(make_vocab_size_divisible_by=1, **sizes)) == 1
        assert problems(make_vocab_size_divisible_by=4, **sizes) == []


def test_rows_that_cannot_be_judged_yet():
    """The tokenizer says how large the vocabulary is; sizes that are wrong have rules of their own."""
    assert problems(vocab_size=None) == []
    assert problems(vocab_size=3, make_vocab_size_divisible_by=0) == []


@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, math.nan])
def test_label_smoothing(value):
    assert only(vocab_label_smoothing=value) == (
        f"--vocab-label-smoothing is {value}: it must be at least 0 and below 1."
    )


@pytest.mark.parametrize("value", [-1e-4, math.nan, math.inf])
def test_z_loss(value):
    assert only(vocab_z_loss=value) == f"--vocab-z-loss is {value}: it must be finite and not negative."


def test_loss_terms_in_range():
    assert problems(vocab_label_smoothing=0.1, vocab_z_loss=1e-4) == []
    assert problems(vocab_label_smoothing=0.0, vocab_z_loss=0.0) == []


@pytest.mark.parametrize("value", [0, -8])
def test_chunk(value):
    assert only(vocab_chunk_size=value) == f"--vocab-chunk-size is {value}: use at least 1 row, such as 8192."
    assert problems(vocab_chunk_size=1) == []


def test_costs_file_that_is_not_there(tmp_path):
    path = tmp_path / "costs.json"
    assert only(vocab_costs=str(path)) == (
        f"--vocab-costs {path}: there is no such file. `megatron-ext trace --measured DIR` writes costs.json "
        "from a run with --ext-trace DIR."
    )
    assert "there is no such file" in only(vocab_costs=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is no JSON: "),
        ('{"forward": "fast"}', "forward must be a number, or a list with one number per rank"),
        (
            Costs(forward=(1.0, 1.0)).to_json(),
            "forward has 2 values, but there are 4 pipeline ranks: give one number per rank, or one for all",
        ),
        (Costs(comm={"C1": -1.0}).to_json(), "comm of C1 is -1.0: a time is finite and not negative"),
    ],
)
def test_costs_file_that_does_not_fit(tmp_path, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    assert only(vocab_costs=str(path)).startswith(f"--vocab-costs {path}: {message}")


def test_costs_file_that_is_no_text(tmp_path):
    path = tmp_path / "costs.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert only(vocab_costs=str(path)).startswith(f"--vocab-costs {path}: ")


def test_costs_file_that_fits(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(Costs(forward=(1.0,) * 4, backward=2.5).to_json())
    assert problems(vocab_costs=str(path)) == []


def test_flags_without_the_mode_are_refused():
    found = flags_need_the_mode(arguments(vocab_parallel="off", vocab_save="none", vocab_z_loss=1e-4))
    assert found == (
        "--vocab-save and --vocab-z-loss given, but --vocab-parallel is off, so nothing would come of it. "
        "Add --vocab-parallel vocab-2, or remove the rest."
    )
    assert flags_need_the_mode(arguments(vocab_parallel="off")) is None
    assert flags_need_the_mode(arguments(vocab_save="none")) is None


def test_other_users_of_the_output_layer():
    found = only(logits_save_dir="d", log_straggler=True)
    assert found.startswith("--logits-save-dir reads logits from the output layer")
    assert "--log-straggler times forward_step" in found
    assert found.endswith("with --vocab-parallel vocab-2. Remove --logits-save-dir and --log-straggler.")


def test_weight_shards():
    assert only(tensor_parallel_num_weight_shards=4, tensor_model_parallel_size=2, world_size=8) == (
        "--tensor-parallel-num-weight-shards 4 cuts weights that --vocab-parallel vocab-2 cuts already. "
        "Set it to 2 or remove it."
    )
    assert problems(tensor_parallel_num_weight_shards=2, tensor_model_parallel_size=2, world_size=8) == []
