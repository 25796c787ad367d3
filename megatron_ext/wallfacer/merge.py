"""Putting partial attention outputs together: exact, in fp32 or wider, and safe for rows without keys.

An output over some keys comes with the log-sum-exp of its scores, -inf where a row has no keys yet.
"""

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """Type in which values of `dtype` are summed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def merge_(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Take in the output of more keys, in place: `out` `[s, b, h, d]`, `lse` `[s, b, h]`.

    Either side may have rows without keys.
    """
    if out.is_cuda:
        _compiled_merge()(out, lse, more_out, more_lse)
    else:
        _merge(out, lse, more_out, more_lse)


def _merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    # The difference of two -inf is nan: rows without keys on either side keep what they have.
    share = torch.sigmoid(more_lse - lse).masked_fill_(more_lse == -torch.inf, 0.0)
    out.lerp_(more_out.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, more_lse, out=lse)


@functools.cache
def _compiled_merge() -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """One fused kernel, where torch may compile."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return _merge
    return torch.compile(_merge, dynamic=True)


def combine(lses: Tensor, own: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over all keys, and the share of each row's final output that is this rank's.

    Args:
        lses: `[members, s, b, h]`, of the members' keys.
        own: this rank's of them.
        sink: `[h]`, score of a key without a value that every row sees (attention sink), or None.
    """
    total = torch.logsumexp(lses, dim=0)
    if sink is not None:
        total = torch.logaddexp(total, sink.to(total.dtype))
    share = torch.exp(own - total).masked_fill_(own == -torch.inf, 0.0)
    return total, share


def dot_rows(grad: Tensor, out: Tensor) -> Tensor:
    """Dot products `[s, b, h]` of outputs and their gradients `[s, b, h, d]`."""
    wide = accumulator_of(out.dtype)
    return (grad.to(wide) * out.to(wide)).sum(dim=-1)


def stand_in(grad: Tensor, dots: Tensor, out: Tensor) -> Tensor:
    """Fill `out` with rows whose dot product with `grad` is `dots`: the outputs, projected on their
    gradients.

    Kernels use outputs for nothing but that product, so these do as well as the outputs, which need not
    travel.
    """
    norm = torch.linalg.vector_norm(grad, dim=-1, dtype=dots.dtype)
    factor = (dots / norm / norm).masked_fill_(norm == 0, 0.0)  # divided twice: the square may underflow
    return torch.mul(grad, factor.unsqueeze(-1), out=out)


def sink_gradient(sink: Tensor, lse: Tensor, dots: Tensor) -> Tensor:
    """Gradient `[h]` of a sink from rows with final log-sum-exp `lse` and products `dots`, both `[s, b,
    h]`."""
    weight = torch.exp(sink.to(lse.dtype) - lse)
    return -(weight * dots).sum(dim=(0, 1)).to(sink.dtype)
