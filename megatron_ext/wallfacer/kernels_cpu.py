"""torch's flash attention on CPU: fused, any head dimension, key heads shared by query heads."""

import torch
from torch import Tensor

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class CpuFlash:
    """The operators behind scaled_dot_product_attention, called as such for their log-sum-exp."""

    name = "cpu-flash"

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """See `kernels.Kernel`."""
        if device.type != "cpu":
            return "it runs on CPU"
        return None if dtype in TYPES else "it computes in fp64, fp32, bf16 and fp16"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.Kernel`."""
        assert q.shape[2] * k.shape[2] > 0, "an empty tile would end the process"
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, causal, scale=scale)

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
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
