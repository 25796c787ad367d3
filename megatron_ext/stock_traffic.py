"""Counts the communication that others start: stock Megatron's, by wrapping torch's `ProcessGroup` methods.

Every Python path ends in a method of the pybind class `ProcessGroup`: functions of `torch.distributed` (also
those bound by value elsewhere), `torch.distributed.nn.functional`, coalescing managers, batches of
point-to-point operations, object collectives. Replacing the methods on the class sees them all.

Not seen, since C++ calls C++ there: functional collectives (`torch.distributed._functional_collectives`, so
DTensor's redistribution and collectives inside compiled code), `torch.nn.parallel.DistributedDataParallel`,
Transformer Engine's userbuffers, and MoE dispatchers with kernels of their own (DeepEP and the like). Of the
functional ones megatron-core 0.19 uses only `DTensor.full_tensor()`, for gradients that FSDP has sharded and
that must be whole (tied embeddings across pipeline stages, norms under sequence parallelism).
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from megatron_ext.group_names import name_of
from megatron_ext.ledger import UNSIZED, Ledger, current_feature, ideal_bytes, ledger

Where = tuple[int | str, ...]
"""An argument: its position after self, then its keyword names in torch's overloads."""


class Method(NamedTuple):
    """Kind of a method of ProcessGroup, and where it takes what counts."""

    kind: str
    input: Where = ()
    output: Where = ()
    root: Where = ()
    splits: Where = ()


METHODS = {
    "allreduce": Method("all_reduce", (0, "tensors", "tensor")),
    "allreduce_coalesced": Method("all_reduce", (0, "tensors")),
    "allgather": Method("all_gather", (1, "input_tensors", "input_tensor")),
    "_allgather_base": Method("all_gather", (1, "input")),
    "allgather_coalesced": Method("all_gather", (1, "input_list")),
    "allgather_into_tensor_coalesced": Method("all_gather", (1, "inputs")),
    "reduce_scatter": Method(
        "reduce_scatter", (1, "input_tensors", "input"), (0, "output_tensors", "output")
    ),
    "_reduce_scatter_base": Method("reduce_scatter", (1, "inputTensor"), (0, "outputTensor")),
    "reduce_scatter_tensor_coalesced": Method("reduce_scatter", (1, "inputs"), (0, "outputs")),
    "alltoall": Method("all_to_all", (1, "input_tensors")),
    "alltoall_base": Method("all_to_all", (1, "input"), splits=(3, "input_split_sizes")),
    "broadcast": Method("broadcast", (0, "tensors", "tensor"), root=(1, "opts", "root")),
    "reduce": Method("reduce", (0, "tensors", "tensor"), root=(1, "opts", "root")),
    "gather": Method("gather", (1, "input_tensors", "input_tensor"), root=(2, "opts", "root")),
    "scatter": Method(
        "scatter", (1, "input_tensors"), (0, "output_tensors", "output_tensor"), root=(2, "opts", "root")
    ),
    "send": Method("send", (0, "tensors")),
    "recv": Method("recv"),
    "recv_anysource": Method("recv"),
    "barrier": Method("barrier"),
    "monitored_barrier": Method("barrier"),
}


class StockCounter:
    """Counts into `ledger` from `start()` to `stop()`, or inside a `with` block; one at a time."""

    _active: "StockCounter | None" = None

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._originals: dict[str, Callable[..., Any]] = {}

    def start(self) -> "StockCounter":
        """Wrap the methods. Raises RuntimeError when a counter is active."""
        if StockCounter._active is not None:
            raise RuntimeError("communication is being counted already: stop that counter first")
        StockCounter._active = self
        for name, method in METHODS.items():
            self._originals[name] = original = getattr(ProcessGroup, name)
            setattr(ProcessGroup, name, _counted(original, method, self._ledger))
        return self

    def stop(self) -> None:
        """Put the original methods back; nothing happens when this counter is not active."""
        for name, original in self._originals.items():
            setattr(ProcessGroup, name, original)
        self._originals.clear()
        if StockCounter._active is self:
            StockCounter._active = None

    def __enter__(self) -> "StockCounter":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


def count_stock(into: Ledger | None = None) -> StockCounter:
    """A counter of stock communication: `with count_stock(): ...`, or `start()` and `stop()`."""
    return StockCounter(ledger() if into is None else into)


def size_of(tensors: Any) -> int | None:
    """Bytes of a tensor, or of all tensors in nested lists; None when unknown (sparse, not a tensor)."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes if tensors.layout is torch.strided else None
    if isinstance(tensors, (list, tuple)):
        if len(tensors) == 1:  # what torch.distributed hands over as a rule
            return size_of(tensors[0])
        sizes = [size_of(tensor) for tensor in tensors]
        return None if None in sizes else sum(sizes)
    return None


def kept_of(inputs: Any, splits: Iterable[int] | None, group_rank: int, group_size: int) -> int | None:
    """Bytes of an all-to-all's input that stay on this rank; `splits` are those of a tensor's rows."""
    if isinstance(inputs, (list, tuple)):
        return size_of(inputs[group_rank])
    total = size_of(inputs)
    if not splits or not total:
        return total and total // group_size
    return list(splits)[group_rank] * (total // inputs.shape[0])


def _counted(original: Callable[..., Any], method: Method, into: Ledger) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        feature = current_feature()
        if feature is None:
            return original(group, *args, **kwargs)
        count = _bytes_of(method, group, args, kwargs)
        work = original(group, *args, **kwargs)
        kind = method.kind if count is not None else method.kind + UNSIZED
        into.add(feature, kind, name_of(group), count or 0)
        return work

    return call


def _bytes_of(method: Method, group: ProcessGroup, args: tuple, kwargs: dict[str, Any]) -> int | None:
    # On the path of every collective: no containers, no keywords that are not needed.
    if not method.input:
        return 0
    kind, size, rank = method.kind, group.size(), group.rank()
    inputs = _argument(method.input, args, kwargs)
    input_bytes = size_of(inputs)
    output_bytes = kept_bytes = root = 0
    if method.output:
        output_bytes = size_of(_argument(method.output, args, kwargs))
    if method.root:
        root = _argument(method.root, args, kwargs)
        root = root if isinstance(root, int) else getattr(root, "rootRank", None)
    if kind == "all_to_all":
        splits = _argument(method.splits, args, kwargs) if method.splits else None
        kept_bytes = kept_of(inputs, splits, rank, size)
    if input_bytes is None or output_bytes is None or kept_bytes is None or root is None:
        return None
    return ideal_bytes(kind, size, rank, input_bytes, output_bytes, kept_bytes, root)


def _argument(where: Where, args: tuple, kwargs: dict[str, Any]) -> Any:
    if where[0] < len(args):
        return args[where[0]]
    return next((kwargs[name] for name in where[1:] if name in kwargs), None)
