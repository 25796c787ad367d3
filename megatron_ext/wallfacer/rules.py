"""What WallFacer cannot do, said before any process group exists."""

from argparse import Namespace
from dataclasses import fields

from megatron_ext.tools.plan_units import SIZE_EXAMPLE, parse_size
from megatron_ext.wallfacer.config import WallfacerConfig
from megatron_ext.wallfacer.geometry import Geometry, shapes
from megatron_ext.wallfacer.rules_effect import EFFECT_RULES

LARGEST_HEAD_ON_GPU = 256


def _set(args: Namespace, name: str) -> bool:
    return bool(getattr(args, name, None))


def _heads(args: Namespace) -> tuple[int, int] | None:
    """Query and key heads per tensor-parallel rank, None where other rules refuse them."""
    heads, tp = args.num_attention_heads, args.tensor_model_parallel_size
    if not heads or tp < 1 or heads % tp:
        return None
    keys = args.num_query_groups if args.group_query_attention else heads
    return heads // tp, max(1, keys // tp)


def ranks_to_share(args: Namespace) -> str | None:
    """There is something to attend to on other ranks."""
    if args.context_parallel_size != 1:
        return None
    return (
        "--cp-comm-type wallfacer with --context-parallel-size 1 does nothing: the sequence is on one rank. "
        "Set --context-parallel-size to 2 or more, or remove --cp-comm-type."
    )


def team_size_given(args: Namespace) -> str | None:
    """A number of ranks, or auto."""
    text = args.wallfacer_team_size
    if text == "auto" or (text.isdecimal() and int(text) > 0):
        return None
    return f"--wallfacer-team-size {text} is no number of ranks: give 1 or more, or auto."


def teams_fit(args: Namespace) -> str | None:
    """Team size times bundle divides the context-parallel ranks."""
    text, bundle, size = args.wallfacer_team_size, args.wallfacer_kv_bundle, args.context_parallel_size
    if team_size_given(args) is not None or size < 1:
        return None
    flags = [] if text == "auto" else [f"--wallfacer-team-size {text}"]
    if bundle is not None:
        flags.append(f"--wallfacer-kv-bundle {bundle}")
    team = 1 if text == "auto" else int(text)
    try:
        Geometry(size, team, (team if text != "auto" else 1) if bundle is None else bundle)
    except ValueError:
        fitting = ", ".join(f"{c} and {k}" for c, k in shapes(size))
        product = "" if text == "auto" else " (bundle K is the team size C if not given) C * K"
        return (
            f"{' and '.join(flags)} with --context-parallel-size {size}:{product} must divide {size}. "
            f"C and K can be {fitting}."
        )
    return None


def all_layers_under_local(args: Namespace) -> str | None:
    """Stock's own attention for other layers is Transformer Engine's."""
    others = sorted(set(args.cp_comm_type) - {"wallfacer"})
    if not others or args.transformer_impl != "local":
        return None
    return (
        f"--cp-comm-type {' '.join(args.cp_comm_type)} gives some layers {' and '.join(others)}, which needs "
        "Transformer Engine, and --transformer-impl is local. Give --cp-comm-type wallfacer alone."
    )


def no_dropout(args: Namespace) -> str | None:
    """Probabilities are never there as a whole."""
    if not args.attention_dropout:
        return None
    return (
        f"--attention-dropout {args.attention_dropout:g}: WallFacer's attention has no dropout, since no "
        "rank sees all probabilities of a row. Set --attention-dropout 0 (stock's default is 0.1)."
    )


_REFUSED = {
    "hybrid_context_parallel": (
        "--hybrid-context-parallel",
        "gives microbatches ranks of their own, and teams and rings are made once",
    ),
    "qk_clip": ("--qk-clip", "needs the largest score of each head, which no kernel returns"),
    "log_max_attention_logit": (
        "--log-max-attention-logit",
        "needs the largest score of each head, which no kernel returns",
    ),
    "experimental_attention_variant": (
        "--experimental-attention-variant",
        "brings a core attention of its own",
    ),
    "use_kitchen_attention": ("--use-kitchen-attention", "brings a core attention of its own"),
    "perform_rl_step": ("--perform-rl-step", "generates text with caches of keys on one rank"),
    "reset_attention_mask": (
        "--reset-attention-mask",
        "keeps documents apart by a mask of the size of the sequence squared, and none is read (nor by "
        "Transformer Engine's attention, which ignores it)",
    ),
}


def no_other_attention(args: Namespace) -> str | None:
    """Options that need something of attention that it does not have."""
    found = [f"{flag} {why}" for name, (flag, why) in _REFUSED.items() if _set(args, name)]
    if not found:
        return None
    return f"--cp-comm-type wallfacer: {'; '.join(found)}. Remove what is named."


def layers_it_knows(args: Namespace) -> str | None:
    """Layers whose core attention can be replaced."""
    if args.transformer_impl in ("local", "transformer_engine"):
        return None
    return (
        f"--cp-comm-type wallfacer replaces the core attention of --transformer-impl local and "
        f"transformer_engine, not of {args.transformer_impl}. Use one of the two."
    )


def kernel_for_type(args: Namespace) -> str | None:
    """Fused kernels on GPUs compute in 16 bits, and heads have a largest size."""
    if args.distributed_backend == "gloo" or args.wallfacer_kernel not in (
        "auto",
        "torch-flash",
        "flash-attn",
    ):
        return None
    found = []
    if not (args.bf16 or args.fp16):
        found.append("fp32, where fused kernels compute in bf16 and fp16: add --bf16")
    dim = _head_dim(args)
    if dim and dim > LARGEST_HEAD_ON_GPU:
        found.append(
            f"heads of {dim}, where theirs are at most {LARGEST_HEAD_ON_GPU}: use more heads or --kv-channels"
        )
    if not found:
        return None
    return (
        f"--cp-comm-type wallfacer on GPUs with {'; and '.join(found)}. Or set --wallfacer-kernel reference, "
        "which is slow and takes memory of the square of the sequence."
    )


def kernel_for_device(args: Namespace) -> str | None:
    """A kernel that is named runs on the device."""
    name, cpu = args.wallfacer_kernel, args.distributed_backend == "gloo"
    if name in ("auto", "reference") or (name == "cpu-flash") == cpu:
        return None
    return (
        f"--wallfacer-kernel {name} does not run on {'CPU' if cpu else 'GPUs'}. Remove it: the fastest one "
        "that can run is taken."
    )


def kernel_runs_here(args: Namespace) -> str | None:
    """What only this machine knows: its GPU, and the packages that are installed and can be imported."""
    import torch

    from megatron_ext.record import on_gpu

    if args.distributed_backend == "gloo" or kernel_for_type(args) or kernel_for_device(args):
        return None
    place = int(getattr(args, "local_rank", None) or 0)
    if not torch.cuda.is_available() or place >= torch.cuda.device_count() or not on_gpu():
        return None  # stock says it
    from megatron_ext.wallfacer.kernels import select

    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    try:
        select(args.wallfacer_kernel, torch.device("cuda", place), dtype, _head_dim(args) or 1)
    except ValueError as error:
        return f"--wallfacer-kernel {args.wallfacer_kernel}: {error}."
    return None


def _head_dim(args: Namespace) -> int | None:
    if args.kv_channels is None and args.hidden_size and args.num_attention_heads:
        return args.hidden_size // args.num_attention_heads
    return args.kv_channels


def heads_by_chunks(args: Namespace) -> str | None:
    """Each chunk has whole key heads."""
    heads, chunks = _heads(args), args.wallfacer_head_chunks
    if heads is None or (chunks >= 1 and heads[1] % chunks == 0):
        return None
    fitting = ", ".join(str(n) for n in range(1, heads[1] + 1) if heads[1] % n == 0)
    return (
        f"--wallfacer-head-chunks {chunks}: the {heads[1]} key heads of a tensor-parallel rank cannot be cut "
        f"into so many parts. Set it to one of {fitting}."
    )


def window_looks_back(args: Namespace) -> str | None:
    """A causal model sees nothing behind a token."""
    window = args.window_size
    if not window or window[1] in (0, -1) or getattr(args, "bidirectional_attention", False):
        return None
    return (
        f"--window-size {window[0]},{window[1]}: a causal row sees no later keys. Set --window-size "
        f"{window[0]},0."
    )


def planning_is_for_auto(args: Namespace) -> str | None:
    """Nobody else reads the file and the limit."""
    names = [name for name in ("bandwidths", "memory") if getattr(args, f"wallfacer_{name}") is not None]
    if not names or args.wallfacer_team_size == "auto":
        return None
    flags = " and ".join(f"--wallfacer-{name}" for name in names)
    return (
        f"{flags} {'is' if len(names) == 1 else 'are'} for --wallfacer-team-size auto, and it is "
        f"{args.wallfacer_team_size}. Remove one of them."
    )


def memory_is_a_size(args: Namespace) -> str | None:
    """With its unit."""
    text = args.wallfacer_memory
    if text is None or parse_size(text):
        return None
    return f"--wallfacer-memory {text}: that is no size above zero. Write it as {SIZE_EXAMPLE}."


RULES = (
    ranks_to_share,
    team_size_given,
    teams_fit,
    all_layers_under_local,
    no_dropout,
    no_other_attention,
    layers_it_knows,
    kernel_for_type,
    kernel_for_device,
    kernel_runs_here,
    heads_by_chunks,
    window_looks_back,
    planning_is_for_auto,
    memory_is_a_size,
    *EFFECT_RULES,
)


def flags_need_the_comm_type(args: Namespace) -> str | None:
    """For every job: flags of the feature without the flag that turns it on."""
    if "wallfacer" in (getattr(args, "cp_comm_type", None) or ()):
        return None
    given = [
        f"--{field.name.replace('_', '-')}"
        for field in fields(WallfacerConfig)
        if getattr(args, field.name, field.default) != field.default
    ]
    if not given:
        return None
    return (
        f"{', '.join(given)} without --cp-comm-type wallfacer does nothing. Add --cp-comm-type wallfacer, or "
        "remove it."
    )
