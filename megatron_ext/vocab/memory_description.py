"""What a memory plan needs to know of a run, and how Megatron's arguments say it. Imports nothing heavy."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Literal

from megatron_ext.schedules.families import family
from megatron_ext.schedules.placement import Placement

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Description:
    """A dense GPT or LLaMA-like model, its layout, and its types. Item sizes are in bytes."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    query_groups: int
    head_dim: int
    seq_length: int
    micro_batch: int
    vocab: int
    """Padded rows."""
    gated: bool = False
    """SwiGLU: the first MLP layer has twice the width."""
    bias: bool = True
    qkv_bias: bool = False
    norm: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    positions: int = 0
    """Rows of learned position embeddings."""
    rope: bool = False
    tied: bool = False

    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    data: int = 1
    """Data-parallel ranks; the distributed optimizer shards over data x context."""
    sequence_parallel: bool = False
    stage_layers: tuple[int, ...] = ()
    """Layers by pipeline rank."""
    schedule: str = "1f1b"
    chunks: int = 1
    """Of layers per pipeline rank, all of one size."""

    itemsize: int = 4
    """Of weights and activations."""
    grad_itemsize: int = 4
    master_itemsize: int = 0
    """Of the optimizer's copy of the weights; 0 where it works on the model's own."""
    state_itemsize: int = 8
    """Of all optimizer states of one weight (Adam: two in fp32)."""
    distributed_optimizer: bool = False

    flash: bool = True
    """Core attention that keeps no scores."""
    fused: bool = True
    """Norms and activations as fused kernels; torch's own operations keep more."""
    softmax_itemsize: int = 0
    """Of attention scores in the softmax where that is not the model's type (unfused attention only)."""
    dropout_mask: int = 0
    """Bytes per element that a hidden dropout keeps, 0 without dropout."""
    attention_mask: bool = False
    """The data loader gives every microbatch a mask [b, 1, s, s] of bools, and attention keeps it."""
    attention_dropout_mask: int = 0

    recompute: Recompute = "none"
    recompute_method: str = "uniform"
    recompute_layers: int = 1
    """Layers of a chunk (uniform), or how many of a stage's layers are recomputed (block)."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    distribute_saved: bool = False

    vocab_mode: str = "off"
    saving: str = "softmax"
    chunk_rows: int = 8192
    sum_itemsize: int = 4
    """Of the output layer's input gradient where it is summed over ranks."""
    num_statistics: int = 3
    weight_product: bool = False
    """The output layer's weight gradient is a tensor of its own before it is added to the buffer."""

    @property
    def place(self) -> Placement:
        """Where the pipeline's stages live."""
        return family(self.schedule).placement(self.pipeline, self.chunks)

    def chunk_layers(self, rank: int) -> int:
        """Layers of one chunk of a rank."""
        return self.stage_layers[rank] // self.chunks

    @property
    def tokens(self) -> int:
        """n: tokens of a microbatch on one context-parallel rank."""
        return self.micro_batch * self.seq_length // self.context

    @property
    def residual_rows(self) -> int:
        """Rows of hidden states outside the tensor-parallel parts of a layer."""
        return self.tokens // self.tensor if self.sequence_parallel else self.tokens


def stage_layers(args: Namespace) -> tuple[int, ...]:
    """Transformer layers of each pipeline stage, as stock splits them.

    Raises:
        ValueError: the split is no whole number of layers.
    """
    p, layers = args.pipeline_model_parallel_size, args.num_layers
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout:
        return _from_layout(layout, p)
    first = getattr(args, "decoder_first_pipeline_num_layers", None)
    last = getattr(args, "decoder_last_pipeline_num_layers", None)
    if first is not None or last is not None:
        middle = p - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        each = [rest // middle] * middle if middle else []
        if sum(each) != rest:
            raise ValueError(f"{rest} layers do not split evenly over {middle} middle stages")
        return (*([first] if first is not None else []), *each, *([last] if last is not None else []))
    embedding = bool(getattr(args, "account_for_embedding_in_pipeline_split", False))
    loss = bool(getattr(args, "account_for_loss_in_pipeline_split", False))
    if (layers + embedding + loss) % p:
        raise ValueError(f"{layers + embedding + loss} layers do not split evenly over {p} stages")
    each = [(layers + embedding + loss) // p] * p
    each[0] -= embedding
    each[-1] -= loss
    return tuple(each)


def _from_layout(layout: Any, p: int) -> tuple[int, ...]:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    if not isinstance(layout, PipelineParallelLayerLayout):
        layout = PipelineParallelLayerLayout(layout, p)
    return tuple(
        sum(layer.name == "decoder" for chunk in stage for layer in chunk) for stage in layout.layout
    )


def not_modelled(args: Namespace) -> str | None:
    """Why there is no plan for a run: a sentence, or None."""
    switches = {
        "num_experts": "mixture of experts",
        "mtp_num_layers": "multi-token prediction",
        "multi_latent_attention": "multi-latent attention",
        "use_torch_fsdp2": "FSDP",
        "use_megatron_fsdp": "FSDP",
        "cpu_offloading_num_layers": "activation offloading",
        "optimizer_cpu_offload": "optimizer offloading",
        "fp8": "8-bit training",
        "fp4": "4-bit training",
        "linear_3d": "3-D linear layers",
    }
    found = [what for name, what in switches.items() if getattr(args, name, None)]
    if getattr(args, "pipeline_schedule", "stock") == "stock" and _chunks(args) > 1:
        found.append("stock's interleaved pipelines")
    return f"The memory model does not cover {', '.join(dict.fromkeys(found))}." if found else None


def with_vocabulary(args: Namespace, otherwise: str) -> Namespace:
    """The arguments with a padded vocabulary, which Megatron knows only when the tokenizer is built.

    Raises:
        ValueError: the vocabulary's size is not known yet, and so `otherwise`.
    """
    if args.padded_vocab_size:
        return args
    if args.vocab_size is None:
        raise ValueError(
            f"there is no tokenizer yet to say the vocabulary's size, and {otherwise}. Give --vocab-size too."
        )
    step = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return Namespace(**{**vars(args), "padded_vocab_size": -(-args.vocab_size // step) * step})


def _chunks(args: Namespace) -> int:
    return getattr(args, "virtual_pipeline_model_parallel_size", None) or 1


def model_description(args: Namespace, *, gpu: bool, vocab: Namespace | None = None) -> Description:
    """From Megatron's arguments as they are after parsing and validation.

    `gpu`: on CPU, torch keeps dropout's noise in the model's type, and no kernel is fused. `vocab` holds the
    flags of vocabulary parallelism, None without it.

    Raises:
        ValueError: something that `not_modelled` names.
    """
    if reason := not_modelled(args):
        raise ValueError(reason)
    item = args.params_dtype.itemsize
    te = args.transformer_impl == "transformer_engine"
    backend = str(getattr(args.attention_backend, "name", args.attention_backend))
    positions = args.max_position_embeddings if args.position_embedding_type == "learned_absolute" else 0
    mask = 1 if gpu else item
    flash = te and backend not in ("unfused", "local")
    in_fp32 = item < 4 and not flash and bool(getattr(args, "attention_softmax_in_fp32", False))
    return Description(
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=args.num_attention_heads,
        query_groups=_query_groups(args),
        head_dim=args.kv_channels,
        seq_length=args.seq_length,
        micro_batch=args.micro_batch_size,
        vocab=args.padded_vocab_size,
        gated=args.swiglu,
        bias=args.add_bias_linear,
        qkv_bias=args.add_qkv_bias,
        norm=args.normalization,
        positions=positions,
        rope=args.position_embedding_type == "rope",
        tied=not args.untie_embeddings_and_output_weights,
        pipeline=args.pipeline_model_parallel_size,
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        data=args.data_parallel_size,
        sequence_parallel=args.sequence_parallel,
        stage_layers=stage_layers(args),
        schedule="1f1b" if _schedule(args) == "stock" else _schedule(args),
        chunks=_chunks(args),
        itemsize=item,
        grad_itemsize=4 if args.accumulate_allreduce_grads_in_fp32 else item,
        **_optimizer(args, item),
        flash=flash,
        fused=gpu,
        softmax_itemsize=4 if in_fp32 else 0,
        dropout_mask=mask if args.hidden_dropout else 0,
        attention_mask=not te and bool(getattr(args, "create_attention_mask_in_dataloader", False)),
        attention_dropout_mask=mask if args.attention_dropout else 0,
        **_recompute(args),
        **_vocabulary(args, vocab, item),
    )


def _schedule(args: Namespace) -> str:
    return getattr(args, "pipeline_schedule", "stock")


def _query_groups(args: Namespace) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def _optimizer(args: Namespace, item: int) -> dict[str, Any]:
    distributed = args.use_distributed_optimizer
    if getattr(args, "use_precision_aware_optimizer", False):
        states = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
        return {
            "master_itemsize": args.main_params_dtype.itemsize,
            "state_itemsize": states,
            "distributed_optimizer": distributed,
        }
    states = 8 if args.optimizer == "adam" else (4 if getattr(args, "sgd_momentum", 0.9) else 0)
    return {
        "master_itemsize": 4 if item < 4 else 0,
        "state_itemsize": states,
        "distributed_optimizer": distributed,
    }


def _recompute(args: Namespace) -> dict[str, Any]:
    return {
        "recompute": args.recompute_granularity or "none",
        "recompute_method": args.recompute_method or "uniform",
        "recompute_layers": args.recompute_num_layers or 1,
        "recompute_modules": tuple(getattr(args, "recompute_modules", None) or ("core_attn",)),
        "distribute_saved": bool(args.distribute_saved_activations),
    }


def _vocabulary(args: Namespace, flags: Namespace | None, item: int) -> dict[str, Any]:
    grad_item = 4 if args.accumulate_allreduce_grads_in_fp32 else item
    fused = bool(getattr(args, "gradient_accumulation_fusion", False))
    if flags is None or flags.vocab_parallel == "off":
        return {}
    return {
        "vocab_mode": flags.vocab_parallel,
        "saving": flags.vocab_save,
        "chunk_rows": flags.vocab_chunk_size,
        "sum_itemsize": max(item, 4) if flags.vocab_sum_dtype == "fp32" else item,
        "num_statistics": 4 if flags.vocab_label_smoothing else 3,
        "weight_product": grad_item != item and not fused,
    }
