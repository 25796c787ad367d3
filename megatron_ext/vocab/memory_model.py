"""Planned memory of a training step, by rank and category, from the architecture and the schedule.

    plan_memory(model_description(args, gpu=True), program) -> [MemoryPlan of rank 0, ...]

Each rank's program is walked: passes and receives take and leave bytes, and the plan is the state at the
highest sum. What one pass needs inside itself counts while it runs. Nothing is fitted: weights, gradients and
optimizer states are counted, activations follow from what each operation keeps for its backward pass
(memory_layers.py), vocabulary passes from functional_memory.py. Left out: scratch space of kernels and of
communication libraries, padding of buffers, what a fused cross entropy saves, and the optimizer's step.
"""

from argparse import Namespace
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from megatron_ext.schedules.action import TRANSFORMER
from megatron_ext.schedules.families import family
from megatron_ext.vocab import memory_layers as layers
from megatron_ext.vocab.memory_description import Description, model_description

if TYPE_CHECKING:
    from megatron_ext.schedules.action import Action
    from megatron_ext.schedules.lower import Program


CHUNKED = (*TRANSFORMER, "RF", "RB")
"""Actions of one chunk."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank at its peak."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Of transformer passes; in stock's pipeline also of its embedding and output layer."""
    vocabulary: int
    """Of vocabulary passes, what they send and receive included."""

    @property
    def total(self) -> int:
        """All categories."""
        return sum(asdict(self).values())

    def as_dict(self) -> dict[str, int]:
        """By category, as a run's record holds it."""
        return asdict(self)


def plan_memory(d: Description, program: "Program") -> list[MemoryPlan]:
    """The plan of every pipeline rank (of its first tensor-parallel rank) for one training step.

    Raises:
        ValueError: program and description are of different pipelines.
    """
    _compare(d, program)
    return [_plan(d, program, rank) for rank in range(d.pipeline)]


def _compare(d: Description, program: "Program") -> None:
    schedule = program.schedule
    same = (schedule.p, schedule.vocab, schedule.place) == (d.pipeline, d.vocab_mode, d.place)
    if not same or len(d.stage_layers) != d.pipeline:
        raise ValueError(
            f"the program is for {schedule.p} ranks with vocabulary {schedule.vocab}, the description for "
            f"{d.pipeline} ranks with {len(d.stage_layers)} stages and {d.vocab_mode}"
        )


def held_bytes(d: Description, program: "Program") -> int:
    """What passes leave for later ones on the fullest rank.

    Activations, matrices' inputs and gradients between B and W, the softmax of stock's cross entropy, and all
    of vocabulary passes. Not counted are activations and gradients that have been received and wait for their
    pass, and what a pass needs while it runs.
    """
    _compare(d, program)
    most = 0
    for rank in range(d.pipeline):
        walk = _walk(d, rank)
        for action in program.ranks[rank]:
            walk.step(action)
            most = max(most, walk.left())
    return most


def planned_program(d: Description, microbatches: int) -> "Program":
    """The program to plan a step with: a pipeline's peak comes within its first 4p microbatches."""
    from megatron_ext.schedules.build import build
    from megatron_ext.schedules.lower import lower

    few, chunks = min(microbatches, 4 * d.pipeline), d.chunks if d.schedule == "interleaved" else None
    schedule = build(d.pipeline, few, pipeline=d.schedule, vocab=d.vocab_mode, chunks=chunks)
    # Stock's transfers block.
    return lower(schedule, overlap=d.vocab_mode != "off" or d.schedule != "1f1b")


def plan_of_run(
    args: Namespace, *, gpu: bool, vocab: Namespace | None, microbatches: int
) -> list[MemoryPlan]:
    """The plan of a run, by pipeline rank, from Megatron's arguments and the flags of vocabulary parallelism.

    Raises:
        ValueError: the model does not cover this run; the text says why.
    """
    if getattr(args, "paro_strategy", "off") != "off":
        raise ValueError(
            "PaRO splits weights, gradients and optimizer states: `megatron-ext plan paro` plans its memory."
        )
    d = model_description(args, gpu=gpu, vocab=vocab)
    return plan_memory(d, planned_program(d, microbatches))


def _plan(d: Description, program: "Program", rank: int) -> MemoryPlan:
    count = layers.params(d, rank)
    shards = d.data * d.context if d.distributed_optimizer else 1
    walk = _walk(d, rank)
    for action in program.ranks[rank]:
        walk.step(action)
    activations, vocabulary = walk.peak
    return MemoryPlan(
        weights=count * d.itemsize,
        gradients=count * d.grad_itemsize,
        optimizer=-(-count * (d.master_itemsize + d.state_itemsize) // shards),
        activations=activations,
        vocabulary=vocabulary,
    )


def _walk(d: Description, rank: int) -> "_Walk":
    return _VocabularyWalk(d, rank) if d.vocab_mode != "off" else _Walk(d, rank)


class _Walk:
    """Activations of one rank along its program, with stock's embedding and output layer."""

    def __init__(self, d: Description, rank: int):
        self.d, self.rank = d, rank
        self.has_first, self.has_last = rank == d.place.first.rank, rank == d.place.last.rank
        self.kept = [layers.stage_kept(d, rank, chunk) for chunk in range(d.chunks)]
        self.hidden = layers.hidden_bytes(d)
        self.split = family(d.schedule).split
        self.held: Counter[tuple[str, int, int]] = Counter()  # (what, microbatch, chunk) -> bytes
        self.vocabulary: Counter[tuple[str, int]] = Counter()
        self.peak = (0, 0)

    def step(self, action: "Action") -> None:
        """Take note of one action: the moments of a pass, then what it leaves."""
        handle = getattr(self, f"_{action.kind}", None)
        if handle is not None:
            handle(*action[1:] if action.kind in CHUNKED else action[1:2])

    def moment(self, extra: int = 0, vocabulary: int = 0) -> None:
        """A moment at which `extra` bytes exist beside what is held."""
        now = (self.held.total() + extra, self.vocabulary.total() + vocabulary)
        if sum(now) > sum(self.peak):
            self.peak = now

    def left(self) -> int:
        """Bytes that passes have left for later ones."""
        received = sum(size for (what, _, _), size in self.held.items() if what in ("input", "gradient"))
        return self.held.total() - received + self.vocabulary.total()

    def is_first(self, chunk: int) -> bool:
        """Whether a chunk is the first stage."""
        return self.d.place.first == (self.rank, chunk)

    def is_last(self, chunk: int) -> bool:
        """Whether a chunk is the last stage."""
        return self.d.place.last == (self.rank, chunk)

    def _RF(self, i: int, chunk: int) -> None:
        self.held["input", i, chunk] = self.hidden
        self.moment()

    def _RB(self, i: int, chunk: int) -> None:
        self.held["gradient", i, chunk] = self.hidden
        self.moment()

    def _F(self, i: int, chunk: int) -> None:
        self.held.pop(("input", i, chunk), None)  # the first layer keeps it
        self.held["kept", i, chunk] = self.kept[chunk]
        self.moment(2 * self.hidden)  # the last layer's sum, and its output before it is sent
        if self.is_last(chunk) and self.d.vocab_mode == "off":
            self.moment(self._logits(forward=True))
            self.held["softmax", i, chunk] = 4 * self._logit_count

    def _B(self, i: int, chunk: int) -> None:
        if self.is_last(chunk) and self.d.vocab_mode == "off":
            self.moment(self._logits(forward=False))
            self.held.pop(("softmax", i, chunk))
            weight = self.d.vocab // self.d.tensor * self.d.hidden
            product = self.d.itemsize * (self._logit_count + weight) + self.hidden
            self.moment(product + layers.gathered_bytes(self.d))
        self.moment(self._backward(i, chunk))
        self.held.pop(("kept", i, chunk))
        self.held.pop(("gradient", i, chunk), None)
        if self.split:
            self.held["weights", i, chunk] = layers.left_for_weights(self.d, self.d.chunk_layers(self.rank))
            self.moment(self.hidden)
        if self.is_first(chunk) and self.d.vocab_mode == "off":
            # autograd makes a dense gradient of the whole embedding before it is added to the buffer.
            weight = self.d.vocab // self.d.tensor * self.d.hidden
            self.moment(self.d.itemsize * (weight + self.d.tokens * self.d.hidden))

    def _W(self, i: int, chunk: int) -> None:
        self.moment(layers.gathered_bytes(self.d))
        self.held.pop(("weights", i, chunk))

    def _backward(self, i: int, chunk: int) -> int:
        count = self.d.chunk_layers(self.rank)
        received = self.held[("gradient", i, chunk)]  # part of `backward_extra`
        return layers.backward_extra(self.d, count) + layers.recomputed_bytes(self.d, count) - received

    @property
    def _logit_count(self) -> int:
        return self.d.tokens * self.d.vocab // self.d.tensor

    def _logits(self, forward: bool) -> int:
        """Stock's cross entropy: logits in the model's type, and an fp32 copy that becomes the softmax; its
        backward pass turns that into the gradient, and autograd casts it to the model's type."""
        other = self.d.itemsize * self._logit_count if self.d.itemsize < 4 else 0
        return other + (4 * self._logit_count if forward else 0)


class _VocabularyWalk(_Walk):
    """The same with vocabulary passes."""

    def __init__(self, d: Description, rank: int):
        from megatron_ext.vocab.functional_memory import kept_bytes, peak_bytes
        from megatron_ext.vocab.saving import Saving

        super().__init__(d, rank)
        self.rows_bytes = d.itemsize * d.tokens * d.hidden  # whole rows, also with sequence parallelism
        sizes = (d.tokens, layers.shard_rows_of(d, rank), d.hidden, d.itemsize)
        how = (Saving(d.saving, d.chunk_rows), d.vocab_mode)
        self.state = kept_bytes(*sizes, *how, num_statistics=d.num_statistics)
        self.pass_peak = peak_bytes(
            *sizes, *how, num_statistics=d.num_statistics, weight_product=d.weight_product
        )

        # Layers keep what they need of the embeddings. Where the first of them takes them as they are, what
        # it keeps was made by vocabulary passes.
        copied = d.positions or d.dropout_mask or (d.micro_batch > 1 and not d.sequence_parallel)
        self.handed_on = not copied
        if self.handed_on and self.has_first:
            self.kept[d.place.first.chunk] -= self.hidden

    def _IF(self, i: int) -> None:
        self.vocabulary["embeddings", i] = self.rows_bytes
        self.moment()
        if not self.has_first:  # the sum is on its way; on the first stage it waits for F
            self.vocabulary.pop(("embeddings", i))

    def _F(self, i: int, chunk: int) -> None:
        if self.is_first(chunk):
            self.vocabulary.pop(("embeddings", i))
            if self.handed_on:
                self.vocabulary["embeddings", i] = self.hidden
        super()._F(i, chunk)
        if self.is_last(chunk):
            self.vocabulary["hidden", i] = self.rows_bytes

    def _C0(self, i: int) -> None:
        self.vocabulary["hidden", i] = self.rows_bytes
        self.moment()

    def _output_pass(self, i: int) -> None:
        self.vocabulary.pop(("hidden", i), None)  # part of the state
        self.vocabulary["state", i] = self.pass_peak
        self.moment()
        self.vocabulary["state", i] = self.state

    _S = _U = _output_pass

    def _C1(self, i: int) -> None:
        if self.d.vocab_mode == "vocab-2":
            self._keep_sum(i)

    def _T(self, i: int) -> None:
        self._output_pass(i)
        self.vocabulary.pop(("state", i))
        if self.d.vocab_mode != "vocab-2":
            self._keep_sum(i)

    def _keep_sum(self, i: int) -> None:
        if self.has_last:
            self.vocabulary["sum", i] = self.d.sum_itemsize * self.d.residual_rows * self.d.hidden

    def _B(self, i: int, chunk: int) -> None:
        super()._B(i, chunk)
        if self.is_last(chunk):
            self.vocabulary.pop(("sum", i), None)
        if self.is_first(chunk):
            self.vocabulary.pop(("embeddings", i), None)
            self.vocabulary["embedding gradient", i] = self.rows_bytes

    def _g(self, i: int) -> None:
        self.vocabulary["embedding gradient", i] = self.rows_bytes
        self.moment()

    def _IB(self, i: int) -> None:
        # In 16 bits the rows are added up in fp32 first, and the addends are cast to it.
        item = 4 if self.d.grad_itemsize < 4 else 0
        total = item * layers.shard_rows_of(self.d, self.rank) * self.d.hidden
        self.moment(vocabulary=total + (self.d.itemsize + item) * self.d.tokens * self.d.hidden)
        self.vocabulary.pop(("embedding gradient", i), None)
