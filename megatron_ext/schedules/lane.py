"""Lanes: where communication runs beside compute, one operation after another.

A lane executes submitted functions in order. On a GPU it is a CUDA stream; on CPU it is a thread, since
gloo's blocking calls release the interpreter lock. `InlineLane` runs at once and blocks: no overlap.

    ticket = lane.submit(function, inputs)      # returns at once
    result = ticket.wait()                      # on a GPU only the current stream waits
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Function = Callable[[], Any]


class Ticket(Protocol):
    """An operation that was submitted."""

    def wait(self) -> Any:
        """Its result, once it has ended (on a GPU: once the current stream may use it). Raises its error."""


class Lane(Protocol):
    """Executes operations in the order of their submission."""

    def submit(self, function: Function, inputs: Sequence[Tensor] = (), name: str = "") -> Ticket:
        """Queue `function`; `inputs` are the tensors of the current stream that it reads."""

    def drain(self) -> None:
        """Wait for everything submitted; raises the first error."""


class Clock:
    """Collects spans (lane, name, start, end) of one traced step; None is passed where nothing is traced."""

    def __init__(self, now: Callable[[], Any], cpu: Callable[[], float] | None = None):
        self.now = now
        self.spans: list[tuple[str, str, Any, Any]] = []
        self.cpu: dict[str, float] = {}
        """Seconds of processor time by compute pass, where `cpu` tells the time of the calling thread: other
        processes of a busy machine do not count."""
        self._cpu = cpu

    @contextlib.contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """The span of a compute pass."""
        start, cpu = self.now(), self._cpu() if self._cpu else 0.0
        yield
        if self._cpu:
            self.cpu[name] = self._cpu() - cpu
        self.add("compute", name, start, self.now())

    def add(self, lane: str, name: str, start: Any, end: Any) -> None:
        """One finished span; appending is atomic, so lanes need no lock."""
        self.spans.append((lane, name, start, end))


class _Done:
    def __init__(self, result: Any):
        self._result = result

    def wait(self) -> Any:
        return self._result


class InlineLane:
    """Runs every operation at once, in the caller's thread and stream."""

    def __init__(self, name: str):
        self.name = name
        self.clock: Clock | None = None

    def submit(self, function: Function, inputs: Sequence[Tensor] = (), name: str = "") -> Ticket:
        """Run `function` now."""
        clock = self.clock
        start = clock.now() if clock else None
        with torch.no_grad():
            result = function()
        if clock:
            clock.add(self.name, name, start, clock.now())
        return _Done(result)

    def drain(self) -> None:
        """Nothing is ever left."""


class _ThreadTicket:
    def __init__(self, function: Function, name: str, clock: Clock | None):
        self.function: Function | None = function
        self.name = name
        self.clock = clock
        self.ended = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self, lane: str) -> None:
        start = self.clock.now() if self.clock else None
        try:
            with torch.no_grad():
                self.result = self.function()
        except BaseException as error:
            self.error = error
        self.function = None  # lets go of the tensors that it holds
        if self.clock:
            self.clock.add(lane, self.name, start, self.clock.now())
        self.ended.set()

    def wait(self) -> Any:
        self.ended.wait()
        if self.error is not None:
            raise self.error
        return self.result


class ThreadLane:
    """A thread that runs blocking operations; for gloo.

    The thread is a daemon: a rank that fails must be able to exit while its lane waits for a dead peer. After
    an error nothing more is started, and everything queued fails with that error.
    """

    def __init__(self, name: str):
        self.name = name
        self.clock: Clock | None = None
        self._queue: queue.SimpleQueue[_ThreadTicket] = queue.SimpleQueue()
        self._last: _ThreadTicket | None = None
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"lane-{name}", daemon=True)
        self._thread.start()

    def submit(self, function: Function, inputs: Sequence[Tensor] = (), name: str = "") -> Ticket:
        """Queue `function` for the thread."""
        ticket = _ThreadTicket(function, name, self.clock)
        self._last = ticket
        self._queue.put(ticket)
        return ticket

    def drain(self) -> None:
        """Wait until the thread has nothing to do; raises the first error."""
        if self._last is not None:
            self._last.wait()
            self._last = None

    def _work(self) -> None:
        while True:
            ticket = self._queue.get()
            if self._failed is not None:
                ticket.error, ticket.function = self._failed, None
                ticket.ended.set()
                continue
            ticket.run(self.name)
            self._failed = ticket.error


class _StreamTicket:
    def __init__(self, result: Any, event: Any):
        self._result = result
        self._event = event

    def wait(self) -> Any:
        stream = torch.cuda.current_stream()
        stream.wait_event(self._event)
        for tensor in _tensors(self._result):
            tensor.record_stream(stream)
        return self._result


class StreamLane:
    """A CUDA stream of its own; the host never waits."""

    def __init__(self, name: str):
        self.name = name
        self.clock: Clock | None = None
        self._stream = torch.cuda.Stream()

    def submit(self, function: Function, inputs: Sequence[Tensor] = (), name: str = "") -> Ticket:
        """Enqueue `function` behind what the current stream has been given so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        for tensor in inputs:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream), torch.no_grad():
            start = self.clock.now() if self.clock else None
            result = function()
            if self.clock:
                self.clock.add(self.name, name, start, self.clock.now())
            event = self._stream.record_event()
        return _StreamTicket(result, event)

    def drain(self) -> None:
        """Let the current stream wait for everything enqueued."""
        torch.cuda.current_stream().wait_stream(self._stream)


def make_lane(name: str, *, overlap: bool, on_gpu: bool) -> Lane:
    """The lane of this device."""
    if not overlap:
        return InlineLane(name)
    return StreamLane(name) if on_gpu else ThreadLane(name)


def _tensors(result: Any) -> list[Tensor]:
    """Tensors in a result: a tensor, a tuple or list of results, or an object with tensor attributes."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in _tensors(item)]
    fields = vars(result).values() if hasattr(result, "__dict__") else ()
    return [value for value in fields if isinstance(value, Tensor)]
