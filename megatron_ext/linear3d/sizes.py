"""Sizes of the model that the grid cuts: what shapes, bytes and memory follow from. Pure."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Literal

from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.layouts import EMBEDDING_SITES, HEAD_SITES, LAYER_SITES, Site

VocabMode = Literal["plane", "grid", "stages"]
"""plane and grid: how the vocabulary layers lie on the grid. stages: --vocab-parallel has them."""
Save = Literal["gathered", "shard_weight", "shard_all"]
Sum = Literal["ordered", "native"]


@dataclass(frozen=True)
class ModelSizes:
    """A GPT on one tensor-parallel group, per microbatch."""

    seq: int
    batch: int
    """Sequences of a microbatch, those of all Gi parts."""
    hidden: int
    heads: int
    kv_groups: int
    head_dim: int
    ffn: int
    vocab: int
    """Rows of the embedding, padding included."""
    glu: bool = False
    bias: bool = True
    rms: bool = False
    learned: bool = True
    """Learned absolute positions."""
    max_positions: int = 0
    tied: bool = True
    itemsize: int = 4
    """Bytes of a weight or an activation."""
    qk_norm: bool = False

    @property
    def qkv(self) -> int:
        """Rows of the QKV weight."""
        return (self.heads + 2 * self.kv_groups) * self.head_dim

    @property
    def fc1(self) -> int:
        """Rows of the first MLP weight."""
        return self.ffn * (2 if self.glu else 1)

    def weight(self, name: str) -> tuple[int, int]:
        """Whole shape `[out, in]` of the weight of a site."""
        attention = self.heads * self.head_dim
        return {
            "qkv": (self.qkv, self.hidden),
            "proj": (self.hidden, attention),
            "fc1": (self.fc1, self.hidden),
            "fc2": (self.hidden, self.ffn),
            "head": (self.vocab, self.hidden),
            "embedding": (self.vocab, self.hidden),
        }[name]

    @property
    def layer_parameters(self) -> int:
        """Elements of the four matrices of a layer."""
        return sum(out * inside for out, inside in (self.weight(name) for name in LAYER_SITES))

    @classmethod
    def of_args(cls, args: Namespace) -> "ModelSizes":
        """From Megatron's arguments, freshly parsed or validated; sizes that are not given are 0."""
        heads, hidden = args.num_attention_heads or 0, args.hidden_size or 0
        grouped = args.group_query_attention
        tp = max(args.tensor_model_parallel_size, 1)
        vocab = getattr(args, "padded_vocab_size", None) or padded_vocab(args, tp)
        ffn = args.ffn_hidden_size or (int(8 * hidden / 3 / 64) * 64 if args.swiglu else 4 * hidden)
        return cls(
            seq=(args.seq_length or 0) // max(args.context_parallel_size, 1),
            batch=args.micro_batch_size or 0,
            hidden=hidden,
            heads=heads,
            kv_groups=args.num_query_groups if grouped else heads,
            head_dim=args.kv_channels or (hidden // heads if heads else 0),
            ffn=ffn,
            vocab=vocab,
            glu=bool(args.swiglu or getattr(args, "quick_geglu", False)),
            bias=args.add_bias_linear,
            rms=args.normalization == "RMSNorm",
            learned=args.position_embedding_type == "learned_absolute",
            max_positions=args.max_position_embeddings or 0,
            tied=not args.untie_embeddings_and_output_weights,
            itemsize=2 if args.bf16 or args.fp16 else 4,
            qk_norm=bool(getattr(args, "qk_layernorm", False)),
        )


def padded_vocab(args: Namespace, tp: int) -> int:
    """Rows of the embedding as Megatron pads them; 0 when the vocabulary is not known yet."""
    size = getattr(args, "vocab_size", None)
    if not size:
        return 0
    if getattr(args, "tokenizer_type", None) == "NullTokenizer":
        size += 1  # Megatron adds an end-of-document token
    step = args.make_vocab_size_divisible_by * tp
    return -(-size // step) * step


def sites_of(mode: VocabMode) -> dict[str, Site]:
    """All sites of a model by name."""
    found = dict(LAYER_SITES)
    if mode != "stages":
        found |= {"head": HEAD_SITES[mode], "embedding": EMBEDDING_SITES[mode]}
    return found


def local_weight(sizes: ModelSizes, site: Site, grid: Grid3D) -> tuple[int, int]:
    """Shape of a rank's part of the weight of a site."""
    out, inside = site.weight.local_shape(grid, sizes.weight(site.name))
    return out, inside
