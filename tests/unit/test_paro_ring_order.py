"""In which order a ring's hops are submitted beside what is spread."""

from types import SimpleNamespace

import pytest

from megatron_ext.paro.ring import ring_all_gather
from megatron_ext.schedules.lane import InlineLane

PIECES, RANKS = 3, 4


@pytest.mark.parametrize(("paired", "ahead"), [(True, 2), (False, PIECES * RANKS)])
def test_hops_ahead_of_what_is_spread(paired, ahead):
    """On NCCL one more hop than what is spread has been submitted, on gloo all of them."""
    submitted, seen = [], []

    class Counting(InlineLane):
        def submit(self, function, inputs=(), name=""):
            submitted.append(function)
            return super().submit(function, inputs, name)

    nothing = lambda *args: None  # noqa: E731
    hops = SimpleNamespace(
        size=RANKS, rank=1, paired=paired, expect=nothing, send=nothing, wait=nothing, finish=nothing
    )
    wire = SimpleNamespace(pieces=PIECES, incoming=nothing, outgoing=nothing, land=nothing)
    ring_all_gather(hops, Counting("hops"), wire, lambda block, c: seen.append(((block, c), len(submitted))))
    order = [((1 - turn) % RANKS, c) for turn in range(RANKS) for c in range(PIECES)]
    assert [where for where, _ in seen] == order
    total = PIECES * RANKS
    assert [count for _, count in seen] == [min(number + ahead, total) for number in range(total)]
    assert len(submitted) == total + 1  # and `finish`
