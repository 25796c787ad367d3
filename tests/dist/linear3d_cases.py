"""Layers on a grid beside the same layers on one rank, in float64, for tests in forked ranks."""

from collections import Counter
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import traffic
from megatron_ext.groups import GroupRegistry
from megatron_ext.linear3d.chain import Chain, Overlap
from megatron_ext.linear3d.comm import GridComm
from megatron_ext.linear3d.embedding import GridWordEmbedding
from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.groups import GROUPS
from megatron_ext.linear3d.layers import GridLinear, GridNorm
from megatron_ext.linear3d.layouts import EMBEDDING_SITES, HEAD_SITES, LAYER_SITES, RESIDUAL
from megatron_ext.linear3d.parameters import part_of


def make_comm(registry: GroupRegistry, grid: Grid3D, how: str = "ordered") -> GridComm:
    """The grid's groups over all ranks of the test."""
    groups = {}
    for name in GROUPS:
        label = f"{name}-{'-'.join(map(str, grid.sizes))}-{grid.order}"
        places = grid.places(name.removesuffix("-grads"))
        groups[name] = registry.get(label, places, communicator=label)
    return GridComm(grid, groups, torch.distributed.get_rank(), how)


def config(hidden: int, *, glu: bool = False, dtype: torch.dtype = torch.float64, rms: bool = False):
    """What our modules read of a TransformerConfig."""
    return SimpleNamespace(
        hidden_size=hidden,
        use_cpu_initialization=True,
        perform_initialization=True,
        params_dtype=dtype,
        layernorm_zero_centered_gamma=False,
        normalization="RMSNorm" if rms else "LayerNorm",
        embedding_init_method=lambda t: torch.nn.init.normal_(t, std=0.5),
        glu=glu,
    )


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Whole:
    """Whole parameters by name, leaves of autograd."""

    def __init__(
        self, s: int, b: int, h: int, f: int, vocab: int, glu: bool, bias: bool = True, rms: bool = False
    ):
        wide = 2 * f if glu else f
        shapes = {
            "qkv.weight": (3 * h, h),
            "proj.weight": (h, h),
            "fc1.weight": (wide, h),
            "fc2.weight": (h, f),
            "norm.weight": (h,),
            "embedding.weight": (vocab, h),
            "head.weight": (vocab, h),
        }
        if not rms:
            shapes["norm.bias"] = (h,)
        if bias:
            shapes |= {"qkv.bias": (3 * h,), "proj.bias": (h,), "fc1.bias": (wide,), "fc2.bias": (h,)}
        self.params = {
            name: (random(number, *shape) * (0.3 if len(shape) > 1 else 1)).requires_grad_()
            for number, (name, shape) in enumerate(shapes.items())
        }
        self.tokens = torch.randint(vocab, (b, s), generator=torch.Generator().manual_seed(99))
        self.labels = torch.randint(vocab, (b, s), generator=torch.Generator().manual_seed(98))
        self.h, self.glu, self.rms = h, glu, rms

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.params[f"{name}.weight"], self.params.get(f"{name}.bias"))

    def loss(self, tied: bool) -> Tensor:
        """Per-token losses `[b, s]` of a small network that uses every kind of layer."""
        p = self.params
        x = F.embedding(self.tokens, p["embedding.weight"]).transpose(0, 1)
        normal = (
            F.rms_norm(x, (self.h,), p["norm.weight"], 1e-5)
            if self.rms
            else F.layer_norm(x, (self.h,), p["norm.weight"], p["norm.bias"], 1e-5)
        )
        x = x + self.linear("proj", heads(self.linear("qkv", normal)))
        x = x + self.linear("fc2", activation(self.linear("fc1", x), self.glu))
        logits = F.linear(x, p["embedding.weight" if tied else "head.weight"])
        flat = F.cross_entropy(logits.flatten(0, 1), self.labels.t().flatten(), reduction="none")
        return flat.view(x.shape[:2]).t()


def heads(qkv: Tensor) -> Tensor:
    """In the place of attention: something that mixes the three parts of a head, of size 2."""
    q, k, v = qkv.unflatten(-1, (-1, 3, 2)).unbind(-2)
    return (torch.tanh(q) * k.cumsum(0) * 0.1 + v).flatten(-2)


def activation(x: Tensor, glu: bool) -> Tensor:
    if not glu:
        return F.gelu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class OnGrid:
    """The same network on a grid."""

    def __init__(
        self,
        comm: GridComm,
        whole: Whole,
        *,
        mode: str,
        save: str,
        overlap: Overlap,
        tied: bool,
        keep: bool = False,
    ):
        self.comm, self.whole, self.mode, self.tied = comm, whole, mode, tied
        self.chain = Chain(comm, overlap)
        make = {
            "chain": self.chain,
            "save": save,
            "init_method": torch.nn.init.normal_,
            "skip_bias_add": False,
        }
        made = config(whole.h, glu=whole.glu, rms=whole.rms)
        sites = {**LAYER_SITES, "head": HEAD_SITES[mode]}
        self.linears = {}
        for name, site in sites.items():
            out, inside = whole.params[f"{name}.weight"].shape
            gated = whole.glu and name == "fc1"
            bias = f"{name}.bias" in whole.params
            self.linears[name] = GridLinear(
                inside, out, site=site, config=made, bias=bias, stride=2 if gated else 1, **make
            )
            self.linears[name].keeps_gathered = keep and name != "head"
        self.chain.link([self.linears[name] for name in LAYER_SITES])
        self.norm = GridNorm(made, whole.h, comm=comm)
        vocab = whole.params["embedding.weight"].shape[0]
        self.embedding = GridWordEmbedding(comm, EMBEDDING_SITES[mode], vocab, made)
        self.modules = {**self.linears, "norm": self.norm, "embedding": self.embedding}
        with torch.no_grad():
            for name, param in self.named():
                gated = getattr(self.modules[name.split(".")[0]], "gated", False)
                param.copy_(self.part(name, gated))

    def named(self):
        for name, module in self.modules.items():
            for key, param in module.named_parameters():
                yield f"{name}.{key}", param

    def part(self, name: str, gated: bool) -> Tensor:
        """This rank's part of the whole parameter."""
        whole = self.whole.params[name]
        return own(whole, self.param(name).grid_layout, self.comm, gated)

    def param(self, name: str) -> Tensor:
        module, key = name.split(".")
        return getattr(self.modules[module], key)

    def loss(self) -> Tensor:
        """Per-token losses `[b, s]`, whole, on every rank."""
        from megatron_ext.linear3d import model

        x = self.embedding(self.whole.tokens)
        batch, seq = self.whole.tokens.shape
        assert tuple(x.shape) == RESIDUAL.local_shape(self.comm.grid, (seq, batch, self.whole.h))
        qkv = self.linears["qkv"](self.norm(x))[0]
        x = x + self.linears["proj"](heads(qkv))[0]
        x = x + self.linears["fc2"](activation(self.linears["fc1"](x)[0], self.whole.glu))[0]
        logits = self.linears["head"](x, weight=self.embedding.weight if self.tied else None)[0]
        holder = SimpleNamespace(grid_setup=SimpleNamespace(comm=self.comm, vocab=self.mode))
        return model._loss(holder, self.whole.labels, logits)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of this rank's parts, those of vectors summed."""
        for _, param in self.named():
            param.main_grad = param.grad
        from megatron_ext.linear3d.model import sum_vectors

        module = torch.nn.ModuleDict(self.modules)
        module.grid_setup = SimpleNamespace(comm=self.comm)
        sum_vectors(module)
        return {name: param.grad for name, param in self.named()}


def own(whole: Tensor, layout, comm: GridComm, gated: bool) -> Tensor:
    """This rank's part of a whole tensor; a gated vector has its gate part first."""
    if gated and whole.dim() == 1:
        return torch.cat([half[layout.slices(comm.grid, comm.coords, half.shape)] for half in whole.chunk(2)])
    return part_of(whole, comm, layout, gated=gated)


def sent(what: str = "bytes") -> Counter:
    """Bytes, or "calls", by (site, kind, axes) since the ledger was drained."""
    found: Counter = Counter()
    for row in traffic.ledger().drain():
        if row["feature"].startswith("linear3d:") and row["bytes"]:
            axes = row["group"].split("-")[0]
            found[row["feature"].removeprefix("linear3d:"), row["kind"], axes] += row[what]
    return found


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    size = expected.abs().max().item()
    return (found - expected).abs().max().item() / (size or 1.0)
