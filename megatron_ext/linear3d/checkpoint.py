"""Checkpoints of a grid: stock's names and global shapes, so that stock and every other grid read them.

Weights, states of the plain optimizers, and those of the distributed optimizer under
--dist-ckpt-optim-fully-reshardable are stored by parameter. The other format of the distributed optimizer
stores its flat buffers; a rank of another grid would find other parameters in a buffer of the same size.
"""

import functools
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any


def grid_name(args: Namespace) -> str:
    """What a checkpoint's buffers belong to: "linear3d-2x2x2-ijl", or "stock"."""
    sizes = getattr(args, "linear_3d", None)
    if not sizes:
        return "stock"
    return f"linear3d-{'x'.join(sizes)}-{args.linear_3d_order}-{args.linear_3d_vocab}"


def name_buffers_apart(name: Callable[[], str], original: Callable) -> Callable:
    """Wrap of `DistributedOptimizer.__init__`: flat buffers of a grid get names of their own."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if hasattr(self, "data_parallel_group_idx"):  # not on a rank without parameters
            self.data_parallel_group_idx = f"{self.data_parallel_group_idx}.{name()}"

    return __init__


def refuse_foreign_buffers(original: Callable) -> Callable:
    """Wrap of `_load_base_checkpoint`: says why the buffers of another grid, or of stock, cannot be read.

    Raises:
        ValueError: that is what would be loaded.
    """

    @functools.wraps(original)
    def load(load_dir: Any, args: Namespace, *rest: Any, **kwargs: Any) -> Any:
        loaded = original(load_dir, args, *rest, **kwargs)
        state, _, release, _ = loaded
        if state and not release and _has_foreign_buffers(state, args):
            raise ValueError(
                f"The checkpoint in {load_dir} was saved by a run of {grid_name(state['args'])} with the "
                "distributed optimizer's state as flat buffers, which fit only the layout that saved them, "
                f"and this run is one of {grid_name(args)}. Save it with "
                "--dist-ckpt-optim-fully-reshardable, or load the weights alone with --no-load-optim."
            )
        return loaded

    return load


def _has_foreign_buffers(state: Mapping[str, Any], args: Namespace) -> bool:
    from megatron.core.dist_checkpointing import load_content_metadata
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    saved = state.get("args")
    if saved is None or not args.use_distributed_optimizer or args.no_load_optim or args.finetune:
        return False
    if getattr(saved, "no_save_optim", False) or grid_name(saved) == grid_name(args):
        return False
    kind = (load_content_metadata(preloaded_state_dict=state) or {}).get("distrib_optim_sharding_type")
    return kind is not None and kind not in DistributedOptimizer.checkpoint_fully_reshardable_formats
