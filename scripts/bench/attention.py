"""Benchmark of context-parallel attention over slow links: every team size C and bundle K against a ring.

    python scripts/bench/attention.py calls --ranks 4 8 16 --rate 400mbit      # where links set the pace
    python scripts/bench/attention.py calls --seq 16384 --heads 2 --rate 400mbit   # where attention does
    python scripts/bench/attention.py calls --ranks 4 --methods 2x2 2x1        # on links without limits
    python scripts/bench/attention.py train --rate 100mbit                     # tokens/s of both scripts

`calls` times forward and backward pass of one attention call, every rank on a node of its own, against a
plain ring and a gather of keys that are written on their own (attention_baselines.py), and public peers where
they can run (attention_peers.py). Methods take turns, round by round; ratios are within rounds. A first
round, which is not timed, is checked: rank 0's rows of the plain ring against attention over the whole
sequence, and all ranks' rows of every other method against the plain ring. Bytes of ours are those that were
counted, and must equal the formulas.

A lab needs root, `ip` and `tc` (`scripts/netlab doctor`). All ranks share this machine's cores: choose rate
and sizes so that the links, or the arithmetic, set the pace; the results say which did. Writes results.json,
results.md and results.svg; rows of an earlier run in the same folder are kept unless they are measured again.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import attention_train  # noqa: E402
from attention_peers import NAMES as PEERS  # noqa: E402
from attention_report import (  # noqa: E402
    GATHER,
    RING,
    Case,
    Compute,
    Found,
    Method,
    Row,
    bytes_of,
    cost_of,
    read,
    write,
)

from megatron_ext.netlab.links import Links, parse_rate  # noqa: E402

TOLERANCE = 2e-5
"""Largest deviation of an fp32 result, of the largest value."""
RESULTS = ("out", "dq", "dk", "dv")


def main(argv: list[str]) -> int:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    attention_train.add_arguments(commands)
    calls = commands.add_parser("calls", help="single attention calls")
    add = calls.add_argument
    add("--ranks", nargs="+", type=int, default=[16], metavar="P", help="context-parallel sizes")
    add("--seq", type=int, default=512, metavar="N", help="tokens of the whole sequence")
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, help="as many as --heads if not given")
    add("--head-dim", type=int, default=64)
    add("--bidirectional", action="store_true", help="no causal mask; contiguous split")
    add("--methods", nargs="+", metavar="CxK[-direct]", help="of ours; all that fit if not given")
    add("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    add("--rate", type=parse_rate, help="of each rank's link; without it there is no lab")
    add("--rounds", type=int, default=5, help="of every method, in turn; medians are taken")
    add("--output", type=Path, default=Path("out/attention"))
    args = parser.parse_args(argv)
    if args.command == "train":
        return attention_train.run(args)
    for ranks in args.ranks:
        case = case_of(args, ranks)
        try:
            methods = methods_of(args, ranks)
            for method in methods:
                bytes_of(case, method, 0)
        except ValueError as error:
            calls.error(f"--ranks {ranks}: {error}")
        found = in_ranks(case, partial(measure, case, methods, args.rounds, args.peers))
        setting = {key: str(value) for key, value in vars(args).items() if key != "output"}
        write(args.output, read(args.output).merged(found), setting)
        print(f"CP={ranks} is measured: {args.output / 'results.md'}", flush=True)
    print((args.output / "results.md").read_text())
    return 0


def case_of(args: argparse.Namespace, ranks: int) -> Case:
    """What is asked for on so many ranks."""
    key_heads = args.kv_heads or args.heads
    return Case(ranks, args.seq, args.heads, key_heads, args.head_dim, not args.bidirectional, args.rate)


def methods_of(args: argparse.Namespace, ranks: int) -> list[Method]:
    """Our shapes: those that were named, or all that fit, and direct movement where K = C > 1."""
    from megatron_ext.wallfacer.geometry import shapes

    if args.methods:
        named = [Method.parse(text) for text in args.methods]
        wrong = [method.name for method in named if method.shape is None]
        if wrong:
            raise ValueError(f"--methods {' '.join(wrong)}: write team size x bundle, as 4x1 or 4x4-direct")
        return named
    found = [Method.parse(f"{c}x{k}") for c, k in shapes(ranks)]
    square = [c for c, k in shapes(ranks) if c == k > 1]
    return [*found, *(Method.parse(f"{c}x{c}-direct") for c in square)]


def in_ranks(case: Case, body: Callable[[], Found]) -> Found:
    """Rank 0's findings, of ranks forked for it: into a lab where a rate is given."""
    if case.rate is None:
        from tests.ranks import run_ranks

        return run_ranks(case.ranks, body, timeout=3600)[0].value
    import torch

    from megatron_ext.netlab.forked import run_in_lab
    from megatron_ext.netlab.lab import Lab

    torch.set_num_threads(1)
    with Lab(case.ranks, Links(case.rate)) as lab:
        return run_in_lab(lab, case.ranks, body, timeout=3600)[0].value


# --- in a rank ---------------------------------------------------------------------------------------------


def measure(case: Case, ours: list[Method], rounds: int, peers: list[str]) -> Found:
    """All methods in turn, in several rounds, behind one that is checked."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    calls, notes = make_calls(case, ours, peers)
    own = inputs(case)
    expected = counted(case, Method(RING), calls[Method(RING)], own)
    check_whole(case, expected)
    for method, call in list(calls.items()):
        wrong = difference(counted(case, method, call, own), expected)
        if wrong and method.name in peers:
            notes.append(f"{method.name} was not timed: its {wrong}.")
            del calls[method]
        assert method not in calls or wrong is None, f"{method.name}: {wrong}"
    seconds: dict[Method, list[float]] = {method: [] for method in calls}
    sent: dict[Method, float | None] = {}
    silent = baseline(case, RING, silent=True)
    computing = []
    for _ in range(rounds):
        for method, call in calls.items():
            took, sent[method] = timed(call, own)
            seconds[method].append(took)
        computing.append(timed(silent, own)[0])
    ring = tuple(seconds[Method(RING)])
    rows = [Row(case, method, tuple(took), ring, sent[method]) for method, took in seconds.items()]
    dist.barrier()
    return Found(rows, [Compute(case, sorted(computing)[rounds // 2])], notes)


def make_calls(case: Case, ours: list[Method], peers: list[str]) -> tuple[dict[Method, Callable], list[str]]:
    """`(q, k, v, grad) -> (out, dq, dk, dv)` by method, the plain ring first; and why some are not there."""
    import attention_peers
    import torch.distributed as dist

    calls = {Method(name): baseline(case, name) for name in (RING, GATHER)}
    calls |= {method: rings(case, method) for method in ours}
    notes = []
    for name in peers:
        problem = attention_peers.why_not(name, case.causal)
        if problem is None:
            calls[Method(name)] = attention_peers.call(name, case.causal, dist.new_group())
        else:
            notes.append(f"{name} did not run: {problem}.")
    return calls, notes


def baseline(case: Case, name: str, silent: bool = False) -> Callable:
    """One of those written on their own."""
    import attention_baselines
    import torch.distributed as dist

    links = attention_baselines.Links(dist.new_group(), dist.new_group(), silent)
    function = {RING: attention_baselines.plain_ring, GATHER: attention_baselines.key_gather}[name]
    return partial(function, causal=case.causal, links=links)


def rings(case: Case, method: Method) -> Callable:
    """Ours."""
    import torch
    import torch.distributed as dist

    from megatron_ext.wallfacer.function import Rings
    from megatron_ext.wallfacer.groups import groups_of, rank_lists

    cost, made = cost_of(case, method), {}
    geometry = cost.plan.geometry
    for name, lists in rank_lists(geometry, [tuple(range(case.ranks))]).items():
        groups = {ranks: dist.new_group(list(ranks), group_desc=name) for ranks in map(tuple, lists)}
        made[name] = next(group for ranks, group in groups.items() if dist.get_rank() in ranks)
    engine = Rings(geometry, groups_of(made.get, geometry), cost.options, dist.get_rank())
    what = {"layout": cost.plan.layout, "mask": cost.plan.mask, "scale": case.head_dim**-0.5}

    def call(q, k, v, grad):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = engine.attend(*leaves, **what)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return call


def whole_inputs(case: Case) -> list:
    """q, k, v and the output's gradient of the whole sequence `[N, 1, h, d]`, equal on all ranks."""
    import torch

    generator = torch.Generator().manual_seed(1)
    heads = (case.heads, case.key_heads, case.key_heads, case.heads)
    return [torch.randn(case.seq, 1, h, case.head_dim, generator=generator) for h in heads]


def inputs(case: Case) -> list:
    """Own rows of them."""
    return own_rows(case, whole_inputs(case))


def own_rows(case: Case, whole: list) -> list:
    """Own rows of tensors of the whole sequence: half-chunks r and 2P-1-r, or chunk r."""
    import torch
    import torch.distributed as dist

    rank, parts = dist.get_rank(), (1 + case.causal) * case.ranks
    own = (rank, parts - 1 - rank) if case.causal else (rank,)
    return [torch.cat([x.chunk(parts)[number] for number in own]) for x in whole]


def counted(case: Case, method: Method, call: Callable, own: list) -> tuple:
    """Results of a call; of ours, its bytes must be those of the formulas."""
    import torch.distributed as dist

    from megatron_ext.traffic import ledger

    ledger().drain()
    results = call(*own)
    if method.shape is not None:
        found = {(row["kind"], row["group"]): row["bytes"] for row in ledger().drain() if row["bytes"]}
        expected = bytes_of(case, method, dist.get_rank())
        assert found == expected, f"{method.name} sent {found}, by its formulas {expected}"
    return results


def check_whole(case: Case, results: tuple) -> None:
    """Rank 0's rows against attention over the whole sequence."""
    import torch.distributed as dist

    if dist.get_rank():
        return
    from attention_baselines import flash, flash_backward

    q, k, v, grad = (x.permute(1, 2, 0, 3) for x in whole_inputs(case))
    out, lse = flash(q, k, v, 0.0, case.causal)
    grads = flash_backward(grad, q, k, v, out, lse, 0.0, case.causal)
    expected = own_rows(case, [x.permute(2, 0, 1, 3) for x in (out, *grads)])
    for what, error in zip(RESULTS, errors(results, expected), strict=True):
        assert error <= TOLERANCE, f"{what} of the {RING} is off by {error:.2e} of the largest on rank 0"


def difference(results: tuple, expected: tuple) -> str | None:
    """Which result is not what was expected on some rank, and by how much; the same on all ranks."""
    import torch.distributed as dist

    worst = errors(results, expected)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    found = dict(zip(RESULTS, worst.tolist(), strict=True))
    wrong = [f"{what} is off by {error:.2e} of the largest" for what, error in found.items()]
    return next((text for text, error in zip(wrong, found.values(), strict=True) if error > TOLERANCE), None)


def errors(results: tuple, expected: tuple):
    """Largest deviation of out, dq, dk and dv, of the largest value; infinite where there is a nan."""
    import torch

    pairs = zip(results, expected, strict=True)
    worst = [(found - wanted).abs().max() / wanted.abs().max() for found, wanted in pairs]
    return torch.stack(worst).nan_to_num(nan=torch.inf)


def timed(call: Callable, own: list) -> tuple[float, float | None]:
    """Seconds of the slowest rank, and bytes that the busiest NIC has sent, where its name is known."""
    import torch
    import torch.distributed as dist

    for _ in range(2):  # the second one finds no rank behind
        dist.barrier()
    before, begin = nic_bytes(), time.perf_counter()
    call(*own)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
