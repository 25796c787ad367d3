"""The progress display on a terminal and in a log."""

import io

import pytest

from megatron_ext.tools.data_progress import Progress, format_bytes, format_seconds


class _Terminal(io.StringIO):
    def isatty(self):
        return True


class _Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_log_gets_a_line_every_few_seconds():
    stream, clock = io.StringIO(), _Clock()
    progress = Progress("encoding", 40_000_000, stream, clock=clock, log_every=5.0)
    for second in range(12):
        clock.now = 100.0 + second
        progress.update(2_000_000 * second, second)
    progress.finish(40_000_000, 20)
    assert stream.getvalue() == (
        "encoding  25%  10.0 MB/40.0 MB  5 docs  2.0 MB/s  ETA 15s\n"
        "encoding  50%  20.0 MB/40.0 MB  10 docs  2.0 MB/s  ETA 10s\n"
        "encoding 100%  40.0 MB/40.0 MB  20 docs  3.6 MB/s  in 11s\n"
    )


def test_a_terminal_gets_one_line_that_is_redrawn():
    stream, clock = _Terminal(), _Clock()
    progress = Progress("reading", 1000, stream, clock=clock)
    clock.now += 1
    progress.update(500, 10_000_000)
    clock.now += 0.01
    progress.update(501, 10_000_000)
    clock.now += 1
    progress.finish(1000, 3)
    first, second = stream.getvalue().removeprefix("\r").split("\r")
    assert first.startswith("reading [############............]  50%  500 B/1.0 kB  10000000 docs")
    assert second.startswith("reading [########################] 100%  1.0 kB/1.0 kB  3 docs")
    assert second.endswith("\n")
    assert len(second) - 1 >= len(first), "a shorter line must cover the longer one before it"


def test_nothing_done_yet_has_no_estimate():
    stream, clock = io.StringIO(), _Clock()
    progress = Progress("reading", 1000, stream, clock=clock)
    clock.now += 60
    progress.update(0, 0)
    assert stream.getvalue().endswith("ETA ?\n")


def test_empty_total_does_not_divide_by_zero():
    stream, clock = io.StringIO(), _Clock()
    progress = Progress("reading", 0, stream, clock=clock)
    clock.now += 60
    progress.update(0, 0)
    progress.finish(0, 0)
    assert "100%" in stream.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (10_521_501, "10.5 MB"), (2e9, "2.0 GB")],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "7s"), (59.6, "1m00s"), (75, "1m15s"), (7260, "2h01m")])
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text
