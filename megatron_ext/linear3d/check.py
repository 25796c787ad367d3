"""`--ext-check bytes` for 3-D linear layers: what every rank sends in a step is what the formulas say."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from megatron_ext.hooks import bound
from megatron_ext.ledger import ledger
from megatron_ext.linear3d.sizes import ModelSizes
from megatron_ext.linear3d.volume import FEATURE, Volume, edge_bytes, layer_bytes, vector_bytes
from megatron_ext.patching import Patch


def bytes_patch() -> Patch:
    """The hook into `train_step`."""
    return Patch(
        "megatron.training.training:train_step",
        _around_train_step,
        "wrap",
        "compare the bytes of every step with the formulas of the grid",
        "check:bytes",
        needs=("model", "iteration"),
    )


def _around_train_step(original: Callable) -> Callable:
    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.utils import unwrap_model
        from megatron.training import get_args

        call = bound(original, args, kwargs)
        before = sent_bytes()
        result = original(*args, **kwargs)
        expected: Volume = Counter()
        for chunk in call["model"]:
            model = unwrap_model(chunk)
            expected += step_bytes(ModelSizes.of_args(get_args()), model, get_num_microbatches())
        compare(sent_bytes() - before, expected, call["iteration"] + 1)
        return result

    return train_step


def step_bytes(sizes: ModelSizes, model: Any, microbatches: int) -> Volume:
    """Bytes that this rank sends for a model chunk in one training step, by (site, kind, axes)."""
    from megatron_ext.linear3d.model import recompute_units

    setup = model.grid_setup
    comm, grid, at = setup.comm, setup.comm.grid, setup.comm.coords
    ways = {"save": setup.save, "how": comm.how, "coords": at}
    layers = len(model.decoder.layers)
    again = sum(1 for layer in recompute_units(model.config) if layer < layers)
    total: Volume = Counter()
    for number in range(layers):
        total += layer_bytes(
            sizes,
            grid,
            **ways,
            forward=microbatches * (2 if number < again else 1),
            backward=microbatches,
            kept=microbatches if number >= layers - setup.keep_layers else 0,
        )
    total += edge_bytes(
        sizes,
        grid,
        setup.vocab,
        **ways,
        first=model.pre_process,
        last=model.post_process,
        forward=microbatches,
        backward=microbatches,
    )
    # PaRO's gradients are parts of those of Megatron's wrapper, whose sizes are those of the parameters.
    vectors = [
        (p.grid_summed[0], p.grid_layout, p.grid_summed[1])
        for p in model.parameters()
        if hasattr(p, "grid_summed")
    ]
    for itemsize in {size for *_, size in vectors}:
        total += vector_bytes([(n, lay) for n, lay, size in vectors if size == itemsize], grid, at, itemsize)
    return total


def sent_bytes() -> Volume:
    """What this rank has sent since the ledger was drained."""
    found: Volume = Counter()
    for (feature, kind, group), (count, _) in ledger().totals().items():
        if feature.startswith(f"{FEATURE}:") and count:
            axes = group.removeprefix("linear3d-").removesuffix("-grads")
            found[feature.removeprefix(f"{FEATURE}:"), kind, axes] += count
    return found


def compare(sent: Volume, expected: Volume, step: int) -> None:
    """Raises RuntimeError: bytes that were sent are not those of the formulas; names where they differ."""
    differ = [
        f"\n  {site}: {kind} over {axes}: {sent[key]} bytes sent, {expected[key]} by the formula"
        for key in sorted({*sent, *expected})
        for site, kind, axes in [key]
        if sent[key] != expected[key]
    ]
    if differ:
        raise RuntimeError(
            f"--ext-check bytes, step {step}: this rank has sent other numbers of bytes than --linear-3d "
            f"should.{''.join(differ)}"
        )
