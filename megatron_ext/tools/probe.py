"""megatron-ext probe: latency and bandwidth inside and between groups of the ranks of a running world.

torchrun --nproc-per-node 8 --nnodes 2 ... -m megatron_ext probe --output bandwidths.json
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext import problems
from megatron_ext.paro.groups import ranks_per_node
from megatron_ext.paro.network import ACTIONS, SCOPES, Network
from megatron_ext.tools.compare_text import grid
from megatron_ext.tools.compare_units import human_bytes, human_time
from megatron_ext.tools.plan_units import SIZE_EXAMPLE, parse_size, rate_text

if TYPE_CHECKING:
    from megatron_ext.paro.collectives import HybridGroups

EXIT_OK = 0
DEFAULT_SIZES = ("1MiB", "16MiB")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TITLES = {"members": "inside groups", "groups": "between groups", "flat": "over all ranks, flat"}
_EPILOG = """\
Start it as a training job is started, on every rank, on the nodes that will train:

    torchrun --nproc-per-node 8 --nnodes 2 ... -m megatron_ext probe --output bandwidths.json
    megatron-ext plan paro --bandwidths bandwidths.json ...

All ranks communicate at the same time, so that those that share a NIC share it here, too. `gather` is an
all-gather, `reduce` a reduce-scatter as --paro-comm two-phase and flat make them, in fp32.

Exit code: 0, or 2 where arguments or the environment are wrong.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ext probe",
        description="Measure latency and bandwidth inside and between groups of ranks, for `megatron-ext "
        "plan paro` and --paro-strategy auto.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--group-size", metavar="M", help="consecutive ranks per group (default: those of a node)"
    )
    parser.add_argument(
        "--sizes", nargs="+", metavar="SIZE", default=DEFAULT_SIZES,
        help=f"of buffers, two or more (default {' '.join(DEFAULT_SIZES)})",
    )  # fmt: skip
    parser.add_argument("--repeats", metavar="N", default="5", help="calls; the median counts (default 5)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        default=Path("bandwidths.json"),
        help="(default bandwidths.json)",
    )
    parser.add_argument("--cpu", action="store_true", help="measure gloo between CPUs")
    return parser


def main(argv: list[str]) -> int:
    """Measure on every rank; rank 0 prints and writes. Returns 0; prints what is wrong and exits with 2."""
    args = _parser().parse_args(argv)
    m, sizes, repeats = _checked(args, os.environ)
    network = _measure(m, sizes, repeats, cpu=args.cpu)
    if os.environ["RANK"] == "0":
        print(report(network))
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(network.to_json() + "\n", encoding="utf-8")
        print(f"written: {args.output}")
    return EXIT_OK


def _checked(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[int, list[int], int]:
    """Group size, sizes in bytes and repeats."""
    found = []
    missing = [name for name in _NEEDED if name not in environ]
    if missing:
        problems.refuse(
            [
                f"{', '.join(missing)} not set: a probe runs on all ranks of a job. Start it with torchrun: "
                "torchrun --nproc-per-node N ... -m megatron_ext probe."
            ]
        )
    world = int(environ["WORLD_SIZE"])
    m = _group_size(args.group_size, world, environ, found)
    sizes = [parse_size(text) for text in args.sizes]
    found += [
        f"--sizes {text}: that is no size. Write it as {SIZE_EXAMPLE}."
        for text, size in zip(args.sizes, sizes, strict=True)
        if not size
    ]
    if None not in sizes and len(set(sizes)) < 2:
        found.append(
            f"--sizes {' '.join(args.sizes)}: one size cannot tell latency from bandwidth. Give two."
        )
    if not (args.repeats.isascii() and args.repeats.isdigit() and int(args.repeats)):
        found.append(f"--repeats {args.repeats}: it must be a whole number of 1 or more. Give such a number.")
    if world == 1:
        found.append("the world is one rank: there is no link to measure. Start two ranks or more.")
    if not args.cpu and not _has_gpu():
        found.append("no GPU is visible: add --cpu to measure gloo between CPUs, or run where GPUs are.")
    if found:
        problems.refuse(found)
    return m, sizes, int(args.repeats)


def _group_size(text: str | None, world: int, environ: Mapping[str, str], found: list[str]) -> int:
    where = f"--group-size {text}" if text is not None else "ranks per node"
    if text is None:
        try:
            text = str(ranks_per_node(environ, world))
        except ValueError as reason:
            found.append(f"groups are the ranks of a node: {reason}. Or set --group-size.")
            return 1
    if text.isascii() and text.isdigit() and int(text) and world % int(text) == 0:
        return int(text)
    sizes = ", ".join(str(size) for size in range(1, world + 1) if world % size == 0)
    found.append(
        f"{where}: {world} ranks cannot be cut into groups of {text}. Use --group-size with one of {sizes}."
    )
    return 1


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _measure(m: int, sizes: list[int], repeats: int, *, cpu: bool) -> Network:
    import torch
    import torch.distributed as dist

    from megatron_ext.paro.measure import measure

    device = torch.device("cpu")
    if not cpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if cpu else "nccl")
    try:
        return measure(_groups(m), device, sizes, repeats)
    finally:
        dist.destroy_process_group()


def _groups(m: int) -> "HybridGroups":
    """Groups of m consecutive ranks; every rank makes all of them."""
    import torch.distributed as dist

    from megatron_ext.paro.collectives import HybridGroups

    world, rank = dist.get_world_size(), dist.get_rank()
    lists = {
        "members": [list(range(first, first + m)) for first in range(0, world, m)],
        "groups": [list(range(member, world, m)) for member in range(m)],
    }
    mine = {}
    for name, ranks in lists.items():
        made = {tuple(of): dist.new_group(of, group_desc=f"paro-{name}") for of in ranks}
        mine[name] = next(group for of, group in made.items() if rank in of)
    return HybridGroups(**mine, flat=dist.group.WORLD)


def report(network: Network) -> str:
    """The measurements as a table."""
    rows = []
    for scope in SCOPES:
        for action in ACTIONS:
            if (scope, action) in network.links:
                link = network.link(scope, action)
                samples = network.samples[scope, action]
                times = ", ".join(f"{human_bytes(s.part)}: {human_time(s.seconds)}" for s in samples)
                rows.append([
                    _TITLES[scope], action, rate_text(link.bytes_per_s), human_time(link.latency_s), times
                ])  # fmt: skip
    head = ["links", "", "a rank sends", "latency", "measured, by bytes to each peer"]
    size = f"{network.groups} groups of {network.members} ranks, all at once"
    return f"{size}\n\n{grid(head, rows)}"
