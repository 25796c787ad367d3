"""Multi-ring attention as the core attention of Megatron's layers.

A layer's projections, norms and rotary embedding stay what its spec says (local or Transformer Engine); only
`core_attention` is this one. It gets own rows of queries, keys and values, as stock deals them out.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_ext.groups import device_of
from megatron_ext.wallfacer.function import Result, Rings
from megatron_ext.wallfacer.packed import PackedLayouts
from megatron_ext.wallfacer.plan import make_plan
from megatron_ext.wallfacer.sequence import Layout, whole
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


class Noted(NamedTuple):
    """A forward pass."""

    layer: "WallFacerAttention"
    cost: Cost
    backward: Literal["own", "attached"] | None
    """What follows: a backward pass, that of a recomputed pass, or none, where nothing before is trained."""


@dataclass
class Recomputation:
    """Of the checkpointed function that is running."""

    comes: bool = True
    """Whether it will be computed again. It will not where none of its inputs wants a gradient: the layers
    before it, and it, are frozen."""


@dataclass
class Setup:
    """What all layers of a rank share."""

    rings: Rings
    cp_ranks: tuple[int, ...]
    """Global ranks of the context-parallel group."""
    calls: list[Noted] | None = None
    """Since this was emptied, where bytes are checked."""
    recomputation: Recomputation = field(default_factory=Recomputation)
    layers: list["WallFacerAttention"] = field(default_factory=list)
    once: set["WallFacerAttention"] = field(default_factory=set)
    """Layers whose checkpointed passes do not come again: what is checkpointed must be frozen."""
    layouts: PackedLayouts = field(default_factory=PackedLayouts)


def _make_offset(config: "TransformerConfig", heads: int, device: torch.device) -> Tensor | None:
    """Score of the key without a value that every row sees, one for each head."""
    if config.softmax_type == "vanilla":
        return None
    values = {"device": device, "dtype": config.params_dtype}
    if config.softmax_type == "off-by-one":
        return torch.zeros(heads, **values)
    offset = torch.nn.Parameter(torch.empty(heads, **values))
    # Heads are split: otherwise the gradient norm would count those of the first tensor-parallel rank alone.
    set_tensor_model_parallel_attributes(offset, True, 0, 1)
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
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.softmax_scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, max(1, layer_number)
        )
        self.window = tuple(config.window_size) if windowed else (-1, -1)
        heads = config.num_attention_heads // self.tp_group.size()
        self.softmax_offset = _make_offset(config, heads, device_of(pg_collection.cp))
        self.split = getattr(config, "token_split", "zigzag")
        """How tokens are dealt out to the ranks: what the model's configuration says, or as stock does."""
        self.setup = setup
        self.results: deque[tuple[Layout, Result]] = deque()
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
            layout = self.setup.layouts.get(packed_seq_params, self)
        else:
            # Without any mask it does not matter where tokens are, and shares in one piece make larger tiles.
            split = "contiguous" if mask == Mask() else self.split
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
            layout, result = self.results.popleft()
            if layout != given["layout"]:
                raise RuntimeError(
                    f"layer {self} is recomputed with other documents than it was computed with: its "
                    "PackedSeqParams were changed in between. Give each microbatch its own"
                )
            return rings.attach(result, *tensors, **given)
        if not again:
            wanted = any(x is not None and x.requires_grad for x in (*tensors, given["sink"]))
            self._note(tensors, given, "own" if wanted and torch.is_grad_enabled() else None)
            return rings.attend(*tensors, **given)
        comes = self.setup.recomputation.comes
        self._note(tensors, given, "attached" if comes else None)
        result = rings.run(*tensors, **given)
        if comes:
            self.results.append((given["layout"], result))
        else:
            self.setup.once.add(self)
        return result.out

    def _note(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        given: dict[str, Any],
        backward: Literal["own", "attached"] | None,
    ) -> None:
        if self.setup.calls is None:
            return
        rings, (query, key, _) = self.setup.rings, tensors
        plan = make_plan(rings.geometry, given["layout"], given["mask"])
        native = query.is_cuda
        cost = Cost(plan, Shape.of(query, key), rings.options, native)
        self.setup.calls.append(Noted(self, cost, backward))

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
