"""The harness itself: a failing, dying or hanging rank is a failure that says which rank and why."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailed, ranks, run_ranks


@ranks(3)
def test_ranks_talk_to_each_other():
    total = torch.ones(1) * dist.get_rank()
    dist.all_reduce(total)
    assert total.item() == 3


def test_failure_is_raised_with_its_rank():
    @ranks(2)
    def body():
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.barrier()

    with pytest.raises(RanksFailed, match=r"rank 1 exited with 1[\s\S]*ValueError: boom"):
        body()


def test_killed_rank_is_named():
    def body():
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RanksFailed, match=r"rank 0 exited with -11"):
        run_ranks(2, body)


def test_hang_shows_the_stacks_and_leaves_no_process():
    def body():
        time.sleep(300)

    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=r"ranks \[0, 1\] still ran after 1 s[\s\S]*stacks of rank 1[\s\S]*body") as e:
        run_ranks(2, body, timeout=1)
    assert time.monotonic() - begin < 20
    assert "test_ranks.py" in str(e.value)
    with pytest.raises(ChildProcessError):  # all children were reaped
        os.waitpid(-1, os.WNOHANG)


def test_values_come_back_by_rank():
    results = run_ranks(2, lambda: int(os.environ["RANK"]) * 10)
    assert [r.value for r in results] == [0, 10]
