"""Benchmark of PaRO's collectives: HO-Ring against two-phase, a flat ring and gloo's own.

    python scripts/bench/collectives.py --rate 100mbit                    # a lab for every grid, about 10 min
    python scripts/bench/collectives.py --rate 100mbit --intra-rate 400mbit --grids 2x2
    python scripts/bench/collectives.py --grids 2x2                       # ranks on links without limits
    torchrun ... scripts/bench/collectives.py --grids 2x8                 # as ranks of a running world

A lab needs root, `ip` and `tc` (`scripts/netlab doctor`). Writes results.json, results.md and results.svg;
rows of an earlier run in the same folder are kept unless they are measured again. All methods run in turn,
round by round, so ratios are within one run. A first round, which is not timed, is checked.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from collectives_report import METHODS, OPS, Case, Row, merged, write  # noqa: E402

from megatron_ext.netlab.links import Links, parse_rate  # noqa: E402


def main(argv: list[str]) -> int:
    """Measure every grid, size and collective, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--grids", nargs="+", type=grid, default=[(2, 2), (4, 2), (2, 4), (2, 8)], metavar="KxM")
    add("--ops", nargs="+", choices=OPS, default=list(OPS))
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS[:-1]))
    add("--sizes", nargs="+", type=float, default=[32.0], metavar="MIB", help="of the whole buffer, fp32")
    add("--rate", type=parse_rate, help="of each node's NIC; builds a lab, or says how fast the world's is")
    add("--intra-rate", type=parse_rate, help="inside each node, for all its ranks together")
    add("--rounds", type=int, default=5, help="of every method, in turn; medians are taken")
    add("--output", type=Path, default=Path("out/collectives"))
    args = parser.parse_args(argv)
    if args.intra_rate and not args.rate:
        parser.error("--intra-rate needs --rate, that of the links between nodes")
    setting = {key: str(value) for key, value in vars(args).items() if key != "output"}
    for k, m in args.grids:
        body = partial(measure, args, k, m)
        rows = body() if "RANK" in os.environ else in_ranks(args, k, m, body)
        if int(os.environ.get("RANK", "0")) == 0:
            write(args.output, merged(args.output, rows), setting)
            print(f"{k}x{m} is measured: {args.output / 'results.md'}", flush=True)
    if int(os.environ.get("RANK", "0")) == 0:
        print((args.output / "results.md").read_text())
    return 0


def grid(text: str) -> tuple[int, int]:
    """`4x2` -> (4, 2): groups and members."""
    k, _, m = text.partition("x")
    if not (k.isdigit() and m.isdigit() and int(k) > 0 and int(m) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no grid: write groups x members, as 2x4")
    return int(k), int(m)


def in_ranks(args: argparse.Namespace, k: int, m: int, body: Callable[[], list[Row]]) -> list[Row]:
    """Rank 0's rows, of ranks forked for it: into a lab where a rate is given."""
    if args.rate is None:
        from tests.ranks import run_ranks

        return run_ranks(k * m, body, timeout=1800)[0].value
    import torch

    from megatron_ext.netlab.forked import run_in_lab
    from megatron_ext.netlab.lab import Lab

    torch.set_num_threads(1)
    with Lab(k, Links(args.rate, args.intra_rate)) as lab:
        return run_in_lab(lab, k * m, body, timeout=1800)[0].value


# --- in a rank ---------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, k: int, m: int) -> list[Row]:
    """All sizes and collectives on one grid; every rank returns the same rows."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if dist.get_world_size() != k * m:
        raise SystemExit(f"a grid of {k}x{m} needs {k * m} ranks, and this world has {dist.get_world_size()}")
    groups = make_groups(k, m)
    rows = []
    for mib in args.sizes:
        for op in args.ops:
            block = max(1, round(mib * 2**20 / 4 / (k * m)))
            case = Case(k, m, op, block * k * m * 4, args.rate, args.intra_rate)
            calls = {name: call for name, call in methods(case, groups).items() if name in args.methods}
            rows += measure_case(args, case, calls)
    dist.barrier()
    return rows


def make_groups(k: int, m: int):
    """This rank's process groups."""
    import torch.distributed as dist

    from megatron_ext.paro.collectives import HybridGroups

    rank = dist.get_rank()

    def own(name: str, lists: list[list[int]]):
        made = {tuple(ranks): dist.new_group(ranks, group_desc=f"paro-{name}") for ranks in lists}
        return next(group for ranks, group in made.items() if rank in ranks)

    return HybridGroups(
        members=own("members", [list(range(i * m, i * m + m)) for i in range(k)]),
        groups=own("groups", [list(range(j, k * m, m)) for j in range(m)]),
        flat=own("flat", [list(range(k * m))]),
    )


def methods(case: Case, groups) -> dict[str, Callable]:
    """What each method does to a buffer in the nested layout (for gloo's own: in the order of the ranks)."""
    import torch.distributed as dist

    from megatron_ext.paro.collectives import make_collectives
    from megatron_ext.paro.collectives_flat import flat_ring_all_gather, flat_ring_reduce_scatter
    from megatron_ext.paro.strategy import Level

    whole, inside, block = Level
    two, ring = make_collectives("two-phase", groups), make_collectives("ho-ring", groups)

    def part(flat):
        return flat[ring.grid.within(inside, whole, flat.numel())]

    def by_rank(flat):
        return flat.view(case.n, -1)[ring.grid.rank]

    gathers = {
        "gloo": lambda flat: dist.all_gather_into_tensor(flat, by_rank(flat), group=groups.flat),
        "flat ring": lambda flat: flat_ring_all_gather(flat, groups),
        "two-phase": lambda flat: two.gather(flat, block, whole),
        "two-phase rings": lambda flat: (
            ring.gather(part(flat), block, inside),
            ring.gather(flat, inside, whole),
        ),
        "HO-Ring": lambda flat: ring.gather(flat, block, whole),
        "HO-Ring uncut": lambda flat: uncut(lambda: ring.gather(flat, block, whole)),
    }
    sums = {
        "gloo": lambda flat: dist.reduce_scatter_tensor(by_rank(flat), flat, group=groups.flat),
        "flat ring": lambda flat: flat_ring_reduce_scatter(flat, groups),
        "two-phase": lambda flat: two.sync(flat, whole, block),
        "two-phase rings": lambda flat: (ring.scatter_in_group(flat), ring.sync(part(flat), inside, block)),
        "HO-Ring": lambda flat: ring.sync(flat, whole, block),
        "HO-Ring uncut": lambda flat: uncut(lambda: ring.sync(flat, whole, block)),
    }
    if case.op == "all-gather":
        return gathers
    if case.op == "reduce-scatter":
        return sums
    both = {name: lambda flat, name=name: (sums[name](flat), gathers[name](flat)) for name in METHODS}
    return both | {"gloo": lambda flat: dist.all_reduce(flat, group=groups.flat)}


def uncut(call: Callable[[], None]) -> None:
    """Call with blocks that travel in one piece."""
    from megatron_ext.paro import wires

    pieces, wires.MOST_PIECES = wires.MOST_PIECES, 1
    try:
        call()
    finally:
        wires.MOST_PIECES = pieces


def measure_case(args: argparse.Namespace, case: Case, calls: dict[str, Callable]) -> list[Row]:
    """Rows of one collective: all methods in turn, in several rounds, behind one that is checked."""
    import torch

    from megatron_ext.paro.wires import cuts

    flat = torch.empty(case.size // 4)
    found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in calls}
    for number in range(args.rounds + 1):
        for name, call in calls.items():
            fill(flat, case, name)
            result = timed(call, flat)
            if number == 0:
                check(flat, case, name)
            else:
                found[name].append(result)
    rows = []
    for name, results in found.items():
        times = [seconds for seconds, _ in results]
        sent = [count for _, count in results if count is not None]
        nic = statistics.median(sent) if sent else None
        pieces = len(cuts(flat.view(case.n, -1)[0])) if name == "HO-Ring" else 1
        rows.append(Row(case, name, statistics.median(times), min(times), max(times), nic, pieces))
    return rows


def timed(call: Callable, flat) -> tuple[float, float | None]:
    """Seconds of the slowest rank, and bytes that the busiest NIC has sent, where its name is known."""
    import torch
    import torch.distributed as dist

    for _ in range(2):  # the second one finds no rank behind
        dist.barrier()
    before, begin = nic_bytes(), time.perf_counter()
    call(flat)
    seconds = time.perf_counter() - begin
    dist.barrier()  # what others still have to send belongs to it
    sent = nic_bytes() - before if before is not None else -1.0
    most = torch.tensor([seconds, sent], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most[0].item(), most[1].item() if most[1] >= 0 else None


def nic_bytes() -> int | None:
    """Bytes that this node's NIC has sent, if GLOO_SOCKET_IFNAME names one."""
    from megatron_ext.netlab.namespaces import interface_counters

    name = os.environ.get("GLOO_SOCKET_IFNAME")
    counters = interface_counters()
    return counters[name].tx_bytes if name in counters else None


def fill(flat, case: Case, method: str) -> None:
    """Values whose sums fp32 holds exactly; of a gather, only the own block."""
    import torch.distributed as dist

    rank = dist.get_rank()
    if case.op == "all-gather":
        flat.fill_(-1.0)
        flat.view(case.n, -1)[owned(case, method, rank)] = rank
    else:
        flat.fill_(rank + 1.0)


def owned(case: Case, method: str, rank: int) -> int:
    """Number of a rank's block."""
    from megatron_ext.paro.blocks import Grid

    return rank if method == "gloo" else Grid.of(rank, case.k, case.m).block


def check(flat, case: Case, method: str) -> None:
    """Whether every rank got what it should."""
    import torch.distributed as dist

    blocks, total = flat.view(case.n, -1), case.n * (case.n + 1) / 2
    own = owned(case, method, dist.get_rank())
    if case.op == "all-gather":
        good = all(bool((blocks[owned(case, method, rank)] == rank).all()) for rank in range(case.n))
    else:
        good = bool(((blocks[own] if case.op == "reduce-scatter" else blocks) == total).all())
    assert good, f"{method} gave a wrong result: {case}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
