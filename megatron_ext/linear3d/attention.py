"""Core attention by torch's fused kernels, in the place of stock's local one, which holds all scores."""

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor


class FusedAttention(DotProductAttention):
    """Stock's DotProductAttention with scores that exist only inside a kernel.

    Masks that are not causal, windows, other softmaxes and layer scaling stay with stock's own code.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Queries `[s, b, heads, d]`, keys and values `[s, b, groups, d]` to `[s, b, heads * d]`."""
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        config = self.config
        plain = config.softmax_type == "vanilla" and not config.apply_query_key_layer_scaling
        if kind is not AttnMaskType.causal or config.window_size is not None or not plain:
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            )
        assert attention_bias is None, "refused by stock, too"
        assert packed_seq_params is None, "refused by stock, too"
        parts = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = F.scaled_dot_product_attention(
            *parts,
            is_causal=True,
            dropout_p=self.attention_dropout.p if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def fused(core_attention: Any) -> Any:
    """The fused class for stock's local one; any other stays."""
    return FusedAttention if core_attention is DotProductAttention else core_attention
