"""megatron-ext plan linear3d: all grids of a tensor-parallel group, ranked."""

import argparse
import json
import sys
from math import inf
from typing import get_args

from megatron_ext.linear3d.grid import ORDERS
from megatron_ext.linear3d.planner import Candidate, Refused, Situation, edge_share, one_axis, ranking
from megatron_ext.linear3d.sizes import ModelSizes, Save
from megatron_ext.paro.network import Link
from megatron_ext.problems import UserError
from megatron_ext.tools.compare_text import grid as table
from megatron_ext.tools.compare_units import human_bytes, human_time
from megatron_ext.tools.plan_read import (
    Numbers,
    add_model_flags,
    attention_widths,
    default_ffn,
    padded_vocabulary,
    parse_known,
)
from megatron_ext.tools.plan_units import RATE_EXAMPLE, SIZE_EXAMPLE, parse_rate, parse_size, rate_text

EXIT_OK, EXIT_BAD_INPUT = 0, 2
GIB = 2**30
_EPILOG = f"""\
Rates are written as {RATE_EXAMPLE}, sizes as {SIZE_EXAMPLE}.
Without rates all links are equal; without --tflops compute takes no time, so that nothing runs beside it.
Bytes are exact; times are there to rank grids.

    megatron-ext plan linear3d --tensor-model-parallel-size 16 --hidden-size 8192 --num-attention-heads 64 \\
        --num-layers 32 --seq-length 4096 --micro-batch-size 4 --padded-vocab-size 51200 --bf16 \\
        --ranks-per-node 8 --rate-inside 2400gbit --rate-between 400gbit --tflops 300

Exit code: 0, or 2 where arguments are wrong or no grid splits the model.
"""


def main(argv: list[str]) -> int:
    """Print the ranking; 0, or 2 on bad input."""
    try:
        situation, as_json = parse(argv)
    except UserError as error:
        print("\n".join(f"megatron-ext plan linear3d: {text}" for text in error.problems), file=sys.stderr)
        return EXIT_BAD_INPUT
    found, refused = ranking(situation)
    if not found:
        print(
            f"megatron-ext plan linear3d: no grid splits this model.\n{_refusals(refused)}", file=sys.stderr
        )
        return EXIT_BAD_INPUT
    print(_json(situation, found, refused) if as_json else report(situation, found, refused))
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ext plan linear3d",
        description="Rank all grids of --linear-3d for a model, a tensor-parallel size and a network.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("the model, in Megatron's own flags")
    add_model_flags(model)
    model.add_argument("--micro-batch-size", metavar="N", help="sequences per microbatch (default 1)")
    model.add_argument(
        "--max-position-embeddings", metavar="N", help="rows of learned positions (default: s)"
    )
    for flag in ("--untie-embeddings-and-output-weights", "--disable-bias-linear", "--bf16", "--fp16"):
        model.add_argument(flag, action="store_true", help="as stock's")
    model.add_argument(
        "--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm", help="as stock's"
    )
    model.add_argument(
        "--position-embedding-type", choices=("learned_absolute", "rope", "none"), default="learned_absolute",
        help="as stock's",
    )  # fmt: skip
    network = parser.add_argument_group("the network")
    network.add_argument("--ranks-per-node", metavar="N", help="(default: all)")
    network.add_argument("--rate-inside", metavar="RATE", help="what a rank sends to others of its node")
    network.add_argument("--rate-between", metavar="RATE", help="what a node sends to others")
    network.add_argument("--latency-inside", metavar="US", help="microseconds (default 0)")
    network.add_argument("--latency-between", metavar="US", help="microseconds (default 0)")
    rank = parser.add_argument_group("a rank")
    rank.add_argument("--tflops", metavar="N", help="that it reaches")
    rank.add_argument("--memory", metavar="SIZE", help="what it has for the model")
    run = parser.add_argument_group("flags of the run")
    run.add_argument(
        "--linear-3d-save", choices=get_args(Save), default="shard_weight", help="(default shard_weight)"
    )
    run.add_argument("--linear-3d-vocab", choices=("plane", "grid"), default="plane", help="(default plane)")
    run.add_argument("--linear-3d-order", choices=ORDERS, default="ijl", help="(default ijl)")
    run.add_argument("--no-overlap", action="store_true", help="as --linear-3d-overlap none")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def parse(argv: list[str]) -> tuple[Situation, bool]:
    """What to rank, and whether to print JSON. Raises UserError with all problems."""
    args, found = parse_known(_parser(), argv)
    read = Numbers(args, found)
    ranks = read.count("--tensor-model-parallel-size", "the ranks of the grid")
    sizes = _model(read)
    layers = read.count("--num-layers", "the number of layers")
    stages = read.count("--pipeline-model-parallel-size", "pipeline stages", default=1)
    node = read.count("--ranks-per-node", "ranks of a node", default=ranks or 1)
    inside, between = _rate(read, "--rate-inside"), _rate(read, "--rate-between")
    latencies = [read.number(f, "microseconds") or 0.0 for f in ("--latency-inside", "--latency-between")]
    tflops = read.number("--tflops", "10^12 operations per second")
    memory = args.memory and parse_size(args.memory)
    if args.memory and memory is None:
        found.append(f"--memory {args.memory}: write a size as {SIZE_EXAMPLE}.")
    if found:
        raise UserError(*found)
    assert None not in (ranks, sizes, layers, stages, node)
    local = min(node, ranks)
    near = Link(latencies[0] / 1e6, inside or 1e9)
    far = Link(latencies[1] / 1e6, between / local) if between else near
    return Situation(
        sizes=sizes,
        ranks=ranks,
        layers=-(-layers // stages),
        node=local,
        inside=near,
        between=far,
        save=args.linear_3d_save,
        vocab=args.linear_3d_vocab,
        order=args.linear_3d_order,
        flops=tflops * 1e12 if tflops else inf,
        overlap=not args.no_overlap,
        memory_limit=memory or None,
        state_bytes=18 if args.bf16 or args.fp16 else 16,
    ), args.json


def _rate(read: Numbers, flag: str) -> float | None:
    text = read.given(flag)
    rate = parse_rate(text) if text is not None else None
    if text is not None and rate is None:
        read.problems.append(f"{flag} {text}: write a rate as {RATE_EXAMPLE}.")
    return rate


def _model(read: Numbers) -> ModelSizes | None:
    args = read.args
    hidden, seq = read.count("--hidden-size", "h"), read.count("--seq-length", "the sequence")
    heads = read.count("--num-attention-heads", "the number of attention heads")
    queries, keys = attention_widths(read, hidden) if heads else (None, None)
    batch = read.count("--micro-batch-size", "sequences per microbatch", default=1)
    vocab = padded_vocabulary(read, "give --padded-vocab-size or --vocab-size")
    given = read.given("--ffn-hidden-size") is not None
    ffn = read.count("--ffn-hidden-size", "f") if given else hidden and default_ffn(hidden, gated=args.swiglu)
    positions = read.count("--max-position-embeddings", "rows of positions", default=seq or 1)
    if None in (hidden, seq, heads, queries, keys, batch, vocab, ffn, positions):
        return None
    size = queries // heads
    return ModelSizes(
        seq=seq,
        batch=batch,
        hidden=hidden,
        heads=heads,
        kv_groups=max(1, keys // size),
        head_dim=size,
        ffn=ffn,
        vocab=vocab,
        glu=args.swiglu,
        bias=not args.disable_bias_linear,
        rms=args.normalization == "RMSNorm",
        learned=args.position_embedding_type == "learned_absolute",
        max_positions=positions,
        tied=not args.untie_embeddings_and_output_weights,
        itemsize=2 if args.bf16 or args.fp16 else 4,
    )


_HEAD = ["grid", "axis i", "axis j", "axis l", "together", "calls", "layer", "memory", "against 1-D"]


def report(s: Situation, found: list[Candidate], refused: list[Refused]) -> str:
    """The text for the terminal."""
    best, stock = found[0], one_axis(s, found)
    rows = [_row(c, stock) for c in found]
    far = f", {rate_text(s.between.bytes_per_s)} a rank between nodes" if s.node < s.ranks else ""
    sizes = " ".join(map(str, best.grid.sizes))
    lines = [
        f"{s.ranks} ranks, {s.node} on a node: {rate_text(s.inside.bytes_per_s)} inside{far}; "
        f"save policy {s.save}",
        f"{s.sizes.seq} x {s.sizes.batch} tokens a microbatch, h {s.sizes.hidden}, {s.layers} layers a stage",
        "",
        table(_HEAD, rows, numeric=True),
        "",
        "axis, together: what a rank sends for a layer and microbatch, forward and backward; calls: its",
        "collectives; layer: predicted time of that; memory: of a rank, for all layers and one microbatch "
        "in flight.",
        f"Vocabulary layers of the first grid send {human_bytes(float(edge_share(s, best.grid)))} more.",
        "",
    ]
    if refused:
        lines += [f"{len(refused)} grids cannot split this model:", _refusals(refused), ""]
    if best is stock:
        lines.append("Take stock's tensor parallelism: no grid is faster.")
    else:
        lines.append(f"Take {best.grid}:")
    return "\n".join([*lines, f"  --linear-3d {sizes} --linear-3d-save {s.save}"])


def _row(c: Candidate, stock: Candidate | None) -> list[str]:
    ratio = f"{stock.seconds / c.seconds:.2f} x" if stock and c.seconds else "-"
    return [
        str(c.grid),
        *(human_bytes(float(c.axis_bytes[axis])) for axis in "ijl"),
        human_bytes(float(c.bytes)),
        str(sum(c.calls.values())),
        human_time(c.seconds),
        f"{c.memory / GIB:.2f} GiB" + ("" if c.fits else ", too much"),
        ratio,
    ]


def _refusals(refused: list[Refused]) -> str:
    return "\n".join(f"  {r.grid}: {', '.join(r.reasons)}" for r in refused)


def _json(s: Situation, found: list[Candidate], refused: list[Refused]) -> str:
    grids = [
        {
            "grid": list(c.grid.sizes),
            "bytes": c.axis_bytes,
            "calls": c.calls,
            "seconds": c.seconds,
            "memory": c.memory,
            "fits": c.fits,
        }
        for c in found
    ]
    no = [{"grid": list(r.grid.sizes), "reasons": list(r.reasons)} for r in refused]
    setting = {"ranks": s.ranks, "ranks_per_node": s.node, "save": s.save}
    return json.dumps({"setting": setting, "grids": grids, "refused": no}, indent=1)
