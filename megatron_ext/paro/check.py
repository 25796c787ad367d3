"""`--ext-check bytes` for PaRO: what every rank sends in a training step is what the formulas say."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext.hooks import bound, wait_for_updates
from megatron_ext.ledger import ledger
from megatron_ext.paro.passes import UnitSize
from megatron_ext.paro.volume import Volume, evaluation_bytes, step_bytes
from megatron_ext.patching import Patch

if TYPE_CHECKING:
    from megatron_ext.paro.data_parallel import ParoDataParallel

FEATURE = "paro"
"""What the communication of a step is counted as; that of checkpoints and checks is not part of it."""


def bytes_patch() -> Patch:
    """The hook into `train_step`."""
    return Patch(
        "megatron.training.training:train_step",
        _around_train_step,
        "wrap",
        "compare the bytes of every step with PaRO's formulas",
        "check:bytes",
        needs=("model", "iteration"),
    )


def _around_train_step(original: Callable) -> Callable:
    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        call = bound(original, args, kwargs)
        chunks = call["model"]
        before, starts = sent_bytes(), chunks[0].starts
        result = original(*args, **kwargs)
        for chunk in chunks:
            wait_for_updates(chunk)  # else they would be counted in the next step
        expected = expected_bytes(chunks, get_num_microbatches(), updated=not result[1])
        for _ in range(chunks[0].starts - starts - 1):  # passes that were repeated to find out about a NaN
            repeated = expected_bytes(chunks, get_num_microbatches(), updated=False)
            expected = {key: count + repeated.get(key, 0) for key, count in expected.items()}
        compare(before, sent_bytes(), expected, step=call["iteration"] + 1, chunk=chunks[0])
        return result

    return train_step


def expected_bytes(chunks: Sequence["ParoDataParallel"], microbatches: int, *, updated: bool) -> Volume:
    """Bytes of one training step on this rank, by (kind, group)."""
    setup = chunks[0].setup
    reached, other = [], []
    for chunk in chunks:
        for unit in chunk.units:
            sizes = UnitSize.of_record(unit.describe())
            (reached if unit in chunk.passes.reached else other).append(sizes)
    total = step_bytes(
        setup.strategy,
        reached,
        setup.wire,
        microbatches,
        reshard_after_forward=setup.reshard,
        updated=updated,
    )
    # What no backward pass reaches is frozen, and gathered as in an evaluation.
    for key, count in evaluation_bytes(setup.strategy, other, setup.wire, microbatches).items():
        total[key] = total.get(key, 0) + count
    return total


def sent_bytes() -> Volume:
    """What this rank has sent since the ledger was drained."""
    totals = ledger().totals().items()
    return {(kind, group): count for (feature, kind, group), (count, _) in totals if feature == FEATURE}


def compare(before: Volume, after: Volume, expected: Volume, *, step: int, chunk: "ParoDataParallel") -> None:
    """Raises RuntimeError: the difference of two counts is not what is expected; names where it differs."""
    keys = sorted({*before, *after, *expected})
    differ = []
    for key in keys:
        sent, want = after.get(key, 0) - before.get(key, 0), expected.get(key, 0)
        if sent != want:
            differ.append(f"\n  {key[0]} over {key[1]}: {sent} bytes sent, {want} by the formula")
    if differ:
        raise RuntimeError(
            f"--ext-check bytes, step {step}: data-parallel rank {chunk.setup.grid.rank} has sent other "
            f"numbers of bytes than --paro-strategy {chunk.setup.strategy} should.{''.join(differ)}"
        )
