"""Buffers that are used again in every call, so that hops allocate nothing.

    with scratch.lease(device) as lease:
        buffer = lease.take((rows, 2, b, h, d), dtype)      # any contents
        lease.drop(buffer)                                  # before the block ends, if it is free by then

Buffers of one call serve the next one of the same shapes; other shapes replace them. `peak_bytes` is what the
largest call had in use at a time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

Take = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes a buffer of a shape and type."""
_Key = tuple[int, torch.dtype, torch.device]


class Scratch:
    """A pool of buffers."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._in_use = 0
        self._signature: object = None
        self._free: dict[_Key, list[Tensor]] = defaultdict(list)

    def expect(self, signature: object) -> None:
        """Say what the next call's shapes follow from; buffers of another signature are let go."""
        if signature != self._signature:
            self._free.clear()
            self._signature = signature

    @contextmanager
    def lease(self, device: torch.device) -> Iterator["Lease"]:
        """Buffers that return to the pool at the end."""
        lease = Lease(self, device)
        try:
            yield lease
        finally:
            lease.close()

    def _take(self, key: _Key) -> Tensor:
        numel, dtype, device = key
        self._in_use += numel * dtype.itemsize
        self.peak_bytes = max(self.peak_bytes, self._in_use)
        free = self._free.get(key)
        return free.pop() if free else torch.empty(numel, dtype=dtype, device=device)

    def _give(self, buffer: Tensor) -> None:
        self._in_use -= buffer.numel() * buffer.dtype.itemsize
        self._free[buffer.numel(), buffer.dtype, buffer.device].append(buffer)


class Lease:
    """The buffers of one computation. `Scratch.lease` makes one."""

    def __init__(self, scratch: Scratch, device: torch.device):
        self._scratch, self._device = scratch, device
        self._taken: dict[int, Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of any contents."""
        buffer = self._scratch._take((prod(shape), dtype, self._device))
        found = buffer.view(*shape)
        self._taken[found.data_ptr()] = buffer
        return found

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of zeros."""
        return self.take(shape, dtype).zero_()

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a buffer of this lease."""
        return tensor.data_ptr() in self._taken

    def drop(self, tensor: Tensor) -> None:
        """Give a buffer back early, which nothing uses any more, no transfer either. Ignores other
        tensors."""
        buffer = self._taken.pop(tensor.data_ptr(), None)
        if buffer is not None:
            self._scratch._give(buffer)

    def keep_only(self, *tensors: Tensor) -> None:
        """Give all other buffers back early."""
        kept = {tensor.data_ptr() for tensor in tensors}
        for pointer in [pointer for pointer in self._taken if pointer not in kept]:
            self._scratch._give(self._taken.pop(pointer))

    def close(self) -> None:
        """Give everything back."""
        self.keep_only()
