"""Every rule of WallFacer with its message, its flags, and the process groups that it makes."""

import argparse
import sys

import pytest

from megatron_ext import features, rules
from megatron_ext.rules_sizes import sequence_by_parallel_sizes
from megatron_ext.wallfacer import rules as wallfacer
from megatron_ext.wallfacer.config import WallfacerConfig
from megatron_ext.wallfacer.install import geometry_of, options_of, wallfacer_describe, wallfacer_groups
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.rules import RULES, flags_need_the_comm_type
from tests.unit.stock_args import Job

REFUSED = wallfacer._REFUSED
# Options that only these rules read.
OTHERS = {
    "bidirectional_attention": False,
    "recompute_method": None,
    "recompute_modules": None,
    "recompute_num_layers": None,
    "token_split": None,
    "hierarchical_context_parallel_sizes": None,
    **dict.fromkeys(REFUSED, None),
    "attention_dropout": 0.0,
    "cp_comm_type": ["wallfacer"],
    "use_tp_pp_dp_mapping": False,
    "window_size": None,
}


# WallFacer in bf16 on 8 context-parallel ranks.
JOB = Job(
    RULES,
    {"world_size": 8, "context_parallel_size": 8, "bf16": True},
    vars(WallfacerConfig(wallfacer_team_size="2")) | OTHERS,
)
arguments, problems, only = JOB.arguments, JOB.problems, JOB.only


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
        {"window_size": (128, 4), "bidirectional_attention": True},
        {"wallfacer_team_size": "auto", "wallfacer_memory": "2GB", "wallfacer_movement": "direct"},
        {"wallfacer_team_size": "auto", "wallfacer_keep": "team", "wallfacer_sum_dtype": "model"},
        {"wallfacer_keep": "team", "recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"cp_comm_type": ["wallfacer", "p2p"], "attention_backend": "flash"},
        {"attention_backend": "local"},
        {"attention_backend": "unfused", "distributed_backend": "gloo"},
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


def test_what_only_the_planner_reads():
    text = only(wallfacer_bandwidths="links.json")
    assert text.startswith("--wallfacer-bandwidths is for --wallfacer-team-size auto, and it is 2")
    text = only(wallfacer_bandwidths="links.json", wallfacer_memory="1GB")
    assert text.startswith("--wallfacer-bandwidths and --wallfacer-memory are for --wallfacer-team-size auto")


@pytest.mark.parametrize("size", ["much", "0GB", "12"])
def test_memory_is_a_size(size):
    text = only(wallfacer_team_size="auto", wallfacer_memory=size)
    assert text.startswith(f"--wallfacer-memory {size}: that is no size above zero. Write it as ")


# --- flags that would change nothing -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "flag", "why"),
    [
        ({"team": 1, "wallfacer_order": "pga"}, "order pga", "with C=1 and K=1 it places ranks as gpa does"),
        (
            {"team": 2, "bundle": 4, "wallfacer_backward": "queries"},
            "backward queries",
            "with C=2 and K=4 on 8 ranks nothing goes round",
        ),
        (
            {"team": 2, "bundle": 1, "wallfacer_movement": "direct"},
            "movement direct",
            "with K=1 keys start where they are",
        ),
        (
            {"team": 1, "wallfacer_keep": "team"},
            "keep team",
            "with C=1 and K=1 nothing is gathered that could be kept",
        ),
        (
            {"team": 1, "bundle": 2, "wallfacer_sum_dtype": "model"},
            "sum-dtype model",
            "with C=1 no outputs are sent to be summed",
        ),
        (
            {"bf16": False, "distributed_backend": "gloo", "wallfacer_sum_dtype": "model"},
            "sum-dtype model",
            "without --bf16 or --fp16 the model's type is fp32",
        ),
        (
            {"bf16": False, "distributed_backend": "gloo", "wallfacer_grad_dtype": "model"},
            "grad-dtype model",
            "without --bf16 or --fp16 the model's type is fp32",
        ),
    ],
)
def test_flags_without_effect(changes, flag, why):
    changes = dict(changes)
    if "team" in changes:
        changes |= {"wallfacer_team_size": str(changes.pop("team"))}
        changes |= {"wallfacer_kv_bundle": changes.pop("bundle", None)}
    assert only(**changes) == f"--wallfacer-{flag} changes nothing: {why}. Remove what is named."


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective"},
        {"recompute_activations": True},
    ],
)
@pytest.mark.parametrize("team", ["2", "auto"])
def test_kept_tensors_of_recomputed_layers(recompute, team):
    text = only(wallfacer_keep="team", wallfacer_team_size=team, **recompute)
    granularity = recompute.get("recompute_granularity", "selective")
    assert text.startswith(
        f"--wallfacer-keep team changes nothing: with --recompute-granularity {granularity} attention of all"
    )


def test_some_layers_recomputed():
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    assert problems(wallfacer_keep="team", num_layers=4, **block) == []


def test_options_of_other_attention():
    flash = type("AttnBackend", (), {"name": "flash"})()
    text = only(attention_backend=flash)
    assert text.startswith("--attention-backend flash changes nothing: it chooses among the kernels of Trans")
    assert text.endswith("Remove what is named. --wallfacer-kernel names a kernel of ours.")
    text = only(hierarchical_context_parallel_sizes=[2, 4])
    assert text.startswith("--hierarchical-context-parallel-sizes 2 4 changes nothing: it is for layers with")


# --- what only the machine knows ---------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of this capability, as far as torch says."""

    def make(capability, flash=True):
        import torch

        from megatron_ext import record
        from megatron_ext.wallfacer import kernels_cuda

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
        monkeypatch.setattr(record, "on_gpu", lambda: True)
        kernels_cuda._package_problem.cache_clear()

    yield make
    from megatron_ext.wallfacer import kernels_cuda

    kernels_cuda._package_problem.cache_clear()


@pytest.mark.parametrize("kernel", ["auto", "torch-flash"])
def test_old_gpus(gpu, kernel):
    gpu((7, 5))
    text = only(wallfacer_kernel=kernel)
    assert text.startswith(f"--wallfacer-kernel {kernel}: no attention kernel for torch.bfloat16")
    assert "torch-flash: it needs an Ampere GPU or a later one" in text
    assert "name the kernel 'reference'" in text
    assert problems(wallfacer_kernel="reference") == []
    gpu((8, 0))
    assert problems(wallfacer_kernel=kernel) == []


def test_torch_without_flash_attention(gpu):
    gpu((9, 0), flash=False)
    assert "torch-flash: this torch was built without it" in only(wallfacer_kernel="torch-flash")


def broken_package(folder, version="2.8.3", code="raise ImportError('undefined symbol: _ZN3c10')"):
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn" / "__init__.py").write_text(code + "\n")
    info = folder / f"flash_attn-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("package", "why"),
    [
        ({}, "the package flash-attn does not import (ImportError: undefined symbol: _ZN3c10)"),
        ({"version": "2.5.0"}, "flash-attn 2.5.0 is too old, 2.7 is needed"),
        ({"code": ""}, "the package flash-attn does not import (ModuleNotFoundError: "),
    ],
)
def test_a_package_that_cannot_be_used(gpu, tmp_path, monkeypatch, caplog, package, why):
    broken_package(tmp_path, **package)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    gpu((9, 0))
    assert why in only(wallfacer_kernel="flash-attn")
    assert f"flash-attn is installed and cannot be used: {why}" in caplog.text
    assert problems() == []  # torch's own is there
    sys.modules.pop("flash_attn", None)


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
        "movement": "relocate",
        "chosen_by": "flags",
    }
    chosen = argparse.Namespace(**vars(args), wallfacer_chosen_by="auto (links.json)")
    assert wallfacer_describe(args, chosen)["chosen_by"] == "auto (links.json)"
