"""Megatron's transformer layer, conditioned by AdaLN-Zero, and its spec."""

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, get_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_ext.dit.conditioning import Modulation, PlainNorm, mark_partial, modulate


class DiTLayer(TransformerLayer):
    """Self-attention and MLP whose norms are shifted and scaled, and whose outputs are gated, by condition.

    The conditioning vector `[b, h]` comes in as `context`: `TransformerBlock` hands that from layer to layer,
    and full recomputation differentiates through it. Weights start at zero gates: the layer is the identity.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.modulation = Modulation(config.hidden_size, 6)
        mark_partial(self.modulation, config.sequence_parallel)

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, context: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """`hidden_states` `[s, b, h]` (this rank's tokens) and `context` `[b, h]`; returns both.

        `kwargs` are the block's other hand-me-downs, which a DiT has no use for.
        """
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(context)
        inner = modulate(self.input_layernorm(hidden_states), shift, scale)
        output = self.self_attention(inner, attention_mask=attention_mask)
        hidden_states = self._add(self.self_attn_bda, output, gate, hidden_states)
        inner = modulate(self.pre_mlp_layernorm(hidden_states), mlp_shift, mlp_scale)
        hidden_states = self._add(self.mlp_bda, self.mlp(inner), mlp_gate, hidden_states)
        return hidden_states, context

    def _add(self, bda: Any, output: tuple[Tensor, Tensor | None], gate: Tensor, residual: Tensor) -> Tensor:
        """`residual + dropout(gate * (output + bias))` by Megatron's (fused) function."""
        value, bias = output
        gated = (gate * value, None if bias is None else gate * bias)
        return bda(self.training, self.config.bias_dropout_fusion)(gated, residual, self.hidden_dropout)


def core_attention(backend: BackendSpecProvider, config: TransformerConfig) -> type:
    """The class that computes attention itself, over all tokens of a sample.

    With context parallelism each rank holds a contiguous chunk of the tokens (`tokens.share_of_rank`).
    Transformer Engine's attention can do that; the local one asserts a size of 1.
    """
    return backend.core_attention()


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Spec of a DiT layer with the linear layers and attention of `--transformer-impl`."""
    backend = get_backend(config.transformer_impl)
    rms_norm = config.normalization == "RMSNorm"
    qk_norm = backend.layer_norm(rms_norm=rms_norm, for_qk=True) if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=core_attention(backend, config),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    mlp = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
    no_mask = {"attn_mask_type": AttnMaskType.no_mask}
    return ModuleSpec(
        module=DiTLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=PlainNorm,
            self_attention=ModuleSpec(module=SelfAttention, params=no_mask, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=PlainNorm,
            mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )
