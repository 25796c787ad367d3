"""Memory of one training step, measured on every rank: the hook of `--ext-memory` into stock's `train_step`.

Weights, gradients and optimizer states are found by walking the model chunks and the optimizer. What forward
and backward passes make counts as activations (what a pipeline stage receives included), unless a pass says
otherwise (`megatron_ext.memory.category`). What DDP's gradient reduction makes counts as communication.
Other is what the optimizer step makes on its way, and all else that exists (data, masks, Megatron's scratch
buffer).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ext.hooks import before_optimizer_step, bound, wait_for_updates
from megatron_ext.patching import Patch


class StepMemory:
    """Measures the `step`-th step that this process trains, counted from 1.

    From 2 on is what a user wants: the optimizer makes its states at the end of the first step. Counting
    starts anew in a job that resumes, so that one command measures in every start.
    """

    def __init__(self, step: int):
        self.step = step
        self.done = False
        self._trained = 0
        self._measured: dict[str, Any] | None = None

    def take(self) -> dict[str, Any] | None:
        """What was measured since the last call: bytes, as `MemoryTracker.report` gives them."""
        measured, self._measured = self._measured, None
        return measured

    def missed(self) -> str | None:
        """What to say at the end of a run that never came to the step."""
        if self.done:
            return None
        return (
            f"--ext-memory-step {self.step}: only {self._trained} steps were trained, so no memory was "
            "measured. Train more steps, or measure an earlier one."
        )

    def patches(self) -> list[Patch]:
        """The hooks into `train_step` and DDP's gradient reduction."""
        buckets = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
        return [
            Patch(
                "megatron.training.training:train_step",
                self._around_train_step,
                "wrap",
                "measure the memory of one step by category",
                "memory",
                needs=("model", "optimizer"),
            ),
            Patch(
                f"{buckets}.start_grad_sync",
                _as_communication,
                "wrap",
                "what starting a gradient reduction makes counts as communication",
                "memory",
            ),
            Patch(
                f"{buckets}.finish_grad_sync",
                _as_communication,
                "wrap",
                "what ending a gradient reduction makes counts as communication",
                "memory",
            ),
        ]

    def _around_train_step(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            self._trained += 1
            if self._trained != self.step:
                return original(*args, **kwargs)
            call = bound(original, args, kwargs)
            tracker = tracker_of(call["model"], call["optimizer"])
            with tracker, before_optimizer_step(call["optimizer"], lambda: tracker.default("other")):
                result = original(*args, **kwargs)
                for chunk in call["model"]:
                    wait_for_updates(chunk)
            self._measured, self.done = tracker.report(), True
            return result

        return wrapper


def _as_communication(original: Callable) -> Callable:
    # Backends may copy: gloo's reduce-scatter clones the whole buffer.
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        from megatron_ext.memory import category

        with category("communication"):
            return original(*args, **kwargs)

    return wrapper


def catalogue() -> list[Patch]:
    """Patches of the memory measurement, for the contract."""
    return StepMemory(2).patches()


def tracker_of(model_chunks: list, optimizer: Any) -> Any:
    """A `MemoryTracker` that knows everything that exists before a step."""
    from megatron_ext.memory import MemoryTracker
    from megatron_ext.record import on_gpu

    tracker = MemoryTracker("cuda" if on_gpu() else "cpu")
    for category, tensors in owned(model_chunks, optimizer):
        tracker.hold(category, tensors)
    tracker.hold_rest()
    return tracker


def owned(model_chunks: list, optimizer: Any) -> Iterator[tuple[str, list]]:
    """(category, tensors) of weights, gradients and optimizer states that exist, in this order.

    A tensor may share its storage with one before it: gradients are views into DDP's buffers, and the
    optimizer's parameters are the model's own where it keeps no master weights (nor shards of them).
    Weights are parameters and module buffers. A chunk that splits what it holds says what that is (`held`).
    """
    import torch
    from torch.utils._pytree import tree_leaves

    inner = list(_torch_optimizers(optimizer))
    weights = [param for chunk in model_chunks for param in chunk.parameters()]
    # Megatron's DistributedDataParallel has an attribute `buffers` in front of the method.
    buffers = [buffer for chunk in model_chunks for buffer in torch.nn.Module.buffers(chunk)]
    masters = [param for each in inner for group in each.param_groups for param in group["params"]]
    states = [leaf for each in inner for leaf in tree_leaves(list(each.state.values()))]
    held: dict[str, list] = {"weights": [], "gradients": [], "optimizer": []}
    for chunk in model_chunks:
        for category, tensors in chunk.held().items() if hasattr(chunk, "held") else ():
            held[category] += tensors
    yield "weights", held["weights"] + weights + buffers
    gradients = [grad for param in weights + masters for grad in _gradients(param)]
    yield "gradients", held["gradients"] + gradients
    states = [state for state in states if isinstance(state, torch.Tensor)]
    yield "optimizer", held["optimizer"] + masters + states


def _gradients(param: Any) -> Iterator[Any]:
    """What Megatron keeps gradients in: DDP's buffer, autograd's own, and precision-aware optimizers'."""
    for name in ("main_grad", "grad", "decoupled_grad"):
        gradient = getattr(param, name, None)
        if gradient is not None:
            yield gradient


def _torch_optimizers(optimizer: Any) -> Iterator[Any]:
    """The optimizers that hold states, inside Megatron's wrappers; a rank without parameters has none."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for each in chained:
            yield from _torch_optimizers(each)
    elif hasattr(optimizer, "optimizer"):
        if optimizer.optimizer is not None:
            yield from _torch_optimizers(optimizer.optimizer)
    else:
        yield optimizer
