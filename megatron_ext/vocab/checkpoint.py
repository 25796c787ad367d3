"""Checkpoints of vocabulary shards: parts of stock's tensors, under stock's names and global shapes."""

from collections.abc import Mapping
from typing import Any

from torch.nn import Parameter


def vocab_sharded_state_dict(
    prefix: str,
    params: Mapping[str, tuple[Parameter, str]],
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
