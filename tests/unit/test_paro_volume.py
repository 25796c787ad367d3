"""Bytes by the tables of the strategies, entered by hand, and by the rules that they follow."""

import pytest

from megatron_ext.paro.passes import UnitSize
from megatron_ext.paro.strategy import NAMES, Strategy
from megatron_ext.paro.volume import Wire, step_bytes, totals

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
