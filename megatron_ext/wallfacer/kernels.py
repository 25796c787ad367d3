"""Attention kernels behind one adapter: what multi-ring attention needs of any of them.

A kernel computes one tile, given as views `[b, h, s, d]` with unit stride in d; key and value heads may be
fewer than query heads. Its forward returns the output and the log-sum-exp of the scores (natural logarithm,
`[b, h, s]`, fp32, or fp64 for fp64 inputs). Its backward takes outputs and log-sum-exps of *all* keys, so
that gradients of tiles add up. Rows of which a tile has no keys are the planner's business: every row has at
least one.
"""

from typing import Protocol

import torch
from torch import Tensor

from megatron_ext.wallfacer.options import KernelName
from megatron_ext.wallfacer.tiles import Mode


class Kernel(Protocol):
    """One implementation of attention."""

    name: str

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why it cannot run on such tensors, None if it can."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(output `[b, hq, s, d]` in the type of q, log-sum-exp `[b, hq, s]`). `causal` is for squares
        only."""

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
        """Gradients of q, k and v from that of the output; `out` and `lse` are those of all keys."""


def kernels() -> list[Kernel]:
    """All kernels; those that auto may take come first, fastest first, and the reference is last."""
    from megatron_ext.wallfacer.kernels_cpu import CpuFlash
    from megatron_ext.wallfacer.kernels_cuda import FlashAttn, TorchFlash
    from megatron_ext.wallfacer.kernels_reference import Reference

    return [CpuFlash(), FlashAttn(), TorchFlash(), Reference()]


def select(name: KernelName, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel of this name, or for auto the fastest that can run; never the reference unless it is named.

    Raises:
        ValueError: it cannot run, or none can, with the reasons.
    """
    known = {kernel.name: kernel for kernel in kernels()}
    wanted = [kernel for kernel in known.values() if kernel.name == name or name == "auto"]
    problems = []
    for kernel in wanted:
        if name == "auto" and kernel.name == "reference":
            continue
        problem = kernel.why_not(device, dtype, head_dim)
        if problem is None:
            return kernel
        problems.append(f"{kernel.name}: {problem}")
    raise ValueError(
        f"no attention kernel for {dtype} with head dimension {head_dim} on {device.type} "
        f"({'; '.join(problems)}): use bf16 or fp16 on a GPU, or name the kernel 'reference', which is slow "
        "and takes memory of the square of the sequence"
    )


def tile_forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mode: Mode, scale: float
) -> tuple[Tensor, Tensor]:
    """Output `[s, b, h, d]` and log-sum-exp `[s, b, h]` of a tile, from parts of buffers `[s, b, h, d]`."""
    q, k, v = (_heads_first(x, mode) for x in (q, k, v))
    out, lse = kernel.forward(q, k, v, causal=mode != "full", scale=scale)
    assert lse.shape == out.shape[:3], (kernel.name, lse.shape, out.shape)
    return _rows_first(out, mode), _rows_first(lse, mode)


def tile_backward(
    kernel: Kernel,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mode: Mode,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients `[s, b, h, d]` of a tile's q, k and v, from parts of buffers, `lse` `[s, b, h]`."""
    grad, q, k, v, out = (_heads_first(x, mode) for x in (grad, q, k, v, out))
    lse = _heads_first(lse, mode).contiguous()
    grads = kernel.backward(grad, q, k, v, out, lse, causal=mode != "full", scale=scale)
    dq, dk, dv = (_rows_first(x, mode) for x in grads)
    return dq, dk, dv


def _heads_first(x: Tensor, mode: Mode) -> Tensor:
    """`[s, b, h, ...]` as `[b, h, s, ...]`; turned round where a tile is causal that way."""
    x = x.flip(0) if mode == "reverse" else x
    return x.movedim(0, 2)


def _rows_first(x: Tensor, mode: Mode) -> Tensor:
    x = x.movedim(2, 0)
    return x.flip(0) if mode == "reverse" else x
