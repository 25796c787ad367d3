"""Bare transformer layers on a grid, on a square and on one rank, with the same whole weights."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from linear3d_baselines import Square, layer_norm, linear
from torch import Tensor

from megatron_ext.linear3d.grid import Grid3D


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer: no biases, GELU, heads of size h / heads."""

    seq: int
    batch: int
    hidden: int
    heads: int

    @property
    def ffn(self) -> int:
        return 4 * self.hidden

    def weights(self) -> dict[str, tuple[int, int]]:
        h = self.hidden
        return {"qkv": (3 * h, h), "proj": (h, h), "fc1": (self.ffn, h), "fc2": (h, self.ffn)}


def whole(shape: Shape) -> tuple[dict[str, Tensor], Tensor]:
    """The same weights `[out, in]` and input `[s, b, h]` on every rank."""
    make = torch.Generator().manual_seed(5)
    weights = {
        name: torch.randn(size, generator=make) * size[1] ** -0.5 for name, size in shape.weights().items()
    }
    return weights, torch.randn((shape.seq, shape.batch, shape.hidden), generator=make)


def attention(qkv: Tensor, size: int) -> Tensor:
    """Causal attention of the local heads: `[s, b, heads * 3 * size]` to `[s, b, heads * size]`."""
    parts = qkv.unflatten(-1, (-1, 3, size)).permute(3, 1, 2, 0, 4)
    out = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
    return out.permute(2, 0, 1, 3).flatten(2)


def dense(shape: Shape, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The layer on one rank."""
    h = shape.hidden
    size = h // shape.heads
    normal = F.layer_norm(x, (h,))
    x = x + F.linear(attention(F.linear(normal, weights["qkv"]), size), weights["proj"])
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (h,)), weights["fc1"])), weights["fc2"])


@dataclass
class Method:
    """A layer of one rank: its input, a function from input to output, and what part of the whole they
    are."""

    x: Tensor
    forward: Callable[[Tensor], Tensor]
    params: list[Tensor]
    part: Callable[[Tensor], Tensor]


def on_grid(shape: Shape, grid: Grid3D, comm: Any, save: str, overlap: Any) -> Method:
    """Our layers."""
    from megatron_ext.linear3d.chain import Chain
    from megatron_ext.linear3d.layers import GridLinear, GridNorm
    from megatron_ext.linear3d.layouts import LAYER_SITES, RESIDUAL
    from megatron_ext.linear3d.parameters import part_of

    config = SimpleNamespace(
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.float32,
        layernorm_zero_centered_gamma=False,
        normalization="LayerNorm",
    )
    weights, x = whole(shape)
    chain = Chain(comm, overlap)
    made = {}
    for name, (out, inside) in shape.weights().items():
        made[name] = GridLinear(
            inside,
            out,
            site=LAYER_SITES[name],
            chain=chain,
            save=save,
            config=config,
            init_method=None,
            bias=False,
        )
        made[name].weight.data.copy_(part_of(weights[name], comm, LAYER_SITES[name].weight))
    chain.link(made.values())
    norms = [GridNorm(config, shape.hidden, comm=comm) for _ in range(2)]
    for norm in norms:
        norm.weight.data.fill_(1.0)
        norm.bias.data.zero_()
    size = shape.hidden // shape.heads

    def forward(x: Tensor) -> Tensor:
        x = x + made["proj"](attention(made["qkv"](norms[0](x))[0], size))[0]
        return x + made["fc2"](F.gelu(made["fc1"](norms[1](x))[0]))[0]

    def part(y: Tensor) -> Tensor:
        return y[RESIDUAL.slices(grid, comm.coords, y.shape)].contiguous()

    params = [p for module in (*made.values(), *norms) for p in module.parameters()]
    return Method(part(x).requires_grad_(), forward, params, part)


def on_square(shape: Shape, square: Square) -> Method:
    """2-D (depth 1) or 2.5-D layers."""
    q, d = square.q, square.d
    weights, x = whole(shape)
    size = shape.hidden // shape.heads

    def block(weight: Tensor) -> Tensor:
        rows = weight.t().chunk(q, dim=0)[square.row]
        return rows.chunk(q, dim=1)[square.column].contiguous().requires_grad_()

    made = {name: block(weight) for name, weight in weights.items()}
    local = shape.hidden // q
    norms = [(torch.ones(local).requires_grad_(), torch.zeros(local).requires_grad_()) for _ in range(2)]

    def forward(x: Tensor) -> Tensor:
        normal = layer_norm(x, *norms[0], square)
        x = x + linear(attention(linear(normal, made["qkv"], square), size), made["proj"], square)
        inner = F.gelu(linear(layer_norm(x, *norms[1], square), made["fc1"], square))
        return x + linear(inner, made["fc2"], square)

    def part(y: Tensor) -> Tensor:
        rows = y.chunk(d * q, dim=1)[square.depth * q + square.row]
        return rows.chunk(q, dim=2)[square.column].contiguous()

    return Method(part(x).requires_grad_(), forward, [*made.values(), *(p for n in norms for p in n)], part)
