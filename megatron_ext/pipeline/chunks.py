"""Chunks in a V: which layers, embedding and output layer stock builds where.

Stock builds the chunks of an interleaved pipeline, chunk c of rank r as stage c p + r. In a V, chunk 1 of
rank r is stage 2 p - 1 - r: what stock would build on rank p - 1 - r. So wherever stock asks for the rank
with regard to chunk 1, it gets the mirrored one.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_ext.hooks import bound


def mirrored(chunk: int | None, rank: int, size: int) -> int:
    """The rank on which an interleaved pipeline has the stage that is chunk `chunk` of `rank` in a V."""
    return size - 1 - rank if chunk == 1 else rank


def layer_offset(original: Callable) -> Callable:
    """Wrap of `get_transformer_layer_offset`."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> int:
        call = bound(original, args, kwargs)
        rank = call["pp_rank"]
        if rank is None:
            from megatron.core import parallel_state

            rank = parallel_state.get_pipeline_model_parallel_rank()
        size = call["config"].pipeline_model_parallel_size
        call["pp_rank"] = mirrored(call["vp_stage"], rank, size)
        return original(**call)

    return wrapper


def last_stage(original: Callable) -> Callable:
    """Wrap of `is_pipeline_last_stage`: the last stage is chunk 1 of rank 0."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> bool:
        call = bound(original, args, kwargs)
        if call["ignore_virtual"]:
            return original(*args, **kwargs)
        from megatron.core import parallel_state

        return call["vp_stage"] == 1 and parallel_state.get_pipeline_model_parallel_rank() == 0

    return wrapper


def build_chunk(original: Callable, *, ties: bool) -> Callable:
    """Wrap of `GPTModel.__init__`: embedding and output layer are both on rank 0.

    With `ties`, tied weights are one parameter there: the output layer of chunk 1 uses chunk 0's embedding.
    Vocabulary parallelism, whose wrap comes after this one, shares them out by itself.
    """
    waiting: list[Any] = []  # the embedding of a chunk 0 whose chunk 1 is not there yet

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        call = dict(bound(original, (self, *args), kwargs))
        call.pop("self")
        pipe = call["pg_collection"].pp
        chunk, rank = call["vp_stage"], pipe.rank()
        call["pre_process"] = chunk == 0 and rank == 0
        call["post_process"] = chunk == 1 and rank == 0
        tied, call["share_embeddings_and_output_weights"] = call["share_embeddings_and_output_weights"], False
        original(self, **call)
        if not (ties and tied and rank == 0):
            return
        if chunk == 0:
            waiting[:] = [self.embedding.word_embeddings]
        else:
            _tie(self, waiting.pop())

    return __init__


def _tie(model: Any, embedding: Any) -> None:
    """Let the output layer of `model` use the weight of `embedding`, a module of another chunk."""
    from megatron.core.transformer.module import MegatronModule

    del model.output_layer.weight
    model.output_layer.register_parameter("weight", None)
    model.share_embeddings_and_output_weights = True
    model.shared_embedding_or_output_weight = lambda: embedding.weight

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        # Stock's own method describes a copy on the last stage; here there is none, and nothing else of the
        # output layer is stored.
        found = MegatronModule.sharded_state_dict(model, prefix, sharded_offsets, metadata)
        return {key: value for key, value in found.items() if not key.startswith(f"{prefix}output_layer.")}

    model.sharded_state_dict = sharded_state_dict
