"""What PaRO cannot do, said before any process group exists."""

from argparse import Namespace
from dataclasses import fields

from megatron_ext.paro.config import ParoConfig
from megatron_ext.paro.groups import data_parallel_groups, group_size
from megatron_ext.paro.strategy import Level, Strategy, why_not


def _set(args: Namespace, name: str) -> bool:
    return bool(getattr(args, name, None))


def _levels(args: Namespace) -> Strategy | None:
    """The strategy, None when the planner chooses it or when it is not valid."""
    text = args.paro_strategy
    return None if text == "auto" or why_not(text) else Strategy.parse(text)


def valid_strategy(args: Namespace) -> str | None:
    """One of fourteen, or auto."""
    if args.paro_strategy == "auto":
        return None
    problem = why_not(args.paro_strategy)
    return problem and f"--paro-strategy {args.paro_strategy}: {problem}."


def bandwidths_are_for_auto(args: Namespace) -> str | None:
    """A strategy that is given needs no plan."""
    if args.paro_bandwidths is None or args.paro_strategy == "auto":
        return None
    return (
        f"--paro-bandwidths {args.paro_bandwidths} is for --paro-strategy auto and does nothing with "
        f"--paro-strategy {args.paro_strategy}. Remove it, or set --paro-strategy auto."
    )


def group_size_divides(args: Namespace) -> str | None:
    """Groups are of one size, and none is cut."""
    try:
        groups = data_parallel_groups(args)
    except ValueError:
        return None  # sizes that do not fit are said by the rules of stock's options
    n = len(groups[0])
    try:
        m = group_size(args)
    except ValueError as reason:
        return f"--paro-strategy splits over the ranks of a node: {reason}. Or set --paro-group-size."
    if m >= 1 and n % m == 0:
        return None
    sizes = ", ".join(str(size) for size in range(1, n + 1) if n % size == 0)
    given = (
        f"--paro-group-size {m}" if args.paro_group_size is not None else f"{m} data-parallel ranks per node"
    )
    return (
        f"{given}: {n} data-parallel ranks (data times context parallelism) cannot be cut into groups of "
        f"{m}. Set --paro-group-size to one of {sizes}."
    )


_REFUSED = {
    "overlap_param_gather_with_optimizer_step": (
        "--overlap-param-gather-with-optimizer-step",
        "steps on one model chunk at a time; use --overlap-param-gather alone",
    ),
    "delay_wgrad_compute": ("--delay-wgrad-compute", "moves weight gradients behind the unit's reduction"),
    "ddp_average_in_collective": (
        "--ddp-average-in-collective",
        "averages in a collective over all ranks at once, and sums here run in two steps",
    ),
    "use_precision_aware_optimizer": (
        "--use-precision-aware-optimizer",
        "keeps optimizer states in formats that the shards here do not have",
    ),
    "optimizer_cpu_offload": ("--optimizer-cpu-offload", "moves optimizer states that the engine owns"),
    "fp8_param_gather": ("--fp8-param-gather", "gathers parameters in a format of its own"),
    "fp4_param_gather": ("--fp4-param-gather", "gathers parameters in a format of its own"),
    "reuse_grad_buf_for_mxfp8_param_ag": (
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "shares gradient buffers that are not there",
    ),
    "load_main_params_from_ckpt": (
        "--load-main-params-from-ckpt",
        "reads master weights from a checkpoint of whole parameters",
    ),
    "save_wgrads_interval": (
        "--save-wgrads-interval",
        "needs whole gradients on every rank; use --ext-dump-grads",
    ),
    "check_for_large_grads": ("--check-for-large-grads", "compares gradients with those of other buffers"),
    "init_model_with_meta_device": (
        "--init-model-with-meta-device",
        "builds parameters without values, and their values are split here",
    ),
    "perform_rl_step": ("--perform-rl-step", "moves parameters in and out of memory by itself"),
    "inprocess_restart": ("--inprocess-restart", "replaces process groups that the engine holds"),
    "optimizer_cuda_graph": (
        "--optimizer-cuda-graph",
        "captures the optimizer step, in which updated parameters are sent",
    ),
    "qk_clip": ("--qk-clip", "scales whole matrices after the optimizer step"),
    "nccl_ub": ("--use-nccl-ub", "registers buffers that are not there"),
}

_READ_BETWEEN = {
    "log_params_norm": "--log-params-norm",
    "save_params_interval": "--save-params-interval",
    "check_weight_hash_across_dp_replicas_interval": "--check-weight-hash-across-dp-replicas-interval",
}


def no_other_owner(args: Namespace) -> str | None:
    """Options that own buffers, parameters or the order of the step themselves."""
    found = [f"{flag} {why}" for name, (flag, why) in _REFUSED.items() if _set(args, name)]
    return (
        f"--paro-strategy {args.paro_strategy}: {'; '.join(found)}. Remove what is named." if found else None
    )


def whole_parameters(args: Namespace) -> str | None:
    """Options that read parameters between steps, when split ones have no storage."""
    levels = _levels(args)
    if levels is None or levels.params is Level.N:
        return None
    found = ", ".join(flag for name, flag in _READ_BETWEEN.items() if _set(args, name))
    if not found:
        return None
    return (
        f"--paro-strategy {levels} splits parameters, and {found} reads whole ones between steps. Remove "
        f"{found}, or take a strategy that begins with N."
    )


def parameters_up_to_date(args: Namespace) -> str | None:
    """Options that read parameters right after the optimizer step, when updates are on their way."""
    levels = _levels(args)
    updated = levels is not None and levels.params is Level.N < levels.optimizer
    found = ", ".join(flag for name, flag in _READ_BETWEEN.items() if _set(args, name))
    if not updated or not found or not _set(args, "overlap_param_gather"):
        return None
    return (
        f"--overlap-param-gather with --paro-strategy {levels} updates parameters while the next step "
        f"starts, and {found} reads them before that. Remove one of them."
    )


def one_owner_of_weights(args: Namespace) -> str | None:
    """Weights that are split over further ranks by tensor parallelism are gathered by it."""
    shards, tensor = args.tensor_parallel_num_weight_shards, args.tensor_model_parallel_size
    if shards in (None, tensor):
        return None
    return (
        f"--tensor-parallel-num-weight-shards {shards} splits weights over data-parallel ranks, as "
        f"--paro-strategy {args.paro_strategy} does. Set it to {tensor} or remove it."
    )


def plain_optimizers(args: Namespace) -> str | None:
    """Steps are taken on flat parts of parameters."""
    if args.optimizer in ("adam", "sgd"):
        return None
    return (
        f"--optimizer {args.optimizer} looks at whole matrices, and --paro-strategy {args.paro_strategy} "
        "steps on flat parts of them. Use --optimizer adam or sgd."
    )


def distributed_checkpoints(args: Namespace) -> str | None:
    """Each rank writes its part."""
    if getattr(args, "ckpt_format", "torch_dist") == "torch_dist":
        return None
    return (
        f"--ckpt-format {args.ckpt_format} has no place for states that are split by --paro-strategy "
        f"{args.paro_strategy}. Use --ckpt-format torch_dist."
    )


def whole_vocabulary_shards(args: Namespace) -> str | None:
    """Vocabulary passes use their weights outside of a module's forward pass."""
    levels = _levels(args)
    if getattr(args, "vocab_parallel", "off") == "off" or levels is None or levels.params is Level.N:
        return None
    return (
        f"--paro-strategy {args.paro_strategy} splits parameters, and --vocab-parallel {args.vocab_parallel} "
        "uses its weights all through a step. Take a strategy that begins with N, such as NIG or NNG."
    )


def int8_needs_a_hop(args: Namespace) -> str | None:
    """Quantised is what crosses between groups alone."""
    levels = _levels(args)
    if args.paro_inter_dtype == "native" or levels is None or args.paro_comm != "flat":
        return None
    return (
        "--paro-inter-dtype int8 quantises what crosses between groups, and --paro-comm flat has no hop of "
        "its own between groups. Use --paro-comm two-phase or ho-ring, or --paro-inter-dtype native."
    )


RULES = (
    valid_strategy,
    bandwidths_are_for_auto,
    group_size_divides,
    no_other_owner,
    whole_parameters,
    parameters_up_to_date,
    one_owner_of_weights,
    plain_optimizers,
    distributed_checkpoints,
    whole_vocabulary_shards,
    int8_needs_a_hop,
)


def flags_need_the_strategy(args: Namespace) -> str | None:
    """For every job: flags of the feature without the flag that turns it on."""
    if getattr(args, "paro_strategy", "off") != "off":
        return None
    given = [
        f"--{field.name.replace('_', '-')}"
        for field in fields(ParoConfig)
        if field.name != "paro_strategy" and getattr(args, field.name, field.default) != field.default
    ]
    if not given:
        return None
    return f"{', '.join(given)} without --paro-strategy does nothing. Add --paro-strategy, or remove it."
