"""Progress on stderr: a bar that redraws itself on a terminal, a line every few seconds in a log."""

import time
from collections.abc import Callable
from typing import TextIO

_BAR_WIDTH = 24


class Progress:
    """Shows bytes done of a total, documents, MB/s and the time left.

    Args:
        label: what is going on.
        total_bytes: 100 %.
        stream: a text stream; whether it is a terminal decides the form.
        clock: seconds, for tests.
        log_every: seconds between two lines in a log.
    """

    def __init__(
        self,
        label: str,
        total_bytes: int,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        log_every: float = 5.0,
    ) -> None:
        self.label = label
        self.total_bytes = total_bytes
        self._stream = stream
        self._clock = clock
        self._tty = stream.isatty()
        self._every = 0.1 if self._tty else log_every
        self._start = self._last = clock()
        self._width = 0

    def update(self, done_bytes: int, documents: int) -> None:
        """Report the state; drawn only if the last drawing is old enough."""
        now = self._clock()
        if now - self._last >= self._every:
            self._last = now
            self._draw(self._line(done_bytes, documents, now - self._start, finished=False))

    def finish(self, done_bytes: int, documents: int) -> None:
        """Draw the final state and end the line."""
        self._draw(self._line(done_bytes, documents, self._clock() - self._start, finished=True))
        if self._tty:
            self._stream.write("\n")
            self._stream.flush()

    def _line(self, done_bytes: int, documents: int, seconds: float, finished: bool) -> str:
        share = 1.0 if finished else min(1.0, done_bytes / max(1, self.total_bytes))
        rate = done_bytes / seconds if seconds > 0 else 0.0
        if finished:
            end = f"in {format_seconds(seconds)}"
        else:
            end = f"ETA {format_seconds((self.total_bytes - done_bytes) / rate)}" if rate else "ETA ?"
        filled = round(share * _BAR_WIDTH)
        bar = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] " if self._tty else ""
        done = f"{format_bytes(done_bytes)}/{format_bytes(self.total_bytes)}"
        return (
            f"{self.label} {bar}{100 * share:3.0f}%  {done}  {documents} docs  {rate / 1e6:.1f} MB/s  {end}"
        )

    def _draw(self, line: str) -> None:
        if self._tty:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def format_bytes(count: int) -> str:
    """10521501 -> '10.5 MB'."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    """7 -> '7s', 75 -> '1m15s', 7260 -> '2h01m'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
