"""Optimizer states in checkpoints: whole tensors under stock's names, whatever the strategy and the ranks.

They are those of Megatron's own optimizers without `--use-distributed-optimizer`, so such a run loads ours,
and the other way round. The distributed optimizer's fully reshardable ones are loaded too, and written with
`--dist-ckpt-optim-fully-reshardable`.

    optimizer.state.exp_avg.<parameter>         and exp_avg_sq, or momentum_buffer: of the parameter's shape
    optimizer.state.fp32_param.<parameter>      master weights of 16-bit parameters; the distributed
                                                optimizer's are `param`, of all parameters
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor

from megatron_ext import traffic
from megatron_ext.paro.checkpoint_shares import Entry, Share, host_copy, shares, to_fill, written_here
from megatron_ext.paro.strategy import Level
from megatron_ext.paro.unit import Unit

MASTER = "master"
_STATES = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_SHARDING = "distrib_optim_sharding_type"
_RESHARDABLE = "fully_reshardable"
_BY_LAYER = "non_homogeneous_layers"
_OURS, _SOURCE = "paro", "paro_source"


def content_metadata(chunks: Sequence[Any], *, reshardable: bool) -> dict[str, Any]:
    """What a checkpoint says of itself: the strategy that wrote it, and whose layout of states it follows.

    Collective.
    """
    setup, strategy = chunks[0].setup, chunks[0].setup.strategy
    ours = {
        "strategy": str(strategy),
        "groups": setup.grid.k,
        "members": setup.grid.m,
        "fp32_masters": setup.wire.inter_dtype == "int8"
        and strategy.optimizer is Level.G
        and strategy.params is not Level.G,
    }
    found: dict[str, Any] = {_OURS: ours, _BY_LAYER: _layers_differ(chunks)}
    return {**found, _SHARDING: _RESHARDABLE} if reshardable else found


def _layers_differ(chunks: Sequence[Any]) -> bool:
    """Whether a parameter is trained in some layers and frozen in others; collective.

    Megatron stacks what all layers have in one tensor, unless told that they differ, and there must be no
    holes in it.
    """
    here = {
        (re.sub(r"\.layers\.\d+\.", ".layers.", name), unit.trainable)
        for chunk in chunks
        for unit in chunk.units
        for name in unit.names
    }
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, here)
    kinds = set().union(*everywhere)
    return any((name, not trainable) in kinds for name, trainable in kinds)


# --- saving -------------------------------------------------------------------------------------------------


def save(optimizer: Any, model_state: dict, metadata: Mapping | None) -> dict[str, Any]:
    """Sharded state dict of the optimizer: what all ranks share, and this rank's share of the states."""
    kept = {}
    for share, name in _pairs(optimizer, metadata, written=True):
        values = _gathered(optimizer, share, name)
        kept.update(_entries(optimizer, model_state, metadata, share, name, values))
    return {**_common(optimizer, metadata), _OURS: kept}


def _common(optimizer: Any, metadata: Mapping | None) -> dict[str, Any]:
    """Parameter groups, step and loss scale, in the form of Megatron's optimizers."""
    step = _step(optimizer)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.optimizer.param_groups
    ]
    scaler = {"grad_scaler": optimizer.grad_scaler.state_dict()} if optimizer.grad_scaler else {}
    if _SHARDING in (metadata or {}) or (step and not _steps_by_parameter(optimizer)):
        groups = [{**group, "step": step} for group in groups]
    if _SHARDING in (metadata or {}):
        return {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": metadata[_SHARDING],
            **scaler,
        }
    inner: dict[str, Any] = {"state": {}, "param_groups": groups}
    if step and _steps_by_parameter(optimizer):
        inner["state"]["common_step"] = torch.tensor(float(step))
    return {"optimizer": inner, **scaler} if optimizer.config.fp16 or optimizer.config.bf16 else inner


def _step(optimizer: Any) -> int:
    """Steps taken, from whichever rank has states; collective."""
    inner = optimizer.optimizer
    counts = [state["step"] for state in inner.state.values() if "step" in state]
    counts += [group["step"] for group in inner.param_groups if "step" in group]
    most = torch.tensor(max((int(count) for count in counts), default=0), device=_device(optimizer))
    group = optimizer.get_grad_stats_parallel_group()
    traffic.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group, feature="paro:whole")
    return int(most)


def _gathered(optimizer: Any, share: Share, name: str) -> dict[int, Tensor]:
    """One kept value of the parameters in the share; the whole unit is put together on every rank."""
    unit = share.unit
    flat = torch.zeros(unit.padded, dtype=torch.float32, device=unit.rest.device)
    part = flat[unit.own(Level.N, unit.strategy.optimizer)]
    for shard in optimizer.shards:
        if shard.unit is unit:
            unit.cut_states(part, shard.index).copy_(_value(optimizer, shard, name))
    _exact(optimizer).gather(flat, unit.strategy.optimizer, Level.N)
    return {index: host_copy(unit.view(flat, index)) for index in sorted(share.mine)}


def _value(optimizer: Any, shard: Any, name: str) -> Tensor:
    if name == MASTER:
        return shard.main.detach()
    value = optimizer.optimizer.state.get(shard.main, {}).get(name)
    return torch.zeros_like(shard.main) if value is None else value


# --- loading ------------------------------------------------------------------------------------------------


def load_request(optimizer: Any, model_state: dict, metadata: Mapping | None) -> dict[str, Any]:
    """As `save`, with tensors to be filled.

    Raises:
        ValueError: the checkpoint's optimizer states are laid out by the distributed optimizer's buffers, or
            are those of all layers, some of which are frozen now.
    """
    written_by = (metadata or {}).get(_SHARDING)
    if written_by not in (None, _RESHARDABLE):
        raise ValueError(
            f"this checkpoint holds optimizer states as the distributed optimizer's {written_by} buffers, "
            "which follow its own layout. Save it in the stock run with --dist-ckpt-optim-fully-reshardable "
            "(a run that goes on from this one can, and one step is enough), or load it with --no-load-optim."
        )
    if _layers_differ(optimizer.model_chunks) and not (metadata or {}).get(_BY_LAYER, False):
        raise ValueError(
            "this checkpoint holds states of all layers, and some parameters are frozen in some layers only. "
            "Load it with --no-load-optim, or with --finetune."
        )
    kept = {}
    for share, name in _pairs(optimizer, metadata, written=False):
        values = {i: to_fill(share.unit.params[i], torch.float32) for i in sorted(share.mine)}
        kept.update(_entries(optimizer, model_state, metadata, share, name, values))
    return {_OURS: kept, _SOURCE: LocalNonpersistentObject(dict(metadata or {}))}


def load(optimizer: Any, state: dict[str, Any]) -> None:
    """Take what was asked for. Parameter groups are matched as Megatron does.

    Raises:
        ValueError: the checkpoint has fewer parameter groups than this run.
    """
    inner = state.get("optimizer", state)
    current, saved = optimizer.optimizer.param_groups, inner["param_groups"]
    if len(saved) < len(current):
        raise ValueError(
            f"the checkpoint has {len(saved)} parameter groups, and this run has {len(current)}: flags of "
            "learning rates or weight decay differ. Give those of the run that saved it, or --no-load-optim."
        )
    saved = [{**group, "params": []} for group in saved]
    matched = optimizer._filter_and_reorder_param_groups(current, saved)
    for group, loaded in zip(current, matched, strict=True):
        group.update({key: value for key, value in loaded.items() if key not in ("params", "step")})
    for share, name in _pairs(optimizer, state[_SOURCE], written=False):
        _distribute(optimizer, share, name, state.get(_OURS, {}))
    _set_step(optimizer, inner.get("state", {}).get("common_step", saved[0].get("step", 0)))
    if optimizer.grad_scaler and "grad_scaler" in state:
        optimizer.grad_scaler.load_state_dict(state["grad_scaler"])


def _distribute(optimizer: Any, share: Share, name: str, loaded: dict[str, Any]) -> None:
    """Every rank keeps of one loaded value of a unit the parts that it updates."""
    unit = share.unit
    flat = torch.zeros(unit.padded, dtype=torch.float32, device=unit.rest.device)
    for index in share.mine:
        unit.view(flat, index).copy_(loaded[_name(optimizer, share, index, name)])
    # One rank has each value and the others zeros, so their sum is that value exactly.
    _exact(optimizer).sync(flat, Level.N, unit.strategy.optimizer)
    part = flat[unit.own(Level.N, unit.strategy.optimizer)]
    for shard in optimizer.shards:
        if shard.unit is unit:
            _put(optimizer, shard, name, unit.cut_states(part, shard.index))


def _put(optimizer: Any, shard: Any, name: str, value: Tensor) -> None:
    if name == MASTER:
        shard.main.data.copy_(value)
    else:
        optimizer.optimizer.state[shard.main][name] = value.clone()


def _set_step(optimizer: Any, step: Any) -> None:
    if optimizer.config.optimizer != "adam" or not step:
        return
    if _steps_by_parameter(optimizer):
        for shard in optimizer.shards:
            optimizer.optimizer.state[shard.main]["step"] = torch.tensor(float(step))
    else:
        for group in optimizer.optimizer.param_groups:
            group["step"] = int(step)


def _steps_by_parameter(optimizer: Any) -> bool:
    """Whether it is torch's own Adam; fused ones of other libraries count steps for each group."""
    return isinstance(optimizer.optimizer, (torch.optim.Adam, torch.optim.AdamW))


# --- what is kept, and under which name ---------------------------------------------------------------------


def _pairs(optimizer: Any, metadata: Mapping | None, *, written: bool) -> Iterator[tuple[Share, str]]:
    """Every unit's share with each value that is kept of its parameters, in one order on all ranks."""
    names = _STATES[optimizer.config.optimizer]
    if optimizer.config.optimizer == "sgd" and not optimizer.config.sgd_momentum:
        names = ()
    units = [unit for chunk in optimizer.model_chunks for unit in chunk.units if unit.trainable]
    for share in shares(units):
        for name in (*names, MASTER):
            if name != MASTER or _has_masters(share.unit, written, metadata or {}):
                yield share, name


def _has_masters(unit: Unit, written: bool, metadata: Mapping) -> bool:
    if unit.rest.dtype is not torch.float32:
        return True
    if written:
        return unit.staged is not None or _SHARDING in metadata
    # fp32 weights have masters apart where updates are sent with 8 bits; other checkpoints lack them.
    return unit.staged is not None and metadata.get(_OURS, {}).get("fp32_masters", False)


def _name(optimizer: Any, share: Share, index: int, name: str) -> str:
    """In the state dict of this rank."""
    return f"{optimizer.numbers[share.unit.params[index]]}.{name}"


def _key(name: str, entry: Entry, metadata: Mapping | None) -> str:
    """In the checkpoint."""
    master = "param" if _SHARDING in (metadata or {}) else "fp32_param"
    return f"optimizer.state.{master if name == MASTER else name}.{entry.key}"


def _exact(optimizer: Any) -> Any:
    return optimizer.model_chunks[0].setup.exact


def _device(optimizer: Any) -> torch.device:
    return optimizer.model_chunks[0].units[0].rest.device


def _entries(
    optimizer: Any, model_state: dict, metadata: Mapping | None, share: Share, name: str, values: dict
) -> dict[str, Entry]:
    """Values of parameters, described like the parameters themselves."""
    described = {
        id(entry.data): entry
        for entry in nested_values(model_state)
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory))
    }
    found = {}
    for index, value in values.items():
        entry = described[id(share.unit.params[index])]
        found[_name(optimizer, share, index, name)] = written_here(entry, value, _key(name, entry, metadata))
    return found
