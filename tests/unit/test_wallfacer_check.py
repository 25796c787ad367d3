"""Hooks of WallFacer into Megatron on stand-ins: which layers get its attention, what its checks catch."""

from collections import Counter, deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from megatron_ext.wallfacer.check import around_step, compare, expected_bytes, require_frozen
from megatron_ext.wallfacer.geometry import Geometry
from megatron_ext.wallfacer.install import _our_core_attention, _will_be_recomputed
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.plan import make_plan
from megatron_ext.wallfacer.sequence import whole
from megatron_ext.wallfacer.tiles import CAUSAL
from megatron_ext.wallfacer.volume import Cost, Shape, totals

COST = Cost(make_plan(Geometry(4, 2, 2), whole(64), CAUSAL), Shape(1, 4, 2, 16, 4), Options())
RANK = 1


def layer(results=()):
    return SimpleNamespace(results=deque(results))


def setup(layers, calls, once=()):
    return SimpleNamespace(rings=SimpleNamespace(rank=RANK), layers=layers, calls=calls, once=set(once))


# --- layers ------------------------------------------------------------------------------------------------


@dataclass
class Submodules:
    linear_qkv: object
    core_attention: object
    linear_proj: object


class Attention:
    """As Megatron's begins."""

    def __init__(self, config, submodules, layer_number, cp_comm_type=None):
        self.made = submodules.linear_qkv, submodules.core_attention, submodules.linear_proj


@pytest.mark.parametrize("linear", ["ColumnParallelLinear", "TELayerNormColumnParallelLinear"])
def test_core_attention_of_any_spec_is_replaced_and_nothing_else(linear):
    from megatron_ext.wallfacer.attention import WallFacerAttention

    shared = object()
    init = _our_core_attention(lambda: shared, Attention.__init__)
    spec = Submodules(linear, "the spec's", "TERowParallelLinear")
    found = Attention.__new__(Attention)
    init(found, None, spec, 1, cp_comm_type="wallfacer")
    assert found.made[::2] == (linear, "TERowParallelLinear")
    assert found.made[1].func is WallFacerAttention
    assert found.made[1].keywords == {"setup": shared}
    assert spec.core_attention == "the spec's"  # it is shared by layers, and by models


@pytest.mark.parametrize("kind", [None, "p2p", "a2a+p2p"])
def test_other_layers_are_left_alone(kind):
    init = _our_core_attention(lambda: pytest.fail("no groups are needed"), Attention.__init__)
    found = Attention.__new__(Attention)
    init(found, None, Submodules("a", "b", "c"), 1, cp_comm_type=kind)
    assert found.made == ("a", "b", "c")


# --- bytes -------------------------------------------------------------------------------------------------


def test_bytes_of_the_noted_calls():
    one = layer()
    plain = expected_bytes(setup([one], [(one, COST, "own")] * 3))
    call = Counter(totals(COST.forward(RANK)))
    call.update(totals(COST.backward(RANK)))
    assert plain == {key: 3 * count for key, count in call.items()}
    keeping = Cost(COST.plan, COST.shape, Options(keep="team"))
    kept, attached = (
        sum(expected_bytes(setup([one], [(one, keeping, backward)])).values())
        for backward in ("own", "attached")
    )
    assert kept < attached == sum(call.values())
    assert expected_bytes(setup([one], [(one, COST, None)])) == totals(COST.forward(RANK))


def test_what_was_sent_is_compared():
    one, two = layer(), layer()
    ours = setup([one, two], [(each, COST, "own") for each in (one, two) for _ in range(4)])
    expected = expected_bytes(ours)
    before = dict.fromkeys(expected, 7)
    after = {key: count + 7 for key, count in expected.items()}
    compare(ours, 4, before, after, step=1)
    compare(ours, 2, before, after, step=1)  # passes that were repeated as a whole
    key = ("send", "wallfacer-move")
    with pytest.raises(RuntimeError, match="step 3: context-parallel rank 1 has sent other") as error:
        compare(ours, 4, before, {**after, key: after[key] - 1}, step=3)
    assert f"send over wallfacer-move: {expected[key] - 1} bytes sent, {expected[key]}" in str(error.value)
    with pytest.raises(RuntimeError, match="all_reduce over cp: 8 bytes sent, 0 by the formula"):
        compare(ours, 4, before, {**after, ("all_reduce", "cp"): 8}, step=3)


@pytest.mark.parametrize("passes", [[4, 3], [3, 3], [4, 0], [0, 0]])
def test_layers_that_were_left_out(passes):
    layers = [layer(), layer()]
    calls = [(each, COST, "own") for each, count in zip(layers, passes, strict=True) for _ in range(count)]
    with pytest.raises(RuntimeError, match=r"2 attention layers were passed .* times in 4 microbatches"):
        compare(setup(layers, calls), 4, {}, {}, step=1)


# --- recomputation -----------------------------------------------------------------------------------------


def test_frozen_inputs_are_not_recomputed():
    """As autograd sees it; what is checkpointed inside of something else decides for itself."""
    import torch

    from megatron_ext.wallfacer.attention import Recomputation

    state, seen = Recomputation(), []

    def stock(function, distribute, *args):
        seen.append(state.comes)
        return function(*args)

    checkpoint = _will_be_recomputed(lambda: state, stock)
    frozen, trained = torch.zeros(1), torch.zeros(1, requires_grad=True)
    checkpoint(lambda x, none: x, False, frozen, None)
    checkpoint(lambda x, none: x, False, trained, None)
    checkpoint(lambda x: checkpoint(lambda y: y, False, frozen), False, trained)
    with torch.no_grad():
        checkpoint(lambda x: x, False, trained)
    assert seen == [False, True, True, False, False]
    assert state.comes


@pytest.mark.parametrize(
    ("granularity", "what"), [("full", "layer 2"), ("selective", "attention of layer 2")]
)
def test_weights_that_get_no_gradients(granularity, what):
    """All before a checkpointed layer is frozen, so its passes do not come again."""
    import torch

    def layer_of(number, layer_trained, core_trained):
        layer, core = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        layer.requires_grad_(layer_trained)
        core.requires_grad_(core_trained)
        core.layer_number = number
        core.config = SimpleNamespace(recompute_granularity=granularity)
        layer.self_attention = torch.nn.Module()
        layer.self_attention.core_attention = core
        return layer

    full = granularity == "full"
    frozen = layer_of(1, not full, False)  # what is not checkpointed may be trained
    trained = layer_of(2, full, not full)
    cores = [each.self_attention.core_attention for each in (frozen, trained)]
    model = [torch.nn.ModuleList([frozen]), torch.nn.ModuleList([trained])]
    require_frozen(setup([], None, cores[:1]), model, 1)
    with pytest.raises(RuntimeError, match=f"step 7: {what} is recomputed and trained .* all before it is"):
        require_frozen(setup([], None, cores), model, 7)


def test_results_that_nobody_used():
    one = layer()
    ours = setup([one], None)

    def stock(model, iteration):
        one.results.append("left over")

    with pytest.raises(RuntimeError, match="step 5: 1 attention results that were kept"):
        around_step(lambda: ours, False, stock)("a model", iteration=4)
    one.results.clear()
    assert around_step(lambda: ours, False, lambda model, iteration: "done")("a model", iteration=4) == "done"
