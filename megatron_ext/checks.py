"""Run-time self-checks `--ext-check`: what can be verified while training, at a price.

`replicas` is implemented here and works for every run; `bytes` and `layouts` are offered by features that
declare them (feature table), and asking for one that nothing enabled offers is refused by a rule.
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from megatron_ext import traffic
from megatron_ext.hooks import before_optimizer_step, bound, wait_for_updates, whole_parameters
from megatron_ext.patching import Patch


class ReplicaError(RuntimeError):
    """Parameters that should be equal on several ranks are not."""


def check_replicas(model_chunks: Iterable[Any], step: int | str) -> int:
    """Compare replicated parameters bit for bit and return how many were compared on this rank.

    Dense parameters must agree over the data-parallel (x context-parallel) group, experts over theirs; those
    that tensor parallelism does not split (norms, biases after a row-parallel linear) over the
    tensor-parallel group, or over the group that a parameter names as its `replica_group`; tied embeddings
    between the first and the last pipeline stage.

    Raises:
        ReplicaError: names the parameter, the step and the ranks that differ from the first one.
    """
    chunks = list(model_chunks)
    with ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(whole_parameters(chunk))
        return _check_whole(chunks, step)


def _check_whole(model_chunks: list[Any], step: int | str) -> int:
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    named = [item for chunk in model_chunks for item in unwrap_model(chunk).named_parameters()]
    dense = [(name, p) for name, p in named if getattr(p, "allreduce", True)]
    experts = [(name, p) for name, p in named if not getattr(p, "allreduce", True)]
    own_groups = [(name, p) for name, p in dense if hasattr(p, "replica_group")]
    others = [(name, p) for name, p in dense if not hasattr(p, "replica_group")]
    whole = [(name, p) for name, p in others if not getattr(p, "tensor_model_parallel", False)]
    tied = [(name, p) for name, p in dense if getattr(p, "shared_embedding", False)]
    checked = [
        (dense, parallel_state.get_data_parallel_group(with_context_parallel=True), "data-parallel"),
        (whole, parallel_state.get_tensor_model_parallel_group(), "tensor-parallel"),
    ]
    for group in dict.fromkeys(p.replica_group for _, p in own_groups if p.replica_group is not None):
        members = [(name, p) for name, p in own_groups if p.replica_group is group]
        checked.append((members, group, group.group_desc))
    if experts:
        checked.append((experts, parallel_state.get_expert_data_parallel_group(), "expert-data-parallel"))
    if tied and parallel_state.is_rank_in_embedding_group():
        checked.append((tied, parallel_state.get_embedding_group(), "embedding"))
    compared = 0
    for params, group, axis in checked:
        if group.size() > 1 and params:
            _compare(params, group, axis, step)
            compared += len(params)
    return compared


def _compare(params: list[tuple[str, Any]], group: Any, axis: str, step: int | str) -> None:
    import torch

    sums = torch.stack([_checksum(p) for _, p in params])
    every = torch.empty((group.size() * len(params), 2), dtype=sums.dtype, device=sums.device)
    traffic.all_gather_into_tensor(every, sums, group=group, feature="check:replicas")
    every = every.view(group.size(), len(params), 2)
    different = (every != every[0]).any(dim=-1)
    if not different.any():
        return
    ranks = torch.distributed.get_process_group_ranks(group)
    lines = [
        f"  {name}: ranks {[ranks[i] for i in different[:, column].nonzero().flatten().tolist()]} differ"
        for column, (name, _) in enumerate(params)
        if different[:, column].any()
    ]
    raise ReplicaError(
        f"--ext-check replicas, step {step}: parameters differ within the {axis} group {ranks} "
        f"(reference: rank {ranks[0]}):\n" + "\n".join(lines[:20])
    )


def _checksum(param: Any, chunk: int = 1 << 24) -> Any:
    """Two 64-bit sums of the bit patterns, the second weighted by position: int64 `[2]`.

    Works through `chunk` elements at a time, since 64-bit copies of a large embedding would not fit on a GPU.
    """
    import torch

    flat = param.detach().contiguous().view(-1)
    bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), chunk):
        part = bits[begin : begin + chunk].to(torch.int64)
        place = torch.arange(begin + 1, begin + 1 + part.numel(), device=bits.device)
        total += torch.stack([part.sum(), (part * place).sum()])
    return total


def patches(names: Iterable[str]) -> list[Patch]:
    """Patches of the checks asked for that live here."""
    if "replicas" not in names:
        return []
    trained: list[int] = []  # the last step
    return [
        Patch(
            "megatron.training.training:train_step",
            functools.partial(_replicas_around_train_step, trained),
            "wrap",
            "compare replicated parameters once per step",
            "check:replicas",
            needs=("model", "optimizer", "iteration"),
        ),
        Patch(
            "megatron.training.training:train",
            functools.partial(_replicas_after_training, trained),
            "wrap",
            "compare replicated parameters after the last step's update",
            "check:replicas",
            needs=("model",),
        ),
    ]


def catalogue() -> list[Patch]:
    """Patches of all checks, for the contract."""
    return patches(("replicas",))


def _replicas_around_train_step(trained: list[int], original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        call = bound(original, args, kwargs)

        # Before the optimizer step every parameter has been used, so overlapped gathers have finished.
        def check() -> None:
            check_replicas(call["model"], call["iteration"] + 1)

        with before_optimizer_step(call["optimizer"], check):
            result = original(*args, **kwargs)
        trained[:] = [call["iteration"] + 1]
        return result

    return wrapper


def _replicas_after_training(trained: list[int], original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        def check() -> None:
            if trained:
                chunks = bound(original, args, kwargs)["model"]
                for chunk in chunks:
                    wait_for_updates(chunk)
                check_replicas(chunks, f"{trained[0]}, after its update")

        try:
            result = original(*args, **kwargs)
        except SystemExit:  # how stock leaves on all ranks for --exit-interval and the like
            check()
            raise
        check()
        return result

    return wrapper
