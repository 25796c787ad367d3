"""Public implementations of context-parallel attention that a CPU can run, called as they are.

    torch, all-to-all     torch.distributed.tensor.experimental's ring, which passes keys on
    torch, all-gather     the same with its default, which gathers all keys at once
    yunchang              the zigzag ring of `pip install yunchang`

On a CPU neither reaches its kernels: torch's `context_parallel` knows CUDA's operators only, and yunchang's
kernels are CUDA's. So their rings (transfers, order, merging) run around torch's attention kernel for CPUs,
the same that all other methods use. yunchang's ring is for half precision: of fp32 inputs, as here, its sums
(`dq_buffer.to(torch.float32)`) are the buffers themselves, so its gradients come out wrong, and the benchmark
says so instead of timing it. None of the two is needed by the project.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
NAMES = ("torch all-to-all", "torch all-gather", "yunchang")


def why_not(name: str, causal: bool) -> str | None:
    """Why a peer cannot run here, None if it can."""
    if name == "yunchang":
        if find_spec("yunchang") is None:
            return "not installed: pip install yunchang"
        return None if causal else "its zigzag ring is for causal attention only"
    try:
        from torch.distributed.tensor.experimental._attention import _templated_ring_attention  # noqa: F401
    except ImportError as error:
        return f"this torch has no such ring: {error}"
    return None


def call(name: str, causal: bool, group) -> Callable[..., tuple[Tensor, ...]]:
    """`(q, k, v, grad) -> (out, dq, dk, dv)` of own rows `[n, b, h, d]`."""
    if name == "yunchang":
        return _yunchang(group)
    return _torch(name.removeprefix("torch ").replace("-", ""), causal, group)


def _torch(method: str, causal: bool, group) -> Callable[..., tuple[Tensor, ...]]:
    from torch.distributed.tensor.experimental import _attention as ring
    from torch.distributed.tensor.experimental._context_parallel import _attention as inside

    def attend(q, k, v, grad):
        ring.set_rotate_method(method)
        ring._cp_options.enable_load_balance = causal
        q, k, v, grad = (x.permute(1, 2, 0, 3) for x in (q, k, v, grad))
        out, lse = inside._templated_ring_attention(
            group, 2, flash, query=q, key=k, value=v, is_causal=causal, dropout_p=0.0
        )
        grads = inside._templated_ring_attention_backward(
            group,
            2,
            flash_backward.default,
            grad_out=grad,
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse.contiguous(),
            is_causal=causal,
            dropout_p=0.0,
        )
        return tuple(x.permute(2, 0, 1, 3) for x in (out, *grads[:3]))

    return attend


def _yunchang(group) -> Callable[..., tuple[Tensor, ...]]:
    from yunchang.ring import zigzag_ring_flash_attn as ring

    ring.select_flash_attn_impl = _kernel_for_yunchang

    def attend(q, k, v, grad):
        q, k, v = (x.transpose(0, 1).detach().requires_grad_() for x in (q, k, v))
        out = ring.zigzag_ring_flash_attn_func(q, k, v, causal=True, group=group)
        grads = torch.autograd.grad(out, (q, k, v), grad.transpose(0, 1))
        return tuple(x.transpose(0, 1) for x in (out.detach(), *grads))

    return attend


def _kernel_for_yunchang(attn_type, stage: str, **_) -> Callable:
    """In place of its look-up of kernels; tensors are `[b, s, h, d]`."""

    def forward(q, k, v, dropout_p, softmax_scale, causal, **_):
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        out, lse = flash(*heads, dropout_p, causal, scale=softmax_scale)
        return out.transpose(1, 2), lse.contiguous()

    def backward(grad, q, k, v, out, lse, dq, dk, dv, dropout_p, softmax_scale, causal, *_, **__):
        heads = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
        found = flash_backward(*heads, lse.contiguous(), dropout_p, causal, scale=softmax_scale)
        for target, part in zip((dq, dk, dv), found, strict=True):
            target.copy_(part.transpose(1, 2))

    return forward if stage == "fwd-only" else backward
