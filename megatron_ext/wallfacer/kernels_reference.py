"""Attention in plain torch operations: a reference, and for tensors that no fused kernel takes."""

import torch
from torch import Tensor

from megatron_ext.wallfacer.merge import accumulator_of


class Reference:
    """Scores of a whole tile at once, in fp32 or wider."""

    name = "reference"

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """It takes all floating-point tensors."""
        return None if dtype.is_floating_point else "it computes on floating-point numbers"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.Kernel`."""
        scores = _scores(q, k, causal, scale)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.unsqueeze(-1))
        out = weights @ _wide(v, q.shape[1])
        return out.to(q.dtype), lse

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
        heads, key_heads = q.shape[1], k.shape[1]
        weights = torch.exp(_scores(q, k, causal, scale) - lse.unsqueeze(-1))
        wide_grad = _wide(grad, heads)
        delta = (wide_grad * _wide(out, heads)).sum(dim=-1, keepdim=True)
        score_grad = weights * (wide_grad @ _wide(v, heads).transpose(-1, -2) - delta) * scale
        dq = score_grad @ _wide(k, heads)
        dk = score_grad.transpose(-1, -2) @ _wide(q, heads)
        dv = weights.transpose(-1, -2) @ wide_grad
        return dq.to(q.dtype), _shared(dk, key_heads).to(k.dtype), _shared(dv, key_heads).to(v.dtype)


def _wide(x: Tensor, heads: int) -> Tensor:
    """In the type of sums, with one head for each query head."""
    x = x.to(accumulator_of(x.dtype))
    return x.repeat_interleave(heads // x.shape[1], dim=1) if x.shape[1] != heads else x


def _shared(grad: Tensor, key_heads: int) -> Tensor:
    """Sum gradients of the query heads that share a key head."""
    return grad.unflatten(1, (key_heads, -1)).sum(dim=2)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = _wide(q, q.shape[1]) @ _wide(k, q.shape[1]).transpose(-1, -2) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores
