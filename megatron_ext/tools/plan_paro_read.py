"""What `megatron-ext plan paro` reads from its arguments; what is wrong goes to a list."""

import argparse
from math import inf

from megatron_ext.paro.cost import Compute
from megatron_ext.paro.model import equal_units, flops, score_flops, units_of
from megatron_ext.paro.network import Link, Network
from megatron_ext.paro.passes import UnitSize
from megatron_ext.paro.volume import COMMS, Backend, Comm
from megatron_ext.tools.plan_read import Numbers, attention_widths, default_ffn, padded_vocabulary
from megatron_ext.tools.plan_units import RATE_EXAMPLE, SIZE_EXAMPLE, parse_rate, parse_size
from megatron_ext.vocab.memory_description import Description, stage_layers

DEFAULT_LAYERS = 32


def comms(read: Numbers) -> tuple[Comm, ...] | None:
    args = read.args
    if args.paro_inter_dtype == "native":
        return (args.paro_comm,) if args.paro_comm else COMMS
    if args.paro_comm == "flat":
        read.problems.append(
            "--paro-inter-dtype int8 with --paro-comm flat: there is no hop between groups to quantise. Use "
            "--paro-comm two-phase or ho-ring, or --paro-inter-dtype native."
        )
        return None
    return (args.paro_comm,) if args.paro_comm else tuple(comm for comm in COMMS if comm != "flat")


def grid(read: Numbers) -> tuple[int, int] | None:
    """Groups and members."""
    data = read.count("--data-parallel-size", "the number of data-parallel ranks")
    context = read.count("--context-parallel-size", "the context-parallel size", default=1)
    m = read.count("--paro-group-size", "the number of data-parallel ranks per group (node)")
    if None in (data, context, m):
        return None
    n = data * context
    if n % m == 0:
        return n // m, m
    sizes = ", ".join(str(size) for size in range(1, n + 1) if n % size == 0)
    read.problems.append(
        f"--paro-group-size {m}: {n} data x context ranks cannot be cut into groups of {m}. Use one of "
        f"{sizes}."
    )
    return None


def microbatches(read: Numbers) -> int | None:
    if read.given("--microbatches") is not None:
        return read.count("--microbatches", "the number of microbatches per step")
    if read.given("--global-batch-size") is None:
        read.problems.append(
            "--microbatches is missing: split parameters are gathered for each of them. Give it, or "
            "--global-batch-size and --micro-batch-size."
        )
        return None
    total = read.count("--global-batch-size", "the number of sequences per step")
    micro = read.count("--micro-batch-size", "the number of sequences per microbatch", default=1)
    data = read.args.data_parallel_size
    if total is None or micro is None or not (data or "").isdigit() or not int(data):
        return None
    if total % (micro * int(data)):
        read.problems.append(
            f"--global-batch-size {total} is no multiple of --micro-batch-size {micro} times "
            f"--data-parallel-size {data}. Change one of them."
        )
        return None
    return total // (micro * int(data))


def types(read: Numbers) -> dict[str, int]:
    """Bytes of a parameter, and of its gradient, as stock decides them."""
    args = read.args
    if args.bf16 and args.fp16:
        read.problems.append("--bf16 with --fp16: parameters have one type. Keep one of them.")
    item = 2 if args.bf16 or args.fp16 else 4
    in_fp32 = args.accumulate_allreduce_grads_in_fp32 or (args.bf16 and not args.grad_reduce_in_bf16)
    return {"itemsize": item, "grad_itemsize": 4 if in_fp32 else item}


Model = tuple[tuple[UnitSize, ...] | None, int | None, float]
"""Units, tokens of a microbatch on one rank if known, and FLOPs of attention scores per token."""


def model(read: Numbers, grid: tuple[int, int] | None, types: dict[str, int]) -> Model:
    fraction = read.number("--trainable-fraction", "a part of the parameters", most=1.0)
    trainable = 1.0 if fraction is None else fraction
    if read.given("--parameters") is not None:
        return _by_size(read, grid, types, trainable)
    d = _description(read, types)
    if d is None or grid is None:
        return None, None, 0.0
    units = units_of(d, trainable)
    return units, d.tokens, score_flops(d, units)


def _by_size(read: Numbers, grid: tuple[int, int] | None, types: dict[str, int], trainable: float) -> Model:
    parameters = read.number("--parameters", "the number of parameters, such as 7e9")
    num_layers = read.count("--num-layers", "the number of layers", default=DEFAULT_LAYERS)
    tensor, stages, context = _splits(read)
    tokens = None
    if read.given("--seq-length") is not None:
        length = read.count("--seq-length", "the length of a sequence")
        micro = read.count("--micro-batch-size", "the number of sequences per microbatch", default=1)
        tokens = None if None in (length, micro, context) else length * micro // context
    if parameters is not None and parameters < 1:
        read.problems.append(f"--parameters {read.given('--parameters')}: that is no model. Give 1 or more.")
        return None, None, 0.0
    if grid is None or None in (parameters, num_layers, tensor, stages):
        return None, None, 0.0
    share, layers = max(1, round(parameters / (tensor * stages))), max(1, num_layers // stages)
    return equal_units(share, layers, grid[0] * grid[1], **types, trainable=trainable), tokens, 0.0


def _splits(read: Numbers) -> tuple[int | None, ...]:
    return (
        read.count("--tensor-model-parallel-size", "the tensor-parallel size", default=1),
        read.count("--pipeline-model-parallel-size", "the number of pipeline stages", default=1, flag="-p"),
        read.count("--context-parallel-size", "the context-parallel size", default=1),
    )


def _description(read: Numbers, types: dict[str, int]) -> Description | None:
    args = read.args
    layers = read.count("--num-layers", "the model's transformer layers (or give --parameters)")
    h = read.count("--hidden-size", "the width of the model (or give --parameters)")
    s = read.count("--seq-length", "the length of a sequence (or give --parameters)")
    f = read.count(
        "--ffn-hidden-size", "the width of the MLP", default=default_ffn(h or 1, gated=args.swiglu)
    )
    q, k = attention_widths(read, h)
    vocab = padded_vocabulary(read, "Give --padded-vocab-size or --vocab-size, or --parameters")
    micro = read.count("--micro-batch-size", "the number of sequences per microbatch", default=1)
    tensor, stages, context = _splits(read)
    if None in (layers, h, s, f, q, k, vocab, micro, tensor, stages, context):
        return None
    heads = int(args.num_attention_heads) if (args.num_attention_heads or "").isdigit() else tensor
    head_dim = q // heads or 1
    data = args.data_parallel_size or ""
    try:
        split = stage_layers(argparse.Namespace(pipeline_model_parallel_size=stages, num_layers=layers))
    except ValueError as error:
        read.problems.append(f"--num-layers {layers} with -p {stages}: {error}. Change one of them.")
        return None
    return Description(
        layers=layers, hidden=h, ffn=f, heads=heads, query_groups=k // head_dim, head_dim=head_dim,
        seq_length=s, micro_batch=micro, vocab=vocab, gated=args.swiglu, bias=not args.disable_bias_linear,
        norm=args.normalization, tied=not args.untie_embeddings_and_output_weights,
        pipeline=stages, tensor=tensor, context=context,
        data=int(data) if data.isdigit() else 1,  # what is wrong with it `grid` has said
        stage_layers=split, **types,
    )  # fmt: skip


def network(read: Numbers, grid: tuple[int, int] | None) -> Network | None:
    """Links, from a file or from rates."""
    args = read.args
    rates = [name for name in ("--rate-inside", "--rate-between") if read.given(name) is not None]
    if args.bandwidths is None:
        return _from_rates(read, grid)
    if rates:
        read.problems.append(
            f"--bandwidths with {' and '.join(rates)}: both say how fast links are. Keep one."
        )
        return None
    again = "Give the file that `megatron-ext probe` wrote"
    try:
        found = Network.read(args.bandwidths)
    except OSError as error:
        read.problems.append(f"--bandwidths {args.bandwidths}: cannot be read ({error.strerror}). {again}.")
        return None
    except ValueError as error:
        read.problems.append(f"--bandwidths {args.bandwidths}: {error}. {again}.")
        return None
    missing = [] if grid is None else found.missing(*grid)
    if missing:
        read.problems.append(
            f"--bandwidths {args.bandwidths} has no links {' and '.join(missing)}: it was measured with "
            f"{found.groups} groups of {found.members}. Probe with two groups or more of two ranks or more."
        )
    return found


def backend(read: Numbers, found: Network) -> Backend:
    """What was asked for, else what was measured, else NCCL."""
    return read.args.backend or found.backend or "nccl"


def _from_rates(read: Numbers, grid: tuple[int, int] | None) -> Network | None:
    k, m = grid or (2, 2)
    links = {}
    for where, used in (("inside", m > 1), ("between", k > 1)):
        latency = read.number(f"--latency-{where}", "a latency in microseconds") or 0.0
        rate = _rate(read, f"--rate-{where}", needed=used)
        links[where] = Link(1e-6 * latency, rate or inf)
    sharing = read.count("--ranks-per-nic", "the number of ranks that share a NIC", default=m)
    if sharing is None:
        return None
    if sharing > m or m % sharing:
        read.problems.append(
            f"--ranks-per-nic {sharing}: groups of {m} do not share NICs evenly so. Give a divisor of {m}."
        )
        return None
    rails = read.args.backend != "gloo"
    return Network.given(links["inside"], links["between"], members=m, ranks_per_nic=sharing, rails=rails)


def _rate(read: Numbers, name: str, *, needed: bool) -> float | None:
    text = read.given(name)
    if text is None:
        if needed:
            read.problems.append(
                f"{name} is missing: it is how fast links {name.removeprefix('--rate-')} groups are, such as "
                f"{RATE_EXAMPLE}. Give it, or --bandwidths FILE."
            )
        return None
    rate = parse_rate(text)
    if rate is None:
        read.problems.append(f"{name} {text}: that is no rate above zero. Write it as {RATE_EXAMPLE}.")
    return rate


def compute(
    read: Numbers, units: tuple[UnitSize, ...] | None, tokens: int | None, scores: float
) -> Compute | None:
    """Seconds of compute."""
    optimizer = 1e-3 * (read.time("--optimizer-ms") or 0.0)
    both, rate = read.time("--compute-ms"), read.number("--tflops", "operations per second, in 10^12")
    if read.given("--compute-ms") is not None and read.given("--tflops") is not None:
        read.problems.append("--compute-ms with --tflops: both say how long compute takes. Keep one.")
        return None
    if both is not None:
        # A backward pass takes twice a forward pass.
        return Compute(1e-3 * both / 3, 2e-3 * both / 3, optimizer)
    if read.given("--tflops") is None:
        return Compute(optimizer=optimizer)
    if rate == 0:
        read.problems.append("--tflops 0: nothing would ever be computed. Give what a rank reaches.")
    if tokens is None and read.given("--parameters") is not None and read.given("--seq-length") is None:
        read.problems.append("--tflops needs the tokens of a microbatch. Give --seq-length, or --compute-ms.")
    if not rate or units is None or tokens is None:
        return None
    forward, backward = flops(units, tokens, scores)
    return Compute(forward / rate / 1e12, backward / rate / 1e12, optimizer)


def size(read: Numbers, name: str) -> int | None:
    """Bytes."""
    text = read.given(name)
    if text is None:
        return None
    found = parse_size(text)
    if found is None:
        read.problems.append(f"{name} {text}: that is no size. Write it as {SIZE_EXAMPLE}.")
    return found
