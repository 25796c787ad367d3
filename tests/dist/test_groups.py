"""The group registry on gloo ranks: sharing, creation, names, messages, destruction."""

import datetime
import re

import pytest
import torch
import torch.distributed as dist

from megatron_ext import groups, patching, traffic
from megatron_ext.groups import GroupRegistry, name_of, require_equal
from megatron_ext.layout import Grid, megatron_grid, within
from tests.ranks import ranks

PAIRS = [(0, 1), (2, 3)]


def rank_of(group):
    return dist.get_process_group_ranks(group)


def count_of_groups():
    return len(dist.distributed_c10d._world.pg_map)


@ranks(4)
def test_megatrons_groups_are_shared_by_rank_set():
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(2, 2)
    grid = megatron_grid(4, tp=2, pp=2)
    before = count_of_groups()
    registry = GroupRegistry()
    assert registry.get("vocab", grid.groups("tp", "pp")) is parallel_state.get_model_parallel_group()
    assert registry.get("cube-x", grid.groups("tp")) is parallel_state.get_tensor_model_parallel_group()
    assert registry.get("ring", grid.groups("pp")) is parallel_state.get_pipeline_model_parallel_group()
    assert count_of_groups() == before
    assert name_of(registry.get("vocab", grid.groups("tp", "pp"))) == "mp"
    assert groups.describe()["vocab"] == [0, 1, 2, 3]
    assert registry.describe() == {
        "vocab": [0, 1, 2, 3],
        "cube-x": list(grid.group_of(dist.get_rank(), "tp")),
        "ring": list(grid.group_of(dist.get_rank(), "pp")),
    }


@ranks(4)
def test_new_groups_work_and_are_named():
    registry = GroupRegistry()
    group = registry.get("teams", PAIRS)
    assert rank_of(group) == list(PAIRS[dist.get_rank() // 2])
    assert name_of(group) == "teams"
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=group)
    assert total.item() == sum(PAIRS[dist.get_rank() // 2])
    assert registry.get("teams", PAIRS) is group
    assert registry.get("same ranks", PAIRS) is group
    assert groups.describe() == {"teams": rank_of(group), "same ranks": rank_of(group)}


@ranks(4)
def test_a_communicator_name_gives_a_communicator():
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(2, 1)
    registry = GroupRegistry()
    tensor = parallel_state.get_tensor_model_parallel_group()
    shared = registry.get("cube", PAIRS)
    weights = registry.get("cube-weights", PAIRS, communicator="weights")
    stats = registry.get("cube-stats", PAIRS, communicator="stats")
    assert rank_of(shared) == rank_of(weights) == rank_of(stats) == rank_of(tensor)
    assert len({shared, weights, stats}) == 3
    assert name_of(weights) == "cube-weights"
    assert registry.get("cube-weights-2", PAIRS, communicator="weights") is weights
    # A communicator of one's own is nobody else's, in this registry or another.
    assert GroupRegistry().get("other", PAIRS) is shared


@ranks(4)
def test_dedicated_groups_are_not_lent_out():
    registry = GroupRegistry()
    own = registry.get("overlap", PAIRS, communicator="overlap")
    assert registry.get("plain", PAIRS) is not own
    assert GroupRegistry().get("plain elsewhere", PAIRS) is registry.get("plain", PAIRS)


@ranks(4)
def test_sharing_needs_every_rank():
    """Ranks 0 and 1 have a group of theirs, 2 and 3 do not: all create."""
    half = dist.new_group([0, 1], group_desc="half")
    group = GroupRegistry().get("teams", PAIRS)
    assert group is not half
    assert name_of(group) == "teams"


@ranks(4)
def test_the_world_group_is_shared_last():
    from megatron.core import parallel_state

    everyone = [tuple(range(4))]
    assert GroupRegistry().get("all", everyone) is dist.group.WORLD
    parallel_state.initialize_model_parallel(4, 1)
    tensor = {parallel_state.get_tensor_model_parallel_group(), parallel_state.get_model_parallel_group()}
    assert GroupRegistry().get("all", everyone) in tensor


@ranks(4)
def test_ranks_in_no_list_get_none():
    registry = GroupRegistry()
    group = registry.get("ends", [(0, 3)])
    assert (group is None) == (dist.get_rank() in (1, 2))
    assert registry.describe() == ({"ends": [0, 3]} if group else {})
    assert registry.get("ends", [(0, 3)]) is group
    registry.destroy()


@ranks(4)
def test_sub_groups_of_combined_axes():
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(1, 1, context_parallel_size=2)
    grid = megatron_grid(4, cp=2)
    places = Grid(member=2, group=2)
    registry = GroupRegistry()
    inside = registry.get("inside", within(grid.groups("cp", "dp"), places.groups("member")))
    across = registry.get("across", within(grid.groups("cp", "dp"), places.groups("group")))
    assert inside is parallel_state.get_context_parallel_group()
    assert across is parallel_state.get_data_parallel_group()


@ranks(2)
def test_backend_and_timeout_reach_torch():
    registry = GroupRegistry()
    everyone = [(0, 1)]
    assert registry.get("default backend", everyone) is dist.group.WORLD
    assert registry.get("gloo", everyone, backend="gloo") is dist.group.WORLD
    slow = registry.get("slow", everyone, communicator="slow", timeout=datetime.timedelta(seconds=77))
    assert slow._get_backend(torch.device("cpu")).options._timeout == datetime.timedelta(seconds=77)
    with pytest.raises(ValueError, match="'slow' exists with other ranks, communicator or backend"):
        registry.get("slow", everyone, communicator="slow", backend="gloo")
    for settings in ({"timeout": datetime.timedelta(seconds=1)}, {"pg_options": object()}):
        with pytest.raises(ValueError, match="name one of the feature's own, such as communicator='mine'"):
            registry.get("mine", everyone, **settings)


@ranks(2)
def test_options_reach_torch(monkeypatch):
    """gloo ignores options, so what torch is asked for is what can be seen."""
    asked = []
    new_group = dist.new_group

    def spy(*args, pg_options=None, **kwargs):
        asked.append(pg_options)
        return new_group(*args, **kwargs)

    monkeypatch.setattr(dist, "new_group", spy)
    GroupRegistry().get("special", [(0,), (1,)], communicator="special", pg_options="options")
    assert asked == ["options", "options"]


@ranks(2)
def test_groups_are_warm_and_setting_up_is_not_stock_traffic():
    registry = GroupRegistry()
    with traffic.count_stock():
        registry.get("pair", [(0, 1)], communicator="pair")
        assert {key[0] for key in traffic.ledger().totals()} == {"groups"}
        assert traffic.ledger().totals()[("groups", "all_reduce", "pair")] == (4, 1)
        traffic.ledger().drain()
        registry.get("pair", [(0, 1)], communicator="pair")
        registry.get("pair again", [(0, 1)], communicator="pair")
        assert traffic.ledger().totals() == {}


@ranks(3)
def test_disagreement_is_an_error_on_every_rank():
    registry = GroupRegistry()
    name = "left" if dist.get_rank() == 0 else "right"
    with pytest.raises(
        RuntimeError, match="ranks ask for different process groups at the same time"
    ) as error:
        registry.get(name, [(0, 1, 2)], communicator="own")
    assert "'left': 1 rank lists like [0, 1, 2], communicator 'own'" in str(error.value)
    assert "'right': 1 rank lists" in str(error.value)
    assert "All ranks must ask for the same groups in the same order" in str(error.value)
    lists = [(0, 1), (2,)] if dist.get_rank() == 0 else [(0,), (1, 2)]
    with pytest.raises(RuntimeError, match=re.escape("like [0] (digest")):
        registry.get("lists", lists)
    assert registry.describe() == {}


@ranks(3)
def test_values_that_differ_stop_every_rank():
    require_equal("the job", {"a": 1, "b": "x"})
    with pytest.raises(RuntimeError) as error:
        require_equal("The job", {"a": 1, "b": "y" if dist.get_rank() == 1 else "x"})
    assert str(error.value) == (
        "The job is not the same on all ranks, so nothing was trained:\n  b: x on ranks [0, 2], y on ranks [1]"
    )


@ranks(2)
def test_every_message_about_bad_requests():
    registry = GroupRegistry()
    registry.get("taken", [(0, 1)])
    for name, lists, message in (
        ("taken", [(0,), (1,)], "the group 'taken' exists with other ranks, communicator or backend (1 rank"),
        ("", [(0, 1)], "a group needs a name: give it that of its feature"),
        ("tp", [(0, 1)], "the group name 'tp' is Megatron's: put the feature's name in front"),
        ("world", [(0, 1)], "the group name 'world' is Megatron's"),
        ("x", [], "group 'x' has no rank list: list ranks to group"),
        ("x", [(0, 1), ()], "group 'x' has an empty rank list"),
        ("x", [(1, 0)], "the rank list [1, 0] is not sorted or names a rank twice; torch would sort it"),
        ("x", [(0, 0)], "the rank list [0, 0] is not sorted or names a rank twice"),
        ("x", [(0, 2)], "the rank list [0, 2] leaves the world of 2 ranks: use ranks 0 to 1"),
        ("x", [(-1, 0)], "the rank list [-1, 0] leaves the world of 2 ranks"),
        (
            "x",
            [(0, 1), (1,)],
            "the rank list [1] shares rank 1 with another: ask for two groups under two names",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            registry.get(name, lists)
    assert list(registry.describe()) == ["taken"]


@ranks(4)
def test_destroy_takes_our_groups_and_leaves_megatrons():
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(2, 1)
    before = count_of_groups()
    timeouts = list(parallel_state._global_process_group_list)
    registry = GroupRegistry()
    shared = registry.get("shared", PAIRS)
    own = registry.get("own", PAIRS, communicator="own")
    assert count_of_groups() == before + 1
    assert own in parallel_state._global_process_group_list
    registry.destroy()
    registry.destroy()
    assert count_of_groups() == before
    assert parallel_state._global_process_group_list == timeouts
    assert registry.describe() == {}
    dist.all_reduce(torch.ones(1), group=shared)
    again = registry.get("own", PAIRS, communicator="own")
    assert again is not own
    dist.all_reduce(torch.ones(1), group=again)


@ranks(4)
def test_our_groups_die_with_megatrons():
    from megatron.core import parallel_state

    with patching.apply(groups.catalogue(), contract=None, log=lambda line: None):
        parallel_state.initialize_model_parallel(2, 1)
        registry = GroupRegistry()
        own = registry.get("own", PAIRS, communicator="own")
        parallel_state.destroy_model_parallel()
        assert own not in dist.distributed_c10d._world.pg_map
        assert registry.describe() == {}
        assert not parallel_state.model_parallel_is_initialized()
        parallel_state.initialize_model_parallel(1, 2)
        assert registry.get("own", [(0, 2), (1, 3)], communicator="own") is not own
        parallel_state.destroy_model_parallel()


@ranks(2)
def test_a_registry_outlives_its_world(tmp_path):
    registry = GroupRegistry()
    old = registry.get("pair", [(0, 1)], communicator="pair")
    rank = dist.get_rank()
    dist.destroy_process_group()
    assert groups.describe() == {"pair": [0, 1]}
    store = dist.FileStore(str(tmp_path / "second world"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    new = registry.get("pair", [(0, 1)], communicator="pair")
    assert new is not old
    dist.all_reduce(torch.ones(1), group=new)


@ranks(4)
def test_all_of_megatrons_groups_have_short_names():
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        1, 1, context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2]
    )
    described = groups.describe()
    assert {"tp", "pp", "mp", "dp", "dp-cp", "cp", "cp-l0", "cp-l1", "embd", "dp-gloo"} <= set(described)
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in described), described
    assert "world" not in described
    parallel_state.destroy_model_parallel()


@ranks(4)
def test_names_of_partial_optimizer_and_expert_groups():
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        1, 1, expert_model_parallel_size=2, num_distributed_optimizer_instances=2
    )
    parallel_state.create_all_gather_groups(for_expert_parallelism=True)
    r = dist.get_rank()
    described = groups.describe()
    assert {"intra-dp-cp", "intra-dist-opt", "dp-cp-ag", "expt-dp-ag", "intra-dp-cp-gloo"} <= set(described)
    assert described["inter-dist-opt"] == [r % 2, r % 2 + 2]
    assert described["intra-expt-dp"] == [r]
    assert described["ep"] == [r // 2 * 2, r // 2 * 2 + 1]
    assert name_of(parallel_state.get_inter_distributed_optimizer_instance_group()) == "inter-dist-opt"
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in described), described
    parallel_state.destroy_model_parallel()


@ranks(4)
def test_groups_of_one_name_are_told_apart():
    dist.new_group([0, 1], group_desc="mesh")
    dist.new_group([0, 1, 2], group_desc="mesh")
    dist.new_group([0, 3])
    expected = {
        0: {"mesh": [0, 1], "mesh#2": [0, 1, 2], "ranks-0-3": [0, 3]},
        1: {"mesh": [0, 1], "mesh#2": [0, 1, 2]},
        2: {"mesh": [0, 1, 2]},
        3: {"ranks-0-3": [0, 3]},
    }
    assert groups.describe() == expected[dist.get_rank()]
    assert name_of(None) == name_of(dist.group.WORLD) == "world"
