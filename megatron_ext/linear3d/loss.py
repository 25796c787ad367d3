"""Cross entropy of logits whose vocabulary is spread over axes of the grid."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.linear3d.comm import GridComm

SITE = "loss"


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, comm: GridComm, axes: str) -> Tensor:
        wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
        maximum = comm.all_reduce(wide.amax(dim=-1), axes, SITE, dist.ReduceOp.MAX)
        wide -= maximum.unsqueeze(-1)
        rows = logits.shape[-1]
        own = labels - comm.index(axes) * rows
        foreign = (own < 0) | (own >= rows)
        own = own.masked_fill(foreign, 0)
        target = wide.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0.0)
        softmax = wide.exp_()
        both = comm.all_reduce(torch.stack([softmax.sum(dim=-1), target]), axes, SITE)
        softmax /= both[0].unsqueeze(-1)
        ctx.save_for_backward(softmax, own, foreign)
        ctx.dtype = logits.dtype
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, own, foreign = ctx.saved_tensors
        dlogits = softmax.clone()
        one = torch.where(foreign, 0.0, -1.0).to(dlogits.dtype).unsqueeze(-1)
        dlogits.scatter_add_(-1, own.unsqueeze(-1), one)
        dlogits *= gradient.unsqueeze(-1)
        return dlogits.to(ctx.dtype), None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, comm: GridComm, axes: str) -> Tensor:
    """Loss of every token, fp32 `[...]`, from this rank's rows of the logits `[..., V/parts]`.

    `axes` are those that the vocabulary is cut over, in the order of its parts; `labels` `[...]` are equal on
    all of their ranks.
    """
    return _CrossEntropy.apply(logits, labels, comm, axes)
