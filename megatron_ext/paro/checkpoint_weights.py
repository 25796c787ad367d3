"""Split parameters in checkpoints: whole tensors under stock's names, gathered one unit at a time.

Parameters that are not split are left to Megatron.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.utils import unwrap_model

from megatron_ext.paro.checkpoint_shares import host_copy, shares, to_fill, written_here
from megatron_ext.paro.strategy import Level
from megatron_ext.paro.unit import Unit

if TYPE_CHECKING:
    from megatron_ext.paro.data_parallel import ParoDataParallel


def share_weights(chunk: "ParoDataParallel", state: dict[str, Any], *, loading: bool) -> None:
    """In a model's sharded state dict, replace the entries of split parameters, which have no storage now.

    An entry of this rank's share gets the whole parameter, or a tensor to be filled when `loading`; in place
    of the others is None, which is not written.
    """
    keys = {
        id(entry.data): key
        for key, entry in state.items()
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory))
    }
    for share in shares(_split(chunk)):
        unit = share.unit
        if not loading:
            _gather(chunk, unit)
        for index, param in enumerate(unit.params):
            key = keys[id(param)]
            entry, state[key] = state[key], LocalNonpersistentObject(None)
            if index in share.mine:
                value = to_fill(param, param.dtype) if loading else host_copy(unit.view(unit.full, index))
                state[key] = written_here(entry, value)
        unit.drop_full()


def load_weights(chunk: "ParoDataParallel", state: Mapping[str, Any], strict: bool) -> Any:
    """Load a model's state dict, in which split parameters are whole on the rank that has them in its share.

    Returns:
        What `torch.nn.Module.load_state_dict` returns.

    Raises:
        RuntimeError: with `strict`, when parameters that are not split do not match.
    """
    chunk.params.settle()
    rest = dict(state)
    for share in shares(_split(chunk)):
        unit = share.unit
        _gather(chunk, unit)  # what the checkpoint lacks stays as it is
        for index, name in enumerate(unit.names):
            view, value = unit.view(unit.full, index), rest.pop(name, None)
            if index not in share.mine:
                view.zero_()
            elif value is not None:
                view.copy_(value)
        # One rank has each value and the others zeros, so their sum is that value exactly.
        chunk.setup.exact.sync(unit.full, Level.N, unit.strategy.params)
        unit.keep_own()
        unit.drop_full()
    split = {name for unit in _split(chunk) for name in unit.names}
    result = unwrap_model(chunk).load_state_dict(rest, strict=strict and not split)
    wrong = {*result.missing_keys, *result.unexpected_keys} - split
    if strict and wrong:
        raise RuntimeError(f"the model and the checkpoint differ in {', '.join(sorted(wrong))}")
    return result


def _split(chunk: "ParoDataParallel") -> list[Unit]:
    return [unit for unit in chunk.units if unit.split]


def _gather(chunk: "ParoDataParallel", unit: Unit) -> None:
    unit.drop_full()
    unit.place_own()
    chunk.setup.exact.gather(unit.full, unit.strategy.params, Level.N)
