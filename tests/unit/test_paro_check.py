"""`--ext-check bytes` of PaRO: what it expects, and what it says."""

from types import SimpleNamespace

import pytest

from megatron_ext.paro.blocks import Grid
from megatron_ext.paro.check import compare, expected_bytes, sent_bytes
from megatron_ext.paro.strategy import Strategy
from megatron_ext.paro.volume import Wire
from megatron_ext.traffic import ledger


class Unit:
    """As the engine's, as far as sizes go."""

    def __init__(self, name, padded, trainable=True):
        self.row = {
            "name": name,
            "padded": padded,
            "param_bytes": 4,
            "grad_bytes": 4 * trainable,
            "late": False,
        }

    def describe(self):
        return self.row


def chunk(*units, reached=None, strategy="IIG"):
    setup = SimpleNamespace(
        strategy=Strategy.parse(strategy), grid=Grid.of(3, 2, 2), wire=Wire(2, 2), reshard=True
    )
    passes = SimpleNamespace(reached=set(units if reached is None else reached))
    return SimpleNamespace(setup=setup, units=list(units), passes=passes)


def test_expected_bytes_of_a_step():
    """1024 elements of 4 bytes, 3 microbatches: half of them inside, a quarter between the 2 groups of 2."""
    found = expected_bytes([chunk(Unit("root", 1024))], 3, updated=True)
    assert found == {
        ("all_gather", "paro-members"): 2 * 3 * 2048,
        ("all_to_all", "paro-members-grads"): 3 * 2048,
        ("all_to_all", "paro-groups-grads"): 1024,
        ("all_gather", "paro-groups"): 1024,
    }


def test_a_skipped_step_sends_no_update():
    found = expected_bytes([chunk(Unit("root", 1024))], 3, updated=False)
    assert ("all_gather", "paro-groups") not in found
    assert len(found) == 3


def test_what_no_backward_pass_reaches_is_gathered_once():
    low, high = Unit("layers.0", 1024, trainable=False), Unit("layers.1", 1024, trainable=False)
    once = expected_bytes([chunk(low, high, reached=[high])], 3, updated=True)
    twice = expected_bytes([chunk(low, high)], 3, updated=True)
    assert once == {("all_gather", "paro-members"): 3 * 3 * 2048}
    assert twice == {("all_gather", "paro-members"): 4 * 3 * 2048}


def test_all_chunks_of_a_rank_count():
    one, two = chunk(Unit("layers.0", 1024)), chunk(Unit("layers.1", 1024))
    both = expected_bytes([one, two], 2, updated=True)
    assert both == {key: 2 * count for key, count in expected_bytes([one], 2, updated=True).items()}


def test_only_a_steps_own_communication_counts():
    ledger().drain()
    ledger().add("paro", "all_gather", "paro-members", 10)
    ledger().add("paro:whole", "all_gather", "paro-members", 20)
    ledger().add("stock", "all_reduce", "dp", 30)
    assert sent_bytes() == {("all_gather", "paro-members"): 10}
    ledger().drain()


def test_the_difference_must_be_what_is_expected():
    before, after = {("send", "g"): 10}, {("send", "g"): 30, ("all_gather", "m"): 0}
    compare(before, after, {("send", "g"): 20}, step=1, chunk=chunk())


@pytest.mark.parametrize(
    ("after", "expected", "lines"),
    [
        ({("send", "g"): 5}, {("send", "g"): 7}, ["send over g: 5 bytes sent, 7 by the formula"]),
        ({}, {("send", "g"): 7}, ["send over g: 0 bytes sent, 7 by the formula"]),
        ({("send", "g"): 5}, {}, ["send over g: 5 bytes sent, 0 by the formula"]),
        (
            {("send", "g"): 5, ("all_gather", "m"): 1, ("send", "m"): 2},
            {("send", "g"): 6, ("send", "m"): 2},
            [
                "all_gather over m: 1 bytes sent, 0 by the formula",
                "send over g: 5 bytes sent, 6 by the formula",
            ],
        ),
    ],
)
def test_the_message_names_kind_group_and_both_numbers(after, expected, lines):
    with pytest.raises(RuntimeError) as error:
        compare({}, after, expected, step=4, chunk=chunk())
    assert str(error.value).split("\n  ") == [
        "--ext-check bytes, step 4: data-parallel rank 3 has sent other numbers of bytes than "
        "--paro-strategy IIG should.",
        *lines,
    ]
