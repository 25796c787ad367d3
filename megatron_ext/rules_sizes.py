"""Rules about sizes: the parallel grid against the processes, the model against the grid."""

from argparse import Namespace
from collections.abc import Iterable
from math import lcm

SIZE_FLAGS = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
}


def multiples_near(value: int, step: int) -> str:
    """The multiples of `step` just below and just above `value`, as a text: "8 or 12"."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)


def neighbours(candidates: Iterable[int], value: int) -> str:
    """The candidates (ascending) nearest below and above `value`, as a text: "2 or 4"."""
    candidates = list(candidates)
    below = [c for c in candidates if c < value][-1:]
    above = [c for c in candidates if c > value][:1]
    return " or ".join(str(c) for c in below + above)


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def divisors_near(number: int, value: int) -> str:
    """The divisors of `number` nearest below and above `value`: "2 or 4"."""
    return neighbours(divisors(number), value)


def weight_shard_factor(args: Namespace) -> int:
    """Ranks over which each tensor-parallel shard is split further (--tensor-parallel-num-weight-shards)."""
    shards = getattr(args, "tensor_parallel_num_weight_shards", None)
    tp = args.tensor_model_parallel_size
    return shards // tp if shards and shards % tp == 0 else 1


def model_ranks(args: Namespace) -> int:
    """Ranks that hold one copy of the model; 0 when a size is not positive."""
    sizes = [getattr(args, name) for name in SIZE_FLAGS]
    if min(sizes) < 1:
        return 0
    return sizes[0] * sizes[1] * sizes[2] * weight_shard_factor(args)


def data_parallel(args: Namespace) -> int:
    """Copies of the model, or 0 when the sizes do not fit the processes."""
    ranks = model_ranks(args)
    return args.world_size // ranks if ranks and args.world_size % ranks == 0 else 0


def is_hybrid(args: Namespace) -> bool:
    """Whether a layer pattern decides the layers, so that rules about layer counts cannot judge."""
    return any(
        getattr(args, name, None) is not None for name in ("hybrid_layer_pattern", "hybrid_override_pattern")
    )


def is_heterogeneous(args: Namespace) -> bool:
    """Whether a file gives each layer its own sizes."""
    return any(
        getattr(args, name, None) is not None
        for name in ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
    )


def parallel_sizes_positive(args: Namespace) -> str | None:
    """Every parallel size is at least 1."""
    wrong = [f"{flag} {getattr(args, name)}" for name, flag in SIZE_FLAGS.items() if getattr(args, name) < 1]
    if not wrong:
        return None
    return f"{', '.join(wrong)}: a parallel size counts ranks, so it is at least 1; give 1 to switch it off."


def world_size_divisible(args: Namespace) -> str | None:
    """The processes are a whole number of model copies."""
    ranks = model_ranks(args)
    if ranks == 0 or args.world_size % ranks == 0:
        return None
    parts = [f"{flag} {getattr(args, name)}" for name, flag in SIZE_FLAGS.items() if getattr(args, name) > 1]
    if weight_shard_factor(args) > 1:
        parts.append(f"weight shards {weight_shard_factor(args)} (--tensor-parallel-num-weight-shards)")
    started = f"{args.world_size} process{' was' if args.world_size == 1 else 'es were'} started"
    start = multiples_near(args.world_size, ranks)
    choose = f"sizes whose product divides {args.world_size}" if args.world_size > 1 else "1 for each"
    return (
        f"{' x '.join(parts)} needs {ranks} ranks for one copy of the model, but {started} (WORLD_SIZE), "
        f"which is not a multiple of {ranks}. Start {start} processes (on one machine: torchrun "
        f"--nproc-per-node {start.split()[0]}), or choose {choose}."
    )


def _splits_by_itself(args: Namespace) -> bool:
    """Whether the tensor-parallel group is a grid, whose rules say what it splits."""
    return bool(getattr(args, "linear_3d", None))


def heads_by_tensor_parallel(args: Namespace) -> str | None:
    """Attention heads are split evenly over the tensor-parallel ranks."""
    if _splits_by_itself(args):
        return None
    heads, tp = args.num_attention_heads, args.tensor_model_parallel_size
    if not heads or tp < 1 or heads % tp == 0:
        return None
    return (
        f"--num-attention-heads {heads} cannot be split over --tensor-model-parallel-size {tp}: every rank "
        f"holds whole heads. Set --num-attention-heads to {multiples_near(heads, tp)}, or "
        f"--tensor-model-parallel-size to {divisors_near(heads, tp)}."
    )


def query_groups_fit(args: Namespace) -> str | None:
    """Key/value heads divide the query heads, and divide or are divided by the tensor-parallel size."""
    if not args.group_query_attention or is_heterogeneous(args) or not args.num_attention_heads:
        return None
    groups, heads, tp = args.num_query_groups, args.num_attention_heads, args.tensor_model_parallel_size
    if _splits_by_itself(args):
        tp = 1
    if groups < 1 or heads % groups:
        return (
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}: every key/value "
            "head serves the same number of query heads. Set --num-query-groups to "
            f"{divisors_near(heads, groups)}."
        )
    if tp >= 1 and groups % tp and tp % groups:
        fitting = [d for d in divisors(heads) if d % tp == 0 or tp % d == 0]
        return (
            f"--num-query-groups {groups} is neither a multiple nor a divisor of "
            f"--tensor-model-parallel-size {tp}, so key/value heads cannot be shared out. Set "
            f"--num-query-groups to {neighbours(fitting, groups)}, or --tensor-model-parallel-size to "
            f"{divisors_near(groups, tp)}."
        )
    return None


def hidden_by_heads(args: Namespace) -> str | None:
    """The hidden size is a whole number of heads, unless --kv-channels gives the head size."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    if not hidden or not heads or args.kv_channels is not None or hidden % heads == 0:
        return None
    return (
        f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}, so heads have no whole "
        f"size. Set --hidden-size to {multiples_near(hidden, heads)}, --num-attention-heads to "
        f"{divisors_near(hidden, heads)}, or the head size itself with --kv-channels."
    )


def ffn_by_tensor_parallel(args: Namespace) -> str | None:
    """The MLP's inner size is split evenly over the tensor-parallel ranks (dense GPT layers only)."""
    tp, hidden, ffn = args.tensor_model_parallel_size, args.hidden_size, args.ffn_hidden_size
    if tp < 1 or not hidden or args.num_experts or is_hybrid(args) or is_heterogeneous(args):
        return None
    if _splits_by_itself(args):
        return None
    given = ffn is not None
    if not given:
        ffn = int(8 * hidden / 3 / 64) * 64 if args.swiglu else 4 * hidden
    if ffn % tp == 0:
        return None
    origin = (
        f"--ffn-hidden-size {ffn}" if given else f"The MLP's inner size {ffn} (from --hidden-size {hidden})"
    )
    return (
        f"{origin} cannot be split over --tensor-model-parallel-size {tp}. "
        f"Set --ffn-hidden-size to {multiples_near(ffn, tp)}."
    )


def sequence_by_parallel_sizes(args: Namespace) -> str | None:
    """The sequence is cut evenly for context parallelism and, if asked for, for sequence parallelism."""
    tp, cp, seq = args.tensor_model_parallel_size, args.context_parallel_size, args.seq_length
    if not seq or tp < 1 or cp < 1 or args.decoder_seq_length is not None or getattr(args, "sft", False):
        return None
    flags, step = [], 1
    if cp > 1:
        flags, step = [f"--context-parallel-size {cp} (two chunks a rank)"], 2 * cp
    if args.sequence_parallel and tp > 1:
        flags.append(f"--sequence-parallel over --tensor-model-parallel-size {tp}")
        step = lcm(step, cp * tp)
    if seq % step == 0:
        return None
    return (
        f"--seq-length {seq} cannot be split evenly by {' and '.join(flags)}: it must be a multiple of "
        f"{step}. Set --seq-length to {multiples_near(seq, step)}."
    )


SIZE_RULES = (
    parallel_sizes_positive,
    world_size_divisible,
    heads_by_tensor_parallel,
    query_groups_fit,
    hidden_by_heads,
    ffn_by_tensor_parallel,
    sequence_by_parallel_sizes,
)
