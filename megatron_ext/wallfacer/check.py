"""Checks around a training step: results kept for recomputation are used up, and bytes are the formulas'."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_ext.hooks import bound
from megatron_ext.ledger import ledger
from megatron_ext.wallfacer.comm import FEATURE
from megatron_ext.wallfacer.volume import Volume, totals

if TYPE_CHECKING:
    from megatron_ext.wallfacer.attention import Setup


def around_step(setup: Callable[[], "Setup"], check_bytes: bool, original: Callable) -> Callable:
    """Wrap of `train_step`."""

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        call = bound(original, args, kwargs)
        step = call["iteration"] + 1
        ours = setup()
        if check_bytes:
            ours.calls.clear()
        before = sent_bytes()
        result = original(*args, **kwargs)
        left = sum(len(layer.results) for layer in ours.layers)
        if left:
            raise RuntimeError(
                f"step {step}: {left} attention results that were kept for recomputation were not used, so "
                "passes and recomputations do not match. Run without recomputation, and report this"
            )
        require_frozen(ours, call["model"], step)
        if check_bytes:
            compare(ours, get_num_microbatches(), before, sent_bytes(), step)
        return result

    return train_step


def require_frozen(setup: "Setup", model: Any, step: int) -> None:
    """Raises RuntimeError: weights that are trained were checkpointed where nothing that goes in wants a
    gradient. Autograd then never comes back, and they get none."""
    if not setup.once:
        return
    for module in (module for chunk in model for module in chunk.modules()):
        core = getattr(getattr(module, "self_attention", None), "core_attention", None)
        if core not in setup.once:
            continue
        whole = core.config.recompute_granularity == "full"
        inside = module if whole else core
        trained = [name for name, param in inside.named_parameters() if param.requires_grad]
        if trained:
            raise RuntimeError(
                f"step {step}: {'layer' if whole else 'attention of layer'} {core.layer_number} is "
                f"recomputed and trained ({trained[0]}), and all before it is frozen. Nothing that goes into "
                "it wants a gradient, so Megatron never recomputes it and its weights get none; without "
                "WallFacer this happens, too, and nothing says so. Use --recompute-granularity selective, or "
                "--recompute-method block for frozen layers alone, or let the embedding's output require a "
                "gradient"
            )
    setup.once.clear()


def sent_bytes() -> Volume:
    """What this rank has sent since the ledger was drained."""
    sums = ledger().totals().items()
    return {(kind, group): count for (feature, kind, group), (count, _) in sums if feature == FEATURE}


def expected_bytes(setup: "Setup") -> Volume:
    """Of the calls that were noted, with their backward passes."""
    rank, found = setup.rings.rank, Counter()
    for _, cost, backward in setup.calls:
        found.update(totals(cost.forward(rank)))
        if backward is not None:
            found.update(totals(cost.backward(rank, attached=backward == "attached")))
    return dict(found)


def compare(setup: "Setup", microbatches: int, before: Volume, after: Volume, step: int) -> None:
    """Raises RuntimeError: layers were passed other numbers of times than there are microbatches, or the
    difference of two counts is not what is expected; says where."""
    passes = Counter(id(layer) for layer, _, _ in setup.calls)
    times = {passes[id(layer)] for layer in setup.layers}
    # Passes are repeated as a whole to find out about a NaN.
    if len(times) > 1 or any(count == 0 or count % microbatches for count in times):
        raise RuntimeError(
            f"--ext-check bytes, step {step}: {len(setup.layers)} attention layers were passed "
            f"{sorted(times)} times in {microbatches} microbatches"
        )
    expected, differ = expected_bytes(setup), []
    for key in sorted({*before, *after, *expected}):
        sent, want = after.get(key, 0) - before.get(key, 0), expected.get(key, 0)
        if sent != want:
            differ.append(f"\n  {key[0]} over {key[1]}: {sent} bytes sent, {want} by the formula")
    if differ:
        raise RuntimeError(
            f"--ext-check bytes, step {step}: context-parallel rank {setup.rings.rank} has sent other "
            f"numbers of bytes than attention should.{''.join(differ)}"
        )
