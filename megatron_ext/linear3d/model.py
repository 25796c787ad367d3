"""A stock GPT model on the grid: built from a converted spec, then its embedding, head and loss replaced."""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.hooks import bound
from megatron_ext.linear3d.chain import Chain, Overlap
from megatron_ext.linear3d.comm import GridComm
from megatron_ext.linear3d.embedding import GridEmbedding
from megatron_ext.linear3d.functional import gather_replicated, own_part
from megatron_ext.linear3d.layers import GridLinear
from megatron_ext.linear3d.layouts import EMBEDDING_SITES, HEAD_SITES, VOCAB_AXES, Move
from megatron_ext.linear3d.loss import SITE, cross_entropy
from megatron_ext.linear3d.parameters import sharded
from megatron_ext.linear3d.relayout import to_grid, to_slices
from megatron_ext.linear3d.sizes import Save, VocabMode
from megatron_ext.linear3d.spec import convert_spec

LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


@dataclass(frozen=True)
class Setup:
    """What all model chunks of a rank share."""

    comm: GridComm
    save: Save
    vocab: VocabMode
    overlap: Overlap
    keep_layers: int = 0
    """The last layers of a stage keep gathered weights from forward to backward."""
    fused_attention: bool = False
    """Core attention by fused kernels instead of stock's local one."""


def after_init(setup: Callable[[], Setup], original: Callable) -> Callable:
    """Wrap of `GPTModel.__init__`: a converted spec goes in, and a model on the grid comes out."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        call = dict(bound(original, (self, *args), kwargs))
        options, config = setup(), call["config"]
        chain = Chain(options.comm, options.overlap, recompute_units(config))
        stage = call["pg_collection"].pp.rank() if call["pg_collection"] else _pipeline_rank()
        spec = call["transformer_layer_spec"]
        spec = convert_spec(
            spec,
            config,
            chain,
            options.save,
            call["vp_stage"],
            stage,
            fused_attention=options.fused_attention,
        )
        original(**{**call, "transformer_layer_spec": spec})
        learned = call["position_embedding_type"] == "learned_absolute"
        finish(self, chain, options, call["max_sequence_length"] if learned else None)

    return __init__


def _pipeline_rank() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_rank()


def recompute_units(config: Any) -> dict[int, int]:
    """Layer of a stage -> the number of the unit in which it is recomputed, as stock's block does it."""
    if config.recompute_granularity != "full":
        return {}
    size = config.recompute_num_layers
    if config.recompute_method == "block":
        return {layer: layer for layer in range(size)}
    return {layer: layer // size for layer in range(config.num_layers)}


def finish(model: Any, chain: Chain, setup: Setup, max_positions: int | None) -> None:
    """Replace what a spec does not name."""
    comm, config = setup.comm, model.config
    model.grid_chain, model.grid_setup = chain, setup
    _link(model, chain, setup)
    model.decoder.register_forward_pre_hook(functools.partial(_slice_mask, comm), with_kwargs=True)
    if hasattr(model, "rotary_pos_emb"):
        _fix_rotary_length(model.rotary_pos_emb, comm)
    if setup.vocab == "stages":
        if model.pre_process:
            model.embedding.register_forward_hook(lambda module, given, x: to_grid(x, comm))
        if model.post_process:
            model.decoder.register_forward_hook(lambda module, given, x: to_slices(x, comm))
        if comm.tags is not None:
            comm.tags.watch(model)
        return
    if model.pre_process:
        site = EMBEDDING_SITES[setup.vocab]
        model.embedding = GridEmbedding(comm, site, model.vocab_size, max_positions, config)
    if model.post_process:
        shared = model.share_embeddings_and_output_weights
        model.output_layer = GridLinear(
            config.hidden_size,
            model.vocab_size,
            site=HEAD_SITES[setup.vocab],
            chain=chain,
            save=setup.save,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_weight_param_allocation=model.pre_process and shared,
        )
        model.compute_language_model_loss = types.MethodType(_loss, model)
    model.tie_embeddings_and_output_weights_state_dict = types.MethodType(_tied_state, model)
    if model.pre_process or model.post_process:
        model.setup_embeddings_and_output_layer()
    if comm.tags is not None:
        comm.tags.watch(model)


def _link(model: Any, chain: Chain, setup: Setup) -> None:
    linears, layers = [], list(model.decoder.layers)
    for number, layer in enumerate(layers):
        for name in LINEARS:
            linear = layer.get_submodule(name)
            linear.layer = number
            linear.keeps_gathered = number >= len(layers) - setup.keep_layers
            linears.append(linear)
    chain.link(linears)


def _slice_mask(comm: GridComm, module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A mask with a batch dimension is cut over axis i, as the activations are."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape[0] > 1:
        kwargs = {**kwargs, "attention_mask": own_part(mask, comm, Move("i", 0))}
    return args, kwargs


def _fix_rotary_length(rotary: Any, comm: GridComm) -> None:
    """Stock takes the local sequence times the tensor-parallel size; here it is cut over axis j alone."""
    stock, grid = rotary.get_rotary_seq_len, comm.grid

    def get_rotary_seq_len(*args: Any, **kwargs: Any) -> int:
        return stock(*args, **kwargs) * grid.gj // grid.ranks

    rotary.get_rotary_seq_len = get_rotary_seq_len


def _loss(model: Any, labels: Tensor, logits: Tensor) -> Tensor:
    """In the place of `compute_language_model_loss`: every token's loss `[b, s]` on every rank.

    `labels` `[b, s]` are whole; `logits` are cut as the head's site says.
    """
    setup = model.grid_setup
    comm, cuts = setup.comm, HEAD_SITES[setup.vocab].result.cuts
    labels = labels.transpose(0, 1)
    moves = [Move(axis, dim) for dim in (0, 1) for axis in cuts[dim]]  # type: ignore[arg-type]
    for move in moves:
        labels = own_part(labels, comm, move)
    losses = cross_entropy(logits, labels, comm, VOCAB_AXES[setup.vocab])
    for move in moves:
        losses = gather_replicated(losses, comm, move, SITE)
    return losses.transpose(0, 1).contiguous()


def _tied_state(
    model: Any, state: dict, output_key: str, embedding_key: str, metadata: dict | None = None
) -> None:
    """The last stage's copy of a tied embedding is a copy of the first stage's in checkpoints, too."""
    if not model.post_process or model.pre_process:
        return
    site = HEAD_SITES[model.grid_setup.vocab]
    rank = metadata["dp_cp_group"].rank()
    state[output_key] = sharded(
        model.output_layer.weight,
        embedding_key,
        model.grid_setup.comm,
        site.weight,
        (),
        rank,
        vocab=True,
        copy=1,
    )


def sum_vectors(model: Any) -> None:
    """Sum the gradients of vectors over the axes along which they are equal; once a step, all together.

    After stock's own reductions: over data-parallel ranks the sum commutes, and a distributed optimizer's
    shards have the same borders on all ranks of the grid. A data-parallel engine may keep only its part of a
    gradient; how many elements were summed is left with the parameter.
    """
    comm = model.grid_setup.comm
    together: dict[str, list[Tensor]] = {}
    for param in model.parameters():
        axes = getattr(param, "grid_sum", None)
        grad = getattr(param, "main_grad", None) if axes and param.requires_grad else None
        if grad is not None:
            param.grid_summed = grad.numel(), grad.element_size()
            together.setdefault(axes, []).append(grad)
    for axes, grads in together.items():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        comm.all_reduce(flat, axes, "vectors")
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
