"""What vocabulary parallelism cannot do, said before any process group exists."""

import math
import os
from argparse import Namespace
from dataclasses import fields

from megatron_ext.rules_pipeline import virtual_stages
from megatron_ext.vocab.config import VocabConfig


def _set(args: Namespace, name: str) -> bool:
    return bool(getattr(args, name, None))


def context_parallel_needs_te(args: Namespace) -> str | None:
    """Stock's local attention knows no context parallelism."""
    if args.context_parallel_size <= 1 or args.transformer_impl != "local":
        return None
    if "wallfacer" in args.cp_comm_type:
        return None
    return (
        f"--vocab-parallel {args.vocab_parallel} with --context-parallel-size {args.context_parallel_size}: "
        "--transformer-impl local has no context-parallel attention. Use --transformer-impl "
        "transformer_engine or --cp-comm-type wallfacer, or --context-parallel-size 1."
    )


def no_deferred_embedding_gradients(args: Namespace) -> str | None:
    """Weight gradients of the output layer have a pass of their own already."""
    if not _set(args, "defer_embedding_wgrad_compute"):
        return None
    return (
        "--defer-embedding-wgrad-compute moves the output layer's weight gradient to the end of the step; "
        f"--vocab-parallel {args.vocab_parallel} has a pass of its own for it (T). Remove "
        "--defer-embedding-wgrad-compute."
    )


def no_meta_device(args: Namespace) -> str | None:
    """Initial weights are scattered from where stock makes them."""
    if not _set(args, "init_model_with_meta_device"):
        return None
    return (
        "--init-model-with-meta-device builds weights without values, but --vocab-parallel "
        f"{args.vocab_parallel} shares out the values that stock initialises. Remove it."
    )


def fixed_shapes(args: Namespace) -> str | None:
    """Buffers of all stages have one shape."""
    if not _set(args, "sft"):
        return None
    return (
        f"--sft gives microbatches of different lengths, but --vocab-parallel {args.vocab_parallel} needs "
        "one shape [micro-batch-size, seq-length] on all stages. Remove --sft."
    )


_REFUSED = {
    "logits_save_dir": (
        "--logits-save-dir",
        "reads logits from the output layer, and they are never put together",
    ),
    "logits_load_dir": (
        "--logits-load-dir",
        "reads logits from the output layer, and they are never put together",
    ),
    "inprocess_restart": ("--inprocess-restart", "replaces process groups that the schedule's lanes hold"),
    "fine_grained_activation_offloading": (
        "--fine-grained-activation-offloading",
        "counts forward and backward passes of stock's schedule",
    ),
    "perform_rl_step": ("--perform-rl-step", "calls the model outside the pipeline schedule"),
    "log_straggler": ("--log-straggler", "times forward_step, which does not run the model here"),
}


def no_other_users_of_the_output_layer(args: Namespace) -> str | None:
    """Options that hang on what the schedule moves elsewhere."""
    found = [f"{flag} {why}" for name, (flag, why) in _REFUSED.items() if _set(args, name)]
    if not found:
        return None
    flags = " and ".join(text.split()[0] for text in found)
    return f"{'; '.join(found)} with --vocab-parallel {args.vocab_parallel}. Remove {flags}."


def no_weight_shards(args: Namespace) -> str | None:
    """Generalised tensor parallelism wraps the weights that are shared out."""
    shards = getattr(args, "tensor_parallel_num_weight_shards", None)
    if not shards or shards <= args.tensor_model_parallel_size:
        return None
    return (
        f"--tensor-parallel-num-weight-shards {shards} cuts weights that --vocab-parallel "
        f"{args.vocab_parallel} cuts already. Set it to {args.tensor_model_parallel_size} or remove it."
    )


def flags_need_the_mode(args: Namespace) -> str | None:
    """Flags of vocabulary parallelism do nothing while it is off; a rule for every job."""
    if getattr(args, "vocab_parallel", None) != "off":
        return None
    changed = [
        f"--{f.name.replace('_', '-')}"
        for f in fields(VocabConfig)
        if f.name != "vocab_parallel" and getattr(args, f.name) != f.default
    ]
    if not changed:
        return None
    return (
        f"{' and '.join(changed)} given, but --vocab-parallel is off, so nothing would come of it. "
        "Add --vocab-parallel vocab-2, or remove the rest."
    )


def rows_for_every_rank(args: Namespace) -> str | None:
    """Every rank holds at least one row."""
    vocab, divisor = getattr(args, "vocab_size", None), args.make_vocab_size_divisible_by
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if not vocab or tp < 1 or divisor < 1:
        return None
    rows = -(-vocab // (divisor * tp)) * divisor
    if rows >= pp:
        return None
    return (
        f"--vocab-size {vocab} is {rows * tp} rows with padding, too few for {tp} x {pp} ranks. Raise "
        f"--make-vocab-size-divisible-by to at least {pp}, or drop --vocab-parallel."
    )


def loss_terms_in_range(args: Namespace) -> str | None:
    """Weights of the loss's terms."""
    if not 0 <= args.vocab_label_smoothing < 1:
        return f"--vocab-label-smoothing is {args.vocab_label_smoothing}: it must be at least 0 and below 1."
    if not 0 <= args.vocab_z_loss < math.inf:
        return f"--vocab-z-loss is {args.vocab_z_loss}: it must be finite and not negative."
    return None


def chunk_is_positive(args: Namespace) -> str | None:
    """Rows per chunk."""
    if args.vocab_chunk_size >= 1:
        return None
    return f"--vocab-chunk-size is {args.vocab_chunk_size}: use at least 1 row, such as 8192."


def costs_can_be_read(args: Namespace) -> str | None:
    """The file of measured costs exists and fits the pipeline."""
    path = args.vocab_costs
    if path is None:
        return None
    if not os.path.isfile(path):
        return (
            f"--vocab-costs {path}: there is no such file. `megatron-ext trace --measured DIR` writes "
            "costs.json from a run with --ext-trace DIR."
        )
    from megatron_ext.schedules.costs import Costs

    try:
        Costs.read(path).check(args.pipeline_model_parallel_size)
    except ValueError as error:
        return f"--vocab-costs {path}: {error}"
    return None


def interleaving_has_our_schedule(args: Namespace) -> str | None:
    """Stock's interleaved schedule has no place for vocabulary passes, ours has."""
    chunks = virtual_stages(args)
    if getattr(args, "pipeline_schedule", "stock") != "stock" or (chunks or 1) == 1:
        return None
    return (
        f"--vocab-parallel {args.vocab_parallel} with {chunks} virtual stages per pipeline rank needs a "
        "schedule "
        "of ours for them. Add --pipeline-schedule interleaved."
    )


RULES = (
    interleaving_has_our_schedule,
    context_parallel_needs_te,
    no_deferred_embedding_gradients,
    no_meta_device,
    fixed_shapes,
    no_other_users_of_the_output_layer,
    no_weight_shards,
    rows_for_every_rank,
    loss_terms_in_range,
    chunk_is_positive,
    costs_can_be_read,
)
