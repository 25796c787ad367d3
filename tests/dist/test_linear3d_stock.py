"""The grid 1 x T x 1 is stock's tensor and sequence parallelism, bit for bit; and other small pieces."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ext import cpu, patching
from megatron_ext.groups import GroupRegistry
from megatron_ext.linear3d.chain import Chain, Overlap
from megatron_ext.linear3d.functional import grid_linear
from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.layers import GridLinear, GridNorm
from megatron_ext.linear3d.layouts import INNER, LAYER_SITES, RESIDUAL
from megatron_ext.linear3d.relayout import to_grid, to_slices
from megatron_ext.linear3d.tags import LayoutError, Tags, _HandOn
from tests.dist.linear3d_cases import config, make_comm, random, sent
from tests.ranks import ranks

S, B, H, F4 = 16, 2, 32, 64


def stock_mlp(tp: int, dtype: torch.dtype):
    """Stock's two linears with sequence parallelism, on CPU."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    made = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=tp,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
    )
    group = parallel_state.get_tensor_model_parallel_group()
    same = {"config": made, "init_method": torch.nn.init.normal_, "bias": True, "tp_group": group}
    fc1 = ColumnParallelLinear(H, F4, gather_output=False, skip_bias_add=False, **same)
    fc2 = RowParallelLinear(F4, H, input_is_parallel=True, skip_bias_add=False, **same)
    return fc1, fc2


def bitwise_like_stock(tp: int, dtype: torch.dtype) -> None:
    applied = patching.apply(cpu.torch_patches(), contract=None, log=lambda text: None)
    try:
        fc1, fc2 = stock_mlp(tp, dtype)
        comm = make_comm(GroupRegistry(), Grid3D(1, tp, 1), "native")
        chain = Chain(comm, Overlap())
        ways = {"chain": chain, "save": "gathered", "config": config(H, dtype=dtype), "init_method": None}
        ours = [
            GridLinear(H, F4, site=LAYER_SITES["fc1"], **ways | {"init_method": torch.nn.init.zeros_}),
            GridLinear(F4, H, site=LAYER_SITES["fc2"], **ways | {"init_method": torch.nn.init.zeros_}),
        ]
        chain.link(ours)
        with torch.no_grad():
            for mine, theirs in zip(ours, (fc1, fc2), strict=True):
                theirs.bias.copy_(torch.arange(theirs.bias.numel()).to(dtype) / 7)
                mine.weight.copy_(theirs.weight)
                mine.bias.copy_(theirs.bias)
        results = []
        for layers in ((fc1, fc2), ours):
            x = random(3, S, B, H, dtype=dtype)[RESIDUAL.slices(comm.grid, comm.coords, (S, B, H))]
            x = x.contiguous().requires_grad_()
            y = layers[1](F.gelu(layers[0](x)[0]))[0]
            y.backward(random(4, *y.shape, dtype=dtype))
            grads = [p.grad for layer in layers for p in (layer.weight, layer.bias)]
            results.append([y.detach(), x.grad, *grads])
        for theirs, mine in zip(*results, strict=True):
            assert torch.equal(theirs, mine)
    finally:
        applied.undo()


@ranks(2)
def test_one_axis_is_stock_bit_for_bit():
    bitwise_like_stock(2, torch.float32)


@ranks(8)
def test_one_axis_is_stock_bit_for_bit_on_eight_ranks_in_bf16():
    bitwise_like_stock(8, torch.bfloat16)


@ranks(1)
def test_a_grid_of_one_is_stock_bit_for_bit():
    bitwise_like_stock(1, torch.float32)


@pytest.mark.full
@ranks(8)
def test_one_axis_is_stock_bit_for_bit_on_eight_ranks():
    bitwise_like_stock(8, torch.float32)


@pytest.mark.full
@ranks(2)
def test_one_axis_is_stock_bit_for_bit_in_bf16():
    bitwise_like_stock(2, torch.bfloat16)


@ranks(4)
def test_what_is_saved():
    """Acceptance check 12, scaled down: shard_all keeps shards of inputs and weights, gathered the whole."""
    comm = make_comm(GroupRegistry(), Grid3D(2, 2, 1))
    made = config(H)
    for save, factor in (("shard_all", 1), ("shard_weight", 1), ("gathered", 2)):
        chain = Chain(comm, Overlap())
        fc1 = GridLinear(
            H,
            F4,
            site=LAYER_SITES["fc1"],
            chain=chain,
            save=save,
            config=made,
            init_method=torch.nn.init.ones_,
        )
        x = random(1, *RESIDUAL.local_shape(comm.grid, (S, B, H))).requires_grad_()
        kept = []

        def pack(tensor, kept=kept):
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            grid_linear(x, fc1.weight, fc1, chain, save)
        inputs = x.numel() * (1 if save == "shard_all" else 2)
        assert kept == [inputs, fc1.weight.numel() * factor]


@ranks(8)
def test_relayout():
    """Slices along the sequence and the residual layout hold the same values, and one call moves them."""
    registry = GroupRegistry()
    for sizes, order in (((2, 2, 2), "ijl"), ((2, 2, 2), "lji"), ((1, 4, 2), "ijl"), ((4, 1, 2), "ijl")):
        comm = make_comm(registry, Grid3D(*sizes, order))
        whole = random(1, 16, 4, 8)
        mine = whole.chunk(8)[comm.rank].clone().requires_grad_()
        part = whole[RESIDUAL.slices(comm.grid, comm.coords, whole.shape)]
        sent()
        on_grid = to_grid(mine, comm)
        assert torch.equal(on_grid, part)
        back = to_slices(on_grid, comm)
        assert torch.equal(back, mine)
        (back * 3).sum().backward()
        assert torch.equal(mine.grad, torch.full_like(mine, 3.0))
        kept = (
            mine.numel() // (sizes[0] * sizes[2]) * (comm.rank // (sizes[0] * sizes[2]) == comm.coords["j"])
        )
        assert sum(sent().values()) == 4 * (mine.numel() - kept) * 8


@ranks(4)
def test_norm_does_not_cancel():
    """A mean of 1e4 with a spread of 1 in fp32: the difference of sums of squares would lose all digits."""
    comm = make_comm(GroupRegistry(), Grid3D(1, 1, 4))
    norm = GridNorm(config(64, dtype=torch.float32), 64, comm=comm)
    x = random(5, 8, 2, 64, dtype=torch.float32) + 1e4
    expected = F.layer_norm(x.double(), (64,))
    own = RESIDUAL.slices(comm.grid, comm.coords, x.shape)
    assert (norm(x[own]) - expected[own]).abs().max() < 1e-3
    x = random(6, 8, 2, 64, dtype=torch.float32) * 1e3 + 1e7
    naive = (x.square().mean(-1) - x.mean(-1).square()) / x.double().var(-1, correction=0)
    assert (naive - 1).abs().max() > 0.5


@ranks(2)
def test_layouts_are_asked_for():
    """Two layouts of one shape: the check sees what shapes do not show."""
    comm = make_comm(GroupRegistry(), Grid3D(1, 1, 2))
    tags = comm.tags = Tags(comm.grid)
    chain = Chain(comm, Overlap())
    made = config(H)
    fc1 = GridLinear(
        H,
        F4,
        site=LAYER_SITES["fc1"],
        chain=chain,
        save="gathered",
        config=made,
        init_method=torch.nn.init.ones_,
    )
    norm = GridNorm(made, H, comm=comm)
    x = tags.mark(random(1, S, B, H // 2), RESIDUAL)
    with _HandOn():
        y = norm(x * 2.0) + x
        assert fc1(y)[0].shape == (S // 2, B, F4)
        with pytest.raises(LayoutError, match="of activations in"):
            x + tags.mark(torch.zeros_like(x), INNER)
    with pytest.raises(LayoutError, match="fc1 takes residual"):
        fc1(tags.mark(torch.zeros_like(x), INNER))
    with pytest.raises(LayoutError, match="takes 32 features over 2 ranks"):
        fc1(torch.zeros(S, B, H))
    assert tags.checked == 4


@ranks(1)
def test_fused_attention_is_stock_attention():
    """Grouped queries, values and gradients, against stock's local core attention."""
    from types import SimpleNamespace

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_ext.linear3d.attention import FusedAttention, fused

    assert fused(DotProductAttention) is FusedAttention
    assert fused(GridNorm) is GridNorm
    patches = cpu.torch_patches() + cpu.megatron_patches()
    applied = patching.apply(patches, contract=None, log=lambda text: None)
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        made = TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0
        )
        groups = SimpleNamespace(tp=parallel_state.get_tensor_model_parallel_group())
        results = []
        for kind in (DotProductAttention, FusedAttention):
            core = kind(made, 1, AttnMaskType.causal, "self", pg_collection=groups)
            shapes = ((S, B, 4, 8), (S, B, 2, 8), (S, B, 2, 8))
            qkv = [random(n, *shape, dtype=torch.float32).requires_grad_() for n, shape in enumerate(shapes)]
            mask = torch.ones(1, 1, S, S).triu(1).bool()
            out = core(*qkv, mask, attn_mask_type=AttnMaskType.causal)
            out.backward(random(7, *out.shape, dtype=torch.float32))
            results.append([out, *(part.grad for part in qkv)])
        for theirs, mine in zip(*results, strict=True):
            assert (theirs - mine).abs().max() < 1e-5
    finally:
        applied.undo()
