"""Bytes that a rank holds, by the tables of the strategies, entered by hand, and by the rules behind them."""

import pytest

from megatron_ext.paro.memory import GRADS_BEHIND, PARAMS_AHEAD, memory
from megatron_ext.paro.passes import UnitSize
from megatron_ext.paro.strategy import NAMES, Strategy
from megatron_ext.paro.volume import Wire

M = 1 << 20


def held(name, units, k, m, **how):
    given = {key: how.pop(key) for key in ("state_itemsize", "reshard_after_forward") if key in how}
    return memory(Strategy.parse(name), units, Wire(k, m, **how), **given)


# 2^20 parameters in 2 groups of 4 ranks: 2 bytes each and 4 per gradient; the same with 2 per gradient.
FULL = {
    "NNN": 18874368, "NNI": 9437184, "NII": 6291456, "INI": 7864320, "III": 4718592, "NNG": 7864320,
    "NIG": 4718592, "NGG": 4194304, "ING": 6291456, "IIG": 3145728, "IGG": 2621440, "GNG": 6029312,
    "GIG": 2883584, "GGG": 2359296,
}  # fmt: skip
HALF = {
    "NNN": 16777216, "NNI": 7340032, "NII": 5767168, "INI": 5767168, "III": 4194304, "NNG": 5767168,
    "NIG": 4194304, "ING": 4194304, "NGG": 3932160, "GNG": 3932160, "IIG": 2621440, "IGG": 2359296,
    "GIG": 2359296, "GGG": 2097152,
}  # fmt: skip
# fp32: 2^16 parameters in 2 groups of 2 ranks, no extra master weights.
SINGLE = {
    "NNN": 1048576, "NNI": 786432, "NII": 655360, "INI": 655360, "NNG": 655360, "III": 524288, "NIG": 524288,
    "ING": 524288, "NGG": 458752, "GNG": 458752, "IIG": 393216, "IGG": 327680, "GIG": 327680, "GGG": 262144,
}  # fmt: skip
# A sixty-fourth of FULL's parameters trained.
PARTIAL = {"ING": 614400, "IIG": 565248, "III": 589824, "NNG": 2187264, "GGG": 294912}
# GiB of 7 and 65 B parameters in 4 groups of 8, 2 bytes per gradient: all, 1/16 and 3/1000 trained.
BILLIONS = {
    (7, 1.0): (104.3, 35.9, 24.4, 24.4, 13.0, 28.5, 17.1, 15.9, 17.1, 5.7, 4.5, 15.9, 4.5, 3.3),
    (7, 1 / 16): (18.7, 14.5, 13.8, 3.1, 2.3, 14.0, 13.3, 13.2, 2.6, 1.9, 1.8, 1.4, 0.7, 0.6),
    (65, 1.0): (968.6, 332.9, 227.0, 227.0, 121.1, 264.8, 158.9, 147.6, 158.9, 53.0, 41.6, 147.6, 41.6, 30.3),
    (65, 1 / 16): (174.0, 134.3, 127.7, 28.4, 21.8, 130.1, 123.4, 122.7, 24.1, 17.5, 16.8, 12.8, 6.1, 5.4),
    (65, 0.003): (123.6, 121.7, 121.4, 15.8, 15.5, 121.5, 121.2, 121.2, 15.6, 15.2, 15.2, 4.2, 3.9, 3.9),
}
ORDER = "NNN NNI NII INI III NNG NIG NGG ING IIG IGG GNG GIG GGG".split()


@pytest.mark.parametrize("name", NAMES)
def test_full_training(name):
    assert held(name, [UnitSize(M, 2, 4)], 2, 4).persistent == FULL[name]
    assert held(name, [UnitSize(M, 2, 2)], 2, 4).persistent == HALF[name]
    assert held(name, [UnitSize(1 << 16, 4, 4)], 2, 2).persistent == SINGLE[name]


TRAINED, FROZEN = UnitSize(1 << 14, 2, 4), UnitSize(M - (1 << 14), 2, 4, trainable=False)


@pytest.mark.parametrize("name", sorted(PARTIAL))
def test_partial_training(name):
    assert held(name, [TRAINED, FROZEN], 2, 4).persistent == PARTIAL[name]


@pytest.mark.parametrize("name", NAMES)
def test_frozen_parameters_cost_their_own_bytes_only(name):
    found = held(name, [FROZEN], 2, 4)
    parts = {"N": 1, "I": 4, "G": 8}[name[0]]
    assert found.weights == found.persistent == 2 * FROZEN.padded // parts
    assert (found.gradients, found.master, found.states) == (0, 0, 0)


@pytest.mark.parametrize(("billions", "fraction"), sorted(BILLIONS))
def test_large_models(billions, fraction):
    total = billions * 10**9
    trained = round(total * fraction) // 32 * 32
    units = [UnitSize(trained, 2, 2)]
    if trained < total:
        units.append(UnitSize((total - trained) // 32 * 32, 2, trainable=False))
    for name, expected in zip(ORDER, BILLIONS[billions, fraction], strict=True):
        assert held(name, units, 4, 8).persistent / (1 << 30) == pytest.approx(expected, abs=0.051), name


def test_categories():
    found = held("IIG", [UnitSize(M, 2, 4)], 2, 4)
    assert (found.weights, found.gradients) == (2 * M // 4, 4 * M // 4)
    assert (found.master, found.states, found.staged) == (4 * M // 8, 8 * M // 8, 0)
    assert found.optimizer == 12 * M // 8
    assert held("IIG", [UnitSize(M, 4, 4)], 2, 4).master == 0
    assert held("IIG", [UnitSize(M, 2, 4)], 2, 4, state_itemsize=4).states == 4 * M // 8


@pytest.mark.parametrize("name", NAMES)
def test_int8_updates_keep_new_values_apart(name):
    unit = UnitSize(M, 4, 4)
    found = held(name, [unit], 2, 4, inter_dtype="int8")
    stages = name[2] == "G" and name[0] != "G"
    assert found.staged == found.master == (4 * M // 8 if stages else 0)
    assert found.persistent == held(name, [unit], 2, 4).persistent + 2 * found.staged


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_one_rank_and_one_group(name):
    units = [UnitSize(960, 2, 4), UnitSize(480, 2, trainable=False)]
    for k, m, letter in ((6, 1, "N"), (1, 6, "G")):
        same = held(name.replace("I", letter), units, k, m)
        assert held(name, units, k, m).persistent == same.persistent


def test_late_gradients_are_whole():
    assert held("IGG", [UnitSize(M, 2, 4, late=True)], 2, 4).gradients == 4 * M
    assert held("IGG", [UnitSize(M, 2, 4)], 2, 4).gradients == 4 * M // 8


# Sizes of a root and four layers, the second of which has frozen parameters, too.
UNITS = [
    UnitSize(800, 2, 4),
    UnitSize(160, 2, 4, layer="0"),
    UnitSize(80, 2, 4, layer="1"),
    UnitSize(400, 2, layer="1", trainable=False),
    UnitSize(160, 2, 4, layer="2"),
    UnitSize(240, 2, 4, layer="3"),
]


def test_whole_layers_come_on_top_of_split_parameters():
    assert (PARAMS_AHEAD, GRADS_BEHIND) == (1, 2)
    scratch = 4 * 800  # one reduction's, of the largest unit
    assert held("NNG", UNITS, 2, 4).transient == scratch
    assert held("ING", UNITS, 2, 4).transient == scratch + 2 * (800 + 480 + 240)
    assert held("GNG", UNITS, 2, 4, reshard_after_forward=False).transient == scratch + 2 * 1840
    assert held("NNN", UNITS, 2, 4, reshard_after_forward=False).transient == scratch


def test_whole_gradients_come_on_top_of_split_ones():
    scratch = 4 * 800
    assert held("NIG", UNITS, 2, 4).transient == scratch + 4 * (800 + 240 + 160 + 160)
    assert held("GGG", UNITS, 2, 4).transient == held("ING", UNITS, 2, 4).transient + 4 * 1360
    frozen = [UnitSize(unit.padded, 2, trainable=False, layer=unit.layer) for unit in UNITS]
    assert held("NIG", frozen, 2, 4).transient == 0


def test_scratch_of_a_collective():
    assert held("NNG", UNITS, 2, 4, comm="ho-ring").transient == 0
    assert held("NNG", UNITS, 2, 4, backend="nccl").transient == 0  # sums in place
    assert held("NNG", UNITS, 2, 4, backend="nccl", comm="flat").transient == 2 * 800
    assert held("NNG", UNITS, 1, 1).transient == 0


def test_the_optimizer_steps_with_fp32_copies_of_16_bit_gradients():
    assert held("NNN", [UnitSize(M, 2, 2)], 2, 4).transient == 4 * M
    assert held("NNG", [UnitSize(M, 2, 2)], 2, 4).transient == 2 * M  # scratch is more than M / 2
    found = held("NNN", [UnitSize(M, 2, 4)], 2, 4, backend="nccl")
    assert found.transient == 0
    assert found.total == found.persistent


def test_as_many_gradients_wait_as_the_engine_lets():
    from megatron_ext.paro.grad_flow import IN_FLIGHT

    assert GRADS_BEHIND == IN_FLIGHT
