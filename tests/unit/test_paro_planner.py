"""What is recommended, and why: the rules of thumb, memory first, ties, and units of a described model."""

from argparse import Namespace
from dataclasses import replace

import pytest

from megatron_ext.paro import model
from megatron_ext.paro.auto import situation_of_run
from megatron_ext.paro.cost import Compute
from megatron_ext.paro.network import Link, Network
from megatron_ext.paro.planner import GIB, Situation, candidate, choose, ranking, reason
from megatron_ext.paro.strategy import NAMES, STRATEGIES, Strategy
from megatron_ext.paro.volume import COMMS, Wire, totals
from megatron_ext.vocab.memory_description import Description, model_description
from megatron_ext.vocab.memory_layers import params
from megatron_ext.vocab.memory_model import plan_of_run
from tests.unit.test_memory_model import megatron_args

GB80 = 80 * 10**9
# The paper's clusters: nodes of 8 GPUs, 2000 Gbit/s inside and one NIC of 80 Gbit/s between them.
PAPER = Network.given(Link(0, 250e9), Link(0, 10e9), members=8, ranks_per_nic=8)


def situation(billions, fraction=1.0, *, num_layers=80, k=4, m=8, s=10, **more):
    units = model.equal_units(round(billions * 1e9), num_layers, k * m, 2, 2, fraction)
    given = {"network": PAPER, "memory_limit": GB80, "wire": Wire(k, m, backend="nccl"), "microbatches": s}
    return Situation(units=units, **(given | more))


def fitting(of, **how):
    return {str(c.strategy) for c in ranking(of, [of.wire.comm]) if c.fits}


# --- rules of thumb -----------------------------------------------------------------------------------------


def test_65_billion_parameters_on_80_gb():
    of = situation(65)
    assert fitting(of) == {"IIG", "IGG", "GIG", "GGG"}
    found = ranking(of, ["two-phase"])
    assert [str(c.strategy) for c in found if c.fits] == ["IIG", "IGG", "GIG", "GGG"]
    assert choose(of)[0] == "IIG"
    # ZeRO-3 sends 3 s passes between groups where IIG sends 2.
    by_name = {str(c.strategy): c for c in found}
    assert by_name["GGG"].bytes.between == 15 * by_name["IIG"].bytes.between


def test_7_billion_parameters_on_80_gb_do_not_fit_as_ddp_only():
    of = situation(7, num_layers=32)
    assert fitting(of) == set(NAMES) - {"NNN"}
    assert choose(of)[0] == "NNG"


def test_less_memory_leads_from_NNG_over_NIG_to_IIG_and_GGG():
    chosen = []
    for limit in (40, 20, 9, 5):
        name, _ = choose(situation(7, num_layers=32, memory_limit=limit * GIB))
        chosen.append(name)
    assert chosen == ["NNG", "NIG", "IIG", "GGG"]


def test_fp32_gradients_make_global_optimizer_states_cheaper_between_groups():
    units = model.equal_units(7 * 10**9, 32, 32, 2, 4)
    of = replace(situation(7), units=units, memory_limit=None)
    nng, nni = (candidate(of, Strategy.parse(name), "two-phase") for name in ("NNG", "NNI"))
    assert nng.bytes.between * 4 == nni.bytes.between * 3
    assert choose(of)[0] == "NNG"


def test_partial_training_of_65_billion():
    of = situation(65, 1 / 16)
    assert fitting(of) == {"INI", "III", "ING", "IIG", "IGG", "GNG", "GIG", "GGG"}
    assert choose(of)[0] == "ING"
    # Its gradients take 8 GB; with less room they are split inside the groups, too.
    assert choose(replace(of, memory_limit=25 * 10**9))[0] == "IIG"


def test_three_of_a_thousand_trained():
    of = situation(65, 0.003)
    assert choose(of)[0] == "ING"
    assert not any(name.startswith("N") for name in fitting(of))


def test_one_microbatch_makes_split_gradients_free_between_groups():
    of = situation(65, s=1)
    found = {str(c.strategy): c for c in ranking(of, ["two-phase"])}
    assert found["IGG"].bytes.between == found["IIG"].bytes.between
    assert found["IGG"].needed < found["IIG"].needed
    assert choose(of)[0] == "IGG"


@pytest.mark.parametrize(("k", "m"), [(32, 1), (1, 32)])
def test_groups_that_are_none_need_no_letter_I(k, m):
    # I is N for groups of one rank, and G for one group of all.
    net = Network.given(Link(0, 250e9), Link(0, 10e9), members=m, ranks_per_nic=1)
    for limit in (None, 40 * GIB, 20 * GIB, 5 * GIB):
        of = situation(7, k=k, m=m, network=net, memory_limit=limit)
        assert "I" not in choose(of)[0]


def test_fast_links_hide_all_but_memory_decides_by_communication():
    of = situation(7, compute=Compute(10.0, 20.0), memory_limit=None)
    found = ranking(of)
    assert sum(c.step.total <= found[0].step.total * 1.01 for c in found) > 20
    assert str(found[0].strategy) == "NNG"
    assert found[0].communication == min(c.communication for c in found)


# --- the ranking --------------------------------------------------------------------------------------------


def test_ranking_is_complete_and_in_order():
    of = situation(65)
    found = ranking(of)
    assert {(str(c.strategy), c.comm) for c in found} == {(n, c) for n in NAMES for c in COMMS}
    fits = [c.fits for c in found]
    assert fits == sorted(fits, reverse=True)
    times = [c.step.total for c in found if c.fits]
    assert times[1:] == sorted(times[1:])
    assert times[0] <= times[1] * 1.01
    needs = [c.needed for c in found if not c.fits]
    assert needs == sorted(needs)


def test_other_memory_counts():
    of = situation(65)
    iig = candidate(of, Strategy.parse("IIG"), "two-phase")
    room = GB80 - iig.needed
    assert candidate(replace(of, other_bytes=room), Strategy.parse("IIG"), "two-phase").fits
    assert not candidate(replace(of, other_bytes=room + 1), Strategy.parse("IIG"), "two-phase").fits


def test_only_what_is_offered_is_chosen():
    of = situation(65, strategies=tuple(Strategy.parse(name) for name in ("GGG", "IGG", "NNN")))
    assert choose(of)[0] == "IGG"
    assert "in which 2 of 3 strategies fit" in choose(of)[1]


def test_bytes_are_those_of_the_volume():
    of = situation(7, s=3)
    found = candidate(of, Strategy.parse("IGG"), "ho-ring")
    whole = 2 * sum(unit.padded for unit in of.units)
    assert found.bytes.between == 8 * 4 * 3 * whole // 32  # s + 1 passes over the groups
    assert found.bytes.inside == 9 * 7 * whole // 8  # 3 s over the members
    assert totals({}, of.wire).between == 0


# --- reasons ------------------------------------------------------------------------------------------------


def test_reason_of_the_fastest():
    text = choose(situation(65))[1]
    assert text.startswith("it is the fastest; it needs 62.")
    assert "of 74.5 GiB, in which 4 of 14 strategies fit; the next, IGG, takes 3.5" in text
    assert "5.50 times the bytes between groups" in text
    assert "times the bytes inside" not in text  # as many


def test_reason_when_nothing_fits():
    of = situation(65, memory_limit=10 * GIB)
    name, text = choose(of)
    assert name == "GGG"
    assert text.startswith("nothing fits in 10.0 GiB; GGG needs the least, ")
    assert text.endswith("use more ranks, tensor or pipeline parallelism, or recompute activations")


def test_reason_among_equals():
    compute = Compute(10.0, 20.0)
    text = choose(situation(7, compute=compute, memory_limit=None))[1]
    assert text.startswith("it is among the fastest the one that communicates least; the next, ")
    alone = situation(7, k=1, m=1, compute=compute, memory_limit=None)
    text = choose(alone)[1]
    assert text == "nothing is communicated, so it is the one with the least memory"
    same = situation(7, memory_limit=None, strategies=(Strategy.parse("NNI"), Strategy.parse("NNG")))
    assert choose(same) == (
        "NNG",
        "it is among the fastest the one with the least memory; the next, NNI, takes 1.33 times the memory",
    )


def test_reason_without_a_rival():
    of = situation(7, memory_limit=None, strategies=(Strategy.parse("NNG"),))
    assert reason(of, ranking(of, ["two-phase"])) == "it is the fastest"


# --- models -------------------------------------------------------------------------------------------------

GPT = Description(
    layers=4, hidden=64, ffn=256, heads=4, query_groups=4, head_dim=16, seq_length=32, micro_batch=2,
    vocab=128, positions=32, stage_layers=(4,), data=4, itemsize=2,
)  # fmt: skip


def test_units_of_a_gpt():
    units = model.units_of(GPT)
    layer = 4 * 64 * 64 + 4 * 64 + 2 * 64 * 256 + 256 + 64 + 4 * 64
    outside = 32 * 64 + 2 * 128 * 64 + 2 * 64
    assert [(unit.padded, unit.layer) for unit in units] == [
        (outside, ""), *((layer, f"layer {index}") for index in range(4))
    ]  # fmt: skip
    assert {(unit.itemsize, unit.grad_itemsize, unit.trainable, unit.late) for unit in units} == {
        (2, 4, True, False)
    }
    assert sum(unit.padded for unit in units) == params(GPT, 0)


def test_units_of_the_largest_stage_are_padded():
    staged = replace(GPT, pipeline=4, stage_layers=(1, 1, 1, 1), positions=0, data=7, context=1)
    units = model.units_of(staged)
    assert all(unit.padded % 7 == 0 for unit in units)
    largest = max(params(staged, rank) for rank in range(4))
    assert largest <= sum(unit.padded for unit in units) < largest + 14


def test_vocabulary_parallelism_has_late_units():
    shared = replace(GPT, vocab_mode="vocab-2", pipeline=2, stage_layers=(2, 2))
    late = [unit for unit in model.units_of(shared) if unit.late]
    assert [unit.padded for unit in late] == [2 * 64 * 64]
    assert sum(unit.padded for unit in model.units_of(shared)) == params(shared, 0)


def test_a_part_of_every_unit_is_trained():
    units = model.equal_units(1003, 10, 4, 2, 4, trainable=0.1)
    assert len(units) == 20
    assert sum(unit.padded for unit in units if unit.trainable) == 10 * 12
    assert {unit.trainable for unit in model.equal_units(1000, 2, 4, 2, 4, trainable=0.0)} == {False}
    assert {unit.trainable for unit in model.equal_units(1000, 2, 4, 2, 4)} == {True}


def test_floating_point_operations():
    units = model.units_of(replace(GPT, data=1), trainable=0.5)
    total = sum(unit.padded for unit in units)
    trained = sum(unit.padded for unit in units if unit.trainable)
    scores = model.score_flops(GPT, units)
    assert scores == 4 * 4 * 32 * 64
    assert model.flops(units, 64, scores) == (
        64 * (2 * total + scores),
        64 * (2 * total + 2 * trained + 2 * scores),
    )


# --- the planner's question for a run -----------------------------------------------------------------------


FLAGS = Namespace(
    paro_comm="ho-ring", paro_inter_dtype="int8", paro_reshard_after_forward="off", vocab_parallel="off"
)  # fmt: skip


def run_args(**changed) -> Namespace:
    batch = {"data_parallel_size": 2, "context_parallel_size": 2, "global_batch_size": 48}
    return megatron_args(**batch, overlap_param_gather=True, overlap_grad_reduce=False, **changed)


def test_situation_of_a_run():
    args = run_args()
    of = situation_of_run(args, FLAGS, k=2, m=2, network=PAPER, gpu=False, memory_limit=GIB)
    d = model_description(args, gpu=False)
    assert of.units == model.units_of(d)
    assert of.wire == Wire(2, 2, "ho-ring", "int8", "gloo")
    assert of.microbatches == 48 // (4 * 2)
    assert (of.overlap_params, of.overlap_grads, of.reshard_after_forward) == (True, False, False)
    plans = plan_of_run(args, gpu=False, vocab=None, microbatches=6)
    assert of.other_bytes == max(plan.activations for plan in plans) > 0
    assert of.memory_limit == GIB
    assert choose(of)[0] in NAMES


def test_situation_of_a_run_on_gpus_with_few_strategies():
    some = STRATEGIES[:3]
    of = situation_of_run(
        run_args(), FLAGS, k=2, m=2, network=PAPER, gpu=True, memory_limit=None, strategies=some
    )
    assert (of.strategies, of.wire.backend, of.memory_limit) == (some, "nccl", None)


def test_runs_that_cannot_be_planned_say_why():
    with pytest.raises(ValueError, match="does not cover mixture of experts"):
        situation_of_run(
            run_args(num_experts=8), FLAGS, k=2, m=2, network=PAPER, gpu=False, memory_limit=None
        )
