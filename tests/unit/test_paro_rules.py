"""Every rule of PaRO with its message, and the process groups that it makes."""

import itertools

import pytest

from megatron_ext import features
from megatron_ext.paro import rules as paro
from megatron_ext.paro.config import ParoConfig
from megatron_ext.paro.groups import group_size, paro_groups, rank_lists, statistics_groups
from megatron_ext.paro.install import announcement, paro_agreement
from megatron_ext.paro.rules import RULES, flags_need_the_strategy
from megatron_ext.paro.strategy import NAMES, Level, why_not
from tests.unit.stock_args import Job

REFUSED, READ_BETWEEN = paro._REFUSED, paro._READ_BETWEEN
# Options that only these rules read.
OTHERS = {
    **dict.fromkeys([*REFUSED, *READ_BETWEEN], None),
    "ckpt_format": "torch_dist",
    "optimizer": "adam",
    "overlap_param_gather": False,
    "use_tp_pp_dp_mapping": False,
    "vocab_parallel": "off",
}
WHOLE = "reads whole ones between steps"


# PaRO on 8 ranks in groups of 4.
JOB = Job(
    RULES,
    {"world_size": 8},
    vars(ParoConfig(paro_strategy="IIG", paro_group_size=4)) | OTHERS,
)
arguments, problems, only = JOB.arguments, JOB.problems, JOB.only


# --- rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [*NAMES, "auto"])
def test_usual_jobs(strategy):
    assert problems(paro_strategy=strategy) == []


def test_all_problems_at_once():
    found = problems(paro_strategy="GGG", paro_group_size=3, log_params_norm=True, ckpt_format="torch")
    assert [text.split()[0] for text in found] == ["--paro-group-size", "--paro-strategy", "--ckpt-format"]


@pytest.mark.parametrize("strategy", ["GNI", "NN", "iig", "NIGG", "", "zero3"])
def test_invalid_strategies(strategy):
    assert only(paro_strategy=strategy) == f"--paro-strategy {strategy}: {why_not(strategy)}."
    assert why_not(strategy)


@pytest.mark.parametrize("members", [3, 0, -2, 16])
def test_group_size(members):
    assert only(paro_group_size=members) == (
        f"--paro-group-size {members}: 8 data-parallel ranks (data times context parallelism) cannot be cut "
        f"into groups of {members}. Set --paro-group-size to one of 1, 2, 4, 8."
    )


def test_group_size_beside_model_parallelism():
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "world_size": 16}
    assert "4 data-parallel ranks" in only(paro_group_size=8, **sizes)
    assert problems(paro_group_size=2, **sizes) == []


def test_group_size_by_node(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert problems(paro_group_size=None) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert only(paro_group_size=None) == (
        "--paro-strategy splits over the ranks of a node: with 3 ranks per node the groups do not have the "
        "same number of ranks on each node (2 on node 2 of the group [0, 1, 2, 3, 4, 5, 6, 7]; 3 on node 0 "
        "of the group [0, 1, 2, 3, 4, 5, 6, 7]): choose parallel sizes that divide 3, or start the same "
        "number of ranks on every node. Or set --paro-group-size."
    )


def test_groups_are_not_guessed(monkeypatch):
    """As with plain srun, which does not say how many ranks a node has."""
    for text, given in ((None, "is not set"), ("x", "is 'x'")):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if text:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        assert only(paro_group_size=None) == (
            f"--paro-strategy splits over the ranks of a node: LOCAL_WORLD_SIZE {given}, so the number of "
            "ranks on a node is not known. Start the ranks with torchrun, or export it (with srun: "
            "LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE). Or set --paro-group-size."
        )
    assert problems(paro_group_size=2) == []


def test_bandwidths_without_a_plan():
    assert only(paro_bandwidths="f.json") == (
        "--paro-bandwidths f.json is for --paro-strategy auto and does nothing with --paro-strategy IIG. "
        "Remove it, or set --paro-strategy auto."
    )
    assert problems(paro_bandwidths="f.json", paro_strategy="auto") == []


def test_the_groups_are_announced():
    groups = "8 data-parallel ranks = 2 groups x 4 members (by --paro-group-size)"
    assert announcement(arguments()) == [f"PaRO IIG: {groups}"]
    assert announcement(arguments(paro_strategy="NNG", paro_group_size=8))[1:] == []


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"paro_group_size": 8}, "with one group, --paro-strategy IIG is GGG. Set --paro-group-size"),
        ({"paro_group_size": 1}, "with groups of one rank, --paro-strategy IIG is NNG. Set"),
        (
            {"paro_strategy": "NIG", "paro_reshard_after_forward": "off"},
            "--paro-reshard-after-forward off changes nothing, since NIG does not split parameters.",
        ),
        (
            {"paro_strategy": "NNG", "paro_group_size": 8, "paro_inter_dtype": "int8"},
            "--paro-inter-dtype int8 changes nothing, since there is one group.",
        ),
    ],
)
def test_what_changes_nothing_is_said(changes, warning):
    (found,) = announcement(arguments(**changes))[1:]
    assert found.startswith(f"warning: {warning}")


def test_ranks_agree_on_what_runs(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = paro_agreement(arguments(paro_group_size=None, paro_bandwidths="f"))
    assert found == {
        "--paro-strategy": "IIG",
        "--paro-group-size": 2,
        "--paro-comm": "two-phase",
        "--paro-inter-dtype": "native",
        "--paro-reshard-after-forward": "on",
    }


def test_sizes_that_do_not_fit_have_rules_of_their_own():
    assert problems(tensor_model_parallel_size=3) == []


@pytest.mark.parametrize("name", list(REFUSED))
def test_other_owners(name):
    flag, why = REFUSED[name]
    assert only(**{name: True}) == f"--paro-strategy IIG: {flag} {why}. Remove what is named."


def test_several_other_owners():
    found = only(optimizer_cpu_offload=True, qk_clip=True)
    assert "--optimizer-cpu-offload moves" in found
    assert "; --qk-clip scales" in found


@pytest.mark.parametrize(("name", "flag"), READ_BETWEEN.items())
def test_readers_of_whole_parameters(name, flag):
    assert only(**{name: 1}) == (
        f"--paro-strategy IIG splits parameters, and {flag} {WHOLE}. Remove {flag}, or take a strategy that "
        "begins with N."
    )
    assert problems(**{name: 1}, paro_strategy="NIG") == []
    assert problems(**{name: 1}, paro_strategy="auto") == []


@pytest.mark.parametrize(("name", "flag"), READ_BETWEEN.items())
def test_readers_of_parameters_that_are_on_their_way(name, flag):
    ahead = {name: 1, "overlap_param_gather": True}
    assert only(**ahead, paro_strategy="NIG") == (
        "--overlap-param-gather with --paro-strategy NIG updates parameters while the next step starts, and "
        f"{flag} reads them before that. Remove one of them."
    )
    assert problems(**ahead, paro_strategy="NNN") == []
    assert WHOLE in only(**ahead, paro_strategy="IIG")


def test_weight_shards():
    assert only(tensor_parallel_num_weight_shards=4, tensor_model_parallel_size=2) == (
        "--tensor-parallel-num-weight-shards 4 splits weights over data-parallel ranks, as --paro-strategy "
        "IIG does. Set it to 2 or remove it."
    )
    assert problems(tensor_parallel_num_weight_shards=2, tensor_model_parallel_size=2) == []


@pytest.mark.parametrize("optimizer", ["muon", "dist_muon", "lion"])
def test_optimizers_of_matrices(optimizer):
    assert only(optimizer=optimizer) == (
        f"--optimizer {optimizer} looks at whole matrices, and --paro-strategy IIG steps on flat parts of "
        "them. Use --optimizer adam or sgd."
    )
    assert problems(optimizer="sgd") == []


@pytest.mark.parametrize("kind", ["torch", "fsdp_dtensor"])
def test_checkpoint_formats(kind):
    assert only(ckpt_format=kind) == (
        f"--ckpt-format {kind} has no place for states that are split by --paro-strategy IIG. Use "
        "--ckpt-format torch_dist."
    )


def test_vocabulary_parallelism():
    assert only(vocab_parallel="vocab-2") == (
        "--paro-strategy IIG splits parameters, and --vocab-parallel vocab-2 uses its weights all through a "
        "step. Take a strategy that begins with N, such as NIG or NNG."
    )
    assert problems(vocab_parallel="vocab-2", paro_strategy="NIG") == []


def test_int8_over_flat_collectives():
    assert only(paro_inter_dtype="int8", paro_comm="flat") == (
        "--paro-inter-dtype int8 quantises what crosses between groups, and --paro-comm flat has no hop of "
        "its own between groups. Use --paro-comm two-phase or ho-ring, or --paro-inter-dtype native."
    )
    for comm in ("two-phase", "ho-ring"):
        assert problems(paro_inter_dtype="int8", paro_comm=comm) == []


def test_flags_without_the_strategy():
    found = flags_need_the_strategy(arguments(paro_strategy="off", paro_comm="flat"))
    assert found == (
        "--paro-group-size, --paro-comm without --paro-strategy does nothing. Add --paro-strategy, or remove "
        "it."
    )
    assert flags_need_the_strategy(arguments(paro_strategy="off", paro_group_size=None)) is None
    assert flags_need_the_strategy(arguments()) is None


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances"),
        ({"num_experts": 4}, "--num-experts"),
        ({"hybrid_layer_pattern": "M*"}, "--hybrid-layer-pattern"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"cuda_graph_impl": "local"}, "CUDA graph options"),
    ],
)
def test_what_it_does_not_compose_with(changes, option):
    feature = next(each for each in features.FEATURES if each.name == "paro")
    (found,) = features.conflicts(arguments(**changes), [feature])
    assert found.startswith("PaRO is on together with ")
    assert f"Remove {option}" in found or f"Remove the {option}" in found


# --- groups ------------------------------------------------------------------------------------------------


def test_groups_of_data_parallel_ranks():
    lists = rank_lists(arguments())
    assert lists["members"] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert lists["groups"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert lists["flat"] == [tuple(range(8))]


def test_groups_beside_model_parallelism():
    args = arguments(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, world_size=16, paro_group_size=2
    )
    lists = rank_lists(args)
    assert lists["flat"] == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert lists["members"][:2] == [(0, 2), (4, 6)]
    assert lists["groups"][:2] == [(0, 4), (2, 6)]
    args.use_tp_pp_dp_mapping = True
    assert rank_lists(args)["flat"] == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]


def test_context_parallel_ranks_are_data_parallel():
    args = arguments(context_parallel_size=2, paro_group_size=4)
    assert rank_lists(args)["members"] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_group_size_is_that_of_a_node(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert group_size(arguments(paro_group_size=None)) == 4
    assert group_size(arguments(paro_group_size=None, tensor_model_parallel_size=2)) == 2
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert group_size(arguments(paro_group_size=None, world_size=1)) == 1
    assert group_size(arguments(paro_group_size=2)) == 2


@pytest.mark.parametrize("mapping", [False, True])
@pytest.mark.parametrize("level", list(Level))
def test_statistics_count_every_part_once(level, mapping):
    """Each group has all model-parallel ranks, of as many data-parallel ones as states are split over."""
    args = arguments(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        world_size=16,
        paro_group_size=2,
        use_tp_pp_dp_mapping=mapping,
    )
    found = statistics_groups(args, level)
    assert sorted(itertools.chain(*found)) == list(range(16))
    everyone = rank_lists(args)["flat"]
    size = {Level.N: 1, Level.I: 2, Level.G: 4}[level]
    for ranks in found:
        assert list(ranks) == sorted(ranks)
        places = [[line.index(rank) for rank in line if rank in ranks] for line in everyone]
        assert all(place == places[0] and len(place) == size for place in places)
        assert places[0] == list(range(places[0][0], places[0][0] + size))


def test_every_set_of_ranks_has_two_communicators():
    for comm, sets in (("two-phase", ("members", "groups")), ("flat", ("members", "groups", "flat"))):
        groups = paro_groups(arguments(paro_comm=comm))
        names = [f"paro-{name}{way}" for name in sets for way in ("", "-grads")]
        assert sorted(groups) == sorted([*names, "paro-stats"])
        assert len({groups[name].communicator for name in names}) == 2 * len(sets)
    assert groups["paro-stats"].rank_lists == [tuple(range(8))]
    assert paro_groups(arguments(paro_strategy="III"))["paro-stats"].rank_lists == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ]
