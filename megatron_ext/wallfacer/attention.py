"""Multi-ring attention as the core attention of Megatron's layers.

A layer's projections, norms and rotary embedding stay what its spec says (local or Transformer Engine); only
`core_attention` is this one. It gets own rows of queries, keys and values, as stock deals them out.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_ext.groups import device_of
from megatron_ext.wallfacer.function import Result, Rings
from megatron_ext.wallfacer.plan import make_plan
from megatron_ext.wallfacer.sequence import Layout, packed, whole
from megatron_ext.wallfacer.tiles import Mask
from megatron_ext.wallfacer.volume import Cost, Shape

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
OTHERS = (AttnMaskType.no_mask, AttnMaskType.padding)
PADDED = (AttnMaskType.padding, AttnMaskType.padding_causal)
"""Of packed documents only: otherwise the padding would be in the mask, which is not read."""


@dataclass
class Setup:
    """What all layers of a rank share."""

    rings: Rings
    cp_ranks: tuple[int, ...]
    """Global ranks of the context-parallel group."""
    calls: list[tuple["WallFacerAttention", Cost, bool]] | None = None
    """Forward passes since this was emptied, where bytes are checked: the layer, what the call costs, whether
    the layer will be recomputed."""
    layers: list["WallFacerAttention"] = field(default_factory=list)
    _layouts: deque = field(default_factory=lambda: deque(maxlen=64))

    def packed_layout(self, params: "PackedSeqParams") -> Layout:
        """Of packed documents; read from the device once per microbatch, not once per layer."""
        found = next((layout for known, layout in self._layouts if known is params), None)
        if found is None:
            found = layout_of(params)
            self._layouts.append((params, found))
        return found


def layout_of(params: "PackedSeqParams") -> Layout:
    """Documents of Megatron's packed sequences, each of which is dealt out by itself.

    Raises:
        ValueError: a format other than thd, queries and keys of other lengths, or ranks of its own.
    """
    if params.qkv_format != "thd":
        raise ValueError(f"packed sequences in the format {params.qkv_format!r}: WallFacer reads thd alone")
    if params.local_cp_size is not None or params.cp_group is not None:
        raise ValueError(
            "packed sequences that name context-parallel ranks of their own (dynamic context parallelism): "
            "WallFacer's teams are made of all of them. Use another --cp-comm-type"
        )
    query, keys = (
        _ends(padded, filled)
        for padded, filled in (
            (params.cu_seqlens_q_padded, params.cu_seqlens_q),
            (params.cu_seqlens_kv_padded, params.cu_seqlens_kv),
        )
    )
    if query != keys:
        raise ValueError(
            "packed sequences whose queries and keys have other lengths: WallFacer wants one set"
        )
    return packed(*query)


def _ends(padded: Tensor | None, filled: Tensor) -> tuple[list[int], list[int]]:
    """Ends of documents with and without padding; what collated batches are filled up with is left out."""
    rows = list(zip((filled if padded is None else padded).tolist(), filled.tolist(), strict=True))
    while len(rows) > 2 and rows[-1] == rows[-2]:
        rows.pop()
    with_padding, without = zip(*rows, strict=True)
    return list(with_padding), list(without)


def _make_offset(config: "TransformerConfig", heads: int, device: torch.device) -> Tensor | None:
    """Score of the key without a value that every row sees, one for each head."""
    if config.softmax_type == "vanilla":
        return None
    values = {"device": device, "dtype": config.params_dtype}
    if config.softmax_type == "off-by-one":
        return torch.zeros(heads, **values)
    offset = torch.nn.Parameter(torch.empty(heads, **values))
    if config.perform_initialization:
        config.init_method(offset)
    return offset


class WallFacerAttention(MegatronModule):
    """Core attention `[s, b, hq, d]` x `[s, b, hk, d]` -> `[s, b, hq d]` over context-parallel ranks.

    With packed documents tensors are `[t, h, d]`. Its arguments are those of stock's core attentions, and
    `setup`. Where activations are recomputed, the first pass leaves its result for the second one, which then
    repeats neither attention nor its communication.

    Raises:
        ValueError: something in the config, or a mask, that it cannot compute.
    """

    def __init__(
        self,
        config: "TransformerConfig",
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: "ProcessGroupCollection | None" = None,
        *,
        setup: Setup,
    ):
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"attention dropout of {dropout}: WallFacer has none, set --attention-dropout 0")
        if attention_type != "self":
            raise ValueError(f"{attention_type} attention: WallFacer computes self attention alone")
        ranks = tuple(torch.distributed.get_process_group_ranks(pg_collection.cp))
        if ranks != setup.cp_ranks:
            raise ValueError(
                f"a layer whose context-parallel ranks are {list(ranks)}, where WallFacer's groups are made "
                f"of {list(setup.cp_ranks)}: build layers with Megatron's own context-parallel group"
            )
        self.attn_mask_type = attn_mask_type
        self.tp_group = pg_collection.tp
        self.softmax_scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, max(1, layer_number)
        )
        self.window = tuple(config.window_size) if windowed else (-1, -1)
        heads = config.num_attention_heads // self.tp_group.size()
        self.softmax_offset = _make_offset(config, heads, device_of(pg_collection.cp))
        self.setup = setup
        self.results: deque[Result] = deque()
        """Of layers that will be recomputed, oldest first: backward passes come in the order of forward
        passes."""
        setup.layers.append(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: "PackedSeqParams | None" = None,
    ) -> Tensor:
        """Attention of own rows. `attention_mask` is not read: which keys a row sees follows from the type
        of mask, the window and the documents."""
        if attention_bias is not None:
            raise ValueError("an attention bias: WallFacer's kernels take none")
        tensors = (query, key, value)
        if packed_seq_params is not None:
            tensors = tuple(x.unsqueeze(1) if x.dim() == 3 else x for x in tensors)
        given = self._given(tensors[0], attn_mask_type or self.attn_mask_type, packed_seq_params)
        out = self._attend(tensors, given)
        return out.flatten(2).squeeze(1) if packed_seq_params is not None else out.flatten(2)

    def _given(
        self, query: Tensor, mask_type: AttnMaskType, packed_seq_params: "PackedSeqParams | None"
    ) -> dict[str, Any]:
        """Keyword arguments of `Rings.attend`."""
        causal = mask_type in CAUSAL
        if mask_type not in CAUSAL + OTHERS or (mask_type in PADDED and packed_seq_params is None):
            raise ValueError(
                f"a mask of the type {mask_type.name}: WallFacer computes causal and bidirectional "
                "attention, and padding only of packed documents"
            )
        left, right = (None if side < 0 else side for side in self.window)
        mask = Mask(left, 0 if causal else right)
        if packed_seq_params is not None:
            layout = self.setup.packed_layout(packed_seq_params)
        else:
            # Attention without any mask does not depend on where tokens are.
            split = "contiguous" if mask == Mask() else "zigzag"
            layout = whole(query.shape[0] * len(self.setup.cp_ranks), split)
        return {"layout": layout, "mask": mask, "scale": self.softmax_scale, "sink": self.softmax_offset}

    def _attend(self, tensors: tuple[Tensor, Tensor, Tensor], given: dict[str, Any]) -> Tensor:
        rings, again = self.setup.rings, is_checkpointing()
        if again and torch.is_grad_enabled():
            if not self.results:
                raise RuntimeError(
                    f"layer {self} is recomputed more often than it was computed: WallFacer keeps one result "
                    "for each pass. Use --cp-comm-type p2p, or no recomputation"
                )
            return rings.attach(self.results.popleft(), *tensors, **given)
        self._note(tensors, given, again)
        if again:
            result = rings.run(*tensors, **given)
            self.results.append(result)
            return result.out
        return rings.attend(*tensors, **given)

    def _note(self, tensors: tuple[Tensor, Tensor, Tensor], given: dict[str, Any], again: bool) -> None:
        if self.setup.calls is None:
            return
        rings, (query, key, _) = self.setup.rings, tensors
        plan = make_plan(rings.geometry, given["layout"], given["mask"])
        native = query.is_cuda
        self.setup.calls.append((self, Cost(plan, Shape.of(query, key), rings.options, native), again))

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict | None = None,
    ) -> dict[str, Any]:
        """The learned offset, under the name that stock gives it; else nothing."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
