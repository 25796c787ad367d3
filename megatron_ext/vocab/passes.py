"""The passes of one training or evaluation step: Megatron's model, and the vocabulary shards around it.

The transformer passes are those of every pipeline (pipeline/passes.py), but the model is called with what the
user's `forward_step` called its stand-in with, and the loss is a pass of its own: stock's
`forward_step_calc_loss` with the user's loss function. The vocabulary passes are ours (vocab/functional.py),
and they run without autograd. `arrived` puts received tensors where later passes find them.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules as stock
from torch import Tensor

from megatron_ext.memory import category
from megatron_ext.pipeline import passes as transformer
from megatron_ext.pipeline.passes import TransformerPasses
from megatron_ext.schedules.action import P2P, Action
from megatron_ext.vocab.batch import Call
from megatron_ext.vocab.comm import VocabComm
from megatron_ext.vocab.output import OutputPasses
from megatron_ext.vocab.shards import EmbeddingShard, OutputShard
from megatron_ext.vocab.volume import Sizes


class _Entry(torch.autograd.Function):
    """Where embeddings enter autograd: `keep` gets their gradient.

    A leaf of autograd would hold their values until B, on the first stage only, and layers that need them
    keep their own.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        ctx.keep = keep
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.keep(gradient)
        return None, None, None


@dataclass
class Job(transformer.Job):
    """What stays the same for all steps on this rank."""

    comm: VocabComm
    embedding: EmbeddingShard
    output: OutputPasses
    scatters: bool
    """Embeddings come out of stock's embedding layer split along the sequence."""

    def sizes(self, step: "Step") -> Sizes:
        """What the bytes of a step depend on."""
        weight, options = self.embedding.weight, self.output.options
        return Sizes(
            options.mode,
            p=self.comm.pp,
            t=self.comm.tp,
            stage=self.rank,
            m=step.microbatches,
            n=step.tokens[0].numel(),
            hidden=self.config.hidden_size,
            itemsize=weight.element_size(),
            sum_itemsize=(options.sum_dtype or weight.dtype).itemsize,
            sequence_parallel=self.config.sequence_parallel,
            scatters=self.scatters,
            statistics=options.terms.num_statistics,
            forward_only=step.forward_only,
            place=self.place,
        )

    @property
    def output_shard(self) -> OutputShard:
        """The module that holds this rank's rows of the output layer."""
        return self.output.shard


@dataclass(kw_only=True)
class Step(transformer.Step):
    """One step's input, and its results as stock's schedules return them."""

    calls: list[list[Call]]
    """By chunk and microbatch."""
    tokens: Tensor
    labels: Tensor
    """Both int32 `[m, b, s]`."""


class StepPasses(TransformerPasses):
    """Implements `schedules.runtime.Passes` for one step of real training."""

    job: Job
    step: Step

    def __init__(self, job: Job, step: Step):
        super().__init__(job, step)
        self._hidden_slices: dict[int, Tensor] = {}  # last stage: what a tensor-parallel rank sends
        self._hidden: dict[int, Tensor] = {}
        self._partial_embeddings: dict[int, Tensor] = {}
        self._embeddings: dict[int, Tensor] = {}  # first stage: sums that wait for F
        self._embedding_grads: dict[int, Tensor] = {}
        self._first_grads: dict[int, Tensor] = {}  # first stage: gradients of the embeddings
        self._losses_grads: dict[int, Tensor] = {}
        self._passes = {
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
            "e": self._embeddings_arrived,
            "g": self._embedding_grads.__setitem__,
            "C0": self._hidden.__setitem__,
            "C1": job.output.after_1,
            "C2": job.output.after_2,
            "C3": job.output.after_3,
            "G": job.output.set_gradient,
        }

    # --- what the runtime calls ----------------------------------------------------------------------------

    def compute_vocabulary(self, action: Action) -> None:
        """Run a pass of the vocabulary."""
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
        if action.kind in P2P:
            super().arrived(action, result)
        elif result is not None and action.kind in self._arrivals:
            self._arrivals[action.kind](action.microbatch, result)

    # --- transformer ---------------------------------------------------------------------------------------

    def _forward(self, i: int, chunk: int) -> None:
        job, step = self.job, self.step
        if job.is_first(chunk):
            job.embedding.feed(self._entering(i))
        call = step.calls[chunk][i]
        extra = {"fp32_output": False} if job.half_outputs and not job.place.vee else {}
        job.output_shard.deferring = True

        def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Any]:
            return model(*call.args, **call.kwargs, **extra), call.loss_func

        try:  # the loss is a pass of its own
            output, _ = self._stock_forward(forward_step, None, i, chunk, with_loss=False)
        finally:
            job.output_shard.deferring = False
        call.args, call.kwargs = (), {}
        self._outputs[i, chunk] = output
        self._forget_input(i, chunk)
        if not job.is_last(chunk):
            return
        self._check_hidden(output)
        rows = output.detach().reshape(-1, output.shape[-1])
        self._hidden_slices[i] = rows if job.config.sequence_parallel else job.comm.own_slice(rows)
        self._release((i, chunk))

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

    def _entering(self, i: int) -> Tensor:
        rows = self._embeddings.pop(i)
        if self.step.forward_only:
            return rows
        anchor = torch.empty(0, device=rows.device, requires_grad=True)
        return _Entry.apply(anchor, rows, functools.partial(self._first_grads.__setitem__, i))

    def _output_gradient(self, i: int, chunk: int) -> Tensor | None:
        if not self.job.is_last(chunk):
            return super()._output_gradient(i, chunk)
        gradient = self.job.output.input_gradient(i)
        shape = (-1, self.step.tokens.shape[1], gradient.shape[-1])
        return gradient.to(self.job.config.params_dtype).view(shape)

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
        root = self.job.place.first.rank
        return lambda: comm.collect(partial, root=root, whole=whole), [partial]

    def _embeddings_arrived(self, i: int, rows: Tensor) -> None:
        _, b, s = self.step.tokens.shape
        shape = (-1, b, rows.shape[-1]) if self.job.scatters else (b, s, rows.shape[-1])
        self._embeddings[i] = rows.view(shape)

    def _spread_embedding_gradient(self, i: int) -> tuple[Callable[[], Any], Sequence[Tensor]]:
        job, comm, n = self.job, self.job.comm, self.step.tokens[i].numel()
        if job.has_first:
            rows = self._first_grads.pop(i).reshape(-1, job.config.hidden_size)
            slice_ = rows if job.scatters else comm.own_slice(rows)
            slice_ = slice_.contiguous()
        else:
            slice_ = self._buffer(n)
        return lambda: comm.spread(slice_, n, root=self.job.place.first.rank), [slice_]

    def _embed_backward(self, i: int) -> None:
        self.job.output.lookup_gradient(self.job.embedding, self._embedding_grads.pop(i), self._token_rows(i))

    # --- output layer --------------------------------------------------------------------------------------

    def _labels(self, i: int) -> Tensor:
        """Labels `[n]` in the order of the hidden states' rows `[s, b]`."""
        return self.step.labels[i].t().reshape(-1).long()

    def _spread_hidden(self, i: int) -> tuple[Callable[[], Any], Sequence[Tensor]]:
        comm, n = self.job.comm, self.step.tokens[i].numel()
        slice_ = self._hidden_slices.pop(i) if self.job.has_last else self._buffer(n)
        root = self.job.place.last.rank
        return lambda: comm.spread(slice_, n, root=root), [slice_]

    def _buffer(self, n: int) -> Tensor:
        config = self.job.config
        shape = (self.job.comm.slice_rows(n), config.hidden_size)
        return torch.empty(shape, dtype=config.params_dtype, device=self.step.tokens.device)

    def _loss(self, i: int) -> None:
        job, step = self.job, self.step
        _, b, s = step.tokens.shape
        leaf = job.output.losses(i).view(s, b).t().contiguous()
        chunk = job.place.last.chunk
        call = step.calls[chunk][i]
        loss_func, call.loss_func = call.loss_func, None  # it holds the loss mask
        with torch.set_grad_enabled(not step.forward_only):
            leaf.requires_grad_(not step.forward_only)
            per_token = leaf.clone()  # like stock's losses it may be changed in place
            if job.config.timers is not None:
                job.config.timers("forward-compute", log_level=2).start()
            loss, num_tokens = stock.forward_step_calc_loss(
                job.models[chunk],
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
        step.add_tokens(num_tokens)
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
        if self.job.has_last:
            gradient = self._losses_grads.pop(i)
        else:
            gradient = torch.empty(tokens.numel(), dtype=torch.float32, device=tokens.device)
        root = self.job.place.last.rank
        return lambda: comm.broadcast(gradient, root=root), [gradient]
