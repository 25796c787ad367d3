"""Every rule of 3-D linear layers with its message, and the process groups that they make."""

from argparse import Namespace

import pytest

from megatron_ext import features, rules
from megatron_ext.linear3d import rules as linear3d
from megatron_ext.linear3d.config import Linear3dConfig
from megatron_ext.linear3d.groups import GROUPS, linear3d_groups
from megatron_ext.linear3d.install import sum_of
from megatron_ext.linear3d.rules import RULES, flags_need_the_grid
from megatron_ext.vocab.config import VocabConfig
from tests.unit.stock_args import Job

OTHERS = {
    **dict.fromkeys(linear3d._REFUSED, None),
    "ckpt_format": "torch_dist",
    "optimizer": "adam",
    "gradient_accumulation_fusion": False,
    "transformer_impl": "local",
    "recompute_modules": None,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "add_bias_linear": True,
    "use_tp_pp_dp_mapping": False,
    "vocab_parallel": "off",
    "paro_strategy": "off",
    "make_vocab_size_divisible_by": 128,
    "untie_embeddings_and_output_weights": False,
} | {name: value for name, value in vars(VocabConfig()).items() if name != "vocab_parallel"}


# A grid of 2 x 2 x 2.
JOB = Job(
    RULES,
    {
        "world_size": 8,
        "tensor_model_parallel_size": 8,
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "micro_batch_size": 2,
    },
    vars(Linear3dConfig(linear_3d=["2", "2", "2"])) | OTHERS,
)
arguments, problems, only = JOB.arguments, JOB.problems, JOB.only


def grid(*sizes):
    return [str(size) for size in sizes]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 8, 1), (2, 4, 1), (1, 4, 2)])
def test_usual_jobs(sizes):
    assert problems(linear_3d=grid(*sizes)) == []
    assert problems(linear_3d=["auto"]) == []


@pytest.mark.parametrize(
    "value", [["2", "2"], ["2", "x", "2"], ["auto", "2"], ["0", "4", "2"], ["-2", "2", "2"]]
)
def test_values_that_are_no_grid(value):
    assert "give the lengths of three axes" in only(linear_3d=value)


def test_grid_and_tensor_parallel_size():
    text = only(tensor_model_parallel_size=4, world_size=4)
    assert "a grid of 8 ranks, but --tensor-model-parallel-size is 4" in text
    assert "Set --tensor-model-parallel-size 8, or a grid of 4 ranks, such as" in text


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"micro_batch_size": 3}, ("--micro-batch-size 3", "over i", "multiple of 2", "2 or 4")),
        (
            {"seq_length": 10, "linear_3d": grid(1, 4, 2)},
            ("--seq-length 10", "axes i 1, j 4, l 2", "multiple of 4", "8 or 12"),
        ),
        (
            {"group_query_attention": True, "num_query_groups": 4, "linear_3d": grid(1, 8, 1)},
            ("--num-query-groups 4", "whole key/value groups", "multiple of 8"),
        ),
        ({"num_attention_heads": 6, "kv_channels": 8}, ("--num-attention-heads 6", "of 4", "4 or 8")),
        ({"ffn_hidden_size": 255}, ("--ffn-hidden-size 255", "multiple of 4", "252 or 256")),
        ({"hidden_size": 66, "kv_channels": 8}, ("--hidden-size 66", "over l", "multiple of 4", "64 or 68")),
        (
            {"linear_3d": grid(8, 1, 1), "num_attention_heads": 2, "kv_channels": 3, "micro_batch_size": 8,
             "group_query_attention": True, "num_query_groups": 1},
            ("--kv-channels 3", "rows of the QKV weight", "multiple of"),
        ),
        (
            {"vocab_parallel": "vocab-2", "seq_length": 12, "linear_3d": grid(2, 2, 2)},
            ("--seq-length 12", "all ranks, for the vocabulary layers", "multiple of 8"),
        ),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_split(changes, parts):
    text = only(**changes)
    assert all(part in text for part in parts), text


def test_all_sizes_at_once():
    (text,) = problems(micro_batch_size=3, seq_length=31, ffn_hidden_size=255)
    assert all(flag in text for flag in ("--micro-batch-size 3", "--seq-length 31", "--ffn-hidden-size 255"))


def test_auto_needs_a_grid_that_fits():
    text = only(
        linear_3d=["auto"],
        micro_batch_size=1,
        seq_length=31,
        num_attention_heads=3,
        kv_channels=5,
        hidden_size=63,
    )
    assert "no grid of 8 ranks splits this model" in text
    assert "--seq-length 31" in text


def test_transformer_engine_is_refused():
    assert "know one tensor-parallel axis" in only(transformer_impl="transformer_engine")


def test_fused_gradients():
    assert "axis i of 2 ranks" in only(gradient_accumulation_fusion=True)
    assert problems(gradient_accumulation_fusion=True, linear_3d=grid(1, 4, 2)) == []


@pytest.mark.parametrize("name", linear3d._REFUSED)
def test_other_cuts(name):
    flag, why = linear3d._REFUSED[name]
    text = only(**{name: True})
    assert flag in text
    assert why in text


def test_optimizers_and_checkpoints():
    assert "along both dimensions" in only(optimizer="muon")
    assert "--ckpt-format torch " in only(ckpt_format="torch")


def test_recomputation():
    text = only(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
    assert "--recompute-modules core_attn mlp" in text
    assert problems(recompute_granularity="selective") == []


def test_other_owners_of_weights():
    assert "which axis i of --linear-3d 2 2 2 does" in only(tensor_parallel_num_weight_shards=16)
    assert "begins with N" in only(paro_strategy="IIG")
    assert problems(paro_strategy="NNG") == problems(paro_strategy="NIG") == []


def test_numbers_and_files():
    assert "give a number of layers" in only(linear_3d_keep_layers=-1)
    assert "there is no such file" in only(linear_3d_bandwidths="/nowhere/bandwidths.json")


def test_flags_without_the_grid():
    text = flags_need_the_grid(arguments(linear_3d=None, linear_3d_save="gathered", linear_3d_order="lji"))
    assert text.startswith("--linear-3d-order, --linear-3d-save without --linear-3d does nothing")
    assert flags_need_the_grid(arguments(linear_3d=None)) is None
    assert flags_need_the_grid(arguments(linear_3d_save="gathered")) is None


def test_conflicts():
    on = [next(f for f in features.FEATURES if f.name == "linear3d")]
    moe = features.conflicts(arguments(num_experts=4), on)
    assert any("Remove --num-experts" in text for text in moe)
    assert features.conflicts(arguments(), on) == []


def test_stock_rules_leave_heads_to_the_grid():
    """4 heads on 8 ranks: the grid cuts them over j and l alone, and stock's rule would refuse."""
    found = rules.run(arguments(num_attention_heads=4), [*rules.base_rules(), *RULES])
    assert not [text for text in found if "attention-heads" in text]
    assert problems(num_attention_heads=4) == []


def test_groups():
    args = arguments(world_size=16, pipeline_model_parallel_size=2)
    found = linear3d_groups(args)
    assert set(found) == {f"linear3d-{name}" for name in GROUPS}
    assert len({group.communicator for group in found.values()}) == len(found)
    assert list(found["linear3d-l"].rank_lists)[:2] == [(0, 1), (2, 3)]
    assert list(found["linear3d-jl"].rank_lists) == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
    ]
    assert list(found["linear3d-i"].rank_lists) == list(found["linear3d-i-grads"].rank_lists)


@pytest.mark.parametrize(
    ("asked", "bf16", "backend", "how"),
    [
        ("auto", False, "nccl", "native"),
        ("auto", True, "nccl", "ordered"),
        ("auto", False, "gloo", "ordered"),
        ("native", True, "gloo", "native"),
    ],
)
def test_how_sums_are_made(asked, bf16, backend, how):
    args = Namespace(bf16=bf16, fp16=False, distributed_backend=backend)
    assert sum_of(Namespace(linear_3d_sum=asked), args) == how
