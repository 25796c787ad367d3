"""Layouts of packed sequences are read once per microbatch, and never taken from one that has changed."""

import gc

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_ext.wallfacer import packed as module
from megatron_ext.wallfacer.packed import REMEMBERED, PackedLayouts


def params(*ends):
    found = torch.tensor(ends, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=found, cu_seqlens_kv=found)


@pytest.fixture
def reads(monkeypatch):
    """Layouts that were read from the device."""
    found = []
    layout_of = module.layout_of
    monkeypatch.setattr(module, "layout_of", lambda p: found.append(p) or layout_of(p))
    return found


def test_once_for_all_layers(reads):
    layouts, one, two = PackedLayouts(), params(0, 32, 64), params(0, 16, 64)
    for _ in range(2):  # two microbatches in flight
        for layer in ("first", "second", "third"):
            assert layouts.get(one, layer).documents[0].end == 32
            assert layouts.get(two, layer).documents[0].end == 16
        layouts = PackedLayouts()
    assert len(reads) == 4


WRITES = {
    "copy": lambda x: x.copy_(torch.tensor([0, 16, 64])),
    "item": lambda x: x.__setitem__(1, 16),
    "add": lambda x: x.sub_(torch.tensor([0, 16, 0])),
}


@pytest.mark.parametrize("write", WRITES)
def test_tensors_that_are_written_to_between_layers(write):
    layouts, given = PackedLayouts(), params(0, 32, 64)
    assert layouts.get(given, "first").documents[0].end == 32
    WRITES[write](given.cu_seqlens_q)
    assert layouts.get(given, "second").documents[0].end == 16


BEHIND = {
    "data": lambda x: x.data.copy_(torch.tensor([0, 16, 64])),
    "numpy": lambda x: np.copyto(x.numpy(), np.array([0, 16, 64], dtype=np.int32)),
}


@pytest.mark.parametrize("write", BEHIND)
def test_buffers_that_the_next_microbatch_is_written_into(reads, write):
    """Behind torch's back: its count of writes does not change."""
    layouts, given = PackedLayouts(), params(0, 32, 64)
    for layer in ("first", "second"):
        assert layouts.get(given, layer).documents[0].end == 32
    version = given.cu_seqlens_q._version
    BEHIND[write](given.cu_seqlens_q)
    assert given.cu_seqlens_q._version == version
    for layer in ("first", "second"):
        assert layouts.get(given, layer).documents[0].end == 16
    assert len(reads) == 2


def test_other_tensors_in_the_same_object():
    layouts, given = PackedLayouts(), params(0, 32, 64)
    layouts.get(given, "first")
    given.cu_seqlens_q = given.cu_seqlens_kv = torch.tensor([0, 16, 64])
    assert layouts.get(given, "second").documents[0].end == 16


def test_addresses_that_are_used_again():
    """What is remembered is held, so nothing else can have its identity."""
    layouts = PackedLayouts()
    for number in range(3 * REMEMBERED):
        end = 8 * (1 + number % 7)
        assert layouts.get(params(0, end, 64), "first").documents[0].end == end
        gc.collect(0)


def test_inference_tensors(reads):
    """Torch does not count writes to them."""
    with torch.inference_mode():
        given = params(0, 32, 64)
    layouts = PackedLayouts()
    for layer in ("first", "second"):
        assert layouts.get(given, layer).documents[0].end == 32
    assert len(reads) == 2


def test_what_is_refused_is_refused_every_time():
    layouts, given = PackedLayouts(), params(0, 32, 64)
    layouts.get(given, "first")
    given.local_cp_size = 2
    with pytest.raises(ValueError, match="dynamic context parallelism"):
        layouts.get(given, "second")
