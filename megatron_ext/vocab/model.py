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
from megatron_ext.schedules.placement import Placement
from megatron_ext.vocab.comm import FEATURE
from megatron_ext.vocab.shard import shard_rows
from megatron_ext.vocab.shards import EmbeddingShard, OutputShard, new_parameter


class _OnlyWordEmbeddings(MegatronModule):
    """Gives the embedding of a stage without stock's embedding layer its stock name."""

    def __init__(self, config: Any, word_embeddings: EmbeddingShard):
        super().__init__(config=config)
        self.word_embeddings = word_embeddings


def convert(
    model: Any, pipe: ProcessGroup, place: Placement, chunk: int, first: EmbeddingShard | None, tied: bool
) -> None:
    """Share out the vocabulary layers of `model`, a chunk, over the pipeline's ranks; collective.

    Every rank's chunk 0 gets its rows of the embedding, and its last chunk those of the output layer. `first`
    is the embedding of chunk 0 for a chunk that is another one.

    Raises:
        ValueError: the vocabulary has fewer rows than there are ranks.
    """
    config, tp = model.config, model.tp_group
    rank, size = pipe.rank(), pipe.size()
    slice_rows = model.vocab_size // tp.size()
    parts = shard_rows(slice_rows, size)
    offset = tp.rank() * slice_rows
    rows = (offset + parts[rank][0], offset + parts[rank][1])
    if chunk == 0:
        root = place.first.rank
        weight = model.embedding.word_embeddings.weight if rank == root else None
        first = EmbeddingShard(config, _scatter(weight, parts, pipe, root, config), rows, model.vocab_size)
        if rank == root:
            model.embedding.word_embeddings = first
        else:
            model.embedding = _OnlyWordEmbeddings(config, first)
    if chunk == place.chunks - 1:
        root = place.last.rank
        weight = None
        if not tied:
            weight = model.output_layer.weight if rank == root else None
            weight = _scatter(weight, parts, pipe, root, config)
        if rank == root:
            del model.output_layer
            model.compute_language_model_loss = _hand_through
        shard = OutputShard(config, weight, rows, model.vocab_size, first if tied else None)
        model.output_layer = shard
    if config.use_mup:
        for name in ("embedding.word_embeddings", "output_layer"):
            weight = getattr(_submodule(model, name), "weight", None)
            if weight is not None:
                weight.is_embedding_parameter = True
    # Both shards of a rank are one parameter: no stage has a copy that stock would have to keep in step.
    model.share_embeddings_and_output_weights = False
    model.sharded_state_dict = types.MethodType(_sharded_state_dict, model)
    if chunk:
        return
    print(
        f"[megatron_ext] stage {rank}, tensor-parallel rank {tp.rank()}: vocabulary rows {rows[0]} to "
        f"{rows[1]} of {model.vocab_size}, {'tied' if tied else 'untied'}",
        flush=True,
    )


def _submodule(model: Any, name: str) -> Any:
    for part in name.split("."):
        model = getattr(model, part, None)
    return model


def is_converted(models: list[Any]) -> bool:
    """Whether `convert` has been at work on these (unwrapped) chunks."""
    return isinstance(getattr(models[-1], "output_layer", None), OutputShard)


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


def after_init(
    pipe: Callable[[], ProcessGroup], placement: Callable[[int], Placement], original: Callable
) -> Callable:
    """Wrap of `GPTModel.__init__` that converts a new model once all its chunks are there.

    Not before, since stock itself copies tied weights from the first to the last stage while it builds them.
    `placement` of a number of pipeline ranks says how many chunks there are.
    """
    built: list[tuple[Any, bool]] = []  # chunks of a model that is not complete

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        call = bound(original, (self, *args), kwargs)
        learned = call["position_embedding_type"] == "learned_absolute"
        scatter = call["scatter_embedding_sequence_parallel"] and self.config.sequence_parallel
        group, chunk = pipe(), call["vp_stage"] or 0
        place = placement(group.size())
        del built[chunk:]  # what is left of a model that was given up
        built.append((self, call["share_embeddings_and_output_weights"]))
        if len(built) == place.chunks:
            first = None
            for number, (model, tied) in enumerate(built):
                convert(model, group, place, number, first, tied)
                first = model.embedding.word_embeddings if first is None else first
            built.clear()
        # Whether the first stage's embedding layer takes sequence slices; other stages have no such layer.
        self.vocab_scatters = scatter and not learned

    return __init__
