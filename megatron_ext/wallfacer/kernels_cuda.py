"""Flash attention on NVIDIA GPUs: the flash-attn package, and torch's own build of it.

Both want rows before heads, `[b, s, h, d]`, and head dimensions in multiples of 8, so others are padded by
zeros, which changes no score, and cut off again.
"""

import functools
import importlib.util
import logging
from importlib import metadata

import torch
import torch.nn.functional as F
from torch import Tensor

LOG = logging.getLogger(__name__)
TYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
OLDEST = (2, 7)
"""Version of flash-attn from which its functions take and return what is used here."""


class _Flash:
    """What the two have in common."""

    name: str

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """See `kernels.Kernel`."""
        if device.type != "cuda":
            return "it runs on NVIDIA GPUs"
        if dtype not in TYPES:
            return "it computes in bf16 and fp16"
        if head_dim > LARGEST_HEAD:
            return f"its head dimension is at most {LARGEST_HEAD}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs an Ampere GPU or a later one"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.Kernel`."""
        out, lse = self._forward(*(_given(x) for x in (q, k, v)), causal, scale)
        return _taken(out, q.shape[-1]), lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernels.Kernel`."""
        # Their gradient kernels want gradient and output in one layout.
        grad, out = (_given(x).contiguous() for x in (grad, out))
        grads = self._backward(grad, *(_given(x) for x in (q, k, v)), out, lse, causal, scale)
        dq, dk, dv = (_taken(x, q.shape[-1]) for x in grads)
        return dq, dk, dv


class TorchFlash(_Flash):
    """torch's build."""

    name = "torch-flash"

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """See `kernels.Kernel`."""
        problem = super().why_not(device, dtype, head_dim)
        if problem is None and not torch.backends.cuda.is_flash_attention_available():
            return "this torch was built without it"
        return problem

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return out, lse

    def _backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # state of dropout
        flash = torch.ops.aten._flash_attention_backward
        sizes = (None, None, q.shape[1], k.shape[1])
        return flash(grad, q, k, v, out, lse, *sizes, 0.0, causal, unused, unused, scale=scale)


class FlashAttn(_Flash):
    """The package."""

    name = "flash-attn"

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """See `kernels.Kernel`."""
        return super().why_not(device, dtype, head_dim) or _package_problem()

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward

        out, lse, *_ = _wrapped_flash_attn_forward(q, k, v, 0.0, scale, causal, -1, -1, 0.0, None, False)
        return out, lse

    def _backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward

        q, k, v = (x.contiguous() for x in (q, k, v))
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        deterministic = torch.are_deterministic_algorithms_enabled()
        _wrapped_flash_attn_backward(
            grad, q, k, v, out, lse, dq, dk, dv, 0.0, scale, causal, -1, -1, 0.0, None, deterministic
        )
        return dq, dk, dv


@functools.cache
def _package_problem() -> str | None:
    """Why the package cannot be used. That it is there and broken is worth a warning: who installed it would
    not expect another kernel."""
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    problem = _installed_problem()
    if problem is not None:
        LOG.warning("flash-attn is installed and cannot be used: %s", problem)
    return problem


def _installed_problem() -> str | None:
    try:
        version = metadata.version("flash-attn")
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            return f"flash-attn {version} is too old, {'.'.join(map(str, OLDEST))} is needed"
        from flash_attn.flash_attn_interface import (  # noqa: F401
            _wrapped_flash_attn_backward,
            _wrapped_flash_attn_forward,
        )
    except Exception as error:  # a build for another torch raises what it likes
        return f"the package flash-attn does not import ({type(error).__name__}: {error})"
    return None


def _given(x: Tensor) -> Tensor:
    """`[b, h, s, d]` as `[b, s, h, d]` with d padded."""
    x = x.transpose(1, 2)
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


def _taken(x: Tensor, head_dim: int) -> Tensor:
    """The inverse."""
    return x[..., :head_dim].transpose(1, 2)
