"""Torch without CUDA, for `cpu.py`: stand-ins for `torch.cuda`, and `device="cuda"` meaning the CPU."""

import functools
import os
from collections.abc import Callable
from typing import Any

from megatron_ext.patching import Patch

# --- stand-ins ---------------------------------------------------------------------------------------------


class _Stream:
    """A CUDA stream on a device whose work is synchronous: nothing to wait for."""

    def __init__(self, *args, **kwargs):
        self.cuda_stream = 0

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False

    def wait_stream(self, stream) -> None: ...

    def wait_event(self, event) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event=None):
        event = event or _Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class _Event:
    """A CUDA event; `elapsed_time` is wall time in milliseconds, as CUDA's."""

    def __init__(self, *args, **kwargs):
        self._at: float | None = None

    def record(self, stream=None) -> None:
        import time

        self._at = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        if self._at is None or end._at is None:
            raise RuntimeError("both events must be recorded before elapsed_time")
        return (end._at - self._at) * 1e3

    def wait(self, stream=None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


_STREAM = _Stream()


class _NullDevice:
    """`with torch.cuda.device(...)`: there is only one CPU."""

    def __init__(self, device=None):
        self.idx = 0

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


def _properties(device=None):
    from types import SimpleNamespace

    import psutil

    return SimpleNamespace(
        name="CPU",
        major=0,
        minor=0,
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=os.cpu_count() or 1,
        gcnArchName="",
    )


def _resident_bytes(device=None) -> int:
    import psutil

    return psutil.Process().memory_info().rss


def _peak_resident_bytes(device=None) -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_stats(device=None) -> dict[str, int]:
    now, peak = _resident_bytes(), _peak_resident_bytes()
    stats: dict[str, int] = {"num_alloc_retries": 0}
    for kind in ("allocated_bytes", "active_bytes", "reserved_bytes", "allocation", "active"):
        stats[f"{kind}.all.current"] = now if kind.endswith("bytes") else 0
        stats[f"{kind}.all.peak"] = peak if kind.endswith("bytes") else 0
    return stats


# --- device="cuda" means the CPU ---------------------------------------------------------------------------


def is_cuda(device: Any) -> bool:
    """Whether a device argument (string, index, torch.device) names CUDA."""
    import torch

    if type(device) is int:  # an index, as torch.cuda.current_device() returns it
        return True
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


def _on_cpu(original: Callable) -> Callable:
    """Wrap a function with a `device` argument: CUDA devices, by name or by position, become the CPU."""
    import torch

    cpu = torch.device("cpu")
    # Only `to` takes a device index by position; elsewhere a positional integer is a size.
    index_at = 1 if original.__name__ == "to" else None

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if kwargs.get("pin_memory"):  # pinning needs a driver
            kwargs["pin_memory"] = False
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = cpu
        elif any(is_cuda(a) for i, a in enumerate(args[:4]) if not isinstance(a, int) or i == index_at):
            args = tuple(cpu if not isinstance(a, int) and is_cuda(a) else a for a in args)
            if index_at and type(args[1]) is int:
                args = (args[0], cpu, *args[2:])
        return original(*args, **kwargs)

    return wrapper


def _cuda_type_names(original: Callable) -> Callable:
    """`Tensor.type()` answers with CUDA's names, which Megatron's clipping asserts on."""

    @functools.wraps(original)
    def wrapper(self, dtype=None, *args, **kwargs):
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original(self, dtype, *args, **kwargs)

    return wrapper


def _returns(value: Any) -> Callable[[Any], Any]:
    return lambda original: lambda *args, **kwargs: value


def _becomes(new: Any) -> Callable[[Any], Any]:
    return lambda original: new


def _self(original: Callable) -> Callable:
    return lambda self, *args, **kwargs: self


def _cpu_manual_seed(seed: int) -> None:
    import torch

    torch.default_generator.manual_seed(int(seed))


def cpu_rng_state(device=None, *args, **kwargs):
    import torch

    return torch.default_generator.get_state()


def cpu_set_rng_state(new_state, *args, **kwargs) -> None:
    import torch

    torch.default_generator.set_state(new_state)


def _keep_generator(original: Callable) -> Callable:
    """A data loader draws a seed for its workers from the CPU's generator.

    On a GPU that leaves CUDA's generator, from which dropout draws, alone. Here both are one, so the draw is
    taken back: a resumed run, which builds its loaders after the checkpoint's state was set, would differ.
    """

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        before = cpu_rng_state()
        original(*args, **kwargs)
        cpu_set_rng_state(before)

    return wrapper


_FACTORIES = (
    "empty empty_strided zeros ones full tensor as_tensor arange linspace rand randn randint randperm eye "
    "empty_like zeros_like ones_like full_like rand_like randn_like scalar_tensor tril_indices triu_indices"
).split()
_TENSOR_METHODS = ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


def torch_patches() -> list[Patch]:
    """Patches of torch: must be applied before megatron is imported."""
    import torch

    def patch(target: str, make: Callable[[Any], Any], why: str, kind: str = "replace") -> Patch:
        return Patch(target=target, make=make, kind=kind, why=why, feature="cpu")

    cuda = [
        ("is_available", _returns(True), "Megatron asserts a GPU"),
        ("is_initialized", _returns(True), "lazy CUDA initialisation must not start"),
        ("_lazy_init", _returns(None), "lazy CUDA initialisation must not start"),
        ("_lazy_call", lambda original: lambda fn, **kw: fn(), "run queued CUDA calls at once"),
        ("device_count", _returns(1), "one device per rank"),
        ("current_device", _returns(0), "device of new tensors"),
        ("set_device", _returns(None), "there is one CPU"),
        ("device", _becomes(_NullDevice), "there is one CPU"),
        ("synchronize", _returns(None), "CPU work is synchronous"),
        ("empty_cache", _returns(None), "no caching allocator"),
        ("ipc_collect", _returns(None), "no CUDA IPC"),
        ("Stream", _becomes(_Stream), "CPU work is synchronous"),
        ("Event", _becomes(_Event), "CPU work is synchronous"),
        ("stream", _returns(_STREAM), "CPU work is synchronous"),
        ("current_stream", _returns(_STREAM), "CPU work is synchronous"),
        ("default_stream", _returns(_STREAM), "CPU work is synchronous"),
        ("set_stream", _returns(None), "CPU work is synchronous"),
        ("is_current_stream_capturing", _returns(False), "no CUDA graphs"),
        ("get_device_properties", lambda original: _properties, "the CPU's properties"),
        ("get_device_name", _returns("CPU"), "the CPU's properties"),
        ("get_device_capability", _returns((0, 0)), "no compute capability"),
        ("memory_allocated", lambda original: _resident_bytes, "resident memory of the process"),
        ("memory_reserved", lambda original: _resident_bytes, "resident memory of the process"),
        ("max_memory_allocated", lambda original: _peak_resident_bytes, "resident memory of the process"),
        ("max_memory_reserved", lambda original: _peak_resident_bytes, "resident memory of the process"),
        ("memory_stats", lambda original: _memory_stats, "resident memory of the process"),
        ("device_memory_used", lambda original: _resident_bytes, "resident memory of the process"),
        ("reset_peak_memory_stats", _returns(None), "the system keeps the peak"),
        ("manual_seed", _becomes(_cpu_manual_seed), "the CPU's generator"),
        ("manual_seed_all", _becomes(_cpu_manual_seed), "the CPU's generator"),
        ("get_rng_state", _becomes(cpu_rng_state), "the CPU's generator"),
        ("set_rng_state", _becomes(cpu_set_rng_state), "the CPU's generator"),
        ("random.get_rng_state", _becomes(cpu_rng_state), "the CPU's generator"),
        ("random.set_rng_state", _becomes(cpu_set_rng_state), "the CPU's generator"),
        ("FloatTensor", _becomes(torch.FloatTensor), "typed constructors"),
        ("DoubleTensor", _becomes(torch.DoubleTensor), "typed constructors"),
        ("HalfTensor", _becomes(torch.HalfTensor), "typed constructors"),
        ("BFloat16Tensor", _becomes(torch.BFloat16Tensor), "typed constructors"),
        ("IntTensor", _becomes(torch.IntTensor), "typed constructors"),
        ("LongTensor", _becomes(torch.LongTensor), "typed constructors"),
        ("ByteTensor", _becomes(torch.ByteTensor), "typed constructors"),
    ]
    out = []
    for name, make, why in cuda:
        module, _, attr = name.rpartition(".")
        out.append(patch(f"torch.cuda{'.' + module if module else ''}:{attr}", make, why))
    out += [
        patch("torch.accelerator:is_available", _returns(False), "DataLoader asks for an accelerator"),
        patch("torch.accelerator:current_device_index", _returns(0), "DataLoader asks for an accelerator"),
        patch(
            "torch.utils.data.dataloader:_BaseDataLoaderIter.__init__",
            _keep_generator,
            "CUDA's generator must not see what draws from the CPU's",
            "wrap",
        ),
        patch("torch:Tensor.cuda", _self, "tensors stay on the CPU"),
        patch("torch:Tensor.pin_memory", _self, "pinning needs a driver"),
        patch("torch:Tensor.record_stream", _self, "CPU work is synchronous"),
        patch("torch:Tensor.type", _cuda_type_names, "gradient clipping asserts CUDA's type names", "wrap"),
        patch("torch.nn:Module.cuda", _self, "modules stay on the CPU"),
        patch("torch.nn:Module.to", _on_cpu, 'device="cuda" means the CPU', "wrap"),
        patch("torch.nn:Module.to_empty", _on_cpu, 'device="cuda" means the CPU', "wrap"),
        patch("torch:Generator", _generator_on_cpu, 'device="cuda" means the CPU'),
    ]
    out += [patch(f"torch:{n}", _on_cpu, 'device="cuda" means the CPU', "wrap") for n in _FACTORIES]
    out += [
        patch(f"torch:Tensor.{n}", _on_cpu, 'device="cuda" means the CPU', "wrap") for n in _TENSOR_METHODS
    ]
    return out


def _generator_on_cpu(original: type) -> type:
    """`torch.Generator(device="cuda")` on the CPU; still a class, so isinstance keeps working."""

    class _Meta(type):
        def __instancecheck__(cls, instance):
            return isinstance(instance, original)

        def __call__(cls, device="cpu"):
            return original("cpu" if is_cuda(device) else device)

        def __getattr__(cls, name):
            return getattr(original, name)

    return _Meta("Generator", (), {"__doc__": original.__doc__})
