"""Point-to-point links of a pipeline rank: activations to the next stage, gradients to the previous one.

Each direction has a process group of its own (on NCCL, operations of one communicator run in order, and the
two directions must not wait for each other) and two lanes, one to send and one to receive. Tensors of one
direction travel in the order of the schedule, which is the same at both ends.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext import traffic
from megatron_ext.schedules.lane import Clock, Lane, Ticket, make_lane

P2P = ("SF", "RF", "SB", "RB")


@dataclass(frozen=True)
class Boundary:
    """What passes between two stages: shape `[s, b, h]` (s over tp with sequence parallelism), and its
    type."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Links:
    """Links of one rank; group ranks are pipeline ranks. Collective: all ranks of the groups construct it."""

    def __init__(
        self, forward: ProcessGroup, backward: ProcessGroup, *, feature: str, overlap: bool, on_gpu: bool
    ):
        if on_gpu and getattr(torch.distributed.group.WORLD, "bound_device_id", None) is not None:
            # Then transfers of all pairs of a group queue up in one communicator, and a receive that is
            # posted early would hold up the send that must come before it.
            raise RuntimeError(
                "torch.distributed was initialised with device_id, which makes point-to-point transfers of a "
                "process group wait for each other. Leave device_id out of init_process_group."
            )
        self.rank, self.size = forward.rank(), forward.size()
        self._feature = feature
        self._groups = {"F": forward, "B": backward}
        self._lanes: dict[str, Lane] = {
            kind: make_lane(f"p2p-{kind[1].lower()}", overlap=overlap, on_gpu=on_gpu) for kind in P2P
        }
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        for group in self._groups.values():
            self._connect(group, device)

    def send(self, kind: str, tensor: Tensor, name: str) -> Ticket:
        """Send the output of a forward ("SF") or the input gradient of a backward ("SB")."""
        peer = self.rank + 1 if kind == "SF" else self.rank - 1
        group = self._groups[kind[1]]
        tensor = tensor.detach()

        def run() -> None:
            traffic.send(tensor.contiguous(), group_dst=peer, group=group, feature=self._feature)

        return self._lanes[kind].submit(run, [tensor], name)

    def receive(self, kind: str, boundary: Boundary, name: str) -> Ticket:
        """Receive an activation ("RF") or a gradient ("RB"); the ticket's result is the tensor."""
        peer = self.rank - 1 if kind == "RF" else self.rank + 1
        group = self._groups[kind[1]]

        def run() -> Tensor:
            tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device=boundary.device)
            traffic.recv(tensor, group_src=peer, group=group, feature=self._feature)
            return tensor

        return self._lanes[kind].submit(run, (), name)

    def drain(self) -> None:
        """Wait for everything sent and received."""
        for lane in self._lanes.values():
            lane.drain()

    def trace(self, clock: Clock | None) -> None:
        """Record spans with `clock` from now on, or stop."""
        for lane in self._lanes.values():
            lane.clock = clock

    def _connect(self, group: ProcessGroup, device: torch.device) -> None:
        # NCCL makes the communicator of a pair at its first use, which blocks the host until both are there.
        # A schedule may post a receive long before its sender comes, so pairs meet here, even ones first.
        one = torch.zeros(1, device=device)
        with traffic.label("groups"):
            for lower in (*range(0, self.size - 1, 2), *range(1, self.size - 1, 2)):
                meet: dict[int, Callable] = {lower: torch.distributed.send, lower + 1: torch.distributed.recv}
                if self.rank in meet:
                    peer = {"group_dst": lower + 1} if self.rank == lower else {"group_src": lower}
                    meet[self.rank](one, group=group, **peer)
