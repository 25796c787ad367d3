"""Live tensor memory by category: what a rank holds at its peak, exactly, on CPU as well as on a GPU.

    tracker = MemoryTracker("cpu")
    tracker.hold("weights", model.parameters())
    tracker.hold_rest()
    with tracker:
        with category("vocabulary"): ...
    tracker.report()

A tracker counts storages, not tensors, so views and aliases count once. It sees each operation below
autograd (`TorchDispatchMode`) and learns from weak references when a storage goes; `tensor.data = ...`,
in-place and `out=` operations need nothing special. Not seen: the scratch space inside one operation, and
what an allocator rounds up or keeps. What is made without an operation (by a fused kernel, or from numpy)
counts when an operation first touches it.

torch's own `torch.distributed._tools.mem_tracker.MemTracker` works in the same way but does not fit a step
of Megatron's: it refuses a model that is called once per microbatch, its categories are fixed and chosen by
hooks that it puts on modules, it does not know main gradients and master weights, and it is for one thread.
"""

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "vocabulary", "communication", "other")


@contextmanager
def category(name: str) -> Iterator[None]:
    """Count what is made in this block under `name`; does nothing while no tracker is active.

    In a thread that the tracker does not see, the block also lets it see that thread. Such a block must end
    before the tracker stops.
    """
    tracker = MemoryTracker._active
    if tracker is None:
        yield
        return
    with tracker.category(name):
        yield


class _Held:
    """A living storage: its address, size in bytes and category, and the watch on its end."""

    __slots__ = ("address", "category", "reference", "size")

    def __init__(self, storage: UntypedStorage, category: str, gone: Callable[["_Held"], None]):
        self.address = storage._cdata
        self.size = storage.nbytes()
        self.category = category
        self.reference: weakref.ref | None = weakref.ref(storage, lambda _: gone(self))


class _Watch(TorchDispatchMode):
    """Shows a tracker every operation of the thread that enters it. One object per thread: it keeps state."""

    supports_higher_order_operators = True

    def __init__(self, tracker: "MemoryTracker"):
        super().__init__()
        self.tracker = tracker

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.tracker._see((args, kwargs, result))
        return result


class MemoryTracker:
    """Counts the bytes of live storages on one type of device ("cpu" or "cuda") from `start()` to `stop()`.

    What a thread makes counts under the category of the block that it is in, see `category`; a thread that is
    in none, such as autograd's, follows the thread that started the tracker. One tracker at a time.
    """

    _active: "MemoryTracker | None" = None

    def __init__(self, device: str, default: str = "activations"):
        self._device = device
        self._default = default
        self._owner = threading.get_ident()
        self._blocks: dict[int, str] = {}  # category of each thread that is in a block
        self._live: dict[int, _Held] = {}  # by address
        # A storage may go at any time, in any thread, even inside `_add`: it is only noted then.
        self._gone: deque[_Held] = deque()
        self._lock = threading.RLock()
        self._now = dict.fromkeys(CATEGORIES, 0)
        self._highest = dict.fromkeys(CATEGORIES, 0)
        self._peak = 0
        self._at_peak = dict(self._now)
        self._resources = ExitStack()

    # --- what exists before --------------------------------------------------------------------------------

    def hold(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Count existing tensors under a category; a storage that is counted already stays where it is."""
        assert category in CATEGORIES, category
        self._see(list(tensors), category)

    def hold_rest(self) -> None:
        """Count every other tensor of this process under "other"."""
        # type(), since isinstance() runs code of lazy modules and proxies.
        self.hold("other", [item for item in gc.get_objects() if issubclass(type(item), Tensor)])

    # --- while it runs -------------------------------------------------------------------------------------

    def start(self) -> "MemoryTracker":
        """Start to watch this thread. Raises RuntimeError when a tracker is active."""
        if MemoryTracker._active is not None:
            raise RuntimeError("memory is being tracked already: stop that tracker first")
        MemoryTracker._active = self
        self._owner = threading.get_ident()
        self._resources.enter_context(_resizes_seen(self._resized))
        self._resources.enter_context(_Watch(self))
        return self

    def stop(self) -> None:
        """Stop to watch, and forget what is alive; `report` still answers.

        Raises RuntimeError when another thread is still inside a `category` block.
        """
        MemoryTracker._active = None
        self._resources.close()
        with self._lock:
            for held in self._live.values():
                held.reference = None
            self._live.clear()
            self._gone.clear()
        if self._blocks.keys() - {self._owner}:
            raise RuntimeError(
                "memory tracking stopped while another thread was inside a category block: what that thread "
                "made may be counted in part. Wait for the thread before the tracker stops."
            )

    def __enter__(self) -> "MemoryTracker":
        return self.start()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.stop()
        except RuntimeError:
            if error is None:  # else the block's own error is the one to show
                raise

    def default(self, name: str) -> None:
        """From now on, count what is made outside of `category` blocks under `name`."""
        assert name in CATEGORIES, name
        self._default = name

    @contextmanager
    def category(self, name: str) -> Iterator[None]:
        """Count what this thread makes in this block under `name`."""
        assert name in CATEGORIES, name
        thread = threading.get_ident()
        outer = self._blocks.get(thread)
        seen = any(isinstance(mode, _Watch) for mode in _get_current_dispatch_mode_stack())
        self._blocks[thread] = name
        try:
            with nullcontext() if seen else _Watch(self):
                yield
        finally:
            if outer is None:
                del self._blocks[thread]
            else:
                self._blocks[thread] = outer

    def report(self) -> dict[str, Any]:
        """Bytes of each category at the moment of the highest total, that total as "peak", and each
        category's own highest value, whenever that was, as "category_peaks"."""
        return {**self._at_peak, "peak": self._peak, "category_peaks": dict(self._highest)}

    # --- counting ------------------------------------------------------------------------------------------

    def _current(self) -> str:
        blocks = self._blocks
        return blocks.get(threading.get_ident()) or blocks.get(self._owner) or self._default

    def _see(self, tree: Any, category: str | None = None) -> None:
        """Count the storages of a nest of tensors (strided ones) as far as they are new or were resized."""
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
        storages = [storage for tensor in strided for storage in get_untyped_storages(tensor)]
        self._count(storages, category or self._current())

    def _resized(self, storage: UntypedStorage) -> None:
        self._count([storage], self._current())

    def _count(self, storages: list[UntypedStorage], category: str) -> None:
        with self._lock:
            self._settle()
            for storage in storages:
                held = self._live.get(storage._cdata)
                if held is None and storage.device.type == self._device:  # a fake tensor's is "meta"
                    held = self._live[storage._cdata] = _Held(storage, category, self._gone.append)
                    self._add(category, held.size)
                elif held is not None and held.size != storage.nbytes():
                    self._add(held.category, storage.nbytes() - held.size)
                    held.size = storage.nbytes()
            total = sum(self._now.values())
            if total > self._peak:
                self._peak, self._at_peak = total, dict(self._now)

    def _settle(self) -> None:
        """Take off what has gone. Must come before a look at `_live`, since addresses are used again."""
        while self._gone:
            held = self._gone.popleft()
            held.reference = None  # it leads back to `held`: a cycle
            if self._live.get(held.address) is held:
                del self._live[held.address]
                self._add(held.category, -held.size)

    def _add(self, category: str, size: int) -> None:
        self._now[category] += size
        self._highest[category] = max(self._highest[category], self._now[category])


@contextmanager
def _resizes_seen(see: Callable[[UntypedStorage], None]) -> Iterator[None]:
    """Call `see` after each `UntypedStorage.resize_`, which is no operation that a mode sees.

    FSDP and offloading free and refill tensors in this way.
    """
    original = UntypedStorage.resize_
    own = vars(UntypedStorage).get("resize_")

    def resize_(self: UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        see(self)
        return result

    UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        if own is None:
            del UntypedStorage.resize_
        else:
            UntypedStorage.resize_ = own
