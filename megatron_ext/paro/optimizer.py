"""PaRO's optimizer: Megatron's mixed-precision optimizer over the parts of parameters that a rank updates."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer, copy_optimizer_param_metadata
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.paro import checkpoint
from megatron_ext.paro.data_parallel import ParoDataParallel
from megatron_ext.paro.unit import Unit


class Shard:
    """This rank's part of one parameter: what the optimizer steps on.

    Attributes:
        main: `[elements]` in fp32, with the parameter's attributes; a view of the parameter itself if that
            has fp32 and its new values need not be kept apart.
    """

    def __init__(self, param: Parameter, unit: Unit, index: int):
        self.param, self.unit, self.index = param, unit, index
        self.range = unit.shard(index)
        part = unit.param_shard(index)
        self.copied = unit.staged is not None or part.dtype is not torch.float32
        self.main = Parameter(part.float().clone() if self.copied else part)
        tensor_parallel.copy_tensor_model_parallel_attributes(self.main, param)
        copy_optimizer_param_metadata(self.main, param)

    def take_gradient(self) -> None:
        """Give the main part its reduced gradient."""
        self.main.grad = self.unit.grad_shard(self.index).float()

    def store(self) -> None:
        """Write the main part to the parameter."""
        if self.copied:
            self.unit.new_values(self.index).copy_(self.main)

    def load(self) -> None:
        """Read the main part from the parameter."""
        if self.copied:
            self.main.data.copy_(self.unit.param_shard(self.index))


def make_shards(param_groups: list[dict], chunks: Sequence[ParoDataParallel]) -> list[list[Shard]]:
    """Shards of the groups' parameters, group by group, without those of which this rank has nothing."""
    place = {param: found for chunk in chunks for param, found in chunk.place.items()}
    shards = []
    for group in param_groups:
        members = [(param, *place[param]) for param in group["params"]]
        own = [item for item in members if item[1].shard(item[2])[0] < item[1].shard(item[2])[1]]
        shards.append([Shard(*item) for item in own])
    return shards


class ParoOptimizer(MixedPrecisionOptimizer):
    """Steps on this rank's shards, then has the parameters brought up to date on all ranks.

    Args:
        optimizer: torch's, over the main parts of `shards`; None if this rank has none.
        config, grad_scaler, init_state_fn: as Megatron's.
        shards: by parameter group.
        members: all parameters of each group, of which `shards` are this rank's parts.
        chunks: the wrapped model.
        stats: group over which norms are summed: every part of the model once.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Any,
        *,
        shards: list[list[Shard]],
        members: list[list[Parameter]],
        chunks: Sequence[ParoDataParallel],
        stats: Any,
    ):
        super().__init__(optimizer, config, grad_scaler, init_state_fn)
        self.is_stub_optimizer = optimizer is None
        self.groups = shards
        self.members = members
        self.numbers = {param: i for i, param in enumerate(param for group in members for param in group)}
        self.model_chunks = list(chunks)
        for chunk in chunks:
            chunk.on_load = self.reload_model_params
        self.grad_stats_parallel_group = stats

    @property
    def shards(self) -> list[Shard]:
        """All shards, group by group."""
        return [shard for group in self.groups for shard in group]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are in the units' buffers; parts of them that were taken are let go."""
        for shard in self.shards:
            shard.main.grad = None
            shard.param.grad = None

    def _collect_main_grad_data_for_unscaling(self) -> list[Tensor]:
        # torch's check wants at least one tensor.
        return [shard.main.grad for shard in self.shards] or [torch.zeros_like(self.found_inf)]

    def _copy_model_grads_to_main_grads(self) -> None:
        for shard in self.shards:
            shard.take_gradient()

    def _copy_main_params_to_model_params(self) -> None:
        for shard in self.shards:
            shard.store()

    def _copy_model_params_to_main_params(self, state_dict: dict | None = None) -> None:
        if state_dict is not None:
            raise ValueError("--load-main-params-from-ckpt is not offered with --paro-strategy: remove it")
        for shard in self.shards:
            shard.load()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step on the shards, and update the parameters."""
        success = super().step_with_ready_grads()
        for chunk in self.model_chunks:
            chunk.update()
        return success

    def record_fields(self) -> dict[str, Any]:
        """For the run record: how the model is split, and what this rank keeps between steps, in bytes."""
        held = [chunk.held() for chunk in self.model_chunks]
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim()
        ]
        masters = [shard.main for shard in self.shards if shard.copied]
        kept = {
            "params": [tensor for each in held for tensor in each["weights"]],
            "grads": [tensor for each in held for tensor in each["gradients"]],
            "optimizer": [*states, *masters, *(tensor for each in held for tensor in each["optimizer"])],
        }
        setup = self.model_chunks[0].setup
        return {
            "paro": {
                "strategy": str(setup.strategy),
                "groups": setup.grid.k,
                "members": setup.grid.m,
                "comm": setup.wire.comm,
                "bytes": {name: _bytes(tensors) for name, tensors in kept.items()},
                "units": [
                    {**unit.describe(), "backward": unit in chunk.passes.reached}
                    for chunk in self.model_chunks
                    for unit in chunk.units
                ],
            }
        }

    # --- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Not offered: what a rank holds is no checkpoint by itself.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "--paro-strategy needs --ckpt-format torch_dist, which writes what ranks hold as one"
        )

    def sharded_state_dict(
        self, model_sharded_state_dict: dict, is_loading: bool = False, metadata: dict | None = None
    ) -> dict[str, Any]:
        """What is written or asked for, see checkpoint.py; collective."""
        if is_loading:
            return checkpoint.load_request(self, model_sharded_state_dict, metadata)
        return checkpoint.save(self, model_sharded_state_dict, metadata)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `sharded_state_dict` asked for; collective."""
        checkpoint.load(self, state_dict)


def _bytes(tensors: list[Tensor]) -> int:
    """Bytes of all storages, each once; released ones have none."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.size() for storage in storages.values())
