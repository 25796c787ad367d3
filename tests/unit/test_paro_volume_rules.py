"""Bytes by the rules behind the tables: int8, kinds, flat rings, degenerate grids, accumulation."""

import pytest

from megatron_ext.paro.passes import UnitSize
from megatron_ext.paro.strategy import NAMES, STRATEGIES, Level, Strategy
from megatron_ext.paro.volume import COMMS, Wire, evaluation_bytes, step_bytes, totals
from tests.unit.test_paro_volume import FROZEN, TRAINED, M, each_comm, sums, volume

# --- quantised ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("comm", "gather", "reduce"), [("two-phase", "all_gather", "all_to_all"), ("ho-ring", "send", "send")]
)
def test_int8_between_groups(comm, gather, reduce):
    found = volume("IIG", [UnitSize(M, 2, 4)], 4, 2, 4, comm=comm, inter_dtype="int8")
    assert found[gather, "paro-groups"] == 133120
    assert found[reduce, "paro-groups-grads"] == 133120
    native = volume("IIG", [UnitSize(M, 2, 4)], 4, 2, 4, comm=comm)
    assert native[gather, "paro-groups"] + native[reduce, "paro-groups-grads"] == 786432
    assert {key: found[key] for key in found if "members" in key[1]} == {
        key: native[key] for key in native if "members" in key[1]
    }


def test_int8_counts_a_scale_for_the_last_short_block():
    unit = UnitSize(8 * 300, 2, 4)
    assert volume("NNG", [unit], 1, 2, 4, inter_dtype="int8")["all_to_all", "paro-groups-grads"] == 300 + 8


def test_int8_leaves_gathers_of_parameters_as_they_are():
    unit = UnitSize(M, 2, 4)
    found, native = (volume("GGG", [unit], 4, 2, 4, inter_dtype=dtype) for dtype in ("int8", "native"))
    assert found["all_gather", "paro-groups"] == native["all_gather", "paro-groups"]
    assert found["all_to_all", "paro-groups-grads"] == 4 * 133120


def test_int8_sums_that_all_groups_need_travel_twice():
    found = volume("III", [UnitSize(M, 2, 4)], 1, 2, 4, inter_dtype="int8")
    assert found["all_to_all", "paro-groups-grads"] == found["all_gather", "paro-groups-grads"] == 133120


# --- kinds and groups ---------------------------------------------------------------------------------------


def test_kinds_and_groups_of_two_phase_and_ho_ring():
    unit = UnitSize(80, 2, 4)
    share = {"members": 60, "groups": 10}  # elements sent in a pass of 2 groups x 4
    assert volume("NNI", [unit], 1, 2, 4) == {
        ("all_to_all", "paro-members-grads"): 4 * share["members"],
        ("all_to_all", "paro-groups-grads"): 4 * share["groups"],
        ("all_gather", "paro-groups-grads"): 4 * share["groups"],
        ("all_gather", "paro-members"): 2 * share["members"],
    }
    assert volume("GIG", [unit], 3, 2, 4, comm="ho-ring") == {
        ("all_gather", "paro-members"): 6 * 2 * share["members"],
        ("send", "paro-groups"): 6 * 2 * share["groups"],
        ("all_to_all", "paro-members-grads"): 3 * 4 * share["members"],
        ("send", "paro-groups-grads"): 4 * share["groups"],
    }


def test_nccl_sums_what_needs_no_wider_type():
    fp32, bf16 = UnitSize(80, 2, 4), UnitSize(80, 2, 2)
    for unit, kind in ((fp32, "reduce_scatter"), (bf16, "all_to_all")):
        found = volume("NNG", [unit], 1, 2, 4, backend="nccl")
        assert {key[0] for key in found if key[1].endswith("-grads")} == {kind}
    found = volume("NNG", [fp32], 1, 2, 4, backend="nccl", inter_dtype="int8")
    assert ("all_to_all", "paro-groups-grads") in found
    assert ("reduce_scatter", "paro-members-grads") in found
    assert ("send", "paro-flat-grads") in volume("NNG", [bf16], 1, 2, 4, backend="nccl", comm="flat")
    assert ("reduce_scatter", "paro-flat-grads") in volume(
        "NNG", [fp32], 1, 2, 4, backend="nccl", comm="flat"
    )


def test_flat():
    unit = UnitSize(80, 2, 4)
    pass_ = 70  # elements that a rank sends in a ring of 8
    assert volume("NNN", [unit], 1, 2, 4, comm="flat") == {
        ("send", "paro-flat-grads"): 4 * pass_,
        ("all_gather", "paro-flat-grads"): 4 * pass_,
    }
    assert volume("GGG", [unit], 5, 2, 4, comm="flat") == {
        ("all_gather", "paro-flat"): 2 * 10 * pass_,
        ("send", "paro-flat-grads"): 4 * 5 * pass_,
    }
    # What is split inside groups only is moved level by level.
    assert volume("NII", [unit], 5, 2, 4, comm="flat") == volume("NII", [unit], 5, 2, 4)
    assert volume("NNI", [unit], 1, 2, 4, comm="flat") == {
        ("send", "paro-flat-grads"): 4 * pass_,
        ("all_gather", "paro-groups-grads"): 4 * 10,
        ("all_gather", "paro-members"): 2 * 60,
    }


def test_a_flat_ring_leaves_each_group_over_one_link():
    n, unit = 8, UnitSize(80, 2, 4)
    wire = Wire(2, 4, comm="flat")
    found = totals(step_bytes(Strategy.parse("NNG"), [unit], wire, 1), wire)
    per_rank = (4 + 2) * 80 * (n - 1) // n
    assert found.between == per_rank
    assert found.inside * 4 + found.between == 4 * per_rank  # a group's four ranks
    alone = Wire(1, 8, comm="flat")
    found = totals(step_bytes(Strategy.parse("NNG"), [unit], alone, 1), alone)
    assert (found.between, found.inside) == (0, per_rank)


# --- rules --------------------------------------------------------------------------------------------------


def collapsed(name, letter):
    return name.replace("I", letter)


@each_comm
@pytest.mark.parametrize("name", NAMES)
def test_groups_of_one_rank_make_I_the_same_as_N(name, comm):
    units = [UnitSize(960, 2, 4), UnitSize(480, 2, trainable=False)]
    assert volume(name, units, 3, 6, 1, comm=comm) == volume(collapsed(name, "N"), units, 3, 6, 1, comm=comm)
    assert not any("members" in group for _, group in volume(name, units, 3, 6, 1, comm=comm))


@each_comm
@pytest.mark.parametrize("name", NAMES)
def test_one_group_makes_I_the_same_as_G(name, comm):
    units = [UnitSize(960, 2, 4), UnitSize(480, 2, trainable=False)]
    assert volume(name, units, 3, 1, 6, comm=comm) == volume(collapsed(name, "G"), units, 3, 1, 6, comm=comm)
    assert sums(name, units, 3, 1, 6, comm=comm)[0] == 0


@pytest.mark.parametrize("comm", COMMS)
def test_a_single_rank_sends_nothing(comm):
    assert all(not volume(name, [UnitSize(7, 2, 4)], 3, 1, 1, comm=comm) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_accumulation_adds_between_groups(name):
    unit = [UnitSize(M, 4, 4)]
    one, two, eight = (sums(name, unit, s, 2, 4)[0] for s in (1, 2, 8))
    per_microbatch = 2 * name.startswith("G") + (name[1] == "G")
    assert two - one == per_microbatch * M * 4 // 8
    assert eight - one == 7 * (two - one)
    if name == "GGG":
        assert eight == 8 * one
    if name == "NGG":
        assert eight * 2 == 9 * one  # s + 1 passes


@pytest.mark.parametrize("name", NAMES)
def test_keeping_parameters_saves_the_second_gather(name):
    unit = UnitSize(M, 2, 4)
    once = volume(name, [unit], 4, 2, 4, reshard_after_forward=False)
    twice = volume(name, [unit], 4, 2, 4)
    saved = {key: twice[key] - once.get(key, 0) for key in twice if twice[key] != once.get(key, 0)}
    forward = evaluation_bytes(Strategy.parse(name), [unit], Wire(2, 4), 4)
    assert saved == forward
    assert bool(forward) == (name[0] != "N")


def test_evaluation_gathers_once_for_each_microbatch():
    units = [TRAINED, FROZEN]
    assert evaluation_bytes(Strategy.parse("IIG"), units, Wire(2, 4), 5) == {
        ("all_gather", "paro-members"): 5 * 2 * M * 3 // 4
    }
    assert evaluation_bytes(Strategy.parse("GGG"), units, Wire(2, 4, comm="ho-ring"), 5) == {
        ("all_gather", "paro-members"): 5 * 2 * M * 3 // 4,
        ("send", "paro-groups"): 5 * 2 * M // 8,
    }
    assert evaluation_bytes(Strategy.parse("GGG"), units, Wire(2, 4, comm="flat"), 5) == {
        ("all_gather", "paro-flat"): 5 * 2 * M * 7 // 8
    }
    assert evaluation_bytes(Strategy.parse("NGG"), units, Wire(2, 4), 5) == {}
    assert evaluation_bytes(Strategy.parse("GGG"), units, Wire(2, 4), 0) == {}


def test_late_gradients_are_reduced_once_a_step():
    unit, late = UnitSize(M, 2, 4), UnitSize(M, 2, 4, late=True)
    assert volume("NIG", [late], 5, 2, 4) == volume("NNG", [unit], 5, 2, 4)
    assert late.grad_level(Strategy.parse("NGG")) is Level.N


def test_units_add_up():
    units = [UnitSize(960, 2, 4), UnitSize(480, 4, 4), UnitSize(96, 2, trainable=False)]
    for strategy in STRATEGIES:
        whole = step_bytes(strategy, units, Wire(3, 2), 2)
        parts = [step_bytes(strategy, [unit], Wire(3, 2), 2) for unit in units]
        assert whole == {key: sum(part.get(key, 0) for part in parts) for key in whole}


def test_units_of_a_record():
    row = {
        "name": "decoder.layers.0.frozen",
        "numel": 10,
        "padded": 12,
        "param_bytes": 2,
        "grad_bytes": 0,
        "late": False,
    }
    assert UnitSize.of_record(row) == UnitSize(12, 2, 0, trainable=False, layer="decoder.layers.0")
    row |= {"name": "root.late", "grad_bytes": 4, "late": True}
    assert UnitSize.of_record(row) == UnitSize(12, 2, 4, layer="", late=True)
