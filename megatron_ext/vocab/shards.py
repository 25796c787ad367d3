"""Modules that hold this rank's rows of the embedding and of the output layer, under stock's names.

They are modules, and their passes run through `__call__`, because Megatron's data-parallel wrapper gathers
parameters (`--overlap-param-gather`) in forward hooks of the module that owns them.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.vocab.checkpoint import vocab_sharded_state_dict

EMBEDDING_KEY = "embedding.word_embeddings.weight"
OUTPUT_KEY = "output_layer.weight"


class _Shard(MegatronModule):
    """Rows `[lo, hi)` of a stock parameter of `padded_rows` rows: `weight` `[hi - lo, h]`."""

    def __init__(
        self, config: Any, weight: Parameter | None, key: str, rows: tuple[int, int], padded_rows: int
    ):
        super().__init__(config=config)
        self.register_parameter("weight", weight)
        self.key = key
        self.lo, self.hi = rows
        self.padded_rows = padded_rows

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The rows as a part of stock's tensor: its key and global shape."""
        assert not sharded_offsets, f"{self.key} has no offsets of layers"
        if self.weight is None:
            return {}
        rank = metadata["dp_cp_group"].rank()
        params = {"weight": (self.weight, self.key)}
        return vocab_sharded_state_dict(prefix, params, self.padded_rows, (self.lo, self.hi), rank)


class EmbeddingShard(_Shard):
    """This rank's rows of the input embedding.

    On the first stage it stands in the place of stock's word embeddings, and what the model gets from it is
    the sum over all shards, which a pass of its own made (`feed`).
    """

    def __init__(self, config: Any, weight: Parameter, rows: tuple[int, int], padded_rows: int):
        super().__init__(config, weight, EMBEDDING_KEY, rows, padded_rows)
        self._fed: Tensor | None = None

    def feed(self, embeddings: Tensor) -> None:
        """What the next forward pass of the model gets: `[b, s, h]`, or `[s/t, b, h]` where stock
        scatters."""
        assert self._fed is None, "the embeddings of the microbatch before were not used"
        self._fed = embeddings

    def forward(self, input_ids: Tensor | None, run: Callable[[Parameter], Any] | None = None) -> Any:
        """The embeddings that were fed, or with `run`, its result for this rank's rows."""
        if run is not None:
            return run(self.weight)
        if self._fed is None:
            raise RuntimeError(_OUTSIDE)
        embeddings, self._fed = self._fed, None
        return embeddings


class OutputShard(_Shard):
    """This rank's rows of the output layer.

    On the last stage it stands in the place of stock's output layer and hands the hidden states through:
    logits exist only inside the vocabulary passes. With tied embeddings it has no parameter and uses
    `tied`'s.
    """

    def __init__(
        self,
        config: Any,
        weight: Parameter | None,
        rows: tuple[int, int],
        padded_rows: int,
        tied: EmbeddingShard | None,
    ):
        super().__init__(config, weight, OUTPUT_KEY, rows, padded_rows)
        assert (weight is None) == (tied is not None)
        self._tied = (tied,)  # in a tuple, so that it is not registered as a submodule
        self.deferring = False
        """Set while the runtime runs the model; outside of it nobody would compute the logits."""

    @property
    def tied(self) -> EmbeddingShard | None:
        """The embedding whose parameter is used, None when untied."""
        return self._tied[0]

    @property
    def used_weight(self) -> Parameter:
        """The parameter that the output passes use."""
        return self.tied.weight if self.weight is None else self.weight

    def forward(
        self,
        hidden_states: Tensor | None,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        run: Callable[[Parameter], Any] | None = None,
    ) -> Any:
        """(hidden states, None) in the place of (logits, bias), or with `run`, its result for these rows."""
        if run is not None:
            # The parameter's owner is called, for its hooks.
            return run(self.weight) if self.tied is None else self.tied(None, run=run)
        if not self.deferring:
            raise RuntimeError(_OUTSIDE)
        return hidden_states, None


_OUTSIDE = (
    "the model was called outside the pipeline schedule. With --vocab-parallel its embedding and logits "
    "exist only inside the schedule's own passes: call it through Megatron's forward_backward_func, or drop "
    "the flag."
)


def new_parameter(rows: int, like: Tensor) -> Parameter:
    """An uninitialised shard parameter `[rows, h]` with the attributes that stock's vocabulary weights
    have."""
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    weight = Parameter(torch.empty((rows, like.shape[1]), dtype=like.dtype, device=like.device))
    # The gradient norm counts each shard once: its ranks are those of tp x pp.
    set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
    weight.allreduce = True
    weight.is_embedding_or_output_parameter = True  # --decoupled-lr, Muon
    return weight
