"""3-D layers against the same layers on one rank, in float64: losses, all gradients, and bytes."""

import functools

import pytest
import torch
from torch.distributed import ReduceOp, all_reduce, group

from megatron_ext import traffic
from megatron_ext.groups import GroupRegistry
from megatron_ext.linear3d.chain import Overlap
from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.layouts import LAYER_SITES, Layout
from megatron_ext.linear3d.sizes import ModelSizes
from megatron_ext.linear3d.volume import edge_bytes, layer_bytes, vector_bytes
from tests.dist.linear3d_cases import OnGrid, Whole, error, make_comm, own, sent
from tests.ranks import ranks

NONE = Overlap(grads=False, prefetch=False, defer=False)
SAVES = ("gathered", "shard_weight", "shard_all")


def compare(
    registry, grid, *, s, b, h, f, vocab, mode="plane", save="gathered", glu=False, tied=False, **more
):
    """One forward and backward pass; returns this rank's gradients."""
    overlap, how = more.get("overlap", NONE), more.get("how", "ordered")
    rms, bias = more.get("rms", False), not glu
    whole = Whole(s, b, h, f, vocab, glu, bias=bias, rms=rms)
    weights = torch.linspace(0.5, 1.5, b * s, dtype=torch.float64).view(b, s)
    expected = whole.loss(tied)
    (expected * weights).sum().backward()
    comm = make_comm(registry, grid, how)
    net = OnGrid(comm, whole, mode=mode, save=save, overlap=overlap, tied=tied, keep=more.get("keep", False))
    traffic.ledger().drain()
    found = net.loss()
    (found * weights).sum().backward()
    grads = net.gradients()
    bytes_sent = sent()
    assert error(found, expected) <= 1e-12
    for name, grad in grads.items():
        if name == "head.weight" and tied:
            assert grad is None
            continue
        gated = getattr(net.modules[name.split(".")[0]], "gated", False)
        layout = net.param(name).grid_layout
        wanted = own(whole.params[name].grad, layout, comm, gated)
        assert error(grad, wanted) <= 1e-12, (name, grid, mode, save)
    assert_bytes(bytes_sent, net, grid, s, b, h, f, vocab, mode, save, how, glu, rms, more.get("keep", False))
    assert_counted_once(net, whole, tied)
    net.chain.step_ends()
    return grads


def assert_bytes(bytes_sent, net, grid, s, b, h, f, vocab, mode, save, how, glu, rms, keep):
    sizes = ModelSizes(s, b, h, h // 2, h // 2, 2, f, vocab, glu=glu, rms=rms, itemsize=8)
    at = net.comm.coords
    expected = layer_bytes(sizes, grid, save=save, how=how, coords=at, kept=int(keep))
    expected += edge_bytes(sizes, grid, mode, save=save, how=how, coords=at)
    vectors = [(p.numel(), p.grid_layout) for _, p in net.named() if len(p.grid_layout.cuts) == 1]
    expected += vector_bytes(vectors, grid, at, 8)
    # One norm here, of the three that a layer and the end of a model have; statistics in the model's float64.
    found = {key: n for key, n in bytes_sent.items() if key[0] not in ("norm", "loss")}
    assert found == {key: n for key, n in expected.items() if key[0] not in ("norm", "loss")}
    norm = {key: n for key, n in bytes_sent.items() if key[0] == "norm"}
    assert norm == {key: 2 * n // 3 for key, n in expected.items() if key[0] == "norm"}
    loss = {key: n for key, n in bytes_sent.items() if key[0] == "loss"}
    assert loss == {key: 2 * n for key, n in expected.items() if key[0] == "loss"}


def assert_counted_once(net, whole, tied):
    """The squares of all parts that Megatron counts add up to those of the whole parameters."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    counts = functools.partial(param_is_not_tensor_parallel_duplicate, tp_group=group.WORLD)
    total = torch.zeros((), dtype=torch.float64)
    for name, param in net.named():
        if counts(param) and not (tied and name == "head.weight"):
            total += param.detach().square().sum()
    all_reduce(total, ReduceOp.SUM)
    wanted = sum(
        p.detach().square().sum() for n, p in whole.params.items() if not (tied and n == "head.weight")
    )
    assert error(total, wanted) <= 1e-12


SMALL = {"s": 8, "b": 8, "h": 32, "f": 48, "vocab": 64}


@ranks(8)
def test_grids_of_eight():
    registry = GroupRegistry()
    for number, sizes in enumerate([(2, 2, 2), (1, 8, 1), (1, 1, 8), (8, 1, 1), (1, 4, 2), (4, 1, 2)]):
        case = {**SMALL, "mode": ("plane", "grid")[number % 2], "tied": number % 3 == 0}
        compare(
            registry, Grid3D(*sizes), **case, save=SAVES[number % 3], glu=number % 2 == 1, rms=number % 2 == 1
        )


@ranks(8)
def test_calls_of_a_layer():
    """Acceptance check 3: how many collectives a layer makes on the cube, forward and backward."""
    whole = Whole(8, 8, 32, 48, 64, glu=False)
    comm = make_comm(GroupRegistry(), Grid3D(2, 2, 2), "native")
    net = OnGrid(comm, whole, mode="plane", save="gathered", overlap=NONE, tied=False)
    sent()
    net.loss().sum().backward()
    calls = sent("calls")
    layer = {key[1:]: 0 for key in calls}
    for (site, kind, axes), count in calls.items():
        if site in LAYER_SITES:
            layer[kind, axes] += count
    gathers, sums = "all_gather", "reduce_scatter"
    expected = {(kind, axis): 4 for kind in (gathers, sums) for axis in "ijl"}
    assert {key: count for key, count in layer.items() if count} == expected
    # This network has one norm, a layer has two.
    assert 2 * calls["norm", gathers, "l"] == 2 * calls["norm", "all_reduce", "l"] == 2


@ranks(4)
def test_grids_of_four():
    registry = GroupRegistry()
    for sizes in ((2, 2, 1), (1, 2, 2), (2, 1, 2)):
        for save in SAVES:
            compare(registry, Grid3D(*sizes), **SMALL, save=save, glu=True, mode="grid", tied=True)
            compare(registry, Grid3D(*sizes), **SMALL, save=save, how="native")


@ranks(2)
def test_grids_of_two():
    registry = GroupRegistry()
    for sizes in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        for mode in ("plane", "grid"):
            compare(registry, Grid3D(*sizes), **SMALL, mode=mode, rms=True, glu=True)


@ranks(1)
def test_a_grid_of_one():
    compare(GroupRegistry(), Grid3D(1, 1, 1), **SMALL, tied=True)


@ranks(8)
def test_any_order_of_ranks():
    registry = GroupRegistry()
    for order in ("lji", "jil"):
        compare(registry, Grid3D(2, 2, 2, order), **SMALL, tied=True)


@pytest.mark.full
@ranks(8)
def test_every_grid_and_policy():
    registry = GroupRegistry()
    for sizes in ((2, 2, 2), (2, 4, 1), (1, 4, 2), (4, 1, 2), (1, 2, 4), (4, 2, 1), (2, 1, 4)):
        for mode in ("plane", "grid"):
            for save in SAVES:
                compare(
                    registry, Grid3D(*sizes), **SMALL, mode=mode, save=save, glu=True, tied=save != "gathered"
                )
                compare(registry, Grid3D(*sizes), **SMALL, mode=mode, save=save, how="native")


@pytest.mark.full
@ranks(6)
def test_six_ranks():
    registry = GroupRegistry()
    for sizes in ((1, 3, 2), (3, 1, 2), (3, 2, 1)):
        for glu in (False, True):
            compare(registry, Grid3D(*sizes), s=6, b=6, h=36, f=72, vocab=72, save="shard_all", glu=glu)


@pytest.mark.full
@ranks(27, timeout=300)
def test_the_cube_of_27():
    compare(GroupRegistry(), Grid3D(3, 3, 3), s=9, b=3, h=54, f=108, vocab=108, mode="grid", glu=True)


@ranks(4)
def test_overlap_changes_no_bit():
    registry = GroupRegistry()
    for sizes in ((2, 2, 1), (2, 1, 2)):
        for save in SAVES:
            case = {**SMALL, "save": save, "glu": True, "mode": "plane"}
            plain = compare(registry, Grid3D(*sizes), **case)
            for name in ("grads", "prefetch", "defer", "all"):
                on = Overlap(**{key: name in (key, "all") for key in ("grads", "prefetch", "defer")})
                other = compare(registry, Grid3D(*sizes), **case, overlap=on)
                assert all(torch.equal(other[key], plain[key]) for key in plain), (name, save)
            kept = compare(registry, Grid3D(*sizes), **case, overlap=Overlap(), keep=True)
            assert all(torch.equal(kept[key], plain[key]) for key in plain)


def test_vectors_name_their_axes():
    assert Layout("x", ("l",)).replicated == "ij"
