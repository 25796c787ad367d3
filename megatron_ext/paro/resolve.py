"""`--paro-strategy auto`: the planner's choice for a run, before any process group exists.

Every rank plans by itself, from the arguments, the file of bandwidths and the memory of its GPU. Ranks that
come to other choices, since a node has another file or other GPUs, are stopped before the first step: the
launcher compares the choice over all ranks (`paro_agreement`).
"""

import os
import sys
from argparse import Namespace

from megatron_ext.paro.groups import data_parallel_groups, group_size
from megatron_ext.paro.network import Link, Network
from megatron_ext.paro.strategy import STRATEGIES, Level, Strategy

GPU_INSIDE, GPU_NIC = 300e9, 50e9
"""Bytes/s assumed of a GPU inside its node, and of a NIC, one for each GPU, when nothing was measured."""
CPU_INSIDE, CPU_NIC = 2e9, 1.25e9
"""The same for CPU processes that share one NIC."""
USABLE = 0.92
"""Part of a GPU's memory that a plan may fill."""


def resolve(args: Namespace, flags: Namespace) -> None:
    """Set the strategy in both sets of arguments, and say on rank 0 what was chosen and why.

    Raises:
        ValueError: the model cannot be planned, or the file of bandwidths cannot be used.
    """
    from megatron_ext.paro.auto import situation_of_run
    from megatron_ext.paro.planner import choose
    from megatron_ext.record import on_gpu
    from megatron_ext.vocab.memory_description import with_vocabulary

    gpu = on_gpu()
    n, m = len(data_parallel_groups(args)[0]), group_size(args)
    network, source = _network(flags, n // m, m, gpu)
    situation = situation_of_run(
        with_vocabulary(args, "--paro-strategy auto cannot plan; or give a strategy"),
        flags,
        k=n // m,
        m=m,
        network=network,
        gpu=gpu,
        memory_limit=_memory_limit(gpu),
        strategies=candidates(flags),
    )
    name, reason = choose(situation)
    args.paro_strategy = flags.paro_strategy = name
    if int(os.environ.get("RANK", "0")) == 0:
        print(
            f"[megatron_ext] --paro-strategy auto: {name} ({source}): {reason}.", file=sys.stderr, flush=True
        )


def candidates(flags: Namespace) -> tuple[Strategy, ...]:
    """What rules allow with the other features that are on."""
    if getattr(flags, "vocab_parallel", "off") == "off":
        return STRATEGIES
    return tuple(strategy for strategy in STRATEGIES if strategy.params is Level.N)


def _network(flags: Namespace, groups: int, members: int, gpu: bool) -> tuple[Network, str]:
    if flags.paro_bandwidths is not None:
        return _measured(flags.paro_bandwidths, groups, members)
    inside, nic = (GPU_INSIDE, GPU_NIC) if gpu else (CPU_INSIDE, CPU_NIC)
    per_nic = 1 if gpu else members
    network = Network.given(
        Link(0.0, inside), Link(0.0, nic), members=members, ranks_per_nic=per_nic, rails=gpu
    )
    rates = f"{inside / 1e9:g} GB/s inside and {nic / 1e9:g} GB/s per NIC"
    return network, f"{rates} assumed; measure with megatron-ext probe"


def _measured(path: str, groups: int, members: int) -> tuple[Network, str]:
    given = f"--paro-bandwidths {path}"
    try:
        found = Network.read(path)
    except OSError as error:
        raise ValueError(f"{given}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{given}: {error}. Give the file that `megatron-ext probe` wrote.") from None
    world = f"{found.groups} groups of {found.members}"
    if missing := found.missing(groups, members):
        raise ValueError(
            f"{given} has no links {' and '.join(missing)}: it was measured with {world}, and this run has "
            f"{groups} groups of {members}. Probe with its groups."
        )
    source = f"bandwidths of {path}"
    if found.groups and found.members and (found.groups, found.members) != (groups, members):
        source += f", measured with {world}, whose ranks may share NICs otherwise"
    return found, source


def _memory_limit(gpu: bool) -> int | None:
    if not gpu:
        return None
    import torch

    return int(USABLE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
