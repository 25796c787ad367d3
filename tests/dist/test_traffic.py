"""Exact byte counts of our collectives and of stock ones, on 2, 3 and 4 gloo ranks."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import P2POp, ProcessGroup

from megatron_ext import traffic
from megatron_ext.ledger import Ledger
from megatron_ext.stock_traffic import METHODS
from tests.ranks import ranks

SIZES = pytest.mark.parametrize("size", [2, 3, 4])
FEATURE = "vocab"


def on(size, body):
    ranks(size)(body)()


def place():
    return dist.get_world_size(), dist.get_rank()


def floats(n):
    return torch.ones(n)


def octets(n):
    return torch.ones(n, dtype=torch.uint8)


def finish(work):
    for handle in work if isinstance(work, list) else [work]:
        if handle is not None:
            handle.wait()


def cases(p, r):
    """(name, stock call, our call, rows (kind, bytes, calls) expected on this rank)."""
    world = dist.group.WORLD
    us = {"group": world, "feature": FEATURE}
    right, left = (r + 1) % p, (r - 1) % p
    splits = [index + 1 for index in range(p)]
    received = [r + 1] * p
    total = sum(splits)
    share = 7 // p + (r < 7 % p)
    last = p - 1

    def all_to_all(run, **more):
        run(torch.empty(sum(received), 3), torch.ones(total, 3), received, splits, **more)

    def ring(isend, irecv, batch, **more):
        ops = [P2POp(isend, floats(5), right), P2POp(irecv, floats(5), left)]
        return batch(ops, **more)

    def pair(send, recv, **more):
        if r == 0:
            send(floats(6), **more)
        elif r == last:
            recv(floats(6), **more)

    def lists():
        return [floats(2) for _ in range(p)]

    return [
        (
            "all_reduce",
            lambda: dist.all_reduce(octets(7)),
            lambda: traffic.all_reduce(octets(7), **us),
            [("all_reduce", 2 * (7 - share), 1)],
        ),
        (
            "all_reduce max async",
            lambda: dist.all_reduce(octets(7), op=dist.ReduceOp.MAX, async_op=True),
            lambda: traffic.all_reduce(octets(7), dist.ReduceOp.MAX, async_op=True, **us),
            [("all_reduce", 2 * (7 - share), 1)],
        ),
        (
            "all_gather_into_tensor",
            lambda: dist.all_gather_into_tensor(floats(3 * p), floats(3), async_op=True),
            lambda: traffic.all_gather_into_tensor(floats(3 * p), floats(3), async_op=True, **us),
            [("all_gather", (p - 1) * 12, 1)],
        ),
        (
            "reduce_scatter_tensor bf16",
            lambda: dist.reduce_scatter_tensor(floats(5).bfloat16(), floats(5 * p).bfloat16(), async_op=True),
            lambda: traffic.reduce_scatter_tensor(
                floats(5).bfloat16(), floats(5 * p).bfloat16(), async_op=True, **us
            ),
            [("reduce_scatter", (p - 1) * 10, 1)],
        ),
        (
            "all_to_all_single with splits",
            lambda: all_to_all(dist.all_to_all_single),
            lambda: all_to_all(traffic.all_to_all_single, **us),
            [("all_to_all", (total - splits[r]) * 12, 1)],
        ),
        (
            "all_to_all_single equal",
            lambda: dist.all_to_all_single(floats(2 * p), floats(2 * p), async_op=True),
            lambda: traffic.all_to_all_single(floats(2 * p), floats(2 * p), async_op=True, **us),
            [("all_to_all", (p - 1) * 8, 1)],
        ),
        (
            "posted_all_gather",
            lambda: dist.all_gather_into_tensor(floats(3 * p), floats(3), async_op=True),
            lambda: traffic.posted_all_gather(floats(3 * p), floats(3), **us),
            [("all_gather", (p - 1) * 12, 1)],
        ),
        (
            "posted_all_to_all",
            lambda: dist.all_to_all_single(floats(2 * p), floats(2 * p), async_op=True),
            lambda: traffic.posted_all_to_all(floats(2 * p), floats(2 * p), **us),
            [("all_to_all", (p - 1) * 8, 1)],
        ),
        (
            "broadcast from the last",
            lambda: dist.broadcast(floats(3), src=last),
            lambda: traffic.broadcast(floats(3), group_src=last, **us),
            [("broadcast", (p - 1) * 12 if r == last else 0, 1)],
        ),
        (
            "reduce to the last",
            lambda: dist.reduce(floats(3), dst=last),
            lambda: traffic.reduce(floats(3), group_dst=last, **us),
            [("reduce", 0 if r == last else 12, 1)],
        ),
        (
            "gather on 1",
            lambda: dist.gather(floats(2), lists() if r == 1 else None, dst=1),
            lambda: traffic.gather(floats(2), lists() if r == 1 else None, group_dst=1, **us),
            [("gather", 0 if r == 1 else 8, 1)],
        ),
        (
            "scatter from 1",
            lambda: dist.scatter(floats(2), lists() if r == 1 else None, src=1),
            lambda: traffic.scatter(floats(2), lists() if r == 1 else None, group_src=1, **us),
            [("scatter", (p - 1) * 8 if r == 1 else 0, 1)],
        ),
        (
            "barrier",
            dist.barrier,
            lambda: traffic.barrier(**us),
            [("barrier", 0, 1)],
        ),
        (
            "batch_isend_irecv",
            lambda: ring(dist.isend, dist.irecv, dist.batch_isend_irecv),
            lambda: ring(dist.isend, dist.irecv, traffic.batch_isend_irecv, feature=FEATURE),
            [("recv", 0, 1), ("send", 20, 1)],
        ),
        (
            "send and recv",
            lambda: pair(
                lambda t: dist.send(t, dst=last),
                lambda t: dist.recv(t, src=0),
            ),
            lambda: pair(
                lambda t: traffic.send(t, group_dst=last, **us),
                lambda t: traffic.recv(t, group_src=0, **us),
            ),
            {0: [("send", 24, 1)], last: [("recv", 0, 1)]}.get(r, []),
        ),
        (
            "isend and irecv",
            lambda: [dist.isend(floats(6), dst=right), dist.irecv(floats(6), src=left)],
            lambda: [
                traffic.isend(floats(6), group_dst=right, **us),
                traffic.irecv(floats(6), group_src=left, **us),
            ],
            [("recv", 0, 1), ("send", 24, 1)],
        ),
    ]


def rows(ledger, feature="stock"):
    found = ledger.drain()
    assert {row["feature"] for row in found} <= {feature}
    assert {row["group"] for row in found} <= {"world"}
    return [(row["kind"], row["bytes"], row["calls"]) for row in found]


@SIZES
def test_stock_calls_are_counted_exactly(size):
    def body():
        ledger = Ledger()
        for name, stock, _, expected in cases(*place()):
            with traffic.count_stock(ledger):
                finish(stock())
            assert rows(ledger) == expected, name
            finish(stock())
            assert ledger.drain() == [], name

    on(size, body)


@SIZES
def test_our_calls_are_counted_exactly_and_once(size):
    def body():
        stock_ledger = Ledger()
        for counter_is_on in (True, False):
            for name, _, ours, expected in cases(*place()):
                counter = traffic.count_stock(stock_ledger)
                if counter_is_on:
                    counter.start()
                finish(ours())
                counter.stop()
                assert stock_ledger.drain() == [], name
                assert rows(traffic.ledger(), FEATURE) == expected, name

    on(size, body)


@SIZES
def test_posted_collectives_are_those_of_torch(size):
    def body():
        p, r = place()
        us = {"group": dist.group.WORLD, "feature": FEATURE}
        for _ in range(3):  # a message must not be taken for that of another call
            mine = torch.randn(p * 5)
            expected = torch.empty_like(mine)
            found = torch.empty_like(mine)
            dist.all_to_all_single(expected, mine)
            traffic.posted_all_to_all(found, mine, **us)
            assert torch.equal(found, expected)
            gathered = torch.empty(p, 5)
            dist.all_gather_into_tensor(gathered.view(-1), mine[:5])
            in_place = torch.zeros(p, 5)
            in_place[r] = mine[:5]
            for output, part in ((torch.zeros(p, 5), mine[:5]), (in_place, in_place[r])):
                traffic.posted_all_gather(output, part, **us)
                assert torch.equal(output, gathered)

    on(size, body)


def only_stock_cases(p, r):
    gathered = [floats(3) for _ in range(p)]
    parts = [floats(2) for _ in range(p)]
    world = dist.group.WORLD
    text = dist.distributed_c10d._object_to_tensor({"text": "x" * 100}, torch.device("cpu"), world)[0].numel()

    def managed(async_ops, *calls):
        with dist.distributed_c10d._coalescing_manager(async_ops=async_ops) as handle:
            for call in calls:
                call()
        if async_ops:
            handle.wait()

    return [
        (
            "all_gather of a list",
            lambda: dist.all_gather(gathered, floats(3)),
            [("all_gather", (p - 1) * 12, 1)],
        ),
        (
            "_all_gather_base",
            lambda: dist._all_gather_base(floats(3 * p), floats(3)),
            [("all_gather", (p - 1) * 12, 1)],
        ),
        (
            "_reduce_scatter_base",
            lambda: dist._reduce_scatter_base(floats(3), floats(3 * p)),
            [("reduce_scatter", (p - 1) * 12, 1)],
        ),
        (
            "reduce_scatter of a list",
            lambda: dist.reduce_scatter(floats(2), parts),
            [("reduce_scatter", (p - 1) * 8, 1)],
        ),
        ("monitored_barrier", dist.monitored_barrier, [("barrier", 0, 1)]),
        (
            "all_gather_object",
            lambda: dist.all_gather_object([None] * p, {"text": "x" * 100}),
            [("all_gather", (p - 1) * (8 + text), 2)],
        ),
        (
            "broadcast_object_list",
            lambda: dist.broadcast_object_list([{"text": "x" * 100}], src=1),
            [("broadcast", (p - 1) * (8 + text) if r == 1 else 0, 2)],
        ),
        (
            "coalesced all_reduce",
            lambda: managed(True, lambda: dist.all_reduce(floats(p)), lambda: dist.all_reduce(floats(2 * p))),
            [("all_reduce", 2 * (p - 1) * 12, 1)],
        ),
        (
            "coalesced all_gather",
            lambda: managed(
                False,
                lambda: dist.all_gather_into_tensor(floats(3 * p), floats(3)),
                lambda: dist.all_gather_into_tensor(floats(p), floats(1)),
            ),
            [("all_gather", (p - 1) * 16, 1)],
        ),
        (
            "coalesced reduce_scatter",
            lambda: managed(
                True,
                lambda: dist.reduce_scatter_tensor(floats(3), floats(3 * p)),
                lambda: dist.reduce_scatter_tensor(floats(1), floats(p)),
            ),
            [("reduce_scatter", (p - 1) * 16, 1)],
        ),
    ]


@SIZES
def test_every_path_of_torch_distributed_is_counted(size):
    def body():
        ledger = Ledger()
        for name, stock, expected in only_stock_cases(*place()):
            with traffic.count_stock(ledger):
                finish(stock())
            assert rows(ledger) == expected, name

    on(size, body)


@ranks(3)
def test_differentiable_collectives_are_counted_forward_and_backward():
    import torch.distributed.nn.functional as differentiable

    ledger = Ledger()
    x = floats(3).requires_grad_()
    with traffic.count_stock(ledger):
        differentiable.all_reduce(x).sum().backward()
    assert rows(ledger) == [("all_reduce", 2 * 16, 2)]
    with traffic.count_stock(ledger):
        differentiable.all_to_all_single(torch.empty(3), x).sum().backward()
    assert rows(ledger) == [("all_to_all", 2 * 8, 2)]


@ranks(2)
def test_functions_bound_by_value_in_megatron_are_counted():
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import mappings

    ledger = Ledger()
    with traffic.count_stock(ledger):
        mappings.dist_all_gather_func(floats(6), floats(3))
        mappings.dist_reduce_scatter_func(floats(3), floats(6))
        param_and_grad_buffer.dist_all_gather_func(floats(6), floats(3), group=dist.group.WORLD)
        param_and_grad_buffer.dist_reduce_scatter_func(floats(3), floats(6), op=dist.ReduceOp.SUM)
    assert rows(ledger) == [("all_gather", 24, 2), ("reduce_scatter", 24, 2)]


@ranks(2)
def test_functional_collectives_are_not_seen_as_the_module_says():
    from torch.distributed import _functional_collectives as functional

    ledger = Ledger()
    with traffic.count_stock(ledger):
        total = functional.all_reduce(floats(3), "sum", dist.group.WORLD)
        assert total.tolist() == [2, 2, 2]
    assert ledger.drain() == []


@ranks(3)
def test_sums_over_ranks_are_what_an_ideal_algorithm_moves():
    p, _ = place()
    with traffic.count_stock() as counter:
        dist.all_reduce(octets(1001))
        dist.broadcast(octets(5), src=1)
        traffic.all_reduce(octets(1000), group=dist.group.WORLD, feature=FEATURE)
        counter.stop()
    found = [None] * p
    dist.all_gather_object(found, traffic.ledger().totals())
    sums = {key: sum(part[key][0] for part in found) for key in found[0]}
    assert sums == {
        ("stock", "all_reduce", "world"): 2 * (p - 1) * 1001,
        ("stock", "broadcast", "world"): (p - 1) * 5,
        (FEATURE, "all_reduce", "world"): 2 * (p - 1) * 1000,
    }


@ranks(4)
def test_groups_are_told_apart_by_name():
    _, r = place()
    tensor = {
        tuple(members): dist.new_group(members, group_desc="TENSOR_MODEL_PARALLEL_GROUP")
        for members in ([0, 1], [2, 3])
    }
    mine = tensor[(0, 1) if r < 2 else (2, 3)]
    odd = dist.new_group([1, 3])
    with traffic.count_stock():
        dist.all_reduce(floats(4), group=mine)
        traffic.all_reduce(floats(4), group=mine, feature=FEATURE)
        if r in (1, 3):
            dist.all_reduce(floats(2), group=odd)
        dist.all_reduce(floats(1))
    totals = traffic.ledger().totals()
    assert totals[("stock", "all_reduce", "tp")] == totals[(FEATURE, "all_reduce", "tp")] == (16, 1)
    assert totals[("stock", "all_reduce", "world")] == (6, 1)
    assert totals.get(("stock", "all_reduce", "ranks-1-3")) == ((8, 1) if r in (1, 3) else None)


@ranks(2)
def test_coalescing_of_ours_is_counted_once():
    world = dist.group.WORLD
    with traffic.count_stock(), traffic.coalescing(group=world, async_ops=True) as handle:
        traffic.all_reduce(floats(2), group=world, feature=FEATURE)
        traffic.all_reduce(floats(4), group=world, feature=FEATURE)
    handle.wait()
    assert rows(traffic.ledger(), FEATURE) == [("all_reduce", 24, 2)]


@ranks(2)
def test_a_label_claims_stock_communication():
    with traffic.count_stock(), traffic.label(FEATURE):
        dist.all_reduce(floats(2))
    assert rows(traffic.ledger(), FEATURE) == [("all_reduce", 8, 1)]


@ranks(2)
def test_threads_do_not_hide_each_other():
    """A counted helper in one thread leaves stock calls of another thread counted."""
    group = dist.new_group([0, 1], group_desc="side")

    def side():
        for _ in range(200):
            traffic.all_reduce(floats(2), group=group, feature=FEATURE)

    with traffic.count_stock():
        thread = threading.Thread(target=side)
        thread.start()
        for _ in range(200):
            dist.all_reduce(floats(1))
        thread.join()
    assert traffic.ledger().totals() == {
        ("stock", "all_reduce", "world"): (200 * 4, 200),
        (FEATURE, "all_reduce", "side"): (200 * 8, 200),
    }


@ranks(2)
def test_unknown_sizes_are_counted_as_such():
    sparse = torch.eye(2).to_sparse()
    with traffic.count_stock():
        dist.all_reduce(sparse.clone())
        traffic.all_reduce(sparse.clone(), group=dist.group.WORLD, feature=FEATURE)
    assert traffic.ledger().totals() == {
        ("stock", "all_reduce:unsized", "world"): (0, 1),
        (FEATURE, "all_reduce:unsized", "world"): (0, 1),
    }


@ranks(2)
def test_failed_calls_are_not_counted():
    with traffic.count_stock():
        with pytest.raises(RuntimeError):
            dist.all_gather_into_tensor(floats(3), floats(3))
        with pytest.raises((RuntimeError, ValueError)):
            dist.isend(floats(3), dst=dist.get_rank())
    assert traffic.ledger().totals() == {}


@ranks(2)
def test_methods_are_restored():
    originals = {name: getattr(ProcessGroup, name) for name in METHODS}

    def restored():
        return all(getattr(ProcessGroup, name) is original for name, original in originals.items())

    counter = traffic.count_stock()
    counter.stop()
    assert restored()
    counter.start()
    assert not any(getattr(ProcessGroup, name) is original for name, original in originals.items())
    with pytest.raises(RuntimeError, match="counted already: stop that counter first"):
        traffic.count_stock().start()
    counter.stop()
    counter.stop()
    assert restored()
    with pytest.raises(KeyError), traffic.count_stock():
        raise KeyError
    assert restored()
    dist.all_reduce(floats(1))
    assert traffic.ledger().totals() == {}


@ranks(2)
def test_a_rank_outside_the_group_must_not_call():
    with pytest.raises(AssertionError, match="this rank is not in the group"):
        traffic.all_reduce(floats(1), group=None, feature=FEATURE)
