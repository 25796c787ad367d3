"""Turns a stock GPT model, just built, into one whose vocabulary layers are shared out to all stages.

Stock has built and initialised its embedding on the first stage and its output layer on the last one. Here
every stage gets its rows of both, so a run starts from the very weights that stock starts from. The model
stays stock's otherwise: on the first stage the word embeddings come from a queue, on the last one hidden
states come out where logits were.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from megatron_ext import traffic
from megatron_ext.groups import device_of
from megatron_ext.hooks import bound
from megatron_ext.vocab.comm import FEATURE
from megatron_ext.vocab.shard import shard_rows
from megatron_ext.vocab.shards import EmbeddingShard, OutputShard, new_parameter


class _OnlyWordEmbeddings(MegatronModule):
    """Gives the embedding of a stage without stock's embedding layer its stock name."""

    def __init__(self, config: Any, word_embeddings: EmbeddingShard):
        super().__init__(config=config)
        self.word_embeddings = word_embeddings


def convert(model: Any, pipe: ProcessGroup) -> None:
    """Share out the vocabulary layers of `model` over `pipe`, the ranks of its pipeline; collective.

    Raises:
        ValueError: the vocabulary has fewer rows than there are ranks.
    """
    config, tp = model.config, model.tp_group
    rank, size = pipe.rank(), pipe.size()
    slice_rows = model.vocab_size // tp.size()
    parts = shard_rows(slice_rows, size)
    offset = tp.rank() * slice_rows
    rows = (offset + parts[rank][0], offset + parts[rank][1])
    tied = model.share_embeddings_and_output_weights
    embedding = _scatter(
        model.embedding.word_embeddings.weight if rank == 0 else None, parts, pipe, 0, config
    )
    embedding_shard = EmbeddingShard(config, embedding, rows, model.vocab_size)
    output = None
    if not tied:
        weight = model.output_layer.weight if rank == size - 1 else None
        output = _scatter(weight, parts, pipe, size - 1, config)
    if config.use_mup:
        for weight in (embedding, output):
            if weight is not None:
                weight.is_embedding_parameter = True
    if rank == 0:
        model.embedding.word_embeddings = embedding_shard
    else:
        model.embedding = _OnlyWordEmbeddings(config, embedding_shard)
    if rank == size - 1:
        del model.output_layer
        model.compute_language_model_loss = _hand_through
    tied_to = embedding_shard if tied else None
    model.output_layer = OutputShard(config, output, rows, model.vocab_size, tied_to)
    # Both shards of a rank are one parameter: no stage has a copy that stock would have to keep in step.
    model.share_embeddings_and_output_weights = False
    model.sharded_state_dict = types.MethodType(_sharded_state_dict, model)
    print(
        f"[megatron_ext] stage {rank}, tensor-parallel rank {tp.rank()}: vocabulary rows {rows[0]} to "
        f"{rows[1]} of {model.vocab_size}, {'tied' if tied else 'untied'}",
        flush=True,
    )


def is_converted(model: Any) -> bool:
    """Whether `convert` has been at work on this (unwrapped) model."""
    return isinstance(getattr(model, "output_layer", None), OutputShard)


def _scatter(
    weight: Tensor | None, parts: list[tuple[int, int]], pipe: ProcessGroup, root: int, config: Any
) -> Parameter:
    """This rank's rows of the root's `weight` `[V/t, h]`."""
    rank = pipe.rank()
    lo, hi = parts[rank]
    like = weight if weight is not None else _template(config)
    shard = new_parameter(hi - lo, like)
    device = device_of(pipe)  # the model may still be on CPU when the group is NCCL's
    with torch.no_grad():
        if rank != root:
            rows = torch.empty_like(shard, device=device)
            traffic.recv(rows, group_src=root, group=pipe, feature=FEATURE)
            shard.copy_(rows)
            return shard
        for other, (begin, end) in enumerate(parts):
            if other == rank:
                shard.copy_(weight[begin:end])
            else:
                rows = weight[begin:end].detach().to(device).contiguous()
                traffic.send(rows, group_dst=other, group=pipe, feature=FEATURE)
    return shard


def _template(config: Any) -> Tensor:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return torch.empty((0, config.hidden_size), dtype=config.params_dtype, device=device)


def _hand_through(labels: Tensor, logits: Tensor) -> Tensor:
    """In the place of `compute_language_model_loss`: the "logits" are hidden states `[s, b, h]`."""
    return logits


def _sharded_state_dict(
    model: Any, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
) -> dict[str, Any]:
    # Stock's own method ties the output layer of the last stage to the embedding of the first one. Here each
    # shard describes itself, so only what all modules have in common is left.
    return MegatronModule.sharded_state_dict(model, prefix, sharded_offsets, metadata)


def after_init(pipe: Callable[[], ProcessGroup], original: Callable) -> Callable:
    """Wrap of `GPTModel.__init__` that converts the new model."""

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        call = bound(original, (self, *args), kwargs)
        learned = call["position_embedding_type"] == "learned_absolute"
        scatter = call["scatter_embedding_sequence_parallel"] and self.config.sequence_parallel
        convert(self, pipe())
        # Whether the first stage's embedding layer takes sequence slices; other stages have no such layer.
        self.vocab_scatters = scatter and not learned

    return __init__
