"""Measure the links of a running world: passes of two-phase and of flat collectives, at two sizes or more.

All ranks take part in every measurement at the same time, so those that share a NIC share it as in training.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_ext.paro.network import Action, Network, Sample, Scope
from megatron_ext.paro.strategy import Level

if TYPE_CHECKING:
    import torch

    from megatron_ext.paro.collectives import HybridGroups

WARM_UP = 1
ITEMSIZE = 4  # fp32


def measure(groups: "HybridGroups", device: "torch.device", sizes: Sequence[int], repeats: int) -> Network:
    """Links between the ranks of `groups`; every rank gets the same result.

    Args:
        groups: of this rank.
        device: whose tensors they communicate.
        sizes: bytes of whole buffers, two or more different ones.
        repeats: calls of which the median counts, after one that does not.
    """
    grid = groups.grid()
    samples: dict[tuple[Scope, Action], list[Sample]] = {}
    for size in sizes:
        numel = grid.padded(-(-size // ITEMSIZE))
        for key, peers, parts, call in _calls(groups, device, numel):
            if peers:
                seconds = _median(groups, device, call, repeats)
                part = ITEMSIZE * numel // parts
                samples.setdefault(key, []).append(Sample(part, peers, seconds))
    return Network.measured(samples, grid.k, grid.m, "nccl" if device.type == "cuda" else "gloo")


def _calls(
    groups: "HybridGroups", device: "torch.device", numel: int
) -> list[tuple[tuple[Scope, Action], int, int, Callable[[], None]]]:
    """(scope and action, peers, parts of the buffer, call) of every pass."""
    import torch

    from megatron_ext.paro.collectives import make_collectives

    phases = make_collectives("two-phase", groups, feature="probe")
    ring = make_collectives("flat", groups, feature="probe")
    grid = groups.grid()
    k, m, n = grid.k, grid.m, grid.n
    whole = torch.zeros(numel, device=device)
    slice_ = whole[grid.within(Level.I, Level.N, numel)]
    return [
        (("members", "gather"), m - 1, m, lambda: phases.gather(whole, Level.I, Level.N)),
        (("members", "reduce"), m - 1, m, lambda: phases.scatter_in_group(whole)),
        (("groups", "gather"), k - 1, n, lambda: phases.gather(slice_, Level.G, Level.I)),
        (("groups", "reduce"), k - 1, n, lambda: phases.sync(slice_, Level.I, Level.G)),
        (("flat", "gather"), n - 1, n, lambda: ring.gather(whole, Level.G, Level.N)),
        (("flat", "reduce"), n - 1, n, lambda: ring.sync(whole, Level.N, Level.G)),
    ]


def _median(groups: "HybridGroups", device: "torch.device", call: Callable[[], None], repeats: int) -> float:
    """Seconds of one call on the slowest rank."""
    times = [_seconds(groups, device, call) for _ in range(WARM_UP + repeats)]
    return statistics.median(times[WARM_UP:])


def _seconds(groups: "HybridGroups", device: "torch.device", call: Callable[[], None]) -> float:
    import torch
    import torch.distributed as dist

    _wait(device)
    dist.barrier(group=groups.flat)
    start = time.perf_counter()
    call()
    _wait(device)
    slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=groups.flat)
    return slowest.item()


def _wait(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
