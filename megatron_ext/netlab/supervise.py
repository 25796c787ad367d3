"""Watches ranks: passes their output on, notes how each ends, and ends the others when one has failed."""

import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ext.netlab.ranks import Rank

LINGER = 3.0  # seconds in which the other ranks may still say what they have to say, once one has failed
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
STACKS = 0.5  # seconds in which ranks write their stacks
TIMED_OUT = 124  # as timeout(1) exits

OnLine = Callable[[Rank, int, str], None]  # rank, stream (1 stdout, 2 stderr), line without its end


@dataclass
class Outcome:
    """How the ranks ended: the first that failed, or why all were ended."""

    failed: Rank | None = None
    timed_out: float | None = None  # seconds
    still_running: tuple[int, ...] = ()  # when the time was over
    signal: int | None = None

    @property
    def exit_code(self) -> int:
        """0, the code of the first rank that failed (128 + signal if one killed it), 124 or 128 + signal."""
        if self.failed is not None:
            assert self.failed.exit_code is not None
            return self.failed.exit_code if self.failed.exit_code > 0 else 128 - self.failed.exit_code
        if self.timed_out is not None:
            return TIMED_OUT
        return 0 if self.signal is None else 128 + self.signal

    def explain(self) -> str:
        """One line for the user; empty when all went well."""
        if self.failed is not None:
            return self.failed.cause()
        if self.timed_out is not None:
            running = ", ".join(map(str, self.still_running))
            return f"ranks {running} still ran after {self.timed_out:g} s, the limit of --timeout"
        return "" if self.signal is None else f"stopped by {signal.Signals(self.signal).name}"


def supervise(
    ranks: Sequence[Rank],
    on_line: OnLine,
    *,
    timeout: float | None = None,
    stop: "StopSignals | None" = None,
    stacks: bool = False,
) -> Outcome:
    """Wait until all ranks have ended, whatever happens; returns how they did.

    Args:
        timeout: seconds for all of it; None for no limit.
        stop: ends the ranks when one of its signals comes.
        stacks: ranks write their stacks on SIGUSR1; ask for that when the time is over.
    """
    with selectors.DefaultSelector() as selector:
        watch = _Watch(selector, ranks, on_line, stop)
        try:
            watch.until(lambda: bool(watch.outcome.exit_code), timeout)
            _end_the_rest(watch, timeout, stacks)
            watch.drain()
        finally:
            for rank in watch.alive():  # only where this function itself failed
                rank.signal(signal.SIGKILL)
                rank.exit_code = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
            for rank in ranks:
                for descriptor in (rank.pidfd, *rank.outputs):
                    os.close(descriptor)
    return watch.outcome


def _end_the_rest(watch: "_Watch", timeout: float | None, stacks: bool) -> None:
    """Nothing where all ranks have ended; else one has failed, or the time is over, or a signal came."""
    outcome = watch.outcome
    if watch.alive() and not outcome.exit_code:
        outcome.timed_out = timeout
        outcome.still_running = tuple(rank.rank for rank in watch.alive())
        if stacks:
            watch.signal(signal.SIGUSR1)
            watch.until(lambda: False, STACKS)
    elif outcome.failed is not None:
        watch.until(lambda: outcome.signal is not None, LINGER)
    watch.signal(signal.SIGTERM)
    watch.until(lambda: False, GRACE)
    watch.signal(signal.SIGKILL)
    watch.until(lambda: False, None)


class _Watch:
    """The event loop of one `supervise`."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        ranks: Sequence[Rank],
        on_line: OnLine,
        stop: "StopSignals | None",
    ) -> None:
        self.selector = selector
        self.ranks = ranks
        self.on_line = on_line
        self.outcome = Outcome()
        self.stop = stop
        for rank in ranks:
            for descriptor in (rank.pidfd, *rank.outputs):
                selector.register(descriptor, selectors.EVENT_READ, rank)
        if stop is not None:
            selector.register(stop.pipe, selectors.EVENT_READ, None)

    def alive(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.exit_code is None]

    def signal(self, number: int) -> None:
        for rank in self.alive():
            rank.signal(number)

    def until(self, done: Callable[[], bool], seconds: float | None) -> None:
        """Handle events until all ranks have ended, `done` holds or the time is over."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while self.alive() and not done():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            for key, _ in self.selector.select(left):
                self._handle(key.fd, key.data)

    def _handle(self, descriptor: int, rank: Rank | None) -> None:
        if rank is None:
            assert self.stop is not None
            self.outcome.signal = self.outcome.signal or self.stop.read()
        elif descriptor == rank.pidfd:
            self._ended(rank)
        else:
            self._read(rank, descriptor)

    def _ended(self, rank: Rank) -> None:
        self.selector.unregister(rank.pidfd)
        for descriptor in rank.outputs:
            self._read(rank, descriptor)
        rank.exit_code = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
        if rank.exit_code != 0 and self.outcome.exit_code == 0:  # the first; it may end the others
            self.outcome.failed = rank

    def _read(self, rank: Rank, descriptor: int) -> None:
        """Everything that a pipe holds now; its end unregisters it."""
        while True:
            try:
                data = os.read(descriptor, 65536)
            except BlockingIOError:
                return
            if not data:
                if descriptor in self.selector.get_map():
                    self.selector.unregister(descriptor)
                return
            *lines, rank.partial[descriptor] = (rank.partial.get(descriptor, b"") + data).split(b"\n")
            for line in lines:
                self._line(rank, descriptor, line)

    def _line(self, rank: Rank, descriptor: int, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        stream = rank.outputs[descriptor]
        if stream == 2 and text.strip():
            rank.last_line = text.strip()
        self.on_line(rank, stream, text)

    def drain(self) -> None:
        """What is left in the pipes after the end, and lines without an end."""
        for rank in self.ranks:
            for descriptor in rank.outputs:
                self._read(rank, descriptor)
                if rest := rank.partial.pop(descriptor, b""):
                    self._line(rank, descriptor, rest)


class StopSignals:
    """While entered, SIGINT, SIGTERM and SIGHUP only make `pipe` readable instead of ending the process."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __enter__(self) -> "StopSignals":
        self.pipe, self._write = os.pipe()
        for descriptor in (self.pipe, self._write):
            os.set_blocking(descriptor, False)
        self._wakeup = signal.set_wakeup_fd(self._write)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in self.NUMBERS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.pipe)
        os.close(self._write)

    def read(self) -> int | None:
        """The first of these signals that came; None if it was another that the caller handles."""
        return next((number for number in os.read(self.pipe, 4096) if number in self.NUMBERS), None)
