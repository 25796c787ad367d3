"""Worker processes that give their results in order and never outlive the tool."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_ext.tools.data_errors import DataError


class Workers:
    """A pool of `count` fresh processes (spawned, so that torch in this one does not matter).

    Used as a context manager. What is submitted must be picklable. A worker that dies, killed for memory for
    instance, is a DataError and not a hang. Leaving by an exception ends the workers at once, and so does
    the death of this process.
    """

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._count = count
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(
            count, mp_context=context, initializer=_end_with, initargs=(lifeline,)
        )

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is not None:
            self._lifeline.close()
        self._pool.shutdown(cancel_futures=True)
        self._lifeline.close()

    def submit(self, function: Callable, *args: Any) -> Future:
        """Start `function(*args)` in a worker."""
        # Workers are started in here and inherit the mask: Ctrl-C is for this process to handle.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._pool.submit(function, *args)
        except BrokenProcessPool as error:
            raise _died() from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def result(self, future: Future) -> Any:
        """Wait for a result.

        Raises:
            DataError: a worker died.
        """
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise _died() from error

    def map(self, function: Callable, tasks: Iterable[tuple]) -> Iterator[Any]:
        """Results of `function(*task)` in order; tasks are drawn only as workers get free."""
        pending: deque[Future] = deque()
        for task in tasks:
            pending.append(self.submit(function, *task))
            if len(pending) > 4 * self._count:
                yield self.result(pending.popleft())
        while pending:
            yield self.result(pending.popleft())


def _died() -> DataError:
    return DataError(
        "a worker process died, most likely killed for lack of memory; use fewer --workers or split very "
        "long documents."
    )


def _end_with(lifeline: Connection) -> None:
    """Let this process end as soon as the other end of the pipe is closed."""

    def watch() -> None:
        wait([lifeline])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
