"""Multi-ring attention in forked ranks against dense attention on one: inputs, groups and the reference."""

import functools
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from megatron_ext.traffic import ledger
from megatron_ext.wallfacer.function import Rings
from megatron_ext.wallfacer.geometry import Geometry
from megatron_ext.wallfacer.groups import groups_of, rank_lists
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.plan import make_plan
from megatron_ext.wallfacer.sequence import Layout, whole
from megatron_ext.wallfacer.tiles import CAUSAL, Mask
from megatron_ext.wallfacer.volume import Cost, Shape, totals

DEFAULT = Options()
NAMES = ("out", "dq", "dk", "dv", "dsink")


@dataclass(frozen=True)
class Case:
    """One call."""

    layout: Layout = field(default_factory=lambda: whole(64))
    mask: Mask = CAUSAL
    batch: int = 1
    query_heads: int = 4
    key_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    sink: bool = False
    factor: float = 1.0
    """Of the queries: large ones make softmax peak."""
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v, gradient of the output, sink: of the whole sequence, equal on all ranks."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        n, b, d = self.layout.length, self.batch, self.head_dim
        queries, keys = (n, b, self.query_heads, d), (n, b, self.key_heads, d)
        q, k, v, grad = normal(*queries), normal(*keys), normal(*keys), normal(*queries)
        return [q * self.factor, k, v, grad, normal(self.query_heads)]


def visible(case: Case) -> torch.Tensor:
    """Which keys (columns) each query (rows) of the whole sequence sees."""
    n = case.layout.length
    position = torch.arange(n)
    document = torch.full((n,), -1)
    for number, part in enumerate(case.layout.documents):
        document[part.start : part.filled] = number
    distance = position[:, None] - position[None, :]
    seen = (document[:, None] == document[None, :]) & (document >= 0)[:, None]
    if case.mask.left is not None:
        seen &= distance <= case.mask.left
    if case.mask.right is not None:
        seen &= -distance <= case.mask.right
    return seen


def dense(case: Case, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Output and gradients by attention on one device in `dtype`, of the inputs as the case has them."""
    tensors = [x.to(dtype) for x in case.tensors()]
    q, k, v, grad, sink = tensors
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]
    share = case.query_heads // case.key_heads
    wide_k, wide_v = (x.repeat_interleave(share, dim=2) for x in (k, v))
    scores = torch.einsum("ibhd,jbhd->bhij", q, wide_k) * case.scale
    scores = scores.masked_fill(~visible(case), -torch.inf)
    column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    column = column if case.sink else torch.full_like(column, -torch.inf)
    scores = torch.cat((scores, column), dim=-1)
    empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)[..., :-1]
    out = torch.einsum("bhij,jbhd->ibhd", weights, wide_v)
    grads = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    return [out.detach(), *grads]


@functools.cache
def reference(case: Case) -> list[torch.Tensor]:
    """`dense` in fp64, once per process."""
    return dense(case)


def own_part(x: torch.Tensor, layout: Layout, rank: int, size: int) -> torch.Tensor:
    """A rank's rows."""
    return torch.cat([x[start : start + length] for start, length in layout.spans(rank, size)])


@functools.cache
def rings(geometry: Geometry, options: Options = DEFAULT) -> Rings:
    """With groups of its own. All ranks must ask for the same in the same order."""
    made = {}
    for name, lists in rank_lists(geometry, [tuple(range(geometry.size))]).items():
        own = next(ranks for ranks in lists if dist.get_rank() in ranks)
        made[name] = _group(name, own)
    return Rings(geometry, groups_of(made.get, geometry), options, dist.get_rank())


@functools.cache
def _group(name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)
    dist.all_reduce(torch.ones(1), group=group)
    return group


@dataclass
class Outcome:
    """Of one case on this rank."""

    found: list[torch.Tensor]
    forward: dict[tuple[str, str], int]
    backward: dict[tuple[str, str], int]


def compute(engine: Rings, case: Case) -> Outcome:
    """Run a case; own rows of output and gradients, and the bytes sent by (kind, group)."""
    size = engine.geometry.size
    q, k, v, grad = (own_part(x, case.layout, engine.rank, size) for x in case.tensors()[:4])
    sink = case.tensors()[4] if case.sink else None
    leaves = [x.requires_grad_() for x in (q, k, v)] + ([sink.requires_grad_()] if case.sink else [])
    ledger().drain()
    out = engine.attend(q, k, v, layout=case.layout, mask=case.mask, scale=case.scale, sink=sink)
    forward = _sent()
    grads = torch.autograd.grad(out, leaves, grad)
    return Outcome([out.detach(), *grads], forward, _sent())


def _sent() -> dict[tuple[str, str], int]:
    rows = ledger().drain()
    assert all(row["feature"] == "wallfacer" for row in rows), rows
    return {(row["kind"], row["group"]): row["bytes"] for row in rows if row["bytes"]}


def errors(case: Case, outcome: Outcome, size: int) -> dict[str, float]:
    """Largest deviation of each result from the reference on any rank."""
    wanted = [own_part(x, case.layout, dist.get_rank(), size) for x in reference(case)[:4]]
    worst = []
    for found, want in zip(outcome.found[:4], wanted, strict=True):
        assert found.dtype == case.dtype
        worst.append((found.double() - want).abs().max().nan_to_num(nan=torch.inf))
    if case.sink:
        total = outcome.found[4].double()
        dist.all_reduce(total)
        worst.append((total - reference(case)[4]).abs().max().nan_to_num(nan=torch.inf))
    stacked = torch.stack(worst)
    dist.all_reduce(stacked, op=dist.ReduceOp.MAX)
    return dict(zip(NAMES, stacked.tolist(), strict=False))


def formula(engine: Rings, case: Case) -> tuple[dict, dict]:
    """Bytes that this rank should have sent, forward and backward."""
    plan = make_plan(engine.geometry, case.layout, case.mask)
    shape = Shape(case.batch, case.query_heads, case.key_heads, case.head_dim, case.dtype.itemsize)
    cost = Cost(plan, shape, engine.options)
    return totals(cost.forward(engine.rank)), totals(cost.backward(engine.rank))


def check(engine: Rings, case: Case, limits: dict[str, float]) -> dict[str, float]:
    """Compute a case and require results within `limits`, and exactly the bytes of the formulas."""
    outcome = compute(engine, case)
    where = f"{engine.geometry} {engine.options} {case}"
    assert (outcome.forward, outcome.backward) == formula(engine, case), where
    found = errors(case, outcome, engine.geometry.size)
    for name, error in found.items():
        assert error <= limits[name], f"{name} is off by {error:.2e}, allowed {limits[name]:.2e}: {where}"
    return found


FP32 = {"out": 3e-6, "dq": 6e-6, "dk": 6e-6, "dv": 6e-6, "dsink": 2e-5}
FP64 = dict.fromkeys(NAMES, 1e-12)


def varied(case: Case, **changes: object) -> Case:
    """The case with other fields."""
    return replace(case, **changes)
