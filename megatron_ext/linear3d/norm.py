"""LayerNorm and RMSNorm of the residual layout, whose features are cut over axis l; statistics exact in fp32.

Mean and variance come from each rank's mean and centred second moment, so that nothing cancels where the mean
is large; the usual difference of sums of squares would.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.linear3d.comm import GridComm
from megatron_ext.linear3d.layouts import Move

SITE = "norm"
_STACKED = Move("l", 0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _statistics(x: Tensor, comm: GridComm, rms: bool) -> tuple[Tensor | None, Tensor]:
    """Mean `[..., 1]` (None for RMSNorm) and mean square (variance) over all features of all ranks."""
    parts = comm.grid.gl
    if rms:
        own = x.square().mean(dim=-1)
        every = comm.gather(own.unsqueeze(0), _STACKED, SITE).wait()
        return None, (every.sum(dim=0) / parts).unsqueeze(-1)
    mean = x.mean(dim=-1)
    second = (x - mean.unsqueeze(-1)).square().mean(dim=-1)
    every = comm.gather(torch.stack([mean, second]).unsqueeze(0), _STACKED, SITE).wait()
    means, seconds = every[:, 0], every[:, 1]
    whole = means.sum(dim=0) / parts
    variance = (seconds + (means - whole).square()).sum(dim=0) / parts
    return whole.unsqueeze(-1), variance.unsqueeze(-1)


class _GridNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, comm: GridComm, eps: float, centred: bool
    ) -> Tensor:
        wide = x.to(_wide(x.dtype))
        mean, variance = _statistics(wide, comm, rms=bias is None)
        rstd = torch.rsqrt(variance + eps)
        scale = weight.to(wide.dtype) + 1 if centred else weight.to(wide.dtype)
        y = (wide if mean is None else wide - mean) * rstd * scale
        if bias is not None:
            y = y + bias
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.comm, ctx.centred = comm, centred
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        comm = ctx.comm
        wide, dwide = x.to(rstd.dtype), dy.to(rstd.dtype)
        normal = (wide if mean is None else wide - mean) * rstd
        scale = weight.to(rstd.dtype) + 1 if ctx.centred else weight.to(rstd.dtype)
        g = dwide * scale
        features = x.shape[-1] * comm.grid.gl
        sums = [(g * normal).sum(dim=-1)] + ([] if mean is None else [g.sum(dim=-1)])
        moments = comm.all_reduce(torch.stack(sums), "l", SITE).unsqueeze(-1) / features
        dx = g - normal * moments[0]
        if mean is not None:
            dx = dx - moments[1]
        rows = tuple(range(x.dim() - 1))
        dweight = (dwide * normal).sum(dim=rows).to(weight.dtype)
        dbias = None if mean is None else dwide.sum(dim=rows).to(weight.dtype)
        return (dx * rstd).to(x.dtype), dweight, dbias, None, None, None


def grid_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, comm: GridComm, eps: float, centred: bool = False
) -> Tensor:
    """LayerNorm with a bias, RMSNorm without one; `x` `[..., h/Gl]`, `weight` and `bias` `[h/Gl]`.

    Gradients of `weight` and `bias` are those of this rank's tokens. `centred`: the scale is 1 + weight.
    """
    return _GridNorm.apply(x, weight, bias, comm, eps, centred)
