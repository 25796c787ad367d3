"""What vocabulary parallelism cannot do, said before any process group exists."""

import os
from argparse import Namespace


def _set(args: Namespace, name: str) -> bool:
    return bool(getattr(args, name, None))


def context_parallel_needs_te(args: Namespace) -> str | None:
    """Stock's local attention knows no context parallelism."""
    if args.context_parallel_size <= 1 or args.transformer_impl != "local":
        return None
    return (
        f"--vocab-parallel {args.vocab_parallel} with --context-parallel-size {args.context_parallel_size}: "
        "--transformer-impl local has no context-parallel attention. Use --transformer-impl "
        "transformer_engine, or --context-parallel-size 1."
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


def no_partial_checkpointing(args: Namespace) -> str | None:
    """Stock chooses per microbatch by its own in-flight window, which is another one here."""
    if not _set(args, "num_microbatches_with_partial_activation_checkpoints"):
        return None
    return (
        "--num-microbatches-with-partial-activation-checkpoints counts microbatches in stock's 1F1B window, "
        f"and --vocab-parallel {args.vocab_parallel} has a longer one. Remove it, or use "
        "--recompute-granularity for all microbatches."
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
    flags = {"variable_seq_lengths": "--variable-seq-lengths", "sft": "--sft"}
    for name, flag in flags.items():
        if _set(args, name):
            return (
                f"{flag} gives microbatches of different lengths, but --vocab-parallel {args.vocab_parallel} "
                f"needs one shape [micro-batch-size, seq-length] on all stages. Remove {flag}."
            )
    return None


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
    if args.vocab_z_loss < 0:
        return f"--vocab-z-loss is {args.vocab_z_loss}: it must not be negative."
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


RULES = (
    context_parallel_needs_te,
    no_deferred_embedding_gradients,
    no_partial_checkpointing,
    no_meta_device,
    fixed_shapes,
    rows_for_every_rank,
    loss_terms_in_range,
    chunk_is_positive,
    costs_can_be_read,
)
