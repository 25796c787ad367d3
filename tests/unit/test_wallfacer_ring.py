"""What goes round: hops start before computation and carry what they should; buffers come back."""

import itertools

import pytest
import torch

from megatron_ext.wallfacer.chunk import run
from megatron_ext.wallfacer.comm import Pending, add_up, exchange
from megatron_ext.wallfacer.ring import FollowingSum, circulate
from megatron_ext.wallfacer.rows import FEW, sort_rows, unsort_rows
from megatron_ext.wallfacer.scratch import Scratch
from megatron_ext.wallfacer.sequence import gathered, packed, whole

CPU = torch.device("cpu")


class _Ring:
    """Ranks of a ring in one process: hop number i arrives when all ranks have started theirs."""

    def __init__(self, size: int):
        self.size, self.log = size, []
        self._started: list[list[tuple[list, list, int]]] = [[] for _ in range(size)]
        self._done = 0

    def hop(self, rank: int):
        def start(sends, receives, distance):
            self.log.append((rank, "start"))
            self._started[rank].append((sends, receives, distance))
            while all(len(started) > self._done for started in self._started):
                self._deliver([started[self._done] for started in self._started])
                self._done += 1
            return Pending(finish=lambda: self.log.append((rank, "wait")))

        return start

    def _deliver(self, hops):
        taken = [[x.clone() for x in sends] for sends, _, _ in hops]
        for rank, (_, receives, distance) in enumerate(hops):
            for buffer, value in zip(receives, taken[(rank - distance) % self.size], strict=True):
                buffer.copy_(value)


@pytest.mark.parametrize("hops", [(0, 1, 2, 3, 4), (0, 2), (1, 4), (3,), (0,), ()])
def test_circulation(hops):
    ring = _Ring(5)
    own = [[torch.full((2,), float(rank)), torch.full((1,), float(-rank))] for rank in range(5)]
    runs = [
        circulate(ring.hop(rank), mine, [[torch.empty_like(x) for x in mine], mine], hops)
        for rank, mine in enumerate(own)
    ]
    for hop in hops:
        here = [next(steps) for steps in runs]
        for rank, (first, second) in enumerate(here):
            assert first.tolist() == [(rank - hop) % 5] * 2
            assert second.item() == -((rank - hop) % 5)
    assert [next(steps, None) for steps in runs] == [None] * 5


def test_hops_start_before_computation_and_end_after_it():
    ring = _Ring(1)
    own = [torch.zeros(1)]
    for _ in circulate(ring.hop(0), own, [[torch.zeros(1)], own], (0, 1, 2)):
        ring.log.append((0, "use"))
    assert [what for _, what in ring.log] == ["start", "use", "wait", "start", "use", "wait", "use"]


@pytest.mark.parametrize("hops", [(0, 1, 2, 3), (0, 1, 3), (1, 2), (2,), ()])
def test_sums_follow(hops):
    size = 4
    ring = _Ring(size)
    boxes = [(torch.full((2,), 9.0), torch.full((2,), 9.0)) for _ in range(size)]
    sums = [FollowingSum(ring.hop(rank), *boxes[rank], hops) for rank in range(size)]
    for _ in hops:
        for rank in range(size):
            sums[rank].add(torch.full((2,), 10.0**rank))
    for rank in range(size):
        last = hops[-1] if hops else 0
        home = rank - last
        expected = sum(10.0 ** ((home + hop) % size) for hop in hops)
        assert sums[rank].result().tolist() == [expected, expected]


def test_only_part_may_be_the_outbox():
    outbox = torch.ones(2)
    total = FollowingSum(_Ring(1).hop(0), outbox, outbox, (0,))
    total.add(outbox)
    assert total.result() is outbox
    assert outbox.tolist() == [1.0, 1.0]


def test_turns_of_chunks():
    log = []

    def chunk(name: str):
        for stage in range(3):
            log.append(f"{name}{stage}")
            yield

    run(chunk(name) for name in "abc")
    assert log == "a0 b0 a1 c0 b1 a2 c1 b2 c2".split()


def test_what_stays_is_copied():
    sent, received = torch.arange(3.0), torch.empty(3)
    exchange([(sent, 0)], [(received, 0)], None).wait()
    assert torch.equal(sent, received)


def test_sums_in_order():
    parts = torch.tensor([[1.0, 1e8], [1.0, 1.0], [1.0, -1e8]])
    total = torch.empty(2)
    add_up(total, parts)
    assert total.tolist() == [3.0, 0.0]  # the 1 is lost in 1e8, every time


def _cases():
    many = packed(list(range(0, 8 * 30 + 1, 8)))
    for layout, ranks in itertools.product(
        (whole(64), many, whole(64, "contiguous")), [(0, 1), (1, 3), (2,)]
    ):
        yield layout, gathered(layout, ranks, 4), ranks


@pytest.mark.parametrize(("layout", "rows", "ranks"), list(_cases()))
def test_rows_are_sorted_and_back(layout, rows, ranks):
    spans = [span for rank in ranks for span in layout.spans(rank, 4)]
    positions = torch.cat([torch.arange(start, start + length) for start, length in spans])
    buffer = torch.stack((positions, -positions), dim=1).float().view(len(positions), 1, 1, 2)
    by_position = sort_rows(buffer, rows, torch.empty_like(buffer))
    assert by_position[:, 0, 0, 0].tolist() == sorted(positions.tolist())
    assert torch.equal(unsort_rows(by_position, rows, torch.empty_like(buffer)), buffer)
    share = torch.arange(len(positions)).float().view(-1, 1, 1)
    order = positions.argsort().argsort().float()
    half = unsort_rows(by_position, rows, torch.empty_like(buffer, dtype=torch.bfloat16), share)
    assert torch.equal(half, (buffer * order.view(-1, 1, 1, 1)).bfloat16())


def test_many_slices_go_through_an_index():
    sizes = [len(rows.slices) for _, rows, _ in _cases()]
    assert min(sizes) == 1
    assert max(sizes) > FEW


def test_buffers():
    scratch = Scratch()
    scratch.expect("a")
    with scratch.lease(CPU) as lease:
        first = lease.take((2, 3), torch.float32)
        second = lease.zeros((4,), torch.float64)
        assert lease.owns(first)
        assert not lease.owns(torch.empty(6))
        assert second.tolist() == [0.0] * 4
        pointers = {first.data_ptr(), second.data_ptr()}
        lease.drop(first)
        lease.drop(first)
        lease.drop(torch.empty(1))
        again = lease.take((6,), torch.float32)
        assert again.data_ptr() in pointers
        lease.keep_only(again)
        assert not lease.owns(second)
    assert scratch.peak_bytes == 24 + 32
    with scratch.lease(CPU) as lease:
        assert lease.take((3, 2), torch.float32).data_ptr() in pointers
        assert lease.take((3, 2), torch.float32).data_ptr() not in pointers
    scratch.expect("b")
    assert not scratch._free
    assert scratch._in_use == 0
