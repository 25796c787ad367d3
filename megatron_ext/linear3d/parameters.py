"""Parameters on the grid: their attributes, initial values, and places in checkpoints.

Stock asks a parameter `tensor_model_parallel` to count each value once in norms. Here that is said rank by
rank: a vector that is equal along some axes counts on the ranks whose coordinates there are 0.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.linear3d.comm import GridComm
from megatron_ext.linear3d.layouts import Layout, glu_rows


def new_parameter(
    comm: GridComm,
    layout: Layout,
    shape: Sequence[int],
    config: Any,
    init: Callable[[Tensor], Any] | None,
    *,
    gated: bool = False,
) -> Parameter:
    """This rank's part of a parameter of the whole `shape`.

    With --use-cpu-initialization every rank draws the whole tensor and keeps its part, so that initial values
    do not depend on the grid; otherwise it draws its part alone, as stock does. Vectors are always drawn
    whole or constant, so that copies are equal. `init` None: the values do not matter yet.
    """
    local = layout.local_shape(comm.grid, shape)
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    param = Parameter(torch.empty(local, dtype=config.params_dtype, device=device))
    mark(param, comm, layout)
    if init is not None and config.perform_initialization:
        with torch.no_grad():
            _fill(param, comm, layout, shape, config, init, gated)
    return param


def _fill(
    param: Parameter,
    comm: GridComm,
    layout: Layout,
    shape: Sequence[int],
    config: Any,
    init: Callable[[Tensor], Any],
    gated: bool,
) -> None:
    if config.use_cpu_initialization or layout.replicated:
        whole = torch.empty(tuple(shape), dtype=torch.float32, device=param.device)
        init(whole)
        param.copy_(part_of(whole, comm, layout, gated=gated))
        return
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        init(param)


def part_of(whole: Tensor, comm: GridComm, layout: Layout, *, gated: bool = False) -> Tensor:
    """This rank's part of a whole tensor in stock's order of rows."""
    if gated:
        columns = layout.slices(comm.grid, comm.coords, (whole.shape[0] // 2, whole.shape[1]))[1]
        rows = glu_rows(comm.grid, comm.coords, whole.shape[0], layout)
        return torch.cat([whole[part, columns] for part in rows])
    return whole[layout.slices(comm.grid, comm.coords, whole.shape)]


def mark(param: Parameter, comm: GridComm, layout: Layout) -> None:
    """Attributes that Megatron's optimizers, norms and self-checks read, and those that ours do."""
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    replicated = layout.replicated
    set_tensor_model_parallel_attributes(param, comm.grid.owns(replicated, comm.coords), -1, 1)
    param.allreduce = True
    param.grid_layout = layout
    axes = "".join(axis for axis in replicated if comm.grid.size(axis) > 1)
    if axes:
        # Not `sequence_parallel`: stock would sum over all tensor-parallel ranks and mix up slices.
        param.grid_sum = replicated
        param.replica_group = comm.groups[replicated]
    else:
        param.replica_group = None


def sharded(
    param: Tensor,
    key: str,
    comm: GridComm,
    layout: Layout,
    offsets: Sequence[tuple[int, int, int]],
    dp_cp_rank: int,
    *,
    gated: bool = False,
    vocab: bool = False,
    copy: int = 0,
) -> Any:
    """The part's place in stock's tensor of that name, for `megatron.core.dist_checkpointing`.

    Args:
        offsets: of stacked layers, as in `sharded_state_dict`.
        vocab: the padded number of rows may differ in a checkpoint.
        copy: not 0 for a second copy of a parameter (tied embeddings on the last stage).
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    grid, at = comm.grid, comm.coords
    replica = (copy, grid.index(layout.replicated, at), dp_cp_rank)
    cuts = [(dim, grid.index(cut, at), grid.size(cut)) for dim, cut in enumerate(layout.cuts)]

    def place(
        name: str, tensor: Tensor, fragments: Sequence[tuple[int, int, int]], replica_id: Any
    ) -> ShardedTensor:
        shifted = [(dim + len(offsets), index, count) for dim, index, count in fragments]
        return ShardedTensor.from_rank_offsets(
            name,
            tensor,
            *offsets,
            *shifted,
            replica_id=replica_id,
            prepend_axis_num=len(offsets),
            allow_shape_mismatch=vocab,
        )

    if not gated:
        return place(key, param, cuts, replica)

    @torch.no_grad()
    def build(
        key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        assert flattened_range is None, "gradients and states of gated weights are stored by parameter"
        (_, index, count), *rest = cuts
        halves = zip(tensor.chunk(2, dim=0), (index, index + count), strict=True)
        # Stacked layers lose their number after this object was made: the name to use is the one given here.
        return [place(key, half, [(0, at_row, 2 * count), *rest], replica_id) for half, at_row in halves]

    @torch.no_grad()
    def merge(halves: list[Tensor]) -> Tensor:
        return torch.cat(halves)

    return ShardedTensorFactory(key, param, build, merge, replica)


def extra_state(comm: GridComm, key: str, offsets: Sequence[tuple[int, int, int]], dp_cp_rank: int) -> Any:
    """Stock's linears store an empty object beside their weight, and stock misses it where it is not."""
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

    return make_sharded_object_for_checkpoint(None, key, offsets, replica_id=(0, comm.rank, dp_cp_rank))
