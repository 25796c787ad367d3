"""Kernels behind the adapter, and the merging of what they return."""

import pytest
import torch

from megatron_ext.wallfacer import kernels
from megatron_ext.wallfacer.kernels_cpu import CpuFlash
from megatron_ext.wallfacer.kernels_reference import Reference
from megatron_ext.wallfacer.merge import combine, dot_rows, merge_, sink_gradient, stand_in

CPU = torch.device("cpu")


def _inputs(
    rows: int = 6, keys: int = 6, heads: int = 4, key_heads: int = 2, dim: int = 5, dtype=torch.float64
) -> list[torch.Tensor]:
    """q, k, v, gradient as parts of buffers: rows first, keys and values packed."""
    torch.manual_seed(rows + 7 * keys + dim)
    q, grad = (torch.randn(rows + 3, 2, heads, dim, dtype=torch.float64)[1:-2].to(dtype) for _ in range(2))
    bundle = torch.randn(keys + 3, 2, 2, key_heads, dim, dtype=torch.float64)[2:-1].to(dtype)
    return [q, bundle[:, 0], bundle[:, 1], grad]


def _dense(q, k, v, mode: str, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    share = q.shape[2] // k.shape[2]
    scores = torch.einsum("ibhd,jbhd->ibhj", q, k.repeat_interleave(share, 2)) * scale
    allowed = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    allowed = {"full": allowed, "causal": allowed.tril(), "reverse": allowed.triu()}[mode]
    scores = scores.masked_fill(~allowed[:, None, None, :], -torch.inf)
    out = torch.einsum("ibhj,jbhd->ibhd", scores.softmax(-1), v.repeat_interleave(share, 2))
    return out, scores.logsumexp(-1)


@pytest.mark.parametrize("kernel", [CpuFlash(), Reference()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("mode", ["full", "causal", "reverse"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_a_tile(kernel, mode, heads):
    q, k, v, grad = _inputs(rows=6, keys=6 if mode != "full" else 9, heads=heads[0], key_heads=heads[1])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = _dense(*leaves, mode, 0.3)
    wanted = torch.autograd.grad(out, leaves, grad)
    found, found_lse = kernels.tile_forward(kernel, q, k, v, mode, 0.3)
    torch.testing.assert_close((found, found_lse), (out.detach(), lse.detach()), rtol=0, atol=1e-12)
    grads = kernels.tile_backward(kernel, grad, q, k, v, found, found_lse, mode, 0.3)
    torch.testing.assert_close(grads, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [CpuFlash(), Reference()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(kernel, dtype):
    inputs = _inputs(dtype=dtype)
    assert kernel.why_not(CPU, dtype, 5) is None
    out, lse = kernels.tile_forward(kernel, *inputs[:3], "full", 0.4)
    grads = kernels.tile_backward(kernel, inputs[3], *inputs[:3], out, lse, "full", 0.4)
    assert lse.dtype == torch.float32
    assert {x.dtype for x in (out, *grads)} == {dtype}
    wide = [x.double() for x in inputs]
    error = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), _dense(*wide[:3], "full", 0.4)[0], rtol=error, atol=error)


@pytest.mark.parametrize("kernel", [CpuFlash(), Reference()], ids=lambda kernel: kernel.name)
def test_gradients_of_parts_add_up(kernel):
    q, k, v, grad = _inputs(rows=6, keys=9)
    out, lse = kernels.tile_forward(kernel, q, k, v, "full", 0.3)
    whole = kernels.tile_backward(kernel, grad, q, k, v, out, lse, "full", 0.3)
    parts = [
        kernels.tile_backward(kernel, grad, q, k[keys], v[keys], out, lse, "full", 0.3)
        for keys in (slice(0, 4), slice(4, 9))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], rtol=0, atol=1e-12)
    for number in (1, 2):
        both = torch.cat([parts[0][number], parts[1][number]])
        torch.testing.assert_close(both, whole[number], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [CpuFlash(), Reference()], ids=lambda kernel: kernel.name)
def test_large_scores(kernel):
    q, k, v, _ = _inputs(rows=4, keys=4, dtype=torch.float32)
    q = q * 1e4
    out, lse = kernels.tile_forward(kernel, q, k, v, "full", 1.0)
    wanted, wanted_lse = _dense(q.double(), k.double(), v.double(), "full", 1.0)
    assert wanted_lse.abs().max() > 1e4
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-3)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=5e-3)


def test_selection():
    assert kernels.select("auto", CPU, torch.float32, 5).name == "cpu-flash"
    assert kernels.select("reference", CPU, torch.float32, 5).name == "reference"
    with pytest.raises(ValueError, match="flash-attn: it runs on NVIDIA GPUs"):
        kernels.select("flash-attn", CPU, torch.bfloat16, 64)
    cuda = torch.device("cuda")
    with pytest.raises(ValueError, match=r"torch-flash: it computes in bf16 and fp16.*use bf16 or fp16"):
        kernels.select("auto", cuda, torch.float32, 64)
    with pytest.raises(ValueError, match="its head dimension is at most 256"):
        kernels.select("torch-flash", cuda, torch.bfloat16, 320)


def _partial(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, _ = _inputs(rows=4, keys=9, dtype=torch.float32)
    return kernels.tile_forward(CpuFlash(), q, k[keys], v[keys], "full", 0.5)


def test_merge():
    out, lse = (x.clone() for x in _partial(slice(0, 2)))
    merge_(out, lse, *_partial(slice(2, 3)))
    merge_(out, lse, *_partial(slice(3, 9)))
    torch.testing.assert_close((out, lse), _partial(slice(0, 9)))


def test_merge_of_rows_without_keys():
    out, lse = torch.zeros(4, 2, 4, 5), torch.full((4, 2, 4), -torch.inf)
    merge_(out, lse, torch.zeros(4, 2, 4, 5), lse.clone())
    assert not out.any()
    assert (lse == -torch.inf).all()
    more, more_lse = _partial(slice(0, 3))
    merge_(out, lse, more, more_lse)
    assert torch.equal(out, more)  # bit for bit
    assert torch.equal(lse, more_lse)
    merge_(out, lse, torch.randn_like(out), torch.full_like(lse, -torch.inf))
    assert torch.equal(out, more)
    assert torch.equal(lse, more_lse)


def test_merge_of_far_apart_scores():
    out, lse = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), -1e4)
    merge_(out, lse, torch.full_like(out, 2.0), torch.full_like(lse, 1e4))
    assert torch.equal(out, torch.full_like(out, 2.0))
    assert lse.item() == 1e4


def test_merge_in_sixteen_bits_adds_in_fp32():
    out, lse = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1)
    merge_(out, lse, torch.full((1, 1, 1, 8), 1.0, dtype=torch.bfloat16), torch.tensor([[[-7.0]]]))
    expected = 1 / (1 + torch.tensor(7.0).exp())
    torch.testing.assert_close(out, expected.expand(1, 1, 1, 8))


def test_shares_of_members():
    own = torch.tensor([0.0, -torch.inf, -torch.inf, 1.0]).view(4, 1, 1)
    other = torch.tensor([0.0, 2.0, -torch.inf, -torch.inf]).view(4, 1, 1)
    total, share = combine(torch.stack([own, other]), own, None)
    torch.testing.assert_close(share.flatten(), torch.tensor([0.5, 0.0, 0.0, 1.0]))
    assert total.flatten()[2] == -torch.inf
    total, share = combine(torch.stack([own, other]), own, torch.tensor([0.0]))
    assert total.flatten()[2] == 0.0
    torch.testing.assert_close(share.flatten()[:3], torch.tensor([1 / 3, 0.0, 0.0]))


@pytest.mark.parametrize("size", [1.0, 1e-15, 1e15])
def test_stand_in_of_outputs(size):
    torch.manual_seed(0)
    out = torch.randn(5, 2, 3, 16)
    grad = torch.randn(5, 2, 3, 16) * size
    grad[2] = 0.0
    dots = dot_rows(grad, out)
    found = stand_in(grad, dots, torch.empty_like(grad))
    assert found.isfinite().all()
    assert (found.norm(dim=-1) <= out.norm(dim=-1) * 1.0001).all()
    torch.testing.assert_close(dot_rows(grad, found), dots, rtol=1e-5, atol=1e-6 * size)


def test_gradient_of_a_sink():
    torch.manual_seed(1)
    scores, v = torch.randn(6, 2, 3, 4, dtype=torch.float64), torch.randn(4, 2, 3, 5, dtype=torch.float64)
    sink = torch.randn(3, dtype=torch.float64, requires_grad=True)
    column = sink.view(1, 1, 3, 1).expand(6, 2, 3, 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    out = torch.einsum("ibhj,jbhd->ibhd", weights, v)
    grad = torch.randn_like(out)
    (wanted,) = torch.autograd.grad(out, sink, grad)
    lse = torch.logaddexp(scores.logsumexp(-1), sink.detach())
    found = sink_gradient(sink.detach(), lse, dot_rows(grad, out.detach()))
    torch.testing.assert_close(found, wanted)
