"""Adding the output layer's weight gradient to Megatron's buffer."""

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def accumulate_weight_gradient(
    main_grad: Tensor, gradient: Tensor, x: Tensor, rows: slice, *, fused: bool
) -> None:
    """main_grad[rows] += gradient^T x.

    Args:
        main_grad: [V_r, h], fp32 or the model's type.
        gradient: dY [n, number of rows], model dtype.
        x: [n, h], model dtype.
        rows: Which of the shard's rows the gradient is for.
        fused: By Apex's kernel, which adds fp32 products of 16-bit inputs without rounding them in between.
            Otherwise as stock without it: a product in the model's type, then added.

    Raises:
        RuntimeError: `fused`, and the kernel is not installed or has no variant for main_grad's type.
    """
    target = main_grad[rows]
    if fused:
        _fused_kernel(main_grad.dtype)(x, gradient, target)
    elif gradient.dtype == main_grad.dtype:
        target.addmm_(gradient.t(), x)
    else:
        target.add_(torch.matmul(gradient.t(), x))


def _fused_kernel(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], None]:
    try:
        import fused_weight_gradient_mlp_cuda as kernels
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "--gradient-accumulation-fusion is on (the default), but Apex's kernel "
            "fused_weight_gradient_mlp_cuda is not installed. Install Apex with --cuda_ext, "
            "or pass --no-gradient-accumulation-fusion."
        ) from error
    if dtype == torch.float32:
        return kernels.wgrad_gemm_accum_fp32
    if dtype in (torch.float16, torch.bfloat16):
        return kernels.wgrad_gemm_accum_fp16
    raise RuntimeError(
        f"--gradient-accumulation-fusion has no kernel for gradients in {dtype}. "
        "Pass --no-gradient-accumulation-fusion."
    )
