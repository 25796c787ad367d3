"""The transformer passes of one step: Megatron's model chunks, one microbatch and chunk at a time.

One object lives for one step. Each pass leaves what later passes need under (microbatch, chunk), and takes
what it uses up. F is stock's `forward_step` with the user's own function, B stock's `backward_step`; W is
pipeline/weights.py. Vocabulary parallelism subclasses this (vocab/passes.py).
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.pipeline_parallel import schedules as stock
from torch import Tensor

from megatron_ext.memory import category
from megatron_ext.pipeline.weights import Key, WeightGradients
from megatron_ext.schedules.action import TRANSFORMER, Action
from megatron_ext.schedules.placement import Place, Placement


@dataclass
class Job:
    """What stays the same for all steps on this rank."""

    models: list[Any]
    """Chunks, as Megatron passes them on: wrapped."""
    config: Any
    place: Placement
    rank: int
    """In the pipeline."""
    half_outputs: bool
    """The model is wrapped to run in 16 bits, and would return fp32."""
    weights: WeightGradients | None
    """Where backward passes are split."""

    def is_first(self, chunk: int) -> bool:
        """Whether a chunk of this rank is the first stage."""
        return self.place.first == (self.rank, chunk)

    def is_last(self, chunk: int) -> bool:
        """Whether a chunk of this rank is the last stage."""
        return self.place.last == (self.rank, chunk)

    @property
    def has_first(self) -> bool:
        """Whether the first stage is on this rank."""
        return self.place.first.rank == self.rank

    @property
    def has_last(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.place.last.rank == self.rank


@dataclass
class Step:
    """One step's input, and its results as stock's schedules return them."""

    microbatches: int
    forward_only: bool
    first_val_step: bool | None
    cp_size: int
    before_last_backward: Callable[[int], None]
    """Called with the chunk before its last backward pass."""
    after_last_weights: Callable[[int], None]
    """Called with the chunk after its last W."""
    forward_step: Callable | None = None
    """The user's, and its iterators by chunk."""
    iterators: Sequence[Any] = ()
    losses: list[Any] = field(default_factory=list)
    num_tokens: Any = None

    def add_tokens(self, num_tokens: Any) -> None:
        """Count the tokens of a microbatch's loss."""
        self.num_tokens = num_tokens if self.num_tokens is None else self.num_tokens + num_tokens


class TransformerPasses:
    """Implements `schedules.runtime.Passes` for pipelines without vocabulary passes."""

    def __init__(self, job: Job, step: Step):
        self.job = job
        self.step = step
        self._inputs: dict[Key, Tensor] = {}
        self._outputs: dict[Key, Tensor] = {}
        self._output_grads: dict[Key, Tensor] = {}
        self._input_grads: dict[Key, Tensor] = {}
        self.held = 0
        self.most_held = 0
        """Chunk activations that are and were held at once."""

    # --- what the runtime calls ----------------------------------------------------------------------------

    def compute(self, action: Action) -> None:
        """Run a pass."""
        kind, i, chunk = action
        with category("activations" if kind in TRANSFORMER else "vocabulary"):
            if kind == "F":
                self._count(1)
                with self._deferring((i, chunk)):
                    self._forward(i, chunk)
            elif kind == "B":
                with self._deferring((i, chunk)):
                    self._backward(i, chunk)
                if self.job.weights is None:
                    self._count(-1)
            elif kind == "W":
                self._weights(i, chunk)
                self._count(-1)
            else:
                self.compute_vocabulary(action)

    def compute_vocabulary(self, action: Action) -> None:
        """Run a pass of the vocabulary."""
        raise AssertionError(f"{action} has no place without vocabulary parallelism")

    def collective(self, action: Action) -> tuple[Callable[[], Any], Sequence[Tensor]]:
        """The operation behind a launch, and the tensors that it reads."""
        raise AssertionError(f"{action} has no place without vocabulary parallelism")

    def arrived(self, action: Action, result: Any) -> None:
        """Keep what was received for the pass that needs it."""
        key = action.microbatch, action.chunk
        if action.kind == "RF":
            self._inputs[key] = result.requires_grad_(not self.step.forward_only)
        elif action.kind == "RB":
            self._output_grads[key] = result

    def outgoing(self, action: Action) -> Tensor:
        """The activation or gradient to send."""
        key = action.microbatch, action.chunk
        return self._input_grads.pop(key) if action.kind == "SB" else self._outputs[key]

    def sent(self, action: Action) -> None:
        """Let go of an activation's memory, as stock does: backward needs its graph, not its values."""
        if action.kind == "SF":
            self._release((action.microbatch, action.chunk))

    # --- passes --------------------------------------------------------------------------------------------

    def _count(self, change: int) -> None:
        self.held += 0 if self.step.forward_only else change
        self.most_held = max(self.most_held, self.held)

    def _deferring(self, key: Key) -> contextlib.AbstractContextManager[None]:
        return self.job.weights.during(key) if self.job.weights is not None else contextlib.nullcontext()

    def _forward(self, i: int, chunk: int) -> None:
        step, last = self.step, self.job.is_last(chunk)
        output, num_tokens = self._stock_forward(step.forward_step, step.iterators[chunk], i, chunk, last)
        self._outputs[i, chunk] = output
        self._forget_input(i, chunk)
        if last:
            step.add_tokens(num_tokens)
            if step.forward_only:
                del self._outputs[i, chunk]

    def _stock_forward(
        self, forward_step: Callable, iterator: Any, i: int, chunk: int, with_loss: bool
    ) -> tuple[Tensor, Any]:
        job, step = self.job, self.step
        return stock.forward_step(
            forward_step,
            iterator,
            job.models[chunk],
            step.microbatches,
            self._input(i, chunk),
            step.losses,
            job.config,
            step.cp_size,
            is_first_microbatch=stock.check_first_val_step(step.first_val_step, step.forward_only, i == 0),
            current_microbatch=i,
            vp_stage=chunk if job.place.chunks > 1 else None,
            is_last_stage=with_loss,
        )

    def _input(self, i: int, chunk: int) -> Tensor | None:
        """What the chunk takes: received, or of another chunk of this rank; None for the first stage."""
        before = self.job.place.before(self.job.rank, chunk)
        if before is None:
            return None
        if before.rank == self.job.rank:
            output = self._outputs[i, before.chunk]
            self._inputs[i, chunk] = output.detach().requires_grad_(not self.step.forward_only)
            self._release((i, before.chunk))
        return self._inputs[i, chunk]

    def _forget_input(self, i: int, chunk: int) -> None:
        if self.step.forward_only:
            self._inputs.pop((i, chunk), None)

    def _release(self, key: Key) -> None:
        if self.step.forward_only:
            del self._outputs[key]
        else:
            stock.deallocate_output_tensor(self._outputs[key], self.job.config.deallocate_pipeline_outputs)

    def _backward(self, i: int, chunk: int) -> None:
        job, key = self.job, (i, chunk)
        gradient = self._output_gradient(i, chunk)
        if i == self.step.microbatches - 1:
            self.step.before_last_backward(chunk)
        gradient = stock.backward_step(
            self._inputs.pop(key, None), self._outputs.pop(key), gradient, job.config
        )
        if not job.is_first(chunk):
            self._input_grads[key] = gradient

    def _output_gradient(self, i: int, chunk: int) -> Tensor | None:
        """The gradient of a chunk's output: received, or of another chunk of this rank; None for the loss."""
        after: Place | None = self.job.place.after(self.job.rank, chunk)
        if after is None:
            return None
        if after.rank == self.job.rank:
            return self._input_grads.pop((i, after.chunk))
        return self._output_grads.pop((i, chunk))

    def _weights(self, i: int, chunk: int) -> None:
        assert self.job.weights is not None
        self.job.weights.run((i, chunk))
        if i == self.step.microbatches - 1:
            self.step.after_last_weights(chunk)
