"""The GPU's kernels against the reference, and the compiled merge against the plain one."""

import pytest
import torch

from megatron_ext.wallfacer import kernels, merge
from megatron_ext.wallfacer.kernels_cuda import FlashAttn, TorchFlash
from megatron_ext.wallfacer.kernels_reference import Reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("kernel", [TorchFlash(), FlashAttn()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("mode", ["full", "causal", "reverse"])
@pytest.mark.parametrize(
    ("heads", "dim"), [((8, 8), 64), ((8, 2), 128), ((4, 1), 80), ((2, 2), 5), ((2, 1), 256)]
)
def test_a_tile(kernel, mode, heads, dim):
    problem = kernel.why_not(torch.device("cuda"), torch.bfloat16, dim)
    if problem:
        pytest.skip(problem)
    torch.manual_seed(dim)
    rows, keys = 96, 96 if mode != "full" else 160
    bundle = torch.randn(keys, 2, 2, heads[1], dim, device="cuda").bfloat16()
    q, grad = (torch.randn(rows, 2, heads[0], dim, device="cuda").bfloat16() for _ in range(2))
    scale = dim**-0.5
    given = (q, bundle[:, 0], bundle[:, 1])
    found = kernels.tile_forward(kernel, *given, mode, scale)
    exact = kernels.tile_forward(Reference(), *(x.float() for x in given), mode, scale)
    torch.testing.assert_close(found[0].float(), exact[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[1], exact[1], rtol=1e-3, atol=1e-3)
    out, lse = exact[0].bfloat16(), exact[1]
    grads = kernels.tile_backward(kernel, grad, *given, out, lse, mode, scale)
    wide = [x.float() for x in (grad, *given, out)]
    wanted = kernels.tile_backward(Reference(), *wide, lse, mode, scale)
    for one, other in zip(grads, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), other, rtol=5e-2, atol=5e-2)


def test_automatic_choice_is_fused():
    chosen = kernels.select("auto", torch.device("cuda"), torch.bfloat16, 128)
    assert chosen.name in ("flash-attn", "torch-flash")


def test_compiled_merge():
    torch.manual_seed(0)
    out, lse = torch.randn(64, 1, 4, 32, device="cuda"), torch.randn(64, 1, 4, device="cuda")
    more, more_lse = torch.randn_like(out).bfloat16(), torch.randn_like(lse)
    lse[:5], more_lse[3:9] = -torch.inf, -torch.inf
    wanted, wanted_lse = out.clone(), lse.clone()
    merge._merge(wanted[8:], wanted_lse[8:], more[8:], more_lse[8:])
    merge.merge_(out[8:], lse[8:], more[8:], more_lse[8:])
    torch.testing.assert_close((out, lse), (wanted, wanted_lse))
