"""Stock's layer spec with our linears and norms in it; everything else of a layer stays stock's."""

import copy
import dataclasses
import functools
from typing import Any

from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from megatron_ext.linear3d.attention import fused
from megatron_ext.linear3d.chain import Chain
from megatron_ext.linear3d.layers import GridLinear, GridNorm
from megatron_ext.linear3d.layouts import LAYER_SITES
from megatron_ext.linear3d.sizes import Save


class GridMLP(MLP):
    """Stock's MLP; stock's checkpoint code would drop the second cut of gated weights."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)


def on_plane(attention: type, plane: Any) -> type:
    """The attention class with its heads spread over the axes j and l alone: `plane` is their group."""

    class GridSelfAttention(attention):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, pg_collection: Any, **kwargs: Any):
            groups = copy.copy(pg_collection)
            groups.tp = plane
            super().__init__(*args, pg_collection=groups, **kwargs)

    GridSelfAttention.__name__ = f"Grid{attention.__name__}"
    return GridSelfAttention


def convert_spec(
    spec: Any,
    config: Any,
    chain: Chain,
    save: Save,
    vp_stage: int | None,
    pp_rank: int,
    *,
    fused_attention: bool,
) -> Any:
    """The submodules of a whole block, from the spec that a model was given.

    `fused_attention`: stock's local core attention, which holds all scores, gives way to fused kernels.

    Raises:
        ValueError: layers that are not dense GPT layers.
    """
    norm = functools.partial(GridNorm, comm=chain.comm)
    if isinstance(spec, TransformerBlockSubmodules):
        layers = [_layer(layer, chain, save, norm, fused_attention) for layer in spec.layer_specs]
    else:
        count = get_num_layers_to_build(config, vp_stage, pp_rank)
        layers = [_layer(spec, chain, save, norm, fused_attention)] * count
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _layer(spec: ModuleSpec, chain: Chain, save: Save, norm: Any, fused_attention: bool) -> ModuleSpec:
    attention, mlp = spec.submodules.self_attention, spec.submodules.mlp
    inner = getattr(mlp, "keywords", {}).get("submodules")
    if not isinstance(inner, MLPSubmodules):
        raise ValueError(f"--linear-3d splits dense MLPs, and a layer of this model has {mlp}: drop the flag")

    def linear(site: str) -> Any:
        return functools.partial(GridLinear, site=LAYER_SITES[site], chain=chain, save=save)

    core = attention.submodules.core_attention
    heads = dataclasses.replace(
        attention.submodules,
        linear_qkv=linear("qkv"),
        linear_proj=linear("proj"),
        core_attention=fused(core) if fused_attention else core,
    )
    parts = dataclasses.replace(inner, linear_fc1=linear("fc1"), linear_fc2=linear("fc2"))
    submodules = dataclasses.replace(
        spec.submodules,
        input_layernorm=norm,
        pre_mlp_layernorm=norm,
        self_attention=ModuleSpec(
            module=on_plane(attention.module, chain.comm.groups["jl"]),
            params=attention.params,
            submodules=heads,
        ),
        mlp=functools.partial(GridMLP.as_mlp_submodule, submodules=parts),
    )
    return ModuleSpec(module=spec.module, params=spec.params, submodules=submodules)
