"""Gradient dump: every gradient of one step, before the optimizer step, under stock names and global shapes.

Each rank writes the shards it owns (`DIR/step-NNNNNN/rank-NNNN.pt`); `assemble` puts them together. Names,
shapes and offsets come from Megatron's own `sharded_state_dict`, so any tensor, pipeline or data-parallel
layout (interleaved and distributed optimizer included) of one model assembles to the same dictionary.
Gradients are those that the optimizer will use (fp32 as a rule), with the loss scale divided out.
"""

import dataclasses
import functools
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_ext.hooks import before_optimizer_step, bound, whole_parameters
from megatron_ext.patching import Patch


def step_folder(folder: str | Path, step: int) -> Path:
    """Folder of the shards of one step (steps count from 1)."""
    return Path(folder) / f"step-{step:06d}"


def dump(model_chunks: list, optimizer: Any, folder: str | Path, step: int) -> Path:
    """Write this rank's shards; to be called on every rank between gradient reduction and optimizer step.

    Raises:
        ValueError: a model chunk is not wrapped in Megatron's DistributedDataParallel.
    """
    import torch

    scale = float(optimizer.get_loss_scale().item())
    shards = []
    for chunk in model_chunks:
        with whole_parameters(chunk):
            grads = full_gradients(chunk)
            for name, shape, offset, tensor in _named_shards(chunk, grads):
                shards.append(
                    (name, shape, offset, (tensor.double() / scale).to(torch.float32).cpu().clone())
                )
    target = step_folder(folder, step)
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"rank-{torch.distributed.get_rank():04d}.pt"
    content = {"world_size": torch.distributed.get_world_size(), "dump": _common_id(), "shards": shards}
    torch.save(content, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)
    return path


def _common_id() -> str:
    """An id of this dump, the same on all ranks: files of different dumps do not go together."""
    import torch

    from megatron_ext import traffic

    ids = [uuid.uuid4().hex]
    with traffic.label("grads"):
        torch.distributed.broadcast_object_list(ids, src=0)
    return ids[0]


def full_gradients(chunk: Any) -> dict[Any, Any]:
    """Complete reduced gradient of every trainable parameter of a DDP-wrapped chunk: param -> tensor.

    With the distributed optimizer, each rank holds the reduced values of its own part of every bucket only;
    the parts are gathered into a copy, so that training continues unchanged.
    """
    import torch
    from megatron.core.distributed import DistributedDataParallel

    from megatron_ext import traffic

    if not isinstance(chunk, DistributedDataParallel):
        raise ValueError(
            f"The gradient dump reads Megatron's DistributedDataParallel, but the model is wrapped in "
            f"{type(chunk).__name__}. Run without --use-megatron-fsdp / --use-torch-fsdp2 to dump gradients."
        )
    if hasattr(chunk, "full_gradients"):
        return chunk.full_gradients()
    grads = {}
    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        for bucket in group.buckets:
            data = bucket.grad_data
            if group.ddp_config.use_distributed_optimizer:
                process_group = group.intra_distributed_optimizer_instance_group
                part = data.view(process_group.size(), -1)[process_group.rank()].contiguous()
                data = torch.empty_like(bucket.grad_data)
                traffic.all_gather_into_tensor(data, part, group=process_group, feature="grads")
            for param in bucket.params_list:
                begin, end = bucket.param_to_index[param]
                grads[param] = data[begin:end].view(param.shape)
    return grads


def _named_shards(chunk: Any, grads: dict[Any, Any]) -> Iterator[tuple[str, tuple, tuple, Any]]:
    """(name, global shape, global offset, local gradient) of the main replicas on this rank."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
    from megatron.core.utils import unwrap_model

    by_storage = {param.data_ptr(): grad for param, grad in grads.items() if param.numel()}
    for entry in nested_values(unwrap_model(chunk).sharded_state_dict()):
        if not isinstance(entry, (ShardedTensor, ShardedTensorFactory)) or entry.data is None:
            continue
        grad = by_storage.get(entry.data.data_ptr())
        if grad is None:  # frozen parameters, buffers, extra state
            continue
        if isinstance(entry, ShardedTensorFactory):
            built = entry.build_fn(entry.key, grad, entry.replica_id, entry.flattened_range)
            pieces = list(nested_values(built))
        else:
            pieces = [dataclasses.replace(entry, data=grad, dtype=grad.dtype)]
        for piece in pieces:
            if is_main_replica(piece.replica_id):
                yield _unstacked(piece)


def _unstacked(piece: Any) -> tuple[str, tuple, tuple, Any]:
    """Stock name of a shard: stacked layers (`decoder.layers.x` with a layer dim) get their index back."""
    extra = piece.prepend_axis_num
    name = piece.key
    if extra and ".layers." in name:
        head, tail = name.split(".layers.", 1)
        name = f"{head}.layers.{piece.global_offset[0]}.{tail}"
        extra_shape, extra_offset = piece.global_shape[1:extra], piece.global_offset[1:extra]
    else:
        extra_shape, extra_offset = piece.global_shape[:extra], piece.global_offset[:extra]
    shape = (*extra_shape, *piece.global_shape[extra:])
    offset = (*extra_offset, *piece.global_offset[extra:])
    tensor = piece.data.reshape((1,) * len(extra_shape) + tuple(piece.data.shape))
    return name, tuple(shape), tuple(offset), tensor


def assemble(folder: str | Path, step: int = 1) -> dict[str, Any]:
    """All gradients of a dumped step: name -> float32 tensor of the global shape.

    Raises:
        ValueError: no dump, a rank's file is missing, shards overlap, or elements of a gradient are missing.
    """
    import torch

    target = step_folder(folder, step)
    files = sorted(target.glob("rank-*.pt"))
    if not files:
        raise ValueError(f"{target} holds no gradient dump; run with --ext-dump-grads {folder}.")
    loaded = [torch.load(file, weights_only=True) for file in files]
    if len(files) != loaded[0]["world_size"]:
        ranks = loaded[0]["world_size"]
        raise ValueError(f"{target} holds the files of {len(files)} of {ranks} ranks: it is not complete.")
    if len({file["dump"] for file in loaded}) > 1:
        raise ValueError(f"{target} holds files of different dumps; remove the folder and dump again.")
    tensors: dict[str, Any] = {}
    covered: dict[str, Any] = {}
    for shard in (shard for file in loaded for shard in file["shards"]):
        name, shape, offset, value = shard
        if name not in tensors:
            tensors[name] = torch.zeros(shape)
            covered[name] = torch.zeros(shape, dtype=torch.bool)
        place = tuple(slice(o, o + n) for o, n in zip(offset, value.shape, strict=True))
        if tensors[name].shape != shape or covered[name][place].any():
            raise ValueError(f"gradient {name}: shards of different ranks overlap or disagree on the shape.")
        tensors[name][place] = value
        covered[name][place] = True
    for name, mask in covered.items():
        if not mask.all():
            raise ValueError(f"gradient {name}: {int((~mask).sum())} of {mask.numel()} elements are missing.")
    return dict(sorted(tensors.items()))


# --- hook --------------------------------------------------------------------------------------------------


class GradientDump:
    """Dumps at `step` (counted from 1) from inside stock's `train_step`, and knows whether it did."""

    def __init__(self, folder: str, step: int):
        self.folder = folder
        self.step = step
        self.done = False

    def missed(self) -> str | None:
        """What to say at the end of a run that never came to the step."""
        if self.done:
            return None
        return (
            f"--ext-dump-grads: step {self.step} was never trained, so {self.folder} holds no gradients of it"
        )

    def patches(self) -> list[Patch]:
        """The hook into `train_step`."""
        return [
            Patch(
                "megatron.training.training:train_step",
                self._around_train_step,
                "wrap",
                "dump gradients between their reduction and the optimizer step",
                "grads",
                needs=("model", "optimizer", "iteration"),
            )
        ]

    def _around_train_step(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            call = bound(original, args, kwargs)
            now = call["iteration"] + 1
            if now > self.step and not self.done:
                raise ValueError(
                    f"--ext-dump-grads-step {self.step}: this run starts at step {now}, after it. Set a step "
                    "that it trains."
                )
            if now != self.step:
                return original(*args, **kwargs)

            def act() -> None:
                dump(call["model"], call["optimizer"], self.folder, self.step)
                self.done = True

            with before_optimizer_step(call["optimizer"], act):
                return original(*args, **kwargs)

        return wrapper


def catalogue() -> list[Patch]:
    """Patches of the gradient dump, for the contract."""
    return GradientDump("", 1).patches()
