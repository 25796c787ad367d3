"""The passes of one training or evaluation step: Megatron's model, and the vocabulary shards around it.

One object lives for one step. Each pass leaves what later passes need under its microbatch, and takes what it
uses up; `arrived` puts received tensors there. The transformer passes are stock's `forward_step` and
`backward_step`, the loss is stock's `forward_step_calc_loss` with the user's loss function; only the
vocabulary passes are ours (vocab/functional.py), and they run without autograd.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules as stock
from torch import Tensor

from megatron_ext.memory import category
from megatron_ext.schedules.action import Action
from megatron_ext.vocab.batch import Call
from megatron_ext.vocab.comm import VocabComm
from megatron_ext.vocab.output import OutputPasses
from megatron_ext.vocab.shards import EmbeddingShard, OutputShard
from megatron_ext.vocab.volume import Sizes


@dataclass
class Job:
    """What stays the same for all steps on this rank."""

    model: Any
    """As Megatron passes it on: wrapped."""
    config: Any
    comm: VocabComm
    embedding: EmbeddingShard
    output: OutputPasses
    scatters: bool
    """Embeddings come out of stock's embedding layer split along the sequence."""
    half_outputs: bool
    """The model is wrapped to run in 16 bits, and would return fp32."""

    @property
    def first(self) -> bool:
        """Whether this is the first stage."""
        return self.comm.groups.pipe.rank() == 0

    @property
    def last(self) -> int:
        """The last stage's rank in the pipeline."""
        return self.comm.pp - 1

    @property
    def on_last(self) -> bool:
        """Whether this is the last stage."""
        return self.comm.groups.pipe.rank() == self.last

    def sizes(self, step: "Step") -> Sizes:
        """What the bytes of a step depend on."""
        weight, options = self.embedding.weight, self.output.options
        return Sizes(
            options.mode,
            p=self.comm.pp,
            t=self.comm.tp,
            stage=self.comm.groups.pipe.rank(),
            m=step.microbatches,
            n=step.tokens[0].numel(),
            hidden=self.config.hidden_size,
            itemsize=weight.element_size(),
            sum_itemsize=(options.sum_dtype or weight.dtype).itemsize,
            sequence_parallel=self.config.sequence_parallel,
            scatters=self.scatters,
            statistics=options.terms.num_statistics,
            forward_only=step.forward_only,
        )

    @property
    def output_shard(self) -> OutputShard:
        """The module that holds this rank's rows of the output layer."""
        return self.output.shard


@dataclass
class Step:
    """One step's input, and its results as stock's schedules return them."""

    calls: list[Call]
    tokens: Tensor
    labels: Tensor
    """Both int32 `[m, b, s]`."""
    forward_only: bool
    first_val_step: bool | None
    cp_size: int
    before_last_backward: Callable[[], None]
    losses: list[Any] = field(default_factory=list)
    num_tokens: Tensor | None = None

    @property
    def microbatches(self) -> int:
        """m."""
        return len(self.calls)


class StepPasses:
    """Implements `schedules.runtime.Passes` for one step of real training."""

    def __init__(self, job: Job, step: Step):
        self.job = job
        self.step = step
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._hidden_slices: dict[int, Tensor] = {}  # last stage: what a tensor-parallel rank sends
        self._hidden: dict[int, Tensor] = {}
        self._partial_embeddings: dict[int, Tensor] = {}
        self._embeddings: dict[int, Tensor] = {}  # first stage: leaves of autograd
        self._embedding_grads: dict[int, Tensor] = {}
        self._output_grads: dict[int, Tensor] = {}
        self._input_grads: dict[int, Tensor] = {}
        self._losses_grads: dict[int, Tensor] = {}
        self._passes = {
            "F": self._forward,
            "B": self._backward,
            "IF": self._embed,
            "IB": self._embed_backward,
            "S": lambda i: job.output.first(i, self._hidden.pop(i), self._labels(i), step.forward_only),
            "U": job.output.second,
            "T": job.output.third,
            "L": self._loss,
        }
        self._collectives = {
            "e": self._collect_embeddings,
            "g": self._spread_embedding_gradient,
            "C0": self._spread_hidden,
            "C1": job.output.barrier_1,
            "C2": job.output.barrier_2,
            "C3": job.output.barrier_3,
            "G": self._spread_loss_gradient,
        }
        self._arrivals = {
            "RF": self._input_arrived,
            "RB": self._output_grads.__setitem__,
            "e": self._embeddings_arrived,
            "g": self._embedding_grads.__setitem__,
            "C0": self._hidden.__setitem__,
            "C1": job.output.after_1,
            "C2": job.output.after_2,
            "C3": job.output.after_3,
            "G": job.output.set_gradient,
        }

    # --- what the runtime calls ----------------------------------------------------------------------------

    def compute(self, action: Action) -> None:
        """Run a pass."""
        with category("activations" if action.kind in ("F", "B") else "vocabulary"):
            self._passes[action.kind](action.microbatch)

    def collective(self, action: Action) -> tuple[Callable[[], Any], Sequence[Tensor]]:
        """The operation behind a launch, and the tensors that it reads."""
        with category("communication"):
            function, inputs = self._collectives[action.kind](action.microbatch)

        def run() -> Any:
            with category("communication"):
                return function()

        return run, inputs

    def arrived(self, action: Action, result: Any) -> None:
        """Keep what was received for the pass that needs it."""
        arrive = self._arrivals.get(action.kind)
        if arrive is not None and result is not None:
            arrive(action.microbatch, result)

    def outgoing(self, action: Action) -> Tensor:
        """The activation or gradient to send."""
        if action.kind == "SB":
            return self._input_grads.pop(action.microbatch)
        return self._outputs[action.microbatch]

    def sent(self, action: Action) -> None:
        """Let go of an activation's memory, as stock does: backward needs its graph, not its values."""
        if action.kind == "SF":
            self._release(action.microbatch)

    # --- transformer ---------------------------------------------------------------------------------------

    def _forward(self, i: int) -> None:
        job, step = self.job, self.step
        if job.first:
            job.embedding.feed(self._leaf(i))
        call = step.calls[i]
        extra = {"fp32_output": False} if job.half_outputs else {}
        job.output_shard.deferring = True
        try:
            output, _ = stock.forward_step(
                lambda data_iterator, model: (model(*call.args, **call.kwargs, **extra), call.loss_func),
                None,
                job.model,
                step.microbatches,
                None if job.first else self._inputs[i],
                [],
                job.config,
                step.cp_size,
                is_first_microbatch=stock.check_first_val_step(
                    step.first_val_step, step.forward_only, i == 0
                ),
                current_microbatch=i,
                is_last_stage=False,  # the loss is a pass of its own
            )
        finally:
            job.output_shard.deferring = False
        call.args, call.kwargs = (), {}
        self._outputs[i] = output
        if step.forward_only:
            self._inputs.pop(i, None)
        if not job.on_last:
            return
        self._check_hidden(output)
        rows = output.detach().reshape(-1, output.shape[-1])
        self._hidden_slices[i] = rows if job.config.sequence_parallel else job.comm.own_slice(rows)
        self._release(i)

    def _check_hidden(self, output: Tensor) -> None:
        """Other stages receive what the config says: bytes of another type or shape would be misread."""
        config, (b, s) = self.job.config, self.step.tokens.shape[1:]
        rows = s // self.job.comm.tp if config.sequence_parallel else s
        expected = (rows, b, config.hidden_size), config.params_dtype
        if (tuple(output.shape), output.dtype) != expected:
            raise RuntimeError(
                f"the last stage's hidden states are {output.dtype} {tuple(output.shape)}, but "
                f"--vocab-parallel needs {expected[1]} {expected[0]}: what the final norm returns must have "
                "the model's type."
            )

    def _leaf(self, i: int) -> Tensor:
        if self.step.forward_only:
            return self._embeddings.pop(i)
        return self._embeddings[i].requires_grad_()

    def _release(self, i: int) -> None:
        if self.step.forward_only:
            del self._outputs[i]
        else:
            stock.deallocate_output_tensor(self._outputs[i], self.job.config.deallocate_pipeline_outputs)

    def _backward(self, i: int) -> None:
        job = self.job
        if job.on_last:
            gradient = job.output.input_gradient(i)
            shape = (-1, self.step.tokens.shape[1], gradient.shape[-1])
            self._output_grads[i] = gradient.to(job.config.params_dtype).view(shape)
        if i == self.step.microbatches - 1:
            self.step.before_last_backward()
        gradient = stock.backward_step(
            self._inputs.pop(i, None), self._outputs.pop(i), self._output_grads.pop(i), job.config
        )
        if job.first:
            self._input_grads[i] = self._embeddings.pop(i).grad
        else:
            self._input_grads[i] = gradient

    def _input_arrived(self, i: int, tensor: Tensor) -> None:
        self._inputs[i] = tensor.requires_grad_(not self.step.forward_only)

    # --- input layer ---------------------------------------------------------------------------------------

    def _token_rows(self, i: int) -> Tensor:
        """Token ids `[n]` in the order of the embedding's rows: by batch, or by sequence where stock
        scatters."""
        tokens = self.step.tokens[i]
        return (tokens.t() if self.job.scatters else tokens).reshape(-1).long()

    def _embed(self, i: int) -> None:
        tokens = self._token_rows(i)
        self._partial_embeddings[i] = self.job.output.lookup(self.job.embedding, tokens)

    def _collect_embeddings(self, i: int) -> tuple[Callable[[], Any], Sequence[Tensor]]:
        partial, comm, whole = self._partial_embeddings.pop(i), self.job.comm, not self.job.scatters
        return lambda: comm.collect(partial, root=0, whole=whole), [partial]

    def _embeddings_arrived(self, i: int, rows: Tensor) -> None:
        _, b, s = self.step.tokens.shape
        shape = (-1, b, rows.shape[-1]) if self.job.scatters else (b, s, rows.shape[-1])
        self._embeddings[i] = rows.view(shape)

    def _spread_embedding_gradient(self, i: int) -> tuple[Callable[[], Any], Sequence[Tensor]]:
        job, comm, n = self.job, self.job.comm, self.step.tokens[i].numel()
        if job.first:
            rows = self._input_grads.pop(i).reshape(-1, job.config.hidden_size)
            slice_ = rows if job.scatters else comm.own_slice(rows)
            slice_ = slice_.contiguous()
        else:
            slice_ = self._buffer(n)
        return lambda: comm.spread(slice_, n, root=0), [slice_]

    def _embed_backward(self, i: int) -> None:
        self.job.output.lookup_gradient(self.job.embedding, self._embedding_grads.pop(i), self._token_rows(i))

    # --- output layer --------------------------------------------------------------------------------------

    def _labels(self, i: int) -> Tensor:
        """Labels `[n]` in the order of the hidden states' rows `[s, b]`."""
        return self.step.labels[i].t().reshape(-1).long()

    def _spread_hidden(self, i: int) -> tuple[Callable[[], Any], Sequence[Tensor]]:
        comm, n = self.job.comm, self.step.tokens[i].numel()
        slice_ = self._hidden_slices.pop(i) if self.job.on_last else self._buffer(n)
        return lambda: comm.spread(slice_, n, root=comm.pp - 1), [slice_]

    def _buffer(self, n: int) -> Tensor:
        config = self.job.config
        shape = (self.job.comm.slice_rows(n), config.hidden_size)
        return torch.empty(shape, dtype=config.params_dtype, device=self.step.tokens.device)

    def _loss(self, i: int) -> None:
        job, step = self.job, self.step
        _, b, s = step.tokens.shape
        leaf = job.output.losses(i).view(s, b).t().contiguous()
        call = step.calls[i]
        loss_func, call.loss_func = call.loss_func, None  # it holds the loss mask
        with torch.set_grad_enabled(not step.forward_only):
            leaf.requires_grad_(not step.forward_only)
            per_token = leaf.clone()  # like stock's losses it may be changed in place
            if job.config.timers is not None:
                job.config.timers("forward-compute", log_level=2).start()
            loss, num_tokens = stock.forward_step_calc_loss(
                job.model,
                per_token,
                loss_func,
                job.config,
                None,
                False,
                step.microbatches,
                step.losses,
                step.cp_size,
                is_last_stage=True,
            )
        step.num_tokens = num_tokens if step.num_tokens is None else step.num_tokens + num_tokens
        if step.forward_only:
            return
        gradient = stock.backward_step(leaf, loss, None, job.config)
        if gradient is None:  # the loss does not depend on this microbatch
            gradient = torch.zeros_like(leaf)
        self._losses_grads[i] = gradient.t().reshape(-1).contiguous()
        job.output.set_gradient(i, self._losses_grads[i])
        job.output.scale_sum(i, self._losses_grads[i])

    def _spread_loss_gradient(self, i: int) -> tuple[Callable[[], Any], Sequence[Tensor]]:
        comm, tokens = self.job.comm, self.step.tokens[i]
        if self.job.on_last:
            gradient = self._losses_grads.pop(i)
        else:
            gradient = torch.empty(tokens.numel(), dtype=torch.float32, device=tokens.device)
        return lambda: comm.broadcast(gradient, root=comm.pp - 1), [gradient]
