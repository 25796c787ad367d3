"""Checkpoints of vocabulary shards: parts of stock's tensors, under stock's names and global shapes.

Weights, the state of the plain optimizers, and the distributed optimizer's state under
--dist-ckpt-optim-fully-reshardable are stored by parameter, so every layout and stock read them. The other
format of the distributed optimizer stores its flat buffers. Vocabulary parallelism moves rows between ranks,
so a buffer of the same size holds other parameters than stock's: these are kept apart.
"""

import functools
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_ext.patching import Patch

if TYPE_CHECKING:
    from torch.nn import Parameter


def vocab_sharded_state_dict(
    prefix: str,
    params: "Mapping[str, tuple[Parameter, str]]",
    padded_rows: int,
    rows: tuple[int, int],
    dp_cp_rank: int,
) -> dict[str, Any]:
    """Describe this rank's shards to `megatron.core.dist_checkpointing`.

    Args:
        prefix: Of the names of the module's parameters, as in `sharded_state_dict`.
        params: Name -> (the parameter `[hi - lo, h]` itself, stock's key such as `output_layer.weight`).
            Optimizers find the place of their state by the parameter's identity.
        padded_rows: V, the rows of stock's tensor `[V, h]` in this run. A checkpoint may have another V: rows
            that it lacks become zero, rows that are too many are left out, as in stock.
        rows: `[lo, hi)` of this rank. Over all ranks of one data-parallel rank they cover `[0, V)` once.
        dp_cp_rank: Rank among the ranks that hold the same rows.

    Returns:
        prefix + name -> ShardedTensor.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    lo, hi = rows
    out = {}
    for name, (param, key) in params.items():
        assert param.shape[0] == hi - lo, f"{key}: {param.shape[0]} rows for [{lo}, {hi})"
        out[prefix + name] = ShardedTensor(
            key,
            param,
            param.dtype,
            local_shape=tuple(param.shape),
            global_shape=(padded_rows, *param.shape[1:]),
            global_offset=(lo, *[0] * (param.dim() - 1)),
            # Shards may differ by a block of rows, so they are described as boxes and not as cells of a grid.
            # torch checks at saving that the boxes of all ranks fill the tensor without overlap.
            axis_fragmentations=None,
            # Every pipeline rank has rows of its own: only data-parallel ranks are copies.
            replica_id=(0, 0, dp_cp_rank),
            allow_shape_mismatch=True,
        )
    return out


def buffer_patches(feature: str) -> list[Patch]:
    """Flat buffers of one layout are never read by another."""
    return [
        Patch(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
            name_buffers_apart,
            "wrap",
            "names of its own for flat optimizer buffers in checkpoints",
            feature,
        ),
        Patch(
            "megatron.training.checkpointing:_load_base_checkpoint",
            refuse_foreign_buffers,
            "wrap",
            "flat buffers of a run with another layout are refused",
            feature,
            needs=("load_dir", "args"),
        ),
    ]


def name_buffers_apart(original: Callable) -> Callable:
    """Wrap of `DistributedOptimizer.__init__`: its buffers get names of their own in checkpoints.

    Untied and with two stages, a rank has as many vocabulary rows as in stock, and the chunks of a V are as
    large as those of an interleaved pipeline. Under stock's names, stock would read these buffers, and this
    run stock's, without an error and with the states of the wrong rows or layers.
    """

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if hasattr(self, "data_parallel_group_idx"):  # not on a rank without parameters
            from megatron.training import get_args

            self.data_parallel_group_idx = ".".join(
                [str(self.data_parallel_group_idx), *layout_of(get_args())]
            )

    return __init__


def layout_of(args: Namespace) -> list[str]:
    """What of a run decides which parameters a rank holds, beside stock's own flags."""
    found = ["vocab"] if getattr(args, "vocab_parallel", "off") != "off" else []
    return [*found, "v"] if getattr(args, "pipeline_schedule", "stock").startswith("v-") else found


def refuse_foreign_buffers(original: Callable) -> Callable:
    """Wrap of `_load_base_checkpoint` that says why the buffers of another kind of run cannot be read.

    Raises:
        ValueError: that is what would be loaded.
    """

    @functools.wraps(original)
    def load(load_dir, args, *rest, **kwargs):
        loaded = original(load_dir, args, *rest, **kwargs)
        state, _, release, _ = loaded
        if state and not release and _has_foreign_buffers(state, args):
            how = _flags(state["args"]) or "without --vocab-parallel and with stock's placement of layers"
            raise ValueError(
                f"The checkpoint in {load_dir} was saved {how}, and with the distributed "
                "optimizer's state as flat buffers, which fit only the layout that saved them. "
                f"{_flags(args).capitalize()} ranks hold other parameters. Save it with "
                "--dist-ckpt-optim-fully-reshardable, or load the weights alone with --no-load-optim."
            )
        return loaded

    return load


def _flags(args: Namespace) -> str:
    """What a run was given that changes its layout, in words."""
    found = layout_of(args)
    words = [f"--vocab-parallel {args.vocab_parallel}"] if "vocab" in found else []
    words += [f"--pipeline-schedule {args.pipeline_schedule}"] if "v" in found else []
    return f"with {' and '.join(words)}" if words else ""


def _has_foreign_buffers(state: Mapping[str, Any], args: Namespace) -> bool:
    """Whether `state`, the part of a checkpoint that all ranks share, announces buffers of another layout."""
    from megatron.core.dist_checkpointing import load_content_metadata
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    saved = state.get("args")
    if saved is None or not args.use_distributed_optimizer or args.no_load_optim or args.finetune:
        return False
    if getattr(saved, "no_save_optim", False) or layout_of(saved) == layout_of(args):
        return False
    kind = (load_content_metadata(preloaded_state_dict=state) or {}).get("distrib_optim_sharding_type")
    return kind is not None and kind not in DistributedOptimizer.checkpoint_fully_reshardable_formats
