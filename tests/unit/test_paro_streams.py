"""On which CUDA stream PaRO's hook of a gradient works, with streams that only take notes."""

from contextlib import contextmanager

import pytest
import torch

from megatron_ext.paro.pass_hooks import _ComputeStream


class Notes:
    """The calls in their order, and the current stream."""

    def __init__(self):
        self.calls, self.current = [], "compute"


class Stream:
    def __init__(self, name, notes):
        self.name, self._notes = name, notes

    def wait_stream(self, other):
        self._notes.calls.append(f"{self.name} waits for {other.name}")


class Gradient:
    def __init__(self, notes):
        self._notes = notes

    def record_stream(self, stream):
        self._notes.calls.append(f"gradient used by {stream.name}")


@pytest.fixture
def notes(monkeypatch):
    notes = Notes()
    streams = {name: Stream(name, notes) for name in ("compute", "side")}

    @contextmanager
    def entered(stream):
        before, notes.current = notes.current, stream.name
        yield
        notes.current = before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[notes.current])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return notes


def test_gradients_of_another_stream_are_taken_to_the_one_of_the_passes(notes):
    compute = _ComputeStream()
    compute.take()
    notes.current = "side"
    with compute.entered(Gradient(notes)):
        assert notes.current == "compute"
    assert notes.current == "side"
    assert notes.calls == ["compute waits for side", "gradient used by compute"]


def test_the_stream_of_the_passes_waits_for_nothing(notes):
    compute = _ComputeStream()
    compute.take()
    with compute.entered(Gradient(notes)):
        assert notes.current == "compute"
    assert notes.calls == []


def test_nothing_happens_without_a_gpu():
    compute = _ComputeStream()
    with compute.entered(None):
        pass
