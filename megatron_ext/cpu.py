"""Stock Megatron without CUDA: what `--cpu` patches, hides and sets.

Active only under `--cpu`. Nothing here touches numerics: CUDA queries get CPU answers, `device="cuda"`
becomes the CPU, streams and events do nothing (CPU work is synchronous), and CUDA's random generator is the
CPU's. The patches go through the same declarative mechanism as every other (`patching.py`).
"""

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from megatron_ext.cpu_torch import cpu_rng_state, cpu_set_rng_state, torch_patches
from megatron_ext.patching import Patch

# GPU-only packages that Megatron prefers as soon as they import; with one of them present, stock code picks
# fused CUDA kernels for tensors that live on the CPU. A None entry makes `import` raise ModuleNotFoundError
# and `find_spec` return None: exactly what a machine without the package does.
HIDDEN_PACKAGES = (
    "transformer_engine",
    "transformer_engine_torch",
    "apex",
    "amp_C",
    "fused_layer_norm_cuda",
    "fused_weight_gradient_mlp_cuda",
    "flash_attn",
    "flash_attn_3",
    "flashinfer",
    "mamba_ssm",
    "causal_conv1d",
    "deep_ep",
    "nvidia_resiliency_ext",
    "modelopt",
)

# Stock options whose default only works on a GPU: dest -> (value on CPU, the flag as a user would type it).
CPU_DEFAULTS: dict[str, tuple[Any, str]] = {
    "distributed_backend": ("gloo", "--distributed-backend gloo"),
    "transformer_impl": ("local", "--transformer-impl local"),
    "no_persist_layer_norm": (True, "--no-persist-layer-norm"),
    "persist_layer_norm": (False, "--no-persist-layer-norm"),
    "gradient_accumulation_fusion": (False, "--no-gradient-accumulation-fusion"),
    "gradient_reduce_div_fusion": (False, "--no-gradient-reduce-div-fusion"),
    "masked_softmax_fusion": (False, "--no-masked-softmax-fusion"),
    "bias_gelu_fusion": (False, "--no-bias-gelu-fusion"),
    "bias_swiglu_fusion": (False, "--no-bias-swiglu-fusion"),
    "bias_dropout_fusion": (False, "--no-bias-dropout-fusion"),
    "apply_rope_fusion": (False, "--no-rope-fusion"),
    "attention_backend": ("unfused", "--attention-backend unfused"),
    # Worker processes of every rank would fight for the cores that the ranks compute on.
    "num_workers": (0, "--num-workers 0"),
}


def hide_gpu_packages() -> list[str]:
    """Make GPU-only packages look absent; return those that are installed and were hidden.

    Must run before megatron is imported, since Megatron decides at import time.
    """
    from importlib.util import find_spec

    loaded = [name for name in HIDDEN_PACKAGES if sys.modules.get(name) is not None]
    if loaded:
        raise RuntimeError(f"--cpu must hide {', '.join(loaded)} before they are imported; they already are.")
    hidden = []
    for name in HIDDEN_PACKAGES:
        if name not in sys.modules and find_spec(name) is not None:
            hidden.append(name)
        sys.modules[name] = None  # type: ignore[assignment]
    return hidden


def set_environment() -> None:
    """Environment that CPU runs need before torch is imported; values the user set stay."""
    # torch.compile would build C++ kernels at the first step; Megatron uses it only to fuse on GPU.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def quiet_known_noise() -> None:
    """Drop a warning that is always wrong here: the CPU's generator *is* the one behind `torch.cuda`."""
    noise = "CPU RNG state changed within GPU RNG context"
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addFilter(lambda line: line.getMessage() != noise)


def set_defaults(parser) -> list[str]:
    """Make CPU_DEFAULTS the parser's defaults (flags given by the user win); return them as flags."""
    known = {action.dest: action for action in parser._actions}
    shown = []
    for dest, (value, flag) in CPU_DEFAULTS.items():
        if dest not in known:
            continue
        if dest == "attention_backend":
            from megatron.core.transformer.enums import AttnBackend

            value = AttnBackend[value]
        parser.set_defaults(**{dest: value})
        shown.append(flag)
    return shown


def prepare_args(args) -> None:
    """What stock validation asks of a GPU's environment and CPU does not need (before `validate_args`).

    CUDA_DEVICE_MAX_CONNECTIONS orders CUDA kernels; stock asserts it for TP and CP on any device below
    compute capability 10, which the CPU reports.
    """
    fsdp = getattr(args, "use_megatron_fsdp", False) or getattr(args, "use_torch_fsdp2", False)
    if not fsdp:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _norm_with_sequence_parallel(original: Callable) -> Callable:
    """Let torch's norms take part in sequence parallelism.

    The norm works on one token at a time, so it needs nothing but the mark on its parameters that makes
    `finalize_model_grads` sum their gradients over the tensor-parallel group, as Megatron's fused norm does.
    """
    import copy
    import functools

    @functools.wraps(original)
    def wrapper(cls, config, *args, **kwargs):
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = True
        return norm

    return wrapper


def _tracker_rng_state(original: Callable) -> Callable:
    def get_state(device="cuda", clone=False, graph_safe=False):
        return cpu_rng_state()

    return get_state


def _tracker_set_rng_state(original: Callable) -> Callable:
    def set_state(new_state, device=-1, graph_safe=False):
        cpu_set_rng_state(new_state)

    return set_state


def megatron_patches() -> list[Patch]:
    """Patches of megatron: applied after the ones of torch."""
    rng = "megatron.core.tensor_parallel.random"
    return [
        Patch(f"{rng}:_get_cuda_rng_state", _tracker_rng_state, "replace", "the CPU's generator", "cpu"),
        Patch(f"{rng}:_set_cuda_rng_state", _tracker_set_rng_state, "replace", "the CPU's generator", "cpu"),
        Patch(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            _norm_with_sequence_parallel,
            "wrap",
            "sequence parallelism without Apex or Transformer Engine",
            "cpu",
            needs=("config",),
        ),
    ]


def catalogue() -> list[Patch]:
    """Every patch `--cpu` installs."""
    return torch_patches() + megatron_patches()
