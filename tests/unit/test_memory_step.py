"""Which step is measured, and what belongs to the model and the optimizer."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_ext.memory import MemoryTracker, category
from megatron_ext.memory_step import StepMemory, owned


class Chunk(nn.Module):
    """As Megatron's DDP: gradients lie in one buffer, and `buffers` is not nn.Module's method."""

    def __init__(self, gradients=torch.float32, **options):
        super().__init__()
        self.layer = nn.Linear(10, 5, **options)  # 55 elements
        self.register_buffer("scale", torch.ones(7))
        self.grad_data = torch.zeros(64, dtype=gradients)
        self.layer.weight.main_grad = self.grad_data[:50].view(5, 10)
        self.layer.bias.main_grad = self.grad_data[50:55]
        self.buffers = [SimpleNamespace(grad_data=self.grad_data)]


class Optimizer:
    """As Megatron's wrapper around an optimizer of torch."""

    def __init__(self, params, made: bool = True):
        self.optimizer = torch.optim.Adam(params)
        for param in params:
            if made:  # what Adam's first step makes
                moments = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                self.optimizer.state[param] = {"step": torch.zeros(()), **moments}

    def step(self):
        self.temporary = torch.ones(25)


def sizes(chunks, optimizer) -> dict[str, int]:
    tracker = MemoryTracker("cpu")
    for name, tensors in owned(chunks, optimizer):
        tracker.hold(name, tensors)
    report = tracker.report()
    return {name: report[name] for name in ("weights", "gradients", "optimizer")}


def test_parameters_in_fp32_are_the_optimizers_own():
    chunk = Chunk()
    optimizer = SimpleNamespace(chained_optimizers=[Optimizer(list(chunk.parameters()))])
    found = sizes([chunk], optimizer)
    assert found == {"weights": 4 * (55 + 7), "gradients": 4 * 64, "optimizer": 8 * 55 + 2 * 4}


def test_master_weights_belong_to_the_optimizer():
    chunk = Chunk(dtype=torch.bfloat16)
    masters = [param.detach().float() for param in chunk.parameters()]
    for master, param in zip(masters, chunk.parameters(), strict=True):
        master.grad = param.main_grad  # the same storage as the buffer
    found = sizes([chunk], Optimizer(masters))
    assert found == {"weights": 2 * 55 + 4 * 7, "gradients": 4 * 64, "optimizer": 12 * 55 + 2 * 4}


def test_gradients_of_their_own():
    """Master weights may have gradients in another precision than the buffer's."""
    chunk = Chunk(gradients=torch.bfloat16, dtype=torch.bfloat16)
    masters = [param.detach().float() for param in chunk.parameters()]
    for master in masters:
        master.grad = torch.zeros_like(master)
    found = sizes([chunk], Optimizer(masters, made=False))
    assert found == {"weights": 2 * 55 + 4 * 7, "gradients": 2 * 64 + 4 * 55, "optimizer": 4 * 55}


def test_several_chunks_and_optimizers_and_a_rank_without_parameters():
    chunks = [Chunk(), Chunk()]
    chained = [Optimizer(list(chunk.parameters())) for chunk in chunks]
    stub = SimpleNamespace(optimizer=None)
    optimizer = SimpleNamespace(chained_optimizers=[*chained, stub])
    assert sizes(chunks, optimizer)["optimizer"] == 2 * (8 * 55 + 2 * 4)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr("megatron_ext.record.on_gpu", lambda: False)


def train_step(model, optimizer):
    """An activation, a vocabulary pass, then the optimizer step."""
    hidden = torch.ones(100)
    with category("vocabulary"):
        logits = torch.ones(200)
    optimizer.step()
    return hidden.nbytes + logits.nbytes


def test_one_step_is_measured(on_cpu):
    chunk = Chunk()
    optimizer = Optimizer(list(chunk.parameters()))
    memory = StepMemory(2)
    step = memory._around_train_step(train_step)
    assert step([chunk], optimizer) == 1200
    assert memory.take() is None
    assert "only 1 steps were trained" in memory.missed()
    assert step([chunk], optimizer) == 1200
    measured = memory.take()
    assert memory.take() is None  # handed out once
    assert memory.missed() is None
    assert "step" not in vars(optimizer)
    assert step([chunk], optimizer) == 1200
    assert memory.take() is None
    assert measured["weights"] == 4 * (55 + 7)
    assert measured["activations"] == 400
    assert measured["vocabulary"] == 800
    own = measured["category_peaks"]
    assert own["activations"] == 400
    assert own["other"] - measured["other"] <= 100 <= own["other"]  # what the optimizer step made


def test_tracker_stops_when_the_step_fails(on_cpu):
    def fails(model, optimizer):
        raise KeyError

    chunk = Chunk()
    memory = StepMemory(1)
    with pytest.raises(KeyError):
        memory._around_train_step(fails)([chunk], Optimizer(list(chunk.parameters())))
    assert MemoryTracker._active is None
    assert memory.missed()
