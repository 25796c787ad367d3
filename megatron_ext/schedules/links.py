"""Point-to-point links of a pipeline rank: activations to the next stage, gradients to the previous one.

Each direction and way (along the ranks, against them, between the ends of a loop) has a process group of its
own, since on NCCL operations of one communicator run in order, and these must not wait for each other;
and two
lanes, one to send and one to receive. Tensors of one group travel in the order of the schedule, which is the
same at both ends.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext import traffic
from megatron_ext.schedules.lane import Clock, Lane, Ticket, make_lane
from megatron_ext.schedules.placement import Placement

P2P = ("SF", "RF", "SB", "RB")
Way = tuple[str, str]
"""(direction "F" or "B", way of placement.py)"""


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
        self,
        groups: Mapping[Way, ProcessGroup],
        place: Placement,
        *,
        feature: str,
        overlap: bool,
        on_gpu: bool,
    ):
        if on_gpu and getattr(torch.distributed.group.WORLD, "bound_device_id", None) is not None:
            # Then transfers of all pairs of a group queue up in one communicator, and a receive that is
            # posted early would hold up the send that must come before it.
            raise RuntimeError(
                "torch.distributed was initialised with device_id, which makes point-to-point transfers of a "
                "process group wait for each other. Leave device_id out of init_process_group."
            )
        needed = [(direction, way) for direction in "FB" for way in place.ways(direction)]
        self._groups = {key: groups[key] for key in needed}
        self._place = place
        self.size = place.p
        self.rank = next(iter(groups.values())).rank()
        self._feature = feature
        self._lanes: dict[tuple[str, str], Lane] = {
            (side + direction, way): make_lane(f"p2p-{direction.lower()}", overlap=overlap, on_gpu=on_gpu)
            for direction, way in needed
            for side in "SR"
        }
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        for (_, way), group in self._groups.items():
            self._connect(group, way, device)

    def send(self, kind: str, tensor: Tensor, name: str, chunk: int = 0) -> Ticket:
        """Send the output of a chunk's forward ("SF") or the input gradient of its backward ("SB")."""
        peer, group, lane = self._link(kind, chunk)
        tensor = tensor.detach()

        def run() -> None:
            traffic.send(tensor.contiguous(), group_dst=peer, group=group, feature=self._feature)

        return lane.submit(run, [tensor], name)

    def receive(self, kind: str, boundary: Boundary, name: str, chunk: int = 0) -> Ticket:
        """Receive a chunk's activation ("RF") or gradient ("RB"); the ticket's result is the tensor."""
        peer, group, lane = self._link(kind, chunk)

        def run() -> Tensor:
            tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device=boundary.device)
            traffic.recv(tensor, group_src=peer, group=group, feature=self._feature)
            return tensor

        return lane.submit(run, (), name)

    def drain(self) -> None:
        """Wait for everything sent and received."""
        for lane in self._lanes.values():
            lane.drain()

    def trace(self, clock: Clock | None) -> None:
        """Record spans with `clock` from now on, or stop."""
        for lane in self._lanes.values():
            lane.clock = clock

    def _link(self, kind: str, chunk: int) -> tuple[int, ProcessGroup, Lane]:
        """The other rank, the group and the lane of a transfer."""
        edge = self._place.edge(kind, self.rank, chunk)
        assert edge is not None, f"{kind} of chunk {chunk} goes nowhere"
        peer = edge.target if kind[0] == "S" else edge.source
        return peer, self._groups[kind[1], edge.way], self._lanes[kind, edge.way]

    def _connect(self, group: ProcessGroup, way: str, device: torch.device) -> None:
        # NCCL makes the communicator of a pair at its first use, which blocks the host until both are there.
        # A schedule may post a receive long before its sender comes, so pairs meet here, even ones first.
        one = torch.zeros(1, device=device)
        pairs = [(lower, lower + 1) for start in (0, 1) for lower in range(start, self.size - 1, 2)]
        if way == "wrap":
            pairs = [(0, self.size - 1)]
        with traffic.label("groups"):
            for lower, upper in pairs:
                meet: dict[int, Callable] = {lower: torch.distributed.send, upper: torch.distributed.recv}
                if self.rank in meet:
                    peer = {"group_dst": upper} if self.rank == lower else {"group_src": lower}
                    meet[self.rank](one, group=group, **peer)
