"""Benchmark of 3-D linear layers: one bare transformer layer, forward and backward, on every kind of grid.

    python scripts/bench/linear3d.py --ranks 4 8 16 --rate 10mbit        # a lab with one rank on each node
    python scripts/bench/linear3d.py --ranks 4 8 16 --rate 10mbit --weak --output out/linear3d-weak
    python scripts/bench/linear3d.py --ranks 27 --rate 10mbit --hidden 243 --batch 72 --heads 27
    python scripts/bench/linear3d.py --ranks 8 --rate 50mbit --gflops 1 --overlap none grads prefetch all
    python scripts/bench/linear3d.py --ranks 8                           # ranks on links without limits

Compared in one run, round by round: stock's tensor and sequence parallelism as shipped (grid 1 x P x 1 over
gloo's reduce-scatter, input gathered again for weight gradients, as Megatron does it; the layers are bitwise
stock's, see tests/dist/test_linear3d_stock.py), the same over an efficient reduce-scatter, all grids that
were asked for (by default the best by bytes and the cube), SUMMA in 2-D and Tesseract in 2.5-D where there is
such a square. A first round, which is not timed, is checked against the layer on one rank, and gives bytes,
multiply-adds and peak memory; then every method's matrix products are timed alone, on all ranks at once.
With --gflops each of them takes as long as on a device of that speed that every rank has for itself.

A lab needs root, `ip` and `tc` (`scripts/netlab doctor`). All ranks compute on this machine's cores: choose a
rate at which the matrix products of 1-D take a small part of its step. Writes results.json, results.md and
results.svg; rows of an earlier run in the same folder are kept unless they are measured again.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from charts import bars  # noqa: E402
from linear3d_report import STOCK, report  # noqa: E402

from megatron_ext.linear3d.grid import Grid3D, factorizations  # noqa: E402
from megatron_ext.linear3d.sizes import ModelSizes  # noqa: E402
from megatron_ext.linear3d.splits import fits, unsplit  # noqa: E402
from megatron_ext.linear3d.volume import layer_bytes  # noqa: E402
from megatron_ext.netlab.links import Links, parse_rate  # noqa: E402


def main(argv: list[str]) -> int:
    """Measure every number of ranks, and report."""
    args = parse(argv)
    if problems := "\n".join(text for ranks in args.ranks for text in unfit(args, ranks)):
        sys.exit(problems)
    for ranks in args.ranks:
        body = functools.partial(measure, args, ranks)
        rows = body() if "RANK" in os.environ else in_ranks(args, ranks, body)
        if int(os.environ.get("RANK", "0")) == 0:
            save(args.output, rows, {k: str(v) for k, v in vars(args).items() if k != "output"})
            print(f"{ranks} ranks are measured: {args.output / 'results.md'}", flush=True)
    if int(os.environ.get("RANK", "0")) == 0:
        print((args.output / "results.md").read_text())
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", nargs="+", type=int, default=[8])
    add("--grids", nargs="+", metavar="XxYxZ", help="(default: the best by bytes, and the cube)")
    add("--hidden", type=int, default=128)
    add("--seq", type=int, help="(default: 8 h tokens in all)")
    add("--batch", type=int, default=16)
    add("--heads", type=int, help="(default: h / 4)")
    add("--weak", action="store_true", help="scale the batch with the ranks: --batch for 8 of them")
    add("--save", choices=("gathered", "shard_weight", "shard_all"), default="gathered")
    add("--overlap", nargs="+", choices=("none", "grads", "prefetch", "defer", "all"), default=["none"])
    add("--gflops", type=float, help="speed of every rank's matrix products (default: this machine's)")
    add("--rate", type=parse_rate, help="of each node's NIC; builds a lab of one rank on each node")
    add("--rounds", type=int, default=5, help="of every method, in turn; medians are taken")
    add("--output", type=Path, default=Path("out/linear3d"))
    return parser.parse_args(argv)


def shape_of(args: argparse.Namespace, ranks: int) -> Any:
    """Sizes for a number of ranks."""
    from linear3d_layers import Shape

    batch = max(1, args.batch * ranks // 8) if args.weak else args.batch
    seq = args.seq or 8 * args.hidden // args.batch
    return Shape(seq, batch, args.hidden, args.heads or args.hidden // 4)


def unfit(args: argparse.Namespace, ranks: int) -> list[str]:
    """Why this number of ranks cannot be compared: 1-D is what ratios refer to."""
    shape = shape_of(args, ranks)
    grids = [Grid3D(1, ranks, 1), *grids_of(args, ranks, shape)]
    return [problem.text(grid) for grid in grids for problem in unsplit(sizes_of(shape), grid)]


def sizes_of(shape: Any) -> ModelSizes:
    """The same for the formulas."""
    size = shape.hidden // shape.heads
    return ModelSizes(shape.seq, shape.batch, shape.hidden, shape.heads, shape.heads, size, shape.ffn, 0)


def grids_of(args: argparse.Namespace, ranks: int, shape: Any) -> list[Grid3D]:
    """What is measured beside 1 x P x 1."""
    sizes = sizes_of(shape)
    if args.grids:
        asked = [Grid3D(*map(int, text.split("x"))) for text in args.grids]
        return [grid for grid in asked if grid.ranks == ranks and grid != Grid3D(1, ranks, 1)]
    fitting = [grid for grid in factorizations(ranks) if fits(sizes, grid)]
    by_bytes = lambda grid: sum(layer_bytes(sizes, grid, save=args.save, how="ordered").values())  # noqa: E731
    best = min(fitting, key=by_bytes)
    edge = round(ranks ** (1 / 3))
    cube = Grid3D(edge, edge, edge)
    return list(dict.fromkeys([best, *([cube] if cube.ranks == ranks and cube in fitting else [])]))


def in_ranks(args: argparse.Namespace, ranks: int, body: Callable[[], list[dict]]) -> list[dict]:
    """Rank 0's rows, of ranks forked for it: into a lab where a rate is given."""
    import torch

    torch.set_num_threads(1)
    if args.rate is None:
        from tests.ranks import run_ranks

        return run_ranks(ranks, body, timeout=3600)[0].value
    from megatron_ext.netlab.forked import run_in_lab
    from megatron_ext.netlab.lab import Lab

    with Lab(ranks, Links(args.rate, None)) as lab:
        return run_in_lab(lab, ranks, body, timeout=3600)[0].value


# --- in a rank ---------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, ranks: int) -> list[dict]:
    """All methods in turn, in several rounds; every rank returns the same rows."""
    import torch.distributed as dist
    from linear3d_compute import Paced

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    shape = shape_of(args, ranks)
    methods = make_methods(args, ranks, shape)
    rows = {name: check(name, method, shape) for name, method in methods.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    with Paced(args.gflops * 5e8) if args.gflops else contextlib.nullcontext():
        for _ in range(args.rounds):
            for name, method in methods.items():
                times[name].append(timed(method))
    for name, row in rows.items():
        forward, backward = (statistics.median(part) for part in zip(*times[name], strict=True))
        both = [sum(pair) for pair in times[name]]
        row |= {
            "ranks": ranks,
            "rate": args.rate,
            "save": args.save,
            "gflops": args.gflops,
            "shape": [shape.seq, shape.batch, shape.hidden, shape.heads],
            "forward_s": forward,
            "backward_s": backward,
            "step_s": statistics.median(both),
            "least_s": min(both),
            "most_s": max(both),
        }
    return list(rows.values())


def make_methods(args: argparse.Namespace, ranks: int, shape: Any) -> dict[str, Any]:
    """Every method by name."""
    from linear3d_baselines import Square
    from linear3d_layers import on_grid, on_square

    line = Grid3D(1, ranks, 1)
    made = {
        STOCK: on_grid(shape, line, comm(line, "native"), "shard_all", levels("none")),
        "1-D": on_grid(shape, line, comm(line, "ordered"), args.save, levels("none")),
    }
    for grid in grids_of(args, ranks, shape):
        for level in args.overlap if grid != line else ():
            name = f"3-D {grid}" + (f", overlap {level}" if level != "none" else "")
            made[name] = on_grid(shape, grid, comm(grid, "ordered"), args.save, levels(level))
    for q, d in squares(ranks):
        if shape.batch % (q * d) == 0 and shape.hidden % q == 0 and shape.heads % q == 0:
            name = f"2-D SUMMA {q} x {q}" if d == 1 else f"2.5-D {q} x {q} x {d}"
            made[name] = on_square(shape, Square(q, d, at_once=True))
            made[f"{name}, panels in turn"] = on_square(shape, Square(q, d, at_once=False))
    return made


def levels(name: str) -> Any:
    """What runs beside what, by the word that --linear-3d-overlap takes."""
    from megatron_ext.linear3d.chain import Overlap

    return Overlap(**{key: name in (key, "all") for key in ("grads", "prefetch", "defer")})


def squares(ranks: int) -> list[tuple[int, int]]:
    """(q, d) with q * q * d ranks, q above 1."""
    return [
        (q, ranks // (q * q)) for q in range(2, ranks + 1) if ranks % (q * q) == 0 and q >= ranks // (q * q)
    ]


@functools.cache
def comm(grid: Grid3D, how: str) -> Any:
    """The grid's groups over all ranks."""
    import torch.distributed as dist

    from megatron_ext.linear3d.comm import GridComm
    from megatron_ext.linear3d.groups import GROUPS

    groups = {}
    for name in GROUPS:
        for place in grid.places(name.removesuffix("-grads")):
            group = dist.new_group(list(place), group_desc=f"linear3d-{name}")
            if dist.get_rank() in place:
                groups[name] = group
    return GridComm(grid, groups, dist.get_rank(), how)


def step(method: Any) -> tuple[Any, float, float]:
    """The output, and seconds of this rank's forward and backward pass."""
    import torch
    import torch.distributed as dist

    for tensor in (method.x, *method.params):
        tensor.grad = None
    for _ in range(2):  # the second one finds no rank behind
        dist.barrier()
    begin = time.perf_counter()
    y = method.forward(method.x)
    dist.barrier()
    middle = time.perf_counter()
    y.backward(torch.ones_like(y))
    dist.barrier()
    return y, middle - begin, time.perf_counter() - middle


def timed(method: Any) -> tuple[float, float]:
    """Seconds of the slowest rank."""
    import torch
    import torch.distributed as dist

    _, *seconds = step(method)
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most[0].item(), most[1].item()


def check(name: str, method: Any, shape: Any) -> dict[str, Any]:
    """Result and input gradient against one rank; bytes, multiply-adds and peak memory of the busiest
    rank."""
    import torch
    import torch.distributed as dist
    from linear3d_compute import Products
    from linear3d_layers import dense, whole

    from megatron_ext import traffic
    from megatron_ext.memory import MemoryTracker

    weights, x = whole(shape)
    x.requires_grad_()
    expected = dense(shape, x, weights)
    expected.backward(torch.ones_like(expected))
    traffic.ledger().drain()
    with Products() as products:
        y, _, _ = step(method)
    sent = sum(row["bytes"] for row in traffic.ledger().drain())
    for found, wanted in ((y, expected.detach()), (method.x.grad, x.grad)):
        part = method.part(wanted)
        error = (found - part).abs().max() / part.abs().max()
        assert error < 1e-4, f"{name}: a wrong result, off by {error:.1e}"
    tracker = MemoryTracker("cpu")
    tracker.hold("weights", [method.x, *method.params])
    tracker.hold_rest()
    with tracker:
        step(method)
    peak = tracker.report()["peak"]
    macs = products.multiply_adds
    numbers = torch.tensor([sent, macs, -macs, peak, alone(products)], dtype=torch.float64)
    total = torch.tensor([float(sent)], dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    most, macs, least, memory, seconds = numbers.tolist()
    assert macs == -least, f"{name}: ranks differ in their multiply-adds"
    return {
        "method": name,
        "bytes": int(most),
        "mean_bytes": total.item() / dist.get_world_size(),
        "macs": int(macs),
        "peak_bytes": int(memory),
        "products_s": seconds,
    }


def alone(products: Any) -> float:
    """Seconds of a layer's matrix products on this rank, while all ranks compute theirs."""
    import torch.distributed as dist

    compute = products.again()
    compute()
    for _ in range(2):
        dist.barrier()
    begin = time.perf_counter()
    compute()
    return time.perf_counter() - begin


def save(folder: Path, rows: list[dict], setting: dict[str, str]) -> None:
    """Write results; rows of the same method, ranks, shape and rate replace older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    key = lambda row: [row[k] for k in ("method", "ranks", "rate", "shape", "save", "gflops")]  # noqa: E731
    new = [key(row) for row in rows]
    kept = [row for row in old if key(row) not in new] + rows
    path.write_text(json.dumps({"setting": setting, "rows": kept}, indent=1))
    (folder / "results.md").write_text(report(kept))
    named = [(f"{row['ranks']} ranks, {row['method']}", round(row["step_s"], 3)) for row in kept]
    (folder / "results.svg").write_text(bars(named, "seconds of a step"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
