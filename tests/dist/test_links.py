"""Links between three stages: order, both directions at once, sends ahead of receives, and bytes."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext.ledger import ledger
from megatron_ext.schedules.lane import Clock
from megatron_ext.schedules.links import Boundary, Links
from megatron_ext.schedules.placement import Placement
from tests.ranks import ranks

SHAPE = (4, 2, 8)
BOUNDARY = Boundary(SHAPE, torch.float32, torch.device("cpu"))
BYTES = 4 * 4 * 2 * 8
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlap"])


def make_links(overlap):
    forward, backward = (dist.new_group(list(range(dist.get_world_size()))) for _ in range(2))
    groups = {("F", "next"): forward, ("B", "previous"): backward}
    place = Placement(dist.get_world_size())
    return Links(groups, place, feature="vocab", overlap=overlap, on_gpu=False)


def tensor(rank, kind, i):
    """Tells sender, direction and microbatch."""
    return torch.full(SHAPE, 100.0 * rank + 10 * (kind == "SB") + i)


def check_received(ticket, rank, kind, i):
    received = ticket.wait()
    assert received.shape == SHAPE
    assert received.dtype == torch.float32
    torch.testing.assert_close(received, tensor(rank, kind, i), rtol=0, atol=0)


@OVERLAP
@ranks(3, timeout=60)
def test_activations_go_up_and_gradients_down(overlap):
    """One microbatch after another, in lists that complete even when every launch blocks."""
    links, rank = make_links(overlap), dist.get_rank()
    for i in range(3):
        if rank > 0:
            check_received(links.receive("RF", BOUNDARY, f"F{i}"), rank - 1, "SF", i)
        if rank < 2:
            links.send("SF", tensor(rank, "SF", i), f"F{i}")
            check_received(links.receive("RB", BOUNDARY, f"B{i}"), rank + 1, "SB", i)
        if rank > 0:
            links.send("SB", tensor(rank, "SB", i), f"B{i}")
    links.drain()


@ranks(3, timeout=60)
def test_both_directions_keep_their_order():
    """Everything is posted before anything is waited for, receives first on some ranks and last on others."""
    links, rank = make_links(True), dist.get_rank()
    received = {}

    def post_sends():
        for i in range(5):
            if rank < 2:
                links.send("SF", tensor(rank, "SF", i), f"F{i}")
            if rank > 0:
                links.send("SB", tensor(rank, "SB", i), f"B{i}")

    def post_receives():
        for i in range(5):
            if rank > 0:
                received["RF", i] = links.receive("RF", BOUNDARY, f"F{i}")
            if rank < 2:
                received["RB", i] = links.receive("RB", BOUNDARY, f"B{i}")

    for post in (post_sends, post_receives) if rank == 1 else (post_receives, post_sends):
        post()
    for (kind, i), ticket in reversed(received.items()):
        peer = rank - 1 if kind == "RF" else rank + 1
        check_received(ticket, peer, "S" + kind[1], i)
    links.drain()


@ranks(3, timeout=60)
def test_sends_posted_long_before_receives_do_not_block():
    """Rank 0 posts all of its sends and then answers on another group before rank 1 posts a receive."""
    links, rank = make_links(True), dist.get_rank()
    side = dist.new_group([0, 1])
    word = torch.zeros(1)
    if rank == 0:
        for i in range(4):
            links.send("SF", tensor(0, "SF", i), f"F{i}")
        dist.send(word + 5, 1, group=side)
    if rank == 1:
        dist.recv(word, 0, group=side)
        assert word.item() == 5
        for i in range(4):
            check_received(links.receive("RF", BOUNDARY, f"F{i}"), 0, "SF", i)
    links.drain()


@ranks(3, timeout=60)
def test_receives_posted_long_before_sends_do_not_block():
    links, rank = make_links(True), dist.get_rank()
    side = dist.new_group([0, 1])
    word = torch.zeros(1)
    if rank == 1:
        tickets = [links.receive("RF", BOUNDARY, f"F{i}") for i in range(4)]
        dist.send(word + 5, 0, group=side)
        for i, ticket in enumerate(tickets):
            check_received(ticket, 0, "SF", i)
    if rank == 0:
        dist.recv(word, 1, group=side)
        for i in range(4):
            links.send("SF", tensor(0, "SF", i), f"F{i}")
    links.drain()


@ranks(3, timeout=60)
def test_what_is_sent_needs_no_gradient_and_no_layout():
    """A transposed view with a gradient arrives as its values."""
    links, rank = make_links(True), dist.get_rank()
    values = torch.arange(64.0).reshape(SHAPE)
    if rank == 0:
        odd = values.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
        assert not odd.is_contiguous()
        links.send("SF", odd, "F0")
    if rank == 1:
        received = links.receive("RF", BOUNDARY, "F0").wait()
        assert received.is_contiguous()
        assert not received.requires_grad
        torch.testing.assert_close(received, values, rtol=0, atol=0)
    links.drain()


@OVERLAP
@ranks(3, timeout=60)
def test_bytes_in_the_ledger(overlap):
    """Each activation and gradient once, at its sender; the first meeting of the pairs is no part of it."""
    links, rank = make_links(overlap), dist.get_rank()
    assert not [row for row in ledger().drain() if row["feature"] == "vocab"]
    up, down = int(rank < 2), int(rank > 0)
    for i in range(2):
        if down:
            links.receive("RF", BOUNDARY, f"F{i}").wait()
        if up:
            links.send("SF", tensor(rank, "SF", i), f"F{i}")
    for i in range(3):
        if up:
            links.receive("RB", BOUNDARY, f"B{i}").wait()
        if down:
            links.send("SB", tensor(rank, "SB", i), f"B{i}")
    links.drain()
    totals = {"send": [0, 0], "recv": [0, 0]}
    for row in ledger().drain():
        if row["feature"] == "vocab":
            totals[row["kind"]][0] += row["bytes"]
            totals[row["kind"]][1] += row["calls"]
    sends, receives = 2 * up + 3 * down, 2 * down + 3 * up
    assert totals == {"send": [sends * BYTES, sends], "recv": [0, receives]}


@ranks(3, timeout=60)
def test_half_precision_and_spans():
    """The boundary's type is what arrives; spans carry the names of the transfers."""
    links, rank = make_links(True), dist.get_rank()
    boundary = Boundary((3,), torch.bfloat16, torch.device("cpu"))
    ticks = iter(range(100))
    clock = Clock(lambda: next(ticks))
    links.trace(clock)
    if rank == 2:
        links.send("SB", torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16), "SB(0)")
    if rank == 1:
        received = links.receive("RB", boundary, "RB(0)").wait()
        assert received.dtype == torch.bfloat16
        assert received.tolist() == [1.0, 2.0, 3.0]
    links.drain()
    names = [(lane, name) for lane, name, _, _ in clock.spans]
    assert names == {0: [], 1: [("p2p-b", "RB(0)")], 2: [("p2p-b", "SB(0)")]}[rank]
    links.trace(None)


@ranks(1, timeout=60)
def test_one_stage_has_no_neighbours():
    links = make_links(True)
    links.drain()
    assert ledger().drain() == []


@ranks(3, timeout=60)
def test_a_v_goes_both_ways_and_turns_on_the_last_rank():
    """Chunk 0 goes along the ranks, chunk 1 back, and each way has a group of its own."""
    place, rank = Placement(3, 2, vee=True), dist.get_rank()
    ways = [(direction, way) for direction in "FB" for way in place.ways(direction)]
    groups = {key: dist.new_group([0, 1, 2]) for key in ways}
    links = Links(groups, place, feature="vocab", overlap=True, on_gpu=False)
    for chunk in (0, 1):
        received = None
        if place.edge("RF", rank, chunk):
            before = place.before(rank, chunk)
            received = (links.receive("RF", BOUNDARY, "F0", chunk), before.rank)
        if received:
            check_received(received[0], received[1], "SF", chunk)
        if place.edge("SF", rank, chunk):
            links.send("SF", tensor(rank, "SF", chunk), "F0", chunk)
    links.drain()
    assert len(ways) == 4
