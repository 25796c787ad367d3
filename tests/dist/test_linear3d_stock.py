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
from megatron_ext.linear3d.parameters import part_of
from megatron_ext.linear3d.relayout import to_grid, to_slices
from megatron_ext.linear3d.tags import LayoutError, Tags, _HandOn
from tests.dist.linear3d_cases import config, error, make_comm, random, sent
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


def like_stock(tp: int, dtype: torch.dtype, how: str = "native") -> None:
    """Bit for bit; with sums in an order of our own within 1e-6."""
    applied = patching.apply(cpu.torch_patches(), contract=None, log=lambda text: None)
    try:
        fc1, fc2 = stock_mlp(tp, dtype)
        comm = make_comm(GroupRegistry(), Grid3D(1, tp, 1), how)
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
            if how == "native":
                assert torch.equal(theirs, mine)
            else:
                assert error(mine, theirs) <= 1e-6
    finally:
        applied.undo()


@ranks(2)
def test_one_axis_is_stock_bit_for_bit():
    like_stock(2, torch.float32)


@ranks(8)
def test_one_axis_is_stock_bit_for_bit_on_eight_ranks_in_bf16():
    like_stock(8, torch.bfloat16)


@ranks(8)
def test_an_efficient_reduce_scatter_is_within_1e_6_of_stock():
    like_stock(8, torch.float32, "ordered")


@ranks(1)
def test_a_grid_of_one_is_stock_bit_for_bit():
    like_stock(1, torch.float32)


@pytest.mark.full
@ranks(8)
def test_one_axis_is_stock_bit_for_bit_on_eight_ranks():
    like_stock(8, torch.float32)


@pytest.mark.full
@ranks(2)
def test_one_axis_is_stock_bit_for_bit_in_bf16():
    like_stock(2, torch.bfloat16)


@ranks(8)
def test_what_is_saved():
    """Acceptance check 12: an MLP keeps shards of inputs and weights, or both gathered. s 128, b 4, h 256."""
    comm = make_comm(GroupRegistry(), Grid3D(2, 2, 2))
    saved = {
        "shard_all": [16384, 32768, 65536, 32768],
        "shard_weight": [32768, 32768, 131072, 32768],
        "gathered": [32768, 65536, 131072, 65536],
    }
    for save, expected in saved.items():
        made = {"chain": Chain(comm, Overlap()), "save": save, "config": config(256), "bias": False}
        made["init_method"] = torch.nn.init.ones_
        fc1 = GridLinear(256, 1024, site=LAYER_SITES["fc1"], **made)
        fc2 = GridLinear(1024, 256, site=LAYER_SITES["fc2"], **made)
        x = random(1, *RESIDUAL.local_shape(comm.grid, (128, 4, 256))).requires_grad_()
        kept = []

        def pack(tensor, kept=kept):
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            fc2(fc1(x)[0])
        assert kept == expected


def mlp_in_bf16(grid: Grid3D, registry: GroupRegistry) -> dict[str, float]:
    """Relative Frobenius errors of an MLP's results in bf16: s 64, b 8, h 512, f 2048."""
    comm = make_comm(registry, grid)
    shape, dtype = (64, 8, 512), torch.bfloat16
    whole = {"fc1": random(1, 2048, 512) * 512**-0.5, "fc2": random(2, 512, 2048) * 2048**-0.5}
    x, dy = random(3, *shape), random(4, *shape)
    # The reference has the same rounded inputs, and float64 from there on.
    whole, x, dy = {name: w.to(dtype) for name, w in whole.items()}, x.to(dtype), dy.to(dtype)
    leaves = {name: w.double().requires_grad_() for name, w in {**whole, "x": x}.items()}
    y = F.linear(F.gelu(F.linear(leaves["x"], leaves["fc1"])), leaves["fc2"])
    y.backward(dy.double())
    made = {"chain": Chain(comm, Overlap()), "save": "shard_weight", "config": config(512, dtype=dtype)}
    made |= {"bias": False, "init_method": torch.nn.init.zeros_}
    fc1 = GridLinear(512, 2048, site=LAYER_SITES["fc1"], **made)
    fc2 = GridLinear(2048, 512, site=LAYER_SITES["fc2"], **made)
    for linear in (fc1, fc2):
        name = linear.site.name
        linear.weight.data.copy_(part_of(whole[name], comm, linear.site.weight))
    place = RESIDUAL.slices(grid, comm.coords, shape)
    mine = x[place].contiguous().requires_grad_()
    found = fc2(F.gelu(fc1(mine)[0]))[0]
    found.backward(dy[place].contiguous())
    pairs = {"y": (found, y[place]), "dx": (mine.grad, leaves["x"].grad[place])}
    for linear in (fc1, fc2):
        name = linear.site.name
        pairs[name] = linear.weight.grad, part_of(leaves[name].grad, comm, linear.site.weight)
    squares = torch.tensor(
        [[part.double().square().sum() for part in (a - b, b)] for a, b in pairs.values()]
    )
    torch.distributed.all_reduce(squares)
    errors = (squares[:, 0] / squares[:, 1]).sqrt().tolist()
    return dict(zip(pairs, errors, strict=True))


@ranks(8)
def test_bf16_against_float64():
    """Acceptance check 13."""
    registry = GroupRegistry()
    line = mlp_in_bf16(Grid3D(1, 8, 1), registry)
    for sizes in ((2, 2, 2), (8, 1, 1), (1, 1, 8), (1, 4, 2), (4, 2, 1)):
        found = mlp_in_bf16(Grid3D(*sizes), registry)
        for name, value in found.items():
            assert 1e-4 < value <= 1e-2, (sizes, found)
            assert value <= 2 * line[name], (sizes, found, line)


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
