"""Loss reports between pipeline ranks: small objects, once per step.

Stock looks for them on the last pipeline rank, and in a V the loss is on the first one.
"""

import pickle
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.groups import device_of


def send(value: Any, target: int, group: ProcessGroup) -> None:
    """Send a small object of CPU copies."""
    data = pickle.dumps(_on(value, torch.device("cpu")))
    device = device_of(group)
    for tensor in (torch.tensor([len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8)):
        torch.distributed.send(tensor.to(device), group_dst=target, group=group)


def receive(source: int, group: ProcessGroup, device: torch.device) -> Any:
    """What `source` sent, with all tensors on `device`."""
    size = torch.zeros(1, dtype=torch.int64, device=device_of(group))
    torch.distributed.recv(size, group_src=source, group=group)
    data = torch.empty(int(size.item()), dtype=torch.uint8, device=size.device)
    torch.distributed.recv(data, group_src=source, group=group)
    return _on(pickle.loads(data.cpu().numpy().tobytes()), device)


def _on(value: Any, device: torch.device) -> Any:
    """The same with all tensors on `device`."""
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, dict):
        return {key: _on(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on(item, device) for item in value)
    return value
