"""Optimizer states in checkpoints: whole tensors under stock's names, whatever the strategy and the ranks.

They are those of Megatron's own optimizers without `--use-distributed-optimizer`, so such a run loads ours, and
the other way round; ours also loads the fully reshardable ones of the distributed optimizer.

    optimizer.state.exp_avg.<parameter>         and exp_avg_sq, or momentum_buffer: of the parameter's shape
    optimizer.state.fp32_param.<parameter>      master weights of 16-bit parameters (`param` if the
                                                distributed optimizer wrote it)

Every data-parallel rank writes and reads the tensors of its share of the parameters. Units are put together,
or cut up, one after the other, so a rank holds one whole unit and its share at a time.
"""

import dataclasses
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.paro.strategy import Level
from megatron_ext.paro.unit import Unit

MASTER = "master"
_STATES = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_SHARDING = "distrib_optim_sharding_type"


def state_names(optimizer: Any) -> tuple[str, ...]:
    """What is kept of every parameter, besides master weights."""
    if optimizer.config.optimizer == "sgd" and not optimizer.config.sgd_momentum:
        return ()
    return _STATES[optimizer.config.optimizer]


class Share:
    """Which rank writes and reads which parameters: the largest first, to the one that has least."""

    def __init__(self, unit: Unit, loads: list[int]):
        self.unit = unit
        self.owner: dict[Parameter, int] = {}
        for param in sorted(unit.params, key=lambda param: -param.numel()):
            rank = loads.index(min(loads))
            loads[rank] += param.numel()
            self.owner[param] = rank

    @property
    def mine(self) -> list[int]:
        """Numbers of the parameters that this rank writes."""
        rank = self.unit.grid.rank
        return [i for i, param in enumerate(self.unit.params) if self.owner[param] == rank]


def shares(optimizer: Any) -> list[Share]:
    """The shares of all trainable units, in one order on every rank."""
    units = [unit for chunk in optimizer.model_chunks for unit in chunk.units if unit.trainable]
    loads = [0] * (units[0].grid.n if units else 0)
    return [Share(unit, loads) for unit in units]


def save(optimizer: Any, model_state: dict) -> dict[str, Any]:
    """Sharded tensors of this rank's share: name of the kept value -> parameter's number -> tensor."""
    entries, found = _entries(model_state), {}
    for name in _kept(optimizer):
        found[name] = {}
        for share in shares(optimizer):
            flat = _whole(optimizer, share.unit, name)
            for index in share.mine:
                param = share.unit.params[index]
                value = share.unit.view(flat, index).clone()
                found[name][_number(optimizer, param)] = _entry(entries, param, name, "fp32_param", value)
    return found


def load_request(optimizer: Any, model_state: dict, metadata: dict | None) -> dict[str, Any]:
    """As `save`, with tensors to be filled.

    Raises:
        ValueError: the checkpoint's optimizer states are laid out by the distributed optimizer's buffers.
    """
    written_by = (metadata or {}).get(_SHARDING)
    if written_by not in (None, "fully_reshardable"):
        raise ValueError(
            f"this checkpoint holds optimizer states as the distributed optimizer's {written_by} buffers, which "
            "follow its own layout. Save it in the stock run with --dist-ckpt-optim-fully-reshardable, or load it "
            "with --no-load-optim."
        )
    master = "param" if written_by else "fp32_param"
    entries, found = _entries(model_state), {}
    for name in _kept(optimizer):
        found[name] = {}
        for share in shares(optimizer):
            for index in share.mine:
                param = share.unit.params[index]
                value = torch.empty(param.shape, dtype=torch.float32, device=param.device)
                found[name][_number(optimizer, param)] = _entry(entries, param, name, master, value)
    return found


def take(optimizer: Any, loaded: dict[str, Any]) -> None:
    """Distribute loaded tensors: every rank keeps the parts that it updates."""
    shards = {(shard.unit, shard.index): shard for shard in optimizer.shards}
    for name in _kept(optimizer):
        for share in shares(optimizer):
            unit = share.unit
            flat = torch.zeros(unit.padded, dtype=torch.float32, device=unit.rest.device)
            for index in share.mine:
                value = loaded[name][_number(optimizer, unit.params[index])]
                unit.view(flat, index).copy_(value)
            # One rank has each value and the others zeros, so their sum is that value exactly.
            _exact(optimizer).sync(flat, Level.N, unit.strategy.optimizer)
            part = flat[unit.own(Level.N, unit.strategy.optimizer)]
            for index in range(len(unit.params)):
                shard = shards.get((unit, index))
                if shard is not None:
                    _put(optimizer, shard, name, unit.cut_states(part, index))


def _kept(optimizer: Any) -> list[str]:
    """Names of all values kept per parameter; masters where they are not the parameters themselves."""
    masters = optimizer.has_masters
    return [*state_names(optimizer), *([MASTER] if masters else [])]


def _whole(optimizer: Any, unit: Unit, name: str) -> Tensor:
    """One kept value of a whole unit, on every rank."""
    flat = torch.zeros(unit.padded, dtype=torch.float32, device=unit.rest.device)
    part = flat[unit.own(Level.N, unit.strategy.optimizer)]
    for shard in optimizer.shards:
        if shard.unit is unit:
            unit.cut_states(part, shard.index).copy_(_value(optimizer, shard, name))
    _exact(optimizer).gather(flat, unit.strategy.optimizer, Level.N)
    return flat


def _value(optimizer: Any, shard: Any, name: str) -> Tensor:
    if name == MASTER:
        return shard.main.detach()
    state = optimizer.optimizer.state[shard.main]
    value = state.get(name)
    return torch.zeros_like(shard.main) if value is None else value


def _put(optimizer: Any, shard: Any, name: str, value: Tensor) -> None:
    if name == MASTER:
        shard.main.data.copy_(value)
    else:
        optimizer.optimizer.state[shard.main][name] = value.clone()


def _exact(optimizer: Any) -> Any:
    return optimizer.model_chunks[0].setup.exact


def _number(optimizer: Any, param: Parameter) -> int:
    return optimizer.numbers[param]


def _entries(model_state: dict) -> dict[int, Any]:
    """The model's own entries, by the parameter that they hold."""
    return {
        id(entry.data): entry
        for entry in nested_values(model_state)
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory))
    }


def _entry(entries: dict[int, Any], param: Parameter, name: str, master: str, value: Tensor) -> Any:
    """The parameter's entry under the name of a kept value, with this rank as the one that writes it."""
    model = entries[id(param)]
    replica = model.replica_id
    # The last number counts data-parallel copies; the others say which tensor-parallel copy this is.
    main = (*replica[:-1], 0) if isinstance(replica, tuple) else 0
    changes = {"data": value, "replica_id": main}
    changes["key"] = f"optimizer.state.{master if name == MASTER else name}.{model.key}"
    if isinstance(model, ShardedTensor):
        changes["dtype"] = value.dtype
    return dataclasses.replace(model, **changes)
