"""The attention module of Megatron's layers, against dense attention: masks, documents, sinks, recomputation."""

import functools
from types import SimpleNamespace

import pytest

from megatron_ext.wallfacer.geometry import Geometry
from megatron_ext.wallfacer.sequence import packed, whole
from megatron_ext.wallfacer.tiles import BIDIRECTIONAL, CAUSAL, Mask
from tests.ranks import ranks

SIZE = 4


def build(case, geometry, *, mask_type="causal", **config):
    """A module of one layer for the shapes of a case, and what its layers share."""
    import torch.distributed as dist
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_ext.wallfacer.attention import Setup, WallFacerAttention
    from tests.dist import wallfacer_cases as w

    settings = {
        "num_layers": 2,
        "hidden_size": case.query_heads * case.head_dim,
        "num_attention_heads": case.query_heads,
        "num_query_groups": case.key_heads,
        "context_parallel_size": SIZE,
        "attention_dropout": 0.0,
        "params_dtype": case.dtype,
    }
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    setup = Setup(w.rings(geometry), tuple(range(SIZE)), calls=[])
    module = WallFacerAttention(
        config=TransformerConfig(**(settings | config)),
        layer_number=1,
        attn_mask_type=AttnMaskType[mask_type],
        attention_type="self",
        cp_comm_type="wallfacer",
        softmax_scale=None,
        pg_collection=SimpleNamespace(cp=dist.group.WORLD, tp=alone),
        setup=setup,
    )
    return module, setup


def own(case, setup):
    """Own rows of q, k, v, which want gradients, and of the output's gradient."""
    from tests.dist import wallfacer_cases as w

    parts = [w.own_part(x, case.layout, setup.rings.rank, SIZE) for x in case.tensors()[:4]]
    return [x.requires_grad_() for x in parts[:3]], parts[3]


def compare(case, setup, out, grads, limit=1e-12):
    """With dense attention in fp64."""
    from tests.dist import wallfacer_cases as w

    wanted = [w.own_part(x, case.layout, setup.rings.rank, SIZE) for x in w.reference(case)[:4]]
    for name, found, want in zip(w.NAMES, (out, *grads), wanted, strict=False):
        error = (found.double().reshape(want.shape) - want).abs().max()
        assert error <= limit, (name, error, case)


def check(case, geometry, *, thd=None, **config):
    """One call, forward and backward; returns the module and its shared part."""
    import torch

    module, setup = build(case, geometry, **config)
    leaves, grad = own(case, setup)
    given, params = leaves, None
    if thd is not None:
        given, params = [x.squeeze(1) for x in leaves], thd
    out = module(*given, None, packed_seq_params=params)
    n, b = grad.shape[:2]
    width = case.query_heads * case.head_dim
    assert out.shape == ((n, width) if thd is not None else (n, b, width))
    compare(case, setup, out, torch.autograd.grad(out, leaves, grad.reshape(out.shape)))
    (noted,) = setup.calls
    assert noted[0] is module
    return module, setup


@ranks(SIZE)
def test_masks():
    import torch

    from tests.dist.wallfacer_cases import Case

    wide = {"dtype": torch.float64}
    for shape in ((2, 2), (1, 1)):
        geometry = Geometry(SIZE, *shape)
        check(Case(batch=2, **wide), geometry)
        check(Case(layout=whole(64, "contiguous"), mask=BIDIRECTIONAL, **wide), geometry, mask_type="no_mask")
        window = {"window_size": (9, 0), "window_attn_skip_freq": 2}
        check(Case(mask=Mask(9, 0), **wide), geometry, **window)
        both = {"mask_type": "no_mask", "window_size": (9, 3)}
        check(Case(mask=Mask(9, 3), **wide), geometry, **both)


@ranks(SIZE)
def test_bidirectional_attention_does_not_depend_on_the_split():
    """What stock deals out in zigzag may be computed as what is contiguous."""
    import torch

    from tests.dist.wallfacer_cases import Case

    case = Case(layout=whole(64, "zigzag"), mask=BIDIRECTIONAL, dtype=torch.float64)
    check(case, Geometry(SIZE, 2, 2), mask_type="no_mask")


def packed_params(ends, filled=None):
    """As Megatron passes them on."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    padded, real = (torch.tensor(list(x), dtype=torch.int32) for x in (ends, filled or ends))
    if filled is None:
        return PackedSeqParams(qkv_format="thd", cu_seqlens_q=real, cu_seqlens_kv=real)
    names = {"cu_seqlens_q": real, "cu_seqlens_kv": real}
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded, **names
    )


@ranks(SIZE)
def test_packed_documents():
    """Odd lengths inside of padding, a document of one token, and one without any."""
    import torch

    from tests.dist.wallfacer_cases import Case

    cases = [
        ([0, 64, 80, 256], [0, 61, 62, 220]),
        ([0, 8, 16, 24], [0, 1, 1, 9]),
        ([0, 32, 64], None),
    ]
    for (ends, filled), mask_type in zip(cases, ("causal", "padding_causal", "padding"), strict=True):
        mask = BIDIRECTIONAL if mask_type == "padding" else CAUSAL
        case = Case(layout=packed(ends, filled), mask=mask, dtype=torch.float64)
        check(case, Geometry(SIZE, 2, 2), thd=packed_params(ends, filled), mask_type=mask_type)


@ranks(SIZE)
def test_documents_are_read_once_and_without_what_fills_up():
    import torch

    from megatron_ext.wallfacer.packed import layout_of
    from tests.dist.wallfacer_cases import Case

    assert layout_of(packed_params([0, 16, 32, 32, 32])) == packed([0, 16, 32])
    assert layout_of(packed_params([0, 16, 32, 32], [0, 9, 9, 9])) == packed([0, 16, 32], [0, 9, 9])
    _, setup = build(Case(dtype=torch.float64), Geometry(SIZE, 2, 2))
    params = packed_params([0, 32, 64])
    assert setup.layouts.get(params, "a layer") is setup.layouts.get(params, "another")
    assert setup.layouts.get(packed_params([0, 16, 64]), "a layer").documents[0].end == 16


@pytest.mark.parametrize("softmax", ["off-by-one", "learnable"])
@ranks(SIZE)
def test_sinks(softmax):
    import torch

    from tests.dist import wallfacer_cases as w

    case = w.Case(sink=True, dtype=torch.float64)
    values = case.tensors()[4] if softmax == "learnable" else torch.zeros(case.query_heads).double()
    module, setup = build(case, Geometry(SIZE, 2, 2), softmax_type=softmax, params_dtype=torch.float64)
    learned = [name for name, _ in module.named_parameters()]
    assert learned == (["softmax_offset"] if softmax == "learnable" else [])
    with torch.no_grad():
        module.softmax_offset.copy_(values)
    leaves, grad = own(case, setup)
    out = module(*leaves, None)
    wanted_out = leaves_grads = None
    tensors = case.tensors()
    tensors[4] = values
    fixed = type("Fixed", (w.Case,), {"tensors": lambda self: [x.clone() for x in tensors]})
    wanted_out, *leaves_grads = w.dense(fixed(sink=True, dtype=torch.float64))
    wanted = [w.own_part(x, case.layout, setup.rings.rank, SIZE) for x in (wanted_out, *leaves_grads[:3])]
    asked = [*leaves, module.softmax_offset] if softmax == "learnable" else leaves
    found = torch.autograd.grad(out, asked, grad.reshape(out.shape))
    for one, other in zip((out.view_as(wanted[0]), *found[:3]), wanted, strict=True):
        assert (one - other).abs().max() <= 1e-12
    if softmax == "learnable":
        total = found[3].clone()
        torch.distributed.all_reduce(total)
        assert (total - leaves_grads[3]).abs().max() <= 1e-12


# --- recomputation -----------------------------------------------------------------------------------------


def recomputed(module, leaves):
    """As `tensor_parallel.checkpoint` calls a module: without a graph, and later again with one."""
    import torch
    from megatron.core.tensor_parallel import random

    random._set_checkpointing()
    with torch.no_grad():
        first = module(*leaves, None)
    random._unset_checkpointing()

    def again():
        random._set_checkpointing()
        with torch.enable_grad():
            second = module(*leaves, None)
        random._unset_checkpointing()
        return second

    return first, again


@ranks(SIZE)
def test_recomputation_repeats_neither_attention_nor_communication():
    import torch

    from megatron_ext.traffic import ledger
    from megatron_ext.wallfacer.kernels_cpu import CpuFlash
    from tests.dist.wallfacer_cases import Case

    calls = []
    forward = CpuFlash.forward

    def counting(self, *args, **kwargs):
        calls.append(None)
        return forward(self, *args, **kwargs)

    CpuFlash.forward = counting
    module, setup = build(Case(), Geometry(SIZE, 2, 2))
    micro = [own(Case(seed=seed), setup) for seed in (1, 2)]
    plain = []
    for leaves, grad in micro:
        out = module(*leaves, None)
        plain.append((out, torch.autograd.grad(out, leaves, grad.reshape(out.shape))))
    kernels = len(calls)
    calls.clear()
    ledger().drain()
    first = [recomputed(module, leaves) for leaves, _ in micro]
    sent_ahead = ledger().drain()
    assert len(calls) == kernels
    assert len(module.results) == 2
    for (leaves, grad), (out, again), (wanted, grads) in zip(micro, first, plain, strict=True):
        second = again()
        assert ledger().drain() == []
        assert torch.equal(out, wanted)
        assert torch.equal(second, wanted)
        found = torch.autograd.grad(second, leaves, grad.reshape(out.shape))
        assert all(torch.equal(one, other) for one, other in zip(found, grads, strict=True))
        ledger().drain()
    assert len(calls) == kernels
    assert not module.results
    assert sent_ahead
    with pytest.raises(RuntimeError, match="recomputed more often than it was computed"):
        first[0][1]()


@ranks(SIZE)
def test_documents_that_change_before_they_are_recomputed():
    import torch

    from tests.dist.wallfacer_cases import Case

    case = Case(layout=packed([0, 32, 64]), mask=CAUSAL, dtype=torch.float64)
    module, setup = build(case, Geometry(SIZE, 2, 2))
    leaves, _ = own(case, setup)
    params = packed_params([0, 32, 64])
    call = functools.partial(module, packed_seq_params=params)
    _, again = recomputed(call, [x.squeeze(1) for x in leaves])
    params.cu_seqlens_q.copy_(torch.tensor([0, 16, 64]))
    with pytest.raises(RuntimeError, match="recomputed with other documents"):
        again()


@ranks(SIZE)
def test_a_frozen_layer_keeps_nothing():
    """Its pass is checkpointed, and never comes again."""
    import torch

    from megatron_ext.wallfacer.install import _will_be_recomputed
    from tests.dist.wallfacer_cases import Case

    module, setup = build(Case(), Geometry(SIZE, 2, 2))
    leaves, _ = own(Case(), setup)
    checkpoint = _will_be_recomputed(lambda: setup.recomputation, lambda run, _, *args: recomputed(run, args))
    frozen = [x.detach() for x in leaves]
    checkpoint(module, False, *frozen)
    assert not module.results
    (noted,) = setup.calls
    assert noted.backward is None
    checkpoint(module, False, *leaves)
    assert len(module.results) == 1
    assert setup.calls[1].backward == "attached"
    with torch.no_grad():
        module(*leaves, None)
    module(*frozen, None)
    module(*leaves, None)
    assert [call.backward for call in setup.calls[2:]] == [None, None, "own"]


# --- what it refuses ---------------------------------------------------------------------------------------


@ranks(SIZE)
def test_what_it_refuses():
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_ext.wallfacer.packed import layout_of
    from tests.dist.wallfacer_cases import Case

    case, geometry = Case(), Geometry(SIZE, 2, 2)
    with pytest.raises(ValueError, match="set --attention-dropout 0"):
        build(case, geometry, attention_dropout=0.1)
    module, setup = build(case, geometry)
    leaves, _ = own(case, setup)
    with pytest.raises(ValueError, match="attention bias"):
        module(*leaves, None, attention_bias=torch.zeros(1))
    for mask in (AttnMaskType.arbitrary, AttnMaskType.padding, AttnMaskType.padding_causal):
        with pytest.raises(ValueError, match=f"a mask of the type {mask.name}"):
            module(*leaves, None, attn_mask_type=mask)
    with pytest.raises(ValueError, match="reads thd alone"):
        layout_of(PackedSeqParams(qkv_format="bshd"))
    ends = torch.tensor([0, 64])
    with pytest.raises(ValueError, match="queries and keys have other lengths"):
        layout_of(PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends // 2))
    with pytest.raises(ValueError, match="dynamic context parallelism"):
        layout_of(PackedSeqParams(qkv_format="thd", local_cp_size=2))
    setup.cp_ranks = (0, 1)
    with pytest.raises(ValueError, match="Megatron's own context-parallel group"):
        type(module)(
            module.config, 1, AttnMaskType.causal, "self",
            pg_collection=SimpleNamespace(cp=torch.distributed.group.WORLD, tp=module.tp_group), setup=setup,
        )  # fmt: skip
