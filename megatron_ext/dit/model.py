"""The diffusion transformer: patches in, predictions for the same patches out."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.dit.conditioning import (
    Conditioner,
    Modulation,
    PlainNorm,
    mark_partial,
    modulate,
    whole_linear,
)
from megatron_ext.dit.layer import layer_spec
from megatron_ext.dit.tokens import Geometry, position_embedding, share_of_rank


class DiTModel(MegatronModule):
    """One pipeline stage of the model.

    Every stage computes the conditioning vector itself from time and class, with weights of its own that stay
    equal: they start equal, and Megatron sums their gradients over the stages (`has_cond_embedder`,
    `pipeline_parallel`).
    """

    share_embeddings_and_output_weights = False  # Megatron asks every model

    def __init__(
        self,
        config: TransformerConfig,
        geometry: Geometry,
        num_classes: int,
        seed: int,
        pg_collection: ProcessGroupCollection,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ):
        super().__init__(config=config)
        self.geometry = geometry
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        self.pre_process = pre_process
        self.post_process = post_process
        self.vp_stage = vp_stage
        self.stage = pg_collection.pp.rank() + (vp_stage or 0) * pg_collection.pp.size()
        self.conditioner = Conditioner(config.hidden_size, num_classes, seed)
        self._mark_conditioner()
        if pre_process:
            self.patch_in = whole_linear(geometry.patch_dim, config.hidden_size, seed + 1)
        self.decoder = TransformerBlock(
            config,
            layer_spec(config),
            post_layer_norm=False,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        if post_process:
            self.head = Head(config, geometry.patch_dim)

    def _mark_conditioner(self) -> None:
        """Tell Megatron that the stages share these weights."""
        mark_partial(self.conditioner, self.config.sequence_parallel)
        table = self.conditioner.table
        table.pipeline_parallel = True  # gradients are summed over the stages
        table.shared_embedding = True  # in a bucket of its own
        table.shared = self.stage > 0  # counted once in the gradient norm

    def set_input_tensor(self, input_tensor: list[Tensor] | Tensor | None) -> None:
        """Hidden states from the stage before (called by the pipeline schedules)."""
        if isinstance(input_tensor, list):
            (input_tensor,) = input_tensor
        self.decoder.set_input_tensor(input_tensor)

    def forward(self, tokens: Tensor | None, time: Tensor, label: Tensor) -> Tensor:
        """Prediction `[b, s, patch_dim]` on the last stage, hidden states `[s, b, h]` before.

        Args:
            tokens: noisy patches of this context-parallel rank, `[b, s, patch_dim]`; read by the first stage.
            time: `[b]` in [0, 1].
            label: class, `[b]`; the number of classes stands for none.
        """
        condition = self.conditioner(time, label)
        hidden = self._embed(tokens) if self.pre_process else None
        hidden = self.decoder(hidden, attention_mask=None, context=condition)
        if not self.post_process:
            return hidden
        output = self.head(hidden, condition)
        if self.config.sequence_parallel:
            # Every tensor-parallel rank computes the same loss, so backward takes this rank's rows.
            output = gather_from_sequence_parallel_region(
                output, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return output.transpose(0, 1)

    def _embed(self, tokens: Tensor) -> Tensor:
        weight = self.patch_in.weight
        every = torch.arange(self.geometry.num_tokens, device=weight.device)
        index = share_of_rank(every, 0, self.pg_collection.cp)
        positions = position_embedding(index, self.geometry, self.config.hidden_size).to(weight.dtype)
        hidden = self.patch_in(tokens.to(weight.dtype).transpose(0, 1)) + positions[:, None]
        if self.config.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
        return hidden

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Weights for a distributed checkpoint; of the stages' conditioners the first stage's is written."""
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for key, entry in entries.items():
            if key.startswith(f"{prefix}conditioner."):
                entry.replica_id = (self.stage, *entry.replica_id[1:])
        return entries


class Head(torch.nn.Module):
    """Hidden states `[s, b, h]` to patches `[s, b, patch_dim]`, conditioned; zero at the start."""

    def __init__(self, config: TransformerConfig, patch_dim: int):
        super().__init__()
        self.norm = PlainNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.modulation = Modulation(config.hidden_size, 2)
        self.patch_out = whole_linear(config.hidden_size, patch_dim, None)
        mark_partial(self, config.sequence_parallel)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition)
        return self.patch_out(modulate(self.norm(hidden), shift, scale))
