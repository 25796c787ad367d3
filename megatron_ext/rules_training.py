"""Rules about the run: required options, batch sizes, learning rate, lengths, saving."""

from argparse import Namespace

from megatron_ext.rules_sizes import data_parallel, is_hybrid, multiples_near, weight_shard_factor

DATA_OPTIONS = {
    "data_path": "--data-path",
    "data_args_path": "--data-args-path",
    "train_data_path": "--train-data-path",
    "valid_data_path": "--valid-data-path",
    "test_data_path": "--test-data-path",
    "per_split_data_args_path": "--per-split-data-args-path",
}


def is_training(args: Namespace) -> bool:
    """Whether the job trains: some option only makes sense then, or nothing is given at all.

    Megatron's parser serves inference scripts too, which need neither data nor a learning rate.
    """
    if getattr(args, "skip_train", False):
        return False
    hints = ("train_iters", "train_samples", "lr", "save", "mock_data", *DATA_OPTIONS)
    return any(getattr(args, name) for name in hints) or args.hidden_size is None


def required_options(args: Namespace) -> str | None:
    """What stock asks for, now or with a bare TypeError later."""
    if args.use_checkpoint_args:
        return None
    missing = []
    if args.num_layers is None and args.encoder_num_layers is None and not is_hybrid(args):
        missing.append("--num-layers")
    if args.seq_length is None and args.encoder_seq_length is None:
        missing.append("--seq-length")
    for name in ("hidden_size", "num_attention_heads", "max_position_embeddings", "micro_batch_size"):
        if getattr(args, name) is None:
            missing.append("--" + name.replace("_", "-"))
    if is_training(args):
        if args.train_iters is None and args.train_samples is None:
            missing.append("--train-iters (or --train-samples)")
        if args.lr is None:
            missing.append("--lr")
    if not missing:
        return None
    return (
        f"Required options are missing: {', '.join(missing)}. Give them on the command line or in a file "
        "(--ext-config FILE.yaml; configs/ has examples)."
    )


def save_interval_given(args: Namespace) -> str | None:
    """Saving needs to know how often."""
    if args.save is None or (args.save_interval or 0) > 0:
        return None
    return (
        f"--save {args.save} needs --save-interval N (in iterations, at least 1); the last iteration is "
        "always saved. Set it, or remove --save."
    )


def one_training_length(args: Namespace) -> str | None:
    """The run's length is counted in iterations or in samples."""
    if not args.train_iters or not args.train_samples or getattr(args, "skip_train", False):
        return None
    return (
        f"--train-iters {args.train_iters} and --train-samples {args.train_samples} both give the length of "
        "the run: keep one."
    )


def batch_sizes(args: Namespace) -> str | None:
    """The global batch is a whole number of microbatches on every data-parallel rank."""
    micro, batch, dp = args.micro_batch_size, args.global_batch_size, data_parallel(args)
    if micro is None:
        return None
    if micro < 1:
        return f"--micro-batch-size {micro}: give the sequences of one forward pass, at least 1."
    if batch is not None and batch < 1:
        return f"--global-batch-size {batch}: give the sequences of one optimizer step, at least 1."
    if batch is not None and args.step_batch_size_schedule is not None:
        return "--step-batch-size-schedule and --global-batch-size both give the batch size: keep one."
    step = micro * dp * weight_shard_factor(args)
    if not dp or batch is None or batch % step == 0 or (args.decrease_batch_size_if_needed and batch >= step):
        return None
    return (
        f"--global-batch-size {batch} is not a multiple of {step} = --micro-batch-size {micro} x "
        f"data-parallel size {step // micro} ({args.world_size} processes). Set --global-batch-size to "
        f"{multiples_near(batch, step)}."
    )


def evaluation_batch(args: Namespace) -> str | None:
    """The evaluation batch divides in the same way; stock checks it even when it is the training batch."""
    micro, dp = args.eval_micro_batch_size or args.micro_batch_size, data_parallel(args)
    batch = args.eval_global_batch_size or args.global_batch_size
    own = args.eval_micro_batch_size or args.eval_global_batch_size or args.decrease_batch_size_if_needed
    if not own or not micro or micro < 1 or not dp:
        return None
    batch = batch or args.micro_batch_size * dp
    if batch % (micro * dp) == 0:
        return None
    return (
        f"The evaluation batch of {batch} sequences is not a multiple of {micro * dp} = evaluation "
        f"micro-batch-size {micro} x data-parallel size {dp}. Set --eval-global-batch-size to "
        f"{multiples_near(batch, micro * dp)}."
    )


def positions_cover_sequence(args: Namespace) -> str | None:
    """There is a position for every token."""
    seq = args.seq_length if args.seq_length is not None else args.encoder_seq_length
    most = args.max_position_embeddings
    if seq is None or most is None or most >= seq:
        return None
    return (
        f"--max-position-embeddings {most} is below the sequence length {seq}. Set it to {seq} or more, or "
        f"--seq-length to {most} or less."
    )


def learning_rate(args: Namespace) -> str | None:
    """The schedule goes from warm-up to decay, between --min-lr and --lr."""
    if args.lr is None or getattr(args, "skip_train", False):
        return None
    if args.min_lr > args.lr:
        return f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}: lower --min-lr or raise --lr."
    unit = "iters" if args.train_iters else "samples"
    decay = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
    warmup, fraction = getattr(args, f"lr_warmup_{unit}"), args.lr_warmup_fraction
    if fraction is not None:
        if fraction < 1:
            return None
        return f"--lr-warmup-fraction {fraction:g} leaves nothing to decay: set it below 1, for example 0.01."
    if not decay or warmup < decay:
        return None
    length = f"--lr-decay-{unit}" if getattr(args, f"lr_decay_{unit}") else f"--train-{unit}"
    return (
        f"--lr-warmup-{unit} {warmup} does not end before {length} {decay}. Set --lr-warmup-{unit} below "
        f"{decay}, or raise {length}."
    )


def dumped_step_exists(args: Namespace) -> str | None:
    """The step of --ext-dump-grads is one that the run reaches."""
    step = getattr(args, "ext_dump_grads_step", None)
    if step is None or getattr(args, "ext_dump_grads", None) is None:
        return None
    last = args.train_iters
    if step >= 1 and (not last or step <= last):
        return None
    return (
        f"--ext-dump-grads-step {step} is no step of this run: steps count from 1"
        f"{f' to {last} (--train-iters)' if last else ''}. Set it within."
    )


def measured_step_can_be_written(args: Namespace) -> str | None:
    """--ext-memory puts its result into the run record, and needs a step with optimizer states."""
    if not getattr(args, "ext_memory", False):
        return None
    step, found = args.ext_memory_step, []
    if step < 2:
        found.append(f"--ext-memory-step {step} comes before the optimizer has states. Use 2 or a later step")
    if getattr(args, "ext_report", None) is None:
        found.append("--ext-memory writes into the run record, and there is none. Add --ext-report DIR")
    return ". ".join(found) + "." if found else None


def traced_step_has_a_schedule(args: Namespace) -> str | None:
    """--ext-trace records the actions of a pipeline schedule of ours."""
    if getattr(args, "ext_trace", None) is None:
        return None
    stock = getattr(args, "pipeline_schedule", "stock") == "stock"
    if stock and getattr(args, "vocab_parallel", "off") == "off":
        return (
            f"--ext-trace {args.ext_trace} records the passes of a pipeline schedule of this package, and "
            "stock's runs here. Add --vocab-parallel vocab-2 or --pipeline-schedule 1f1b, or leave "
            "--ext-trace out."
        )
    last = args.train_iters
    if args.ext_trace_step >= 1 and (not last or args.ext_trace_step <= last):
        return None
    return (
        f"--ext-trace-step {args.ext_trace_step} is no step of this run: steps count from 1"
        f"{f' to {last} (--train-iters)' if last else ''}. Set it within."
    )


def self_checks_know_the_wrapper(args: Namespace) -> str | None:
    """The replica check and the gradient dump read Megatron's own DistributedDataParallel."""
    sharded = [n for n in ("use_megatron_fsdp", "use_torch_fsdp2") if getattr(args, n, False)]
    asked = ["--ext-check replicas"] if "replicas" in getattr(args, "ext_check", ()) else []
    asked += ["--ext-dump-grads"] if getattr(args, "ext_dump_grads", None) else []
    if not sharded or not asked:
        return None
    flag = f"--{sharded[0].replace('_', '-')}"
    return (
        f"{' and '.join(asked)} cannot read the sharded parameters of {flag}. Leave it out, or "
        "run with --use-distributed-optimizer instead."
    )


TRAINING_RULES = (
    required_options,
    save_interval_given,
    one_training_length,
    batch_sizes,
    evaluation_batch,
    positions_cover_sequence,
    learning_rate,
    dumped_step_exists,
    measured_step_can_be_written,
    traced_step_has_a_schedule,
    self_checks_know_the_wrapper,
)
