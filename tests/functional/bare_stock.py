"""Stock Megatron on CPU by the bare minimum, without megatron_ext: the yardstick for "flag off is stock".

A different mechanism from the launcher's on purpose (a function mode and plain assignments instead of
declared patches), so that both being equal says something.
"""

import contextlib
import os
import runpy
import sys
from types import SimpleNamespace

FLAGS = (
    "--distributed-backend gloo --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--attention-backend unfused --num-workers 0"
).split()


def run(script: str, args: list[str], dropout: bool = False) -> list[tuple[float | None, float]]:
    """Train with the script in this process; returns (loss or None, grad norm) of every step."""
    import torch

    _fake_cuda(dropout)
    import megatron.core.datasets.utils
    import megatron.core.tensor_parallel.random as rng
    import megatron.training.initialize
    import megatron.training.training as training

    megatron.core.datasets.utils.compile_helpers = lambda: None
    rng._get_cuda_rng_state = lambda *a, **k: torch.default_generator.get_state()
    rng._set_cuda_rng_state = lambda state, *a, **k: torch.default_generator.set_state(state)
    seen: list[tuple[float | None, float]] = []
    stock_step = training.train_step

    def train_step(*a, **k):
        result = stock_step(*a, **k)
        seen.append((result[0]["lm loss"].item() if result[0] else None, float(result[5])))
        return result

    training.train_step = train_step
    sys.argv = [script, *args, *FLAGS]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with _CpuDevice():
        runpy.run_path(script, run_name="__main__")
    return seen


def _CpuDevice():
    import torch
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if "device" in kwargs and "cuda" in str(kwargs["device"]):
                kwargs["device"] = "cpu"
            args = tuple("cpu" if isinstance(a, torch.device) and a.type == "cuda" else a for a in args)
            out = func(*args, **kwargs)
            if func is torch.Tensor.type and len(args) == 1 and isinstance(out, str):
                out = out.replace("torch.", "torch.cuda.")
            return out

    return Mode()


def _keep_dropout_apart_from_loaders() -> None:
    """On a GPU the seed of a data loader does not come from the generator that dropout draws from.

    The one thing that CPU mode does beyond the minimum, so that resuming with dropout is exact.
    """
    import torch

    loader = torch.utils.data.dataloader._BaseDataLoaderIter
    stock_init = loader.__init__

    def init(self, *args, **kwargs):
        with torch.random.fork_rng(devices=[]):
            stock_init(self, *args, **kwargs)

    loader.__init__ = init


def _fake_cuda(dropout: bool) -> None:
    import torch

    class Idle:
        def __init__(self, *a, **k): ...
        def __getattr__(self, name):
            return lambda *a, **k: None

        def __enter__(self):
            return self

        def __exit__(self, *exc): ...

    def nothing(*args, **kwargs):
        return None

    cuda = torch.cuda
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = cuda.Event = Idle
    cuda.stream = lambda s: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *a: Idle()
    for name in ("set_device", "synchronize", "empty_cache", "_lazy_init", "reset_peak_memory_stats"):
        setattr(cuda, name, nothing)
    cuda.is_current_stream_capturing = lambda: False
    cuda._lazy_call = lambda fn, **k: fn()
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *a: 0)
    cuda.memory_stats = lambda *a: {}
    cuda.get_device_properties = lambda *a: SimpleNamespace(major=0, minor=0, name="CPU", total_memory=0)
    cuda.get_device_capability = lambda *a: (0, 0)
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *a, **k: torch.default_generator.get_state()
        module.set_rng_state = lambda state, *a, **k: torch.default_generator.set_state(state)
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor", "ByteTensor"):
        setattr(cuda, name, getattr(torch, name))
    if dropout:
        _keep_dropout_apart_from_loaders()
    torch.accelerator.is_available = lambda: False
    torch.accelerator.current_device_index = lambda: 0
    for cls, names in ((torch.Tensor, ("cuda", "pin_memory")), (torch.nn.Module, ("cuda",))):
        for name in names:
            setattr(cls, name, lambda self, *a, **k: self)
