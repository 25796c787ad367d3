"""PaRO's data-parallel wrapper: what Megatron sees of the engine in place of its DistributedDataParallel.

It lays the parameters out in units, and calls the two flows at the right moments of forward and backward
passes: `ParamFlow` gathers and releases parameters, `GradFlow` reduces gradients.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.paro.blocks import Grid
from megatron_ext.paro.checkpoint_weights import load_weights
from megatron_ext.paro.collectives import Collectives
from megatron_ext.paro.grad_flow import GradFlow
from megatron_ext.paro.layout import split_units
from megatron_ext.paro.param_flow import ParamFlow
from megatron_ext.paro.pass_hooks import PassHooks
from megatron_ext.paro.strategy import Level, Strategy
from megatron_ext.paro.unit import Unit, by_param
from megatron_ext.paro.value_check import ValueCheck
from megatron_ext.paro.volume import Wire
from megatron_ext.schedules.lane import Lane


@dataclass(frozen=True)
class Setup:
    """What the wrapper needs besides the model; made once per run."""

    strategy: Strategy
    grid: Grid
    params: Collectives
    """Over communicators for parameters."""
    grads: Collectives
    """Over other communicators of the same ranks for gradients, since both directions overlap."""
    exact: Collectives
    """Like `params`, never quantised, and counted as another feature: for checkpoints and checks."""
    make_lane: Callable[[str, bool], Lane]
    """From a name and whether to overlap."""
    wire: Wire
    """How the collectives run, for the formulas of bytes."""
    reshard: bool = True
    """Whether split parameters are released between forward and backward."""
    broadcast: bool = False
    """Whether ranks start from other weights, so that the first one's go to all before any is split."""
    late: frozenset[str] = frozenset()
    """Names of parameters whose gradients come outside of autograd (vocabulary passes)."""


class ParoDataParallel(DistributedDataParallel):
    """A model chunk whose parameters, gradients and optimizer states are split by a strategy.

    Args: those of Megatron's class, and `setup`.

    Raises:
        ValueError: the model has expert-parallel parameters.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        setup: Setup,
    ):
        # Megatron's own constructor would make the buffers that ours stand in for.
        _BaseDataParallel.__init__(self, config=config, module=module)
        self.ddp_config = ddp_config
        self.setup = setup
        groups = ProcessGroupCollection.setup_process_groups_for_ddp(pg_collection, config, ddp_config)
        for name in ("dp_group", "dp_cp_group", "expt_dp_group", "tp_group", "pp_group", "ep_group"):
            setattr(self, name, groups[name])
        self.buffers, self.expert_parallel_buffers = [], []
        self.bucket_groups, self.expert_parallel_bucket_groups = [], []
        self.force_all_reduce = False
        self.overlap_param_gather_with_optimizer_step = False
        if setup.broadcast:
            super().broadcast_params()
        self._make_units()
        self._make_flows()
        self.passes = PassHooks(self.units, self.params, self.grads, reshard=setup.reshard)

    # --- set-up ---------------------------------------------------------------------------------------------

    def _make_units(self) -> None:
        experts = [n for n, p in self.module.named_parameters() if not getattr(p, "allreduce", True)]
        if experts:
            raise ValueError(f"--paro-strategy does not split expert parameters, such as {experts[0]}")
        setup = self.setup
        factor = 1.0 if self.config.calculate_per_token_loss else 1.0 / setup.grid.n
        units: list[Unit] = []
        for source in split_units(self.module, TransformerLayer, setup.late):
            grad_dtype = torch.float32 if self.ddp_config.grad_reduce_in_fp32 else source.dtype
            units.append(Unit(source, setup.grid, setup.strategy, grad_dtype, factor))
        int8 = setup.wire.inter_dtype == "int8" and setup.grid.k > 1
        if int8 and setup.strategy.optimizer is Level.G and setup.strategy.params is not Level.G:
            for unit in units:
                if unit.trainable:
                    unit.stage()
        self.units = units
        self.place = by_param(units)
        self.starts = 0
        """How often gradients were started at zero."""
        self.on_load: Callable[[], None] = lambda: None  # the optimizer's, when parameters were loaded
        self.params_with_grad = [p for unit in units if unit.trainable for p in unit.params]

    def _make_flows(self) -> None:
        setup, config = self.setup, self.ddp_config
        ahead, beside = config.overlap_param_gather, config.overlap_grad_reduce
        lane = setup.make_lane("paro-params", ahead)
        self.params = ParamFlow(self.units, setup.params, lane, prefetch=ahead)
        trainable = [unit for unit in self._backward_order() if unit.trainable]
        self.grads = GradFlow(
            [unit for unit in trainable if not unit.late],
            [unit for unit in trainable if unit.late],
            setup.grads,
            setup.make_lane("paro-grads", beside),
            early=beside,
            check=ValueCheck() if config.check_for_nan_in_grad else None,
        )
        self.param_to_bucket_group = {param: _Announced() for param in self.params_with_grad}

    def _backward_order(self) -> list[Unit]:
        """Layers from the last to the first, then the root, whose first and last part of the model it has."""
        return [u for u in reversed(self.units) if u.module] + [u for u in self.units if not u.module]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        self.passes.begin_forward()
        output = super().forward(*inputs, **kwargs)
        self.passes.end_forward(output)
        return output

    # --- Megatron's interface -------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside are not the last of the step."""
        self.grads.last = False
        try:
            yield
        finally:
            self.grads.last = True

    def start_grad_sync(self, *unused: Any) -> None:
        """Start the reductions of the step that have not started."""
        if self.ddp_config.overlap_grad_reduce:
            self.grads.start()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Complete all gradients; `main_grad` then is the part that this rank updates."""
        if force_all_reduce:
            raise ValueError("--save-wgrads-interval needs whole gradients on every rank: remove it")
        self.grads.finish()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply the reduced gradients."""
        for unit in self.units:
            if unit.trainable:
                unit.reduced().mul_(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Start a step, or start it again (rerun state machine)."""
        self.starts += 1
        for param in self.params_with_grad:
            param.grad_added_to_main_grad = False
        self.grads.reset()

    def update(self) -> None:
        """After the optimizer step: bring parameters up to date on all ranks."""
        self.params.update(self.units)
        if not self.ddp_config.overlap_param_gather:
            self.params.settle()
        elif any(unit.late for unit in self.units):
            # Vocabulary passes use these outside of any module's forward pass.
            for unit in self.units:
                if unit.module is None:
                    self.params.wait(unit)

    def held(self) -> dict[str, list[Tensor]]:
        """What exists between steps, and what is allocated in them, for the measurement of memory."""
        trained = [unit for unit in self.units if unit.trainable]
        return {
            "weights": [tensor for unit in self.units for tensor in (unit.full, unit.rest)],
            "gradients": [tensor for unit in trained for tensor in (unit.grads, unit.grad_full)],
            "optimizer": [unit.staged for unit in trained if unit.staged is not None],
        }

    def wait_for_updates(self) -> None:
        """Until the updates of the last step are done."""
        self.params.settle()

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Updates start with the optimizer step; wait for them if asked to."""
        if force_sync:
            self.params.settle()

    def enable_forward_pre_hook(self) -> None:
        """Ours stay, since they only wait for what has been started."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """See `enable_forward_pre_hook`; parameters are up to date afterwards."""
        self.params.settle()

    def reset_param_sync_dispatch_state(self) -> None:
        """Nothing is remembered between steps."""

    def free_overlap_buffers(self) -> None:
        """Released with the backward pass already."""

    def full_gradients(self) -> dict[Parameter, Tensor]:
        """The reduced gradient of every trainable parameter, whole, on every rank; collective."""
        found = {}
        for unit in self.units:
            if unit.trainable:
                flat = unit.spread_gradient()
                self.setup.exact.gather(flat, unit.strategy.optimizer, Level.N)
                for index, param in enumerate(unit.params):
                    found[param] = unit.view(flat, index)
        return found

    def broadcast_params(self) -> None:
        """Done where it can be, before parameters are split (--data-parallel-random-init)."""
        assert self.setup.broadcast, "parts of unlike parameters have been put together"

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """The module's, of which split parameters are whole on the rank that reads them; collective."""
        result = load_weights(self, state_dict, strict)
        self.on_load()
        return result

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, all parameters are whole."""
        self.params.gather_all(self.setup.exact)
        yield
        self.params.release(self.units)


class _Announced:
    """Stands for a bucket group: late gradients are reduced at the end of the step, announced or not."""

    def register_grad_ready(self, param: Parameter, force_all_reduce: bool | None = False) -> None:
        """A gradient is complete."""
