"""Arguments of `megatron-ext plan wallfacer`, checked all at once."""

import argparse
from dataclasses import dataclass

from megatron_ext.paro.network import Link, Network
from megatron_ext.problems import UserError
from megatron_ext.tools.plan_read import Numbers, add_model_flags, parse_known
from megatron_ext.tools.plan_units import RATE_EXAMPLE, SIZE_EXAMPLE, parse_rate, parse_size
from megatron_ext.wallfacer.cost import Links
from megatron_ext.wallfacer.geometry import ORDERS, Geometry, shapes
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.planner import Situation
from megatron_ext.wallfacer.recompute import Kept, kept
from megatron_ext.wallfacer.resolve import links_of
from megatron_ext.wallfacer.sequence import Layout, whole
from megatron_ext.wallfacer.tiles import Mask
from megatron_ext.wallfacer.volume import Shape

_DESCRIPTION = """\
Compare all team sizes C, bundles K, placements, ways to move keys and backward passes of --cp-comm-type
wallfacer for an attention layer, a number of ranks and a network: exact bytes inside and between nodes,
steps, memory and predicted time; and recommend one, which may be plain ring attention (C = K = 1). Prints
who meets whom, too.
"""
_EPILOG = f"""\
Rates are written as {RATE_EXAMPLE}, sizes as {SIZE_EXAMPLE}. Without --tflops attention takes no time, and
candidates are ranked by their communication alone. Predicted times are there to rank by, not to foretell a
run's.

    megatron-ext plan wallfacer --seq-length 131072 --num-attention-heads 32 --hidden-size 4096 --bf16 \\
        --context-parallel-size 16 --ranks-per-node 8 --rate-inside 2400gbit --rate-between 400gbit \\
        --ranks-per-nic 1 --tflops 400 --table --svg plan.svg

Exit code: 0, or 2 where arguments or files are wrong.
"""


@dataclass(frozen=True)
class Request:
    """What to compare, and what to print."""

    situation: Situation
    network_source: str
    json: bool
    all: bool
    table: bool
    svg: str | None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ext plan wallfacer",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("the model, in Megatron's own flags")
    add_model_flags(model)
    for flag in ("--bf16", "--fp16"):
        model.add_argument(flag, action="store_true", help="as stock's (default: fp32)")
    model.add_argument("--micro-batch-size", metavar="N", help="sequences per microbatch (default 1)")
    model.add_argument("--window-size", metavar="LEFT,RIGHT", help="sliding window, as stock's")
    model.add_argument("--bidirectional", action="store_true", help="a row sees later keys, too")
    for flag, more in (
        ("--recompute-granularity", {"choices": ("full", "selective")}),
        ("--recompute-method", {"choices": ("uniform", "block")}),
        ("--recompute-num-layers", {"metavar": "N"}),
        ("--recompute-modules", {"metavar": "NAME", "nargs": "+"}),
    ):
        model.add_argument(flag, help="as stock's", **more)
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--context-parallel-size", metavar="N", help="context-parallel ranks")
    ranks.add_argument("--ranks-per-node", metavar="N", help="of all parallelism (default: one node)")
    network = parser.add_argument_group("the network: measured, or by its rates")
    network.add_argument("--bandwidths", metavar="FILE", help="what `megatron-ext probe` wrote")
    network.add_argument("--rate-inside", metavar="RATE", help="what a rank sends to others of its node")
    network.add_argument("--rate-between", metavar="RATE", help="what a NIC sends to other nodes")
    network.add_argument("--ranks-per-nic", metavar="N", help="that share it (default: those of a node)")
    network.add_argument("--latency-inside", metavar="US", help="microseconds (default 0)")
    network.add_argument("--latency-between", metavar="US", help="microseconds (default 0)")
    network.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="(default nccl)")
    cost = parser.add_argument_group("time and memory of a rank")
    cost.add_argument("--tflops", metavar="N", help="that it reaches in attention")
    cost.add_argument("--memory", metavar="SIZE", help="what attention may take: buffers and saved tensors")
    run = parser.add_argument_group("flags of the run; those that are given are not compared")
    run.add_argument("--wallfacer-team-size", metavar="C", help="team size, or auto")
    run.add_argument("--wallfacer-kv-bundle", metavar="K", help="bundle")
    run.add_argument("--wallfacer-order", choices=ORDERS, help="placement")
    run.add_argument("--wallfacer-backward", choices=("auto", "keys", "queries"), default="auto")
    run.add_argument("--wallfacer-keep", choices=("own", "team"), default="own")
    run.add_argument("--wallfacer-movement", choices=("relocate", "direct"), help="of keys")
    run.add_argument("--wallfacer-head-chunks", metavar="N", help="(default 1)")
    run.add_argument("--wallfacer-sum-dtype", choices=("fp32", "model"), default="fp32")
    run.add_argument("--wallfacer-grad-dtype", choices=("fp32", "model"), default="fp32")
    parser.add_argument("--all", action="store_true", help="all placements and backward passes")
    parser.add_argument("--table", action="store_true", help="who meets whom, for the one to take")
    parser.add_argument("--svg", metavar="FILE", help="the same as a picture")
    parser.add_argument("--json", action="store_true", help="print JSON, with all candidates")
    return parser


def parse(argv: list[str]) -> Request:
    """The request. Raises UserError with all problems; SystemExit for --help and a flag without its value."""
    args, found = parse_known(_parser(), argv)
    read = Numbers(args, found)
    size = read.count("--context-parallel-size", "the number of context-parallel ranks")
    tensor = read.count("--tensor-model-parallel-size", "the tensor-parallel size", default=1)
    shape = _shape(read, tensor)
    mask = _mask(read)
    layout = _layout(read, size, mask)
    links = _links(read, size, tensor)
    rate = read.number("--tflops", "operations per second, in 10^12")
    if rate == 0:
        found.append("--tflops 0: nothing would ever be computed. Give what a rank reaches.")
    limit, layers = _size(read), _kept(read)
    team, bundle = _team(read, size)
    options = _options(read, shape)
    if found:
        raise UserError(*found)
    situation = Situation(
        size=size,
        layout=layout,
        shape=shape,
        links=links,
        mask=mask,
        options=options,
        rate=None if rate is None else rate * 1e12,
        kept=layers,
        memory_limit=limit,
        team_size=team,
        bundle_size=bundle,
        order=args.wallfacer_order,
        movement=args.wallfacer_movement,
        native_sums=args.backend == "nccl",
    )
    return Request(situation, args.bandwidths or "as given", args.json, args.all, args.table, args.svg)


def _shape(read: Numbers, tensor: int | None) -> Shape | None:
    heads = read.count("--num-attention-heads", "the number of attention heads")
    if heads is None or tensor is None:
        return None
    if read.given("--kv-channels") is None:
        hidden = read.count("--hidden-size", "the width of the model (or give --kv-channels)")
        dim = None if hidden is None else hidden // heads
    else:
        dim = read.count("--kv-channels", "the size of a head")
    keys = read.count("--num-query-groups", "the number of groups of keys and values", default=heads)
    batch = read.count("--micro-batch-size", "the number of sequences per microbatch", default=1)
    if heads % tensor:
        read.problems.append(
            f"--num-attention-heads {heads} with --tensor-model-parallel-size {tensor}: heads are split over "
            "tensor-parallel ranks. Choose a divisor."
        )
        return None
    if None in (dim, keys, batch):
        return None
    own_keys = max(1, keys // tensor)
    if keys > heads or heads % keys or (heads // tensor) % own_keys:
        read.problems.append(
            f"--num-query-groups {keys} does not divide --num-attention-heads {heads}: each group of keys "
            "serves as many heads as the others. Choose a divisor."
        )
        return None
    half = read.args.bf16 or read.args.fp16
    return Shape(batch, heads // tensor, own_keys, max(1, dim), 2 if half else 4)


def _mask(read: Numbers) -> Mask | None:
    left = right = None
    text = read.given("--window-size")
    if text is not None:
        parts = text.strip("()[] ").replace(" ", "").split(",")
        if len(parts) != 2 or not all(part.lstrip("-").isdecimal() for part in parts):
            read.problems.append(f"--window-size {text}: give two numbers of tokens, such as 4096,0.")
            return None
        left, right = (None if int(part) < 0 else int(part) for part in parts)
    return Mask(left, right if read.args.bidirectional else 0)


def _layout(read: Numbers, size: int | None, mask: Mask | None) -> Layout | None:
    length = read.count("--seq-length", "the length of a sequence")
    if None in (length, size, mask):
        return None
    found = whole(length, "contiguous" if read.args.bidirectional else "zigzag")
    try:
        found.rows(size)
    except ValueError as error:
        read.problems.append(f"--seq-length {length}: {error}.")
        return None
    return found


def _links(read: Numbers, size: int | None, tensor: int | None) -> Links | None:
    per_node = read.count(
        "--ranks-per-node", "the number of ranks of a node", default=(size or 1) * (tensor or 1)
    )
    if None in (size, tensor, per_node):
        return None
    if per_node % tensor:
        read.problems.append(
            f"--ranks-per-node {per_node} with --tensor-model-parallel-size {tensor}: tensor-parallel ranks "
            "would be on two nodes. Choose a divisor."
        )
        return None
    on_node = per_node // tensor
    if read.args.bandwidths is not None:
        return _measured(read, on_node, size)
    parts = {}
    for where, used in (("inside", on_node > 1 and size > 1), ("between", size > on_node)):
        latency = read.number(f"--latency-{where}", "a latency in microseconds") or 0.0
        parts[where] = Link(1e-6 * latency, _rate(read, f"--rate-{where}", needed=used) or float("inf"))
    sharing = read.count("--ranks-per-nic", "the number of ranks that share a NIC", default=per_node)
    if sharing is None:
        return None
    if sharing > per_node or per_node % sharing:
        read.problems.append(
            f"--ranks-per-nic {sharing}: {per_node} ranks of a node do not share NICs evenly so. Give a "
            f"divisor of {per_node}."
        )
        return None
    # Tensor-parallel ranks have rings of their own, which share the NICs.
    together = max(1, sharing // tensor)
    nic = Link(parts["between"].latency_s, parts["between"].bytes_per_s * together / sharing)
    return Links(parts["inside"], nic, on_node, together)


def _measured(read: Numbers, on_node: int, size: int) -> Links | None:
    path = read.args.bandwidths
    if read.given("--rate-inside") is not None or read.given("--rate-between") is not None:
        read.problems.append("--bandwidths with --rate-inside or --rate-between: keep one.")
        return None
    try:
        return links_of(Network.read(path), on_node, size)
    except OSError as error:
        read.problems.append(f"--bandwidths {path}: cannot be read ({error.strerror}).")
    except ValueError as error:
        read.problems.append(f"--bandwidths {path}: {error}. Give the file that `megatron-ext probe` wrote.")
    return None


def _rate(read: Numbers, name: str, *, needed: bool) -> float | None:
    text = read.given(name)
    if text is None:
        if needed:
            where = name.removeprefix("--rate-")
            read.problems.append(
                f"{name} is missing: it is how fast links {where} nodes are, such as {RATE_EXAMPLE}. Give "
                "it, or --bandwidths FILE."
            )
        return None
    rate = parse_rate(text)
    if rate is None:
        read.problems.append(f"{name} {text}: that is no rate above zero. Write it as {RATE_EXAMPLE}.")
    return rate


def _size(read: Numbers) -> int | None:
    text = read.given("--memory")
    found = None if text is None else parse_size(text)
    if text is not None and found is None:
        read.problems.append(f"--memory {text}: that is no size. Write it as {SIZE_EXAMPLE}.")
    return found


def _kept(read: Numbers) -> Kept | None:
    """Of the first stage of 1F1B, which has as many microbatches in flight as there are stages."""
    layers = read.count("--num-layers", "transformer layers", default=1)
    stages = read.count("--pipeline-model-parallel-size", "pipeline stages", default=1)
    number = read.count("--recompute-num-layers", "layers that are recomputed", default=1)
    if None in (layers, stages, number):
        return None
    args = read.args
    return kept(
        max(1, -(-layers // stages)),
        stages,
        granularity=args.recompute_granularity,
        method=args.recompute_method,
        number=number,
        modules=args.recompute_modules,
    )


def _team(read: Numbers, size: int | None) -> tuple[int | None, int | None]:
    """Team size and bundle, None where they are compared."""
    auto = read.given("--wallfacer-team-size") in (None, "auto")
    team = None if auto else read.count("--wallfacer-team-size", "a team size")
    bundle = None
    if read.given("--wallfacer-kv-bundle") is not None:
        bundle = read.count("--wallfacer-kv-bundle", "a bundle")
    elif team is not None:
        bundle = team
    if size is None or (team is None and bundle is None):
        return None, None
    try:
        Geometry(size, team or 1, bundle or 1)
    except ValueError:
        fitting = ", ".join(f"{c} and {k}" for c, k in shapes(size))
        read.problems.append(
            f"team size {team or 'auto'} and bundle {bundle} on {size} context-parallel ranks: their product "
            f"must divide {size}. C and K can be {fitting}."
        )
    return team, bundle


def _options(read: Numbers, shape: Shape | None) -> Options | None:
    args = read.args
    chunks = read.count("--wallfacer-head-chunks", "parts of the key heads", default=1)
    if shape is None or chunks is None:
        return None
    options = Options(
        backward=args.wallfacer_backward,
        keep=args.wallfacer_keep,
        head_chunks=chunks,
        sum_type=args.wallfacer_sum_dtype,
        grad_type=args.wallfacer_grad_dtype,
    )
    try:
        options.check_heads(shape.query_heads, shape.key_heads)
    except ValueError as error:
        read.problems.append(f"--wallfacer-head-chunks {chunks}: {error}.")
    return options
