"""Every rule of WallFacer with its message, its flags, and the process groups that it makes."""

import argparse

import pytest

from megatron_ext import features, rules
from megatron_ext.rules_sizes import sequence_by_parallel_sizes
from megatron_ext.wallfacer import rules as wallfacer
from megatron_ext.wallfacer.config import WallfacerConfig
from megatron_ext.wallfacer.install import geometry_of, options_of, wallfacer_describe, wallfacer_groups
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.rules import RULES, flags_need_the_comm_type
from tests.unit.stock_args import gpt

REFUSED = wallfacer._REFUSED
# Options that only these rules read.
OTHERS = {
    **dict.fromkeys(REFUSED, None),
    "attention_dropout": 0.0,
    "cp_comm_type": ["wallfacer"],
    "use_tp_pp_dp_mapping": False,
    "window_size": None,
}


def arguments(**changes):
    """A GPT job in bf16 with WallFacer on 8 context-parallel ranks, with some entries changed."""
    ours = vars(WallfacerConfig(wallfacer_team_size="2")) | OTHERS
    stock = {name: value for name, value in changes.items() if name not in ours}
    args = gpt(**({"world_size": 8, "context_parallel_size": 8, "bf16": True} | stock))
    for name, value in (ours | changes).items():
        setattr(args, name, value)
    return args


def problems(**changes):
    return rules.run(arguments(**changes), RULES)


def only(**changes):
    found = problems(**changes)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"wallfacer_team_size": "auto"},
        {"wallfacer_team_size": "1", "wallfacer_kv_bundle": 8},
        {"wallfacer_team_size": "auto", "wallfacer_kv_bundle": 4, "wallfacer_bandwidths": "links.json"},
        {"transformer_impl": "local"},
        {"bf16": False, "distributed_backend": "gloo", "wallfacer_kernel": "cpu-flash"},
        {"bf16": False, "wallfacer_kernel": "reference"},
        {"cp_comm_type": ["wallfacer", "p2p"]},
        {"window_size": (128, 0)},
        {"window_size": (128, -1)},
        {"group_query_attention": True, "num_query_groups": 4, "wallfacer_head_chunks": 4},
    ],
)
def test_usual_jobs(changes):
    assert problems(**changes) == []


def test_all_problems_at_once():
    found = problems(attention_dropout=0.1, wallfacer_team_size="3", qk_clip=True)
    assert [text.split()[0] for text in found] == [
        "--wallfacer-team-size",
        "--attention-dropout",
        "--cp-comm-type",
    ]


def test_one_rank():
    text = only(context_parallel_size=1, wallfacer_team_size="1")
    assert text.startswith("--cp-comm-type wallfacer with --context-parallel-size 1 does nothing")
    assert "Set --context-parallel-size to 2 or more" in text


@pytest.mark.parametrize("value", ["0", "-2", "two", "1.5", ""])
def test_team_size_is_a_number(value):
    assert only(wallfacer_team_size=value) == (
        f"--wallfacer-team-size {value} is no number of ranks: give 1 or more, or auto."
    )


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"wallfacer_team_size": "3"}, "--wallfacer-team-size 3 with --context-parallel-size 8: (bundle K"),
        ({"wallfacer_team_size": "4"}, "--wallfacer-team-size 4 with --context-parallel-size 8: (bundle K"),
        (
            {"wallfacer_team_size": "4", "wallfacer_kv_bundle": 4},
            "--wallfacer-team-size 4 and --wallfacer-kv-bundle 4 with --context-parallel-size 8:",
        ),
        (
            {"wallfacer_team_size": "auto", "wallfacer_kv_bundle": 3},
            "--wallfacer-kv-bundle 3 with --context-parallel-size 8: must divide 8.",
        ),
        ({"wallfacer_kv_bundle": 0}, "--wallfacer-team-size 2 and --wallfacer-kv-bundle 0 with"),
    ],
)
def test_teams_fit(changes, start):
    text = only(**changes)
    assert text.startswith(start)
    assert text.endswith(
        "must divide 8. C and K can be 1 and 1, 1 and 2, 1 and 4, 1 and 8, 2 and 1, 2 and 2, 2 and 4, 4 and "
        "1, 4 and 2, 8 and 1."
    )


def test_other_layers_need_te():
    text = only(transformer_impl="local", cp_comm_type=["wallfacer", "p2p"])
    assert "gives some layers p2p, which needs Transformer Engine" in text
    assert text.endswith("Give --cp-comm-type wallfacer alone.")


def test_dropout():
    text = only(attention_dropout=0.1)
    assert text.startswith("--attention-dropout 0.1: WallFacer's attention has no dropout")
    assert text.endswith("Set --attention-dropout 0 (stock's default is 0.1).")


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_want_other_attention(name):
    flag, why = REFUSED[name]
    text = only(**{name: True})
    assert f"{flag} {why}" in text
    assert text.endswith("Remove what is named.")


def test_layers_it_knows():
    assert "not of inference_optimized. Use one of the two" in only(transformer_impl="inference_optimized")


def test_fp32_on_gpus():
    text = only(bf16=False)
    assert "with fp32, where fused kernels compute in bf16 and fp16: add --bf16" in text
    assert "--wallfacer-kernel reference" in text


def test_large_heads_on_gpus():
    text = only(hidden_size=4096, kv_channels=512)
    assert "heads of 512, where theirs are at most 256" in text
    assert problems(hidden_size=4096, kv_channels=512, distributed_backend="gloo") == []


@pytest.mark.parametrize(
    ("kernel", "backend", "where"), [("cpu-flash", "nccl", "GPUs"), ("flash-attn", "gloo", "CPU")]
)
def test_kernel_of_another_device(kernel, backend, where):
    text = only(wallfacer_kernel=kernel, distributed_backend=backend)
    assert text.startswith(f"--wallfacer-kernel {kernel} does not run on {where}. Remove it")


@pytest.mark.parametrize(
    ("tensor", "chunks", "fitting"), [(1, 3, "1, 2, 4, 8"), (2, 8, "1, 2, 4"), (1, 0, "1, 2, 4, 8")]
)
def test_head_chunks(tensor, chunks, fitting):
    text = only(wallfacer_head_chunks=chunks, tensor_model_parallel_size=tensor, world_size=8 * tensor)
    assert text.startswith(f"--wallfacer-head-chunks {chunks}: the {8 // tensor} key heads")
    assert text.endswith(f"Set it to one of {fitting}.")


def test_window_looks_back():
    assert only(window_size=(128, 4)).endswith("a causal row sees no later keys. Set --window-size 128,0.")


def test_bandwidths_without_auto():
    assert "is for --wallfacer-team-size auto, and it is 2" in only(wallfacer_bandwidths="links.json")


def test_the_next_valid_sequence_length_is_named():
    text = sequence_by_parallel_sizes(arguments(seq_length=40))
    assert "it must be a multiple of 16" in text
    assert "48" in text.split("Set --seq-length to")[1]


def test_flags_without_the_comm_type():
    assert flags_need_the_comm_type(arguments()) is None
    text = flags_need_the_comm_type(arguments(cp_comm_type=["p2p"], wallfacer_kv_bundle=2))
    assert text.startswith("--wallfacer-team-size, --wallfacer-kv-bundle without --cp-comm-type wallfacer")
    assert flags_need_the_comm_type(arguments(cp_comm_type=["p2p"], wallfacer_team_size="auto")) is None
    assert flags_need_the_comm_type in rules.base_rules()


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("mla", {"multi_latent_attention": True}),
        ("graphs", {"cuda_graph_impl": "local"}),
    ],
)
def test_refused_with_stock_options(name, on):
    (feature,) = (f for f in features.FEATURES if f.name == "wallfacer")
    found = features.conflicts(arguments(**on), [feature])
    assert len(found) == 1
    assert feature.conflicts[name] in found[0]


# --- what follows from flags -------------------------------------------------------------------------------


def test_geometry():
    geometry = geometry_of(arguments())
    assert (geometry.size, geometry.team_size, geometry.bundle_size, geometry.order) == (8, 2, 2, "gpa")
    lean = geometry_of(arguments(wallfacer_kv_bundle=1, wallfacer_order="pga"))
    assert (lean.bundle_size, lean.order, lean.ring_length) == (1, "pga", 4)


def test_options():
    assert options_of(arguments()) == Options()
    args = arguments(wallfacer_keep="team", wallfacer_sum_dtype="model", wallfacer_backward="keys")
    assert options_of(args) == Options(keep="team", sum_type="model", backward="keys")


def test_groups_of_a_plain_ring():
    args = arguments(wallfacer_team_size="1", world_size=8, context_parallel_size=4)
    found = {name: group.rank_lists for name, group in wallfacer_groups(args).items()}
    contexts = [(0, 1, 2, 3), (4, 5, 6, 7)]
    names = ("wallfacer-ring", "wallfacer-ring-grads", "wallfacer-move-grads", "wallfacer-context")
    assert found == dict.fromkeys(names, contexts)


def test_groups_beside_tensor_and_pipeline_parallelism():
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 4}
    args = arguments(world_size=32, **sizes)
    found = wallfacer_groups(args)
    contexts = list(found["wallfacer-context"].rank_lists)
    assert len(contexts) == 8
    assert contexts[:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    teams = [tuple(ranks) for ranks in found["wallfacer-team"].rank_lists]
    assert teams[:4] == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert all(group.communicator == name for name, group in found.items() if name != "wallfacer-context")


def test_describe():
    args = arguments()
    assert wallfacer_describe(args, args) == {
        "ranks": 8,
        "team_size": 2,
        "kv_bundle": 2,
        "ring_length": 2,
        "order": "gpa",
        "backward": "auto",
        "chosen_by": "flags",
    }
    chosen = argparse.Namespace(**vars(args), wallfacer_chosen_by="auto (links.json)")
    assert wallfacer_describe(args, chosen)["chosen_by"] == "auto (links.json)"
