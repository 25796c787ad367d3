"""The split input layer, and weight gradients of the output layer."""

import sys
import types

import pytest
import torch

from megatron_ext.vocab import functional as ops

RANGES = [(0, 7), (7, 8), (8, 20)]


def tokens_and_weight(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 20, (3, 11), generator=generator)
    return tokens, torch.randn(20, 6, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_sum_up_to_the_embedding(dtype):
    tokens, weight = tokens_and_weight(dtype)
    parts = [ops.lookup(tokens, weight[lo:hi], lo, hi) for lo, hi in RANGES]
    assert torch.equal(sum(parts), weight[tokens])
    assert all(part.dtype == dtype and not part.requires_grad for part in parts)


def test_rows_of_other_shards_are_zero_whatever_the_first_row_holds():
    tokens, weight = tokens_and_weight()
    weight[7] = torch.nan
    part = ops.lookup(tokens, torch.nn.Parameter(weight[7:8]), 7, 8)
    assert torch.equal(part.isnan().all(dim=-1), tokens == 7)
    assert torch.equal(part.nan_to_num(), torch.zeros(3, 11, 6))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float64])
def test_gradients_are_those_of_an_embedding(grad_dtype):
    tokens, _ = tokens_and_weight()
    gradient = torch.randn(3, 11, 6, generator=torch.Generator().manual_seed(6))
    whole = torch.ops.aten.embedding_dense_backward(gradient.to(grad_dtype), tokens, 20, -1, False)
    for lo, hi in RANGES:
        main_grad = torch.ones(hi - lo, 6, dtype=grad_dtype)
        ops.lookup_gradient(gradient, tokens, main_grad, lo, hi)
        torch.testing.assert_close(main_grad, 1 + whole[lo:hi])
        again = torch.ones(hi - lo, 6, dtype=grad_dtype)
        ops.lookup_gradient(gradient, tokens, again, lo, hi)
        assert torch.equal(main_grad, again)


def test_gradients_of_other_shards_tokens_do_nothing():
    tokens = torch.tensor([1, 2, 3])
    gradient = torch.full((3, 4), torch.nan)
    gradient[1] = 1.0
    main_grad = torch.zeros(1, 4)
    ops.lookup_gradient(gradient, tokens, main_grad, 2, 3)
    assert torch.equal(main_grad, torch.ones(1, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_frequent_token_loses_nothing_in_16_bits(dtype):
    main_grad = torch.zeros(3, 2, dtype=dtype)
    ops.lookup_gradient(torch.ones(4096, 2, dtype=dtype), torch.full((4096,), 11), main_grad, 10, 13)
    assert main_grad[:, 0].tolist() == [0, 4096, 0]


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_weight_gradient_is_added_to_its_rows(dtype, grad_dtype):
    generator = torch.Generator().manual_seed(7)
    # Small integers: exact in every type.
    gradient = torch.randint(-2, 3, (5, 3), generator=generator).to(dtype)
    x = torch.randint(-2, 3, (5, 4), generator=generator).to(dtype)
    main_grad = torch.ones(10, 4, dtype=grad_dtype)
    ops.accumulate_weight_gradient(main_grad, gradient, x, slice(6, 9), fused=False)
    expected = torch.ones(10, 4, dtype=torch.float64)
    expected[6:9] += gradient.double().t() @ x.double()
    assert torch.equal(main_grad, expected.to(grad_dtype))


@pytest.mark.parametrize(
    ("grad_dtype", "kernel"),
    [
        (torch.float32, "wgrad_gemm_accum_fp32"),
        (torch.bfloat16, "wgrad_gemm_accum_fp16"),
        (torch.float16, "wgrad_gemm_accum_fp16"),
    ],
)
def test_fused_kernel_gets_what_stock_gives_it(monkeypatch, grad_dtype, kernel):
    """Stock calls kernel(input, gradient of output, main_grad), all contiguous."""
    calls = []

    def add(x, gradient, main_grad):
        assert all(tensor.is_contiguous() for tensor in (x, gradient, main_grad))
        main_grad += gradient.t() @ x
        calls.append(kernel)

    apex = types.ModuleType("fused_weight_gradient_mlp_cuda")
    setattr(apex, kernel, add)
    monkeypatch.setitem(sys.modules, apex.__name__, apex)
    main_grad = torch.zeros(6, 4, dtype=grad_dtype)
    x, gradient = torch.ones(5, 4), torch.ones(5, 3)
    ops.accumulate_weight_gradient(main_grad, gradient, x, slice(2, 5), fused=True)
    assert calls == [kernel]
    assert main_grad[:, 0].tolist() == [0, 0, 5, 5, 5, 0]


def test_fused_kernel_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", None)
    with pytest.raises(RuntimeError, match=r"is not installed.*--no-gradient-accumulation-fusion"):
        ops.accumulate_weight_gradient(
            torch.zeros(2, 2), torch.zeros(1, 2), torch.zeros(1, 2), slice(0, 2), fused=True
        )


def test_fused_kernel_for_another_type(monkeypatch):
    apex = types.ModuleType("fused_weight_gradient_mlp_cuda")
    monkeypatch.setitem(sys.modules, apex.__name__, apex)
    grad = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"no kernel for gradients in torch\.float64"):
        ops.accumulate_weight_gradient(grad, grad, grad, slice(0, 2), fused=True)
