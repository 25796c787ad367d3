"""The distributed optimizer on torch's Adam (no Apex, no Transformer Engine) cannot load its checkpoints.

Torch keeps a `step` tensor per parameter, Apex and Transformer Engine one number per group. Stock 0.19 reads
the steps of an optimizer that has no state yet (and fails), gives all parameters the *same* step tensor (so
Adam advances it once per parameter), looks for a step among the loaded tensors (which have none, or that of
the fresh optimizer), and copies into parameters without `no_grad`. Each is put right; the values are
those of the checkpoint.
"""

import functools
from collections.abc import Callable
from typing import Any


def uses_torch_adam() -> bool:
    """Whether stock's distributed optimizer runs on torch's own Adam in this process."""
    try:
        from megatron.core.optimizer import distrib_optimizer
    except ModuleNotFoundError:
        return False
    return not distrib_optimizer.HAVE_APEX_OR_TE


def state_before_load(original: Callable) -> Callable:
    """Give torch's Adam an empty state before `sharded_state_dict(is_loading=True)` describes it."""

    @functools.wraps(original)
    def sharded_state_dict(self, model_sharded_state_dict, is_loading=False, *args, **kwargs):
        if is_loading and not self.ddp_config.use_megatron_fsdp and not self.optimizer.state:
            _allocate(self.optimizer, self.optimizer_state_keys)
        return original(self, model_sharded_state_dict, is_loading, *args, **kwargs)

    return sharded_state_dict


def _allocate(optimizer: Any, keys: tuple[str, ...]) -> None:
    import torch

    for group in optimizer.param_groups:
        group.setdefault("step", 0.0)
        for param in group["params"]:
            optimizer.state[param] = {key: torch.zeros_like(param.data) for key in keys}
            optimizer.state[param]["step"] = torch.tensor(0.0)


def set_all_but_step(original: Callable) -> Callable:
    """Load the tensors of one parameter; the step has been set already, from the parameter groups."""

    @functools.wraps(original)
    def set_states(self, model_param, tensors, *args, **kwargs):
        import torch

        with torch.no_grad():
            # Stock skips what is not a tensor.
            return original(self, model_param, {**tensors, "step": None}, *args, **kwargs)

    return set_states


def own_step_per_parameter(original: Callable) -> Callable:
    """After `load_state_dict`, no two parameters share a step tensor."""

    @functools.wraps(original)
    def load_state_dict(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()
        return result

    return load_state_dict
