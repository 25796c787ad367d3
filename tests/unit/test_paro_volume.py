"""Bytes by the tables of the strategies, entered by hand, and by the rules that they follow."""

import pytest

from megatron_ext.paro.passes import UnitSize
from megatron_ext.paro.strategy import NAMES, STRATEGIES, Level, Strategy
from megatron_ext.paro.volume import COMMS, Wire, evaluation_bytes, step_bytes, totals

M = 1 << 20
HIERARCHICAL = ("two-phase", "ho-ring")
each_comm = pytest.mark.parametrize("comm", HIERARCHICAL)


def volume(name, units, s, k, m, **how):
    reshard = how.pop("reshard_after_forward", True)
    return step_bytes(Strategy.parse(name), units, Wire(k, m, **how), s, reshard_after_forward=reshard)


def sums(name, units, s, k, m, **how):
    """(a rank's bytes to other groups, a group's, a rank's inside)."""
    found = volume(name, units, s, k, m, **how)
    between = sum(amount for (_, group), amount in found.items() if group.startswith("paro-groups"))
    inside = sum(amount for (_, group), amount in found.items() if group.startswith("paro-members"))
    assert between + inside == sum(found.values())
    assert totals(found, Wire(k, m)).inside == inside
    assert totals(found, Wire(k, m)).between == m * between
    return between, m * between, inside


# Full training: 2^20 parameters, 8 ranks in 2 groups of 4, 4 microbatches, 2 bytes each and 4 per gradient.
FULL = {
    "NNN": (1048576, 4194304, 6291456),
    "NNI": (1048576, 4194304, 4718592),
    "NII": (1048576, 4194304, 14155776),
    "INI": (1048576, 4194304, 15728640),
    "III": (1048576, 4194304, 25165824),
    "NNG": (786432, 3145728, 4718592),
    "NIG": (786432, 3145728, 14155776),
    "NGG": (2359296, 9437184, 14155776),
    "ING": (786432, 3145728, 15728640),
    "IIG": (786432, 3145728, 25165824),
    "IGG": (2359296, 9437184, 25165824),
    "GNG": (2621440, 10485760, 15728640),
    "GIG": (2621440, 10485760, 25165824),
    "GGG": (4194304, 16777216, 25165824),
}
# The same with 2 bytes per gradient.
HALF = {
    "NNN": (524288, 2097152, 3145728),
    "NNI": (524288, 2097152, 3145728),
    "NII": (524288, 2097152, 7864320),
    "INI": (524288, 2097152, 14155776),
    "III": (524288, 2097152, 18874368),
    "NNG": (524288, 2097152, 3145728),
    "NIG": (524288, 2097152, 7864320),
    "NGG": (1310720, 5242880, 7864320),
    "ING": (524288, 2097152, 14155776),
    "IIG": (524288, 2097152, 18874368),
    "IGG": (1310720, 5242880, 18874368),
    "GNG": (2359296, 9437184, 14155776),
    "GIG": (2359296, 9437184, 18874368),
    "GGG": (3145728, 12582912, 18874368),
}
# fp32: 2^16 parameters, 4 ranks in 2 groups of 2, 3 microbatches.
SINGLE = {
    "NNN": (131072, 262144, 262144),
    "NNI": (131072, 262144, 262144),
    "NII": (131072, 262144, 524288),
    "INI": (131072, 262144, 917504),
    "III": (131072, 262144, 1179648),
    "NNG": (131072, 262144, 262144),
    "NIG": (131072, 262144, 524288),
    "NGG": (262144, 524288, 524288),
    "ING": (131072, 262144, 917504),
    "IIG": (131072, 262144, 1179648),
    "IGG": (262144, 524288, 1179648),
    "GNG": (458752, 917504, 917504),
    "GIG": (458752, 917504, 1179648),
    "GGG": (589824, 1179648, 1179648),
}
# A sixty-fourth of 2^20 parameters trained, as in FULL otherwise.
PARTIAL = {
    "ING": (12288, 49152, 12632064),
    "IIG": (12288, 49152, 12779520),
    "III": (16384, 65536, 12779520),
    "NNG": (12288, 49152, 73728),
    "GGG": (2129920, 8519680, 12779520),
}


@each_comm
@pytest.mark.parametrize("name", NAMES)
def test_full_training(name, comm):
    assert sums(name, [UnitSize(M, 2, 4)], 4, 2, 4, comm=comm) == FULL[name]


@each_comm
@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_16_bits(name, comm):
    assert sums(name, [UnitSize(M, 2, 2)], 4, 2, 4, comm=comm) == HALF[name]


@each_comm
@pytest.mark.parametrize("name", NAMES)
def test_fp32(name, comm):
    assert sums(name, [UnitSize(1 << 16, 4, 4)], 3, 2, 2, comm=comm) == SINGLE[name]


TRAINED, FROZEN = UnitSize(1 << 14, 2, 4), UnitSize(M - (1 << 14), 2, 4, trainable=False)


@each_comm
@pytest.mark.parametrize("name", sorted(PARTIAL))
def test_frozen_parameters(name, comm):
    assert sums(name, [TRAINED, FROZEN], 4, 2, 4, comm=comm) == PARTIAL[name]


@pytest.mark.parametrize("name", ["GNG", "GIG"])
def test_frozen_parameters_that_are_split_over_all(name):
    assert sums(name, [TRAINED, FROZEN], 4, 2, 4)[0] == 2105344


def test_frozen_parameters_are_only_gathered():
    for name in NAMES:
        found = volume(name, [FROZEN], 4, 2, 4)
        assert not any(group.endswith("-grads") for _, group in found)
        expected = {} if name[0] == "N" else {"all_gather"}
        assert {kind for kind, _ in found} == set(expected)


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
