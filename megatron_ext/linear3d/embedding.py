"""Embedding of tokens and learned positions on the grid."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.linear3d.comm import GridComm
from megatron_ext.linear3d.functional import gather, own_part, reduce
from megatron_ext.linear3d.layouts import POSITIONS, WEIGHT_AXIS, Move, Site
from megatron_ext.linear3d.parameters import new_parameter, sharded


class _Table(torch.nn.Module):
    """One parameter `weight`, under stock's name."""

    def __init__(self, comm: GridComm, layout: Any, shape: tuple[int, int], config: Any, vocab: bool):
        super().__init__()
        self.comm, self.layout, self.vocab = comm, layout, vocab
        self.weight = new_parameter(comm, layout, shape, config, config.embedding_init_method)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """A part of stock's table."""
        key, rank = f"{prefix}weight", metadata["dp_cp_group"].rank()
        part = sharded(self.weight, key, self.comm, self.layout, sharded_offsets, rank, vocab=self.vocab)
        return {key: part}


class GridWordEmbedding(_Table):
    """Rows of the vocabulary on the grid; every rank looks up those of its part and the sums are
    scattered."""

    def __init__(self, comm: GridComm, site: Site, vocab: int, config: Any):
        super().__init__(comm, site.weight, (vocab, config.hidden_size), config, vocab=True)
        self.site = site
        self._axes = site.weight.cuts[0].removesuffix("i")

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `[b, s]`, equal on all ranks, to `[s/Gj, b/Gi, h/Gl]`."""
        comm, name = self.comm, self.site.name
        table = gather(self.weight, comm, Move(WEIGHT_AXIS, 0), name)
        rows = own_part(tokens, comm, Move("i", 0)).transpose(0, 1) - comm.index(self._axes) * table.shape[0]
        foreign = (rows < 0) | (rows >= table.shape[0])
        found = F.embedding(rows.masked_fill(foreign, 0), table).masked_fill(foreign.unsqueeze(-1), 0.0)
        for move in self.site.plan.reduces:
            found = reduce(found, comm, move, name)
        return found if comm.tags is None else comm.tags.mark(found, self.site.result)


class GridPositions(_Table):
    """Learned positions `[S, h/Gl]`."""

    def __init__(self, comm: GridComm, max_positions: int, config: Any):
        super().__init__(comm, POSITIONS, (max_positions, config.hidden_size), config, vocab=False)

    def forward(self, positions: Tensor) -> Tensor:
        """Position ids `[b, s]`, equal on all ranks, to `[s/Gj, b/Gi, h/Gl]`."""
        own = own_part(own_part(positions, self.comm, Move("i", 0)), self.comm, Move("j", 1))
        return F.embedding(own.transpose(0, 1), self.weight)


class GridEmbedding(MegatronModule):
    """Stock's LanguageModelEmbedding, whose result is in the residual layout."""

    def __init__(self, comm: GridComm, site: Site, vocab: int, max_positions: int | None, config: Any):
        """`max_positions`: of a learned table; None without one."""
        super().__init__(config=config)
        self.word_embeddings = GridWordEmbedding(comm, site, vocab, config)
        self.add_position_embedding = max_positions is not None
        if max_positions is not None:
            self.position_embeddings = GridPositions(comm, max_positions, config)
        self.embedding_dropout = torch.nn.Dropout(config.hidden_dropout)
        self.scatter_to_sequence_parallel = True  # the model must not scatter once more
        self.reduce_scatter_embeddings = True

    def forward(self, input_ids: Tensor, position_ids: Tensor, tokentype_ids: Tensor | None = None) -> Tensor:
        """Ids `[b, s]` to `[s/Gj, b/Gi, h/Gl]`, after dropout."""
        assert tokentype_ids is None, "a GPT has no token types"
        x = self.word_embeddings(input_ids)
        if self.add_position_embedding:
            x = x + self.position_embeddings(position_ids)
        if self.config.use_mup and self.config.mup_embedding_mult != 1.0:
            x = x * self.config.mup_embedding_mult
        if self.config.fp32_residual_connection:
            x = x.float()
        if not self.config.sequence_parallel:  # a grid of one rank
            return self.embedding_dropout(x)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return self.embedding_dropout(x)
