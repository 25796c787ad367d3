"""Lanes on CPU: one operation after another beside the caller, errors, and what is traced.

Lanes are threads, and the parent of forked tests must have none: every case runs in ranks.
"""

import threading
import time

import pytest
import torch

from megatron_ext.schedules.lane import Clock, InlineLane, ThreadLane, make_lane
from tests.ranks import run_ranks

WAIT = 20.0  # seconds until a thread that should come is given up


def in_rank(body):
    """Decorator: run the test in one forked process."""

    def test():
        run_ranks(1, body, timeout=60)

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


@in_rank
def test_submit_returns_at_once():
    lane, gate = ThreadLane("comm"), threading.Event()
    ticket = lane.submit(lambda: gate.wait(WAIT) and 7)
    gate.set()  # reached only because submit does not wait
    assert ticket.wait() == 7
    assert ticket.wait() == 7


@in_rank
def test_operations_run_in_the_order_of_submission():
    lane, ran = ThreadLane("comm"), []

    def run(index):
        time.sleep(0.01 if index % 2 == 0 else 0)
        ran.append(index)
        return index * index

    tickets = [lane.submit(lambda index=index: run(index)) for index in range(10)]
    assert tickets[9].wait() == 81
    assert ran == list(range(10))
    assert [ticket.wait() for ticket in tickets] == [index * index for index in range(10)]


@in_rank
def test_all_run_in_one_other_thread_without_gradients():
    lane = ThreadLane("comm")
    weight = torch.ones(2, requires_grad=True)
    threads = {lane.submit(threading.get_ident).wait() for _ in range(3)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert not lane.submit(lambda: weight * 2, [weight]).wait().requires_grad
    assert lane.submit(lambda: threading.current_thread().name).wait() == "lane-comm"
    assert lane.submit(lambda: threading.current_thread().daemon).wait() is True


@in_rank
def test_lanes_run_beside_each_other():
    one, other, meet = ThreadLane("one"), ThreadLane("other"), threading.Barrier(2)
    tickets = [lane.submit(lambda: meet.wait(WAIT)) for lane in (one, other)]
    assert sorted(ticket.wait() for ticket in tickets) == [0, 1]


@in_rank
def test_drain_waits_for_everything():
    lane, ran = ThreadLane("comm"), []
    lane.drain()
    for index in range(5):
        lane.submit(lambda index=index: (time.sleep(0.01), ran.append(index)))
    lane.drain()
    assert ran == list(range(5))
    lane.drain()


@in_rank
def test_an_error_reaches_the_one_who_waits():
    lane = ThreadLane("comm")
    ticket = lane.submit(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            ticket.wait()


@in_rank
def test_nothing_runs_after_an_error():
    """A rank whose peers are gone must not go on, and every later wait says why."""
    lane, ran = ThreadLane("comm"), []
    before = lane.submit(lambda: "before")

    def fail():
        raise RuntimeError("peer is gone")

    failed = lane.submit(fail)
    later = [lane.submit(lambda index=index: ran.append(index)) for index in range(3)]
    assert before.wait() == "before"
    for ticket in (failed, *later):
        with pytest.raises(RuntimeError, match="peer is gone"):
            ticket.wait()
    with pytest.raises(RuntimeError, match="peer is gone"):
        lane.submit(lambda: ran.append("much later")).wait()
    assert ran == []


@in_rank
def test_drain_raises_the_first_error():
    lane = ThreadLane("comm")
    for text in ("first", "second"):

        def fail(text=text):
            raise RuntimeError(text)

        lane.submit(fail)
    lane.submit(lambda: None)
    with pytest.raises(RuntimeError, match="first"):
        lane.drain()


@in_rank
def test_a_finished_operation_holds_no_tensors():
    """Its function may close over a large tensor, and the ticket lives on."""
    import weakref

    lane, tensor = ThreadLane("comm"), torch.ones(8)
    seen = weakref.ref(tensor)
    ticket = lane.submit(lambda tensor=tensor: float(tensor.sum()), [tensor])
    assert ticket.wait() == 8.0
    del tensor
    lane.submit(lambda: None).wait()  # the thread lets go of the previous one
    assert seen() is None


@in_rank
def test_inline_runs_at_once():
    lane, ran = InlineLane("comm"), []
    weight = torch.ones(2, requires_grad=True)
    first = lane.submit(lambda: ran.append(threading.get_ident()) or weight * 2, [weight])
    assert ran == [threading.get_ident()]
    assert not first.wait().requires_grad
    with pytest.raises(ZeroDivisionError):
        lane.submit(lambda: 1 / 0)
    assert lane.submit(lambda: 3).wait() == 3
    lane.drain()


@in_rank
def test_which_lane():
    assert isinstance(make_lane("comm", overlap=False, on_gpu=False), InlineLane)
    assert isinstance(make_lane("comm", overlap=True, on_gpu=False), ThreadLane)


@in_rank
def test_spans_are_recorded_while_there_is_a_clock():
    for overlap in (False, True):
        lane = make_lane("p2p-f", overlap=overlap, on_gpu=False)
        ticks = iter(range(100))
        lane.submit(lambda: None, name="before").wait()
        clock = lane.clock = Clock(lambda ticks=ticks: next(ticks))
        lane.submit(lambda: None, name="F0").wait()
        lane.submit(lambda: None, name="F1").wait()
        lane.clock = None
        lane.submit(lambda: None, name="after").wait()
        assert clock.spans == [("p2p-f", "F0", 0, 1), ("p2p-f", "F1", 2, 3)]
