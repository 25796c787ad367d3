"""Rules about the pipeline: how layers and microbatches are shared out to stages."""

from argparse import Namespace

from megatron_ext.rules_sizes import (
    data_parallel,
    divisors_near,
    is_hybrid,
    multiples_near,
    weight_shard_factor,
)

FIRST_LAST = {
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers",
}
ACCOUNT_FOR = {
    "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
}
VIRTUAL = {
    "num_layers_per_virtual_pipeline_stage": "--num-layers-per-virtual-pipeline-stage",
    "num_virtual_stages_per_pipeline_rank": "--num-virtual-stages-per-pipeline-rank",
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
}


def _given(args: Namespace, flags: dict[str, str]) -> list[str]:
    """Those of the flags that are set; switches are False and values None when they are not."""
    values = ((getattr(args, name), flag) for name, flag in flags.items())
    return [flag for value, flag in values if value is not None and value is not False]


def _counted_layers(args: Namespace) -> int:
    """Layers to be shared out, with the embedding and the loss counted as one each where asked for."""
    return args.num_layers + len(_given(args, ACCOUNT_FOR))


def virtual_stages(args: Namespace) -> int | None:
    """Model chunks on each pipeline rank (1: not interleaved), or None when that cannot be told here."""
    if len(_given(args, VIRTUAL)) > 1 or args.pipeline_model_parallel_layout is not None or is_hybrid(args):
        return None
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return args.num_virtual_stages_per_pipeline_rank
    chunk = args.num_layers_per_virtual_pipeline_stage
    if chunk is None:
        return 1
    pp = args.pipeline_model_parallel_size
    if not args.num_layers or chunk < 1 or pp < 1 or _counted_layers(args) % (pp * chunk):
        return None
    return _counted_layers(args) // (pp * chunk)


def one_way_to_place_layers(args: Namespace) -> str | None:
    """The options that place layers on stages exclude each other."""
    virtual, placed = _given(args, VIRTUAL), _given(args, FIRST_LAST) + _given(args, ACCOUNT_FOR)
    if len(virtual) > 1:
        return f"{' and '.join(virtual)} are given together, but each of them decides the stages: keep one."
    if VIRTUAL["pipeline_model_parallel_layout"] in virtual and placed:
        return (
            f"--pipeline-model-parallel-layout places every layer, so {' and '.join(placed)} cannot act: "
            "remove one or the other."
        )
    if _given(args, FIRST_LAST) and _given(args, ACCOUNT_FOR):
        return (
            f"{' and '.join(_given(args, FIRST_LAST))} and {' and '.join(_given(args, ACCOUNT_FOR))} place "
            "layers in different ways: remove one or the other."
        )
    if VIRTUAL["num_layers_per_virtual_pipeline_stage"] in virtual and _given(args, FIRST_LAST):
        return (
            "--num-layers-per-virtual-pipeline-stage cannot be used with "
            f"{' and '.join(_given(args, FIRST_LAST))}. Give the number of chunks instead: "
            "--num-virtual-stages-per-pipeline-rank."
        )
    return None


def layers_by_stages(args: Namespace) -> str | None:
    """Without an option that places layers unevenly, every stage gets the same number."""
    pp, layers = args.pipeline_model_parallel_size, args.num_layers
    uneven = _given(args, FIRST_LAST) or args.pipeline_model_parallel_layout is not None
    if uneven or not layers or pp < 1 or is_hybrid(args):
        return None
    counted = _counted_layers(args)
    if counted % pp == 0:
        return None
    extra = counted - layers
    with_extra = f" (+{extra} for {' and '.join(_given(args, ACCOUNT_FOR))})" if extra else ""
    valid = " or ".join(
        str(int(n) - extra) for n in multiples_near(counted, pp).split(" or ") if int(n) > extra
    )
    return (
        f"--num-layers {layers}{with_extra} cannot be shared out evenly to --pipeline-model-parallel-size "
        f"{pp} stages. Set --num-layers to {valid}, --pipeline-model-parallel-size to "
        f"{divisors_near(counted, pp)}, or place layers unevenly with --pipeline-model-parallel-layout or "
        "--decoder-first-pipeline-num-layers / --decoder-last-pipeline-num-layers."
    )


def layers_by_virtual_stages(args: Namespace) -> str | None:
    """Interleaving cuts the layers of every stage into equal chunks."""
    pp, layers = args.pipeline_model_parallel_size, args.num_layers
    if one_way_to_place_layers(args) or _given(args, FIRST_LAST) or is_hybrid(args):
        return None
    chunk, chunks = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if chunk is not None and chunk < 1:
        return f"--num-layers-per-virtual-pipeline-stage {chunk}: give at least 1, or leave it out."
    if chunks is not None and chunks < 1:
        return f"--num-virtual-stages-per-pipeline-rank {chunks}: give at least 1, or leave it out."
    if not layers or pp < 1 or _counted_layers(args) % pp:
        return None
    stage = _counted_layers(args) // pp
    if chunk is not None and stage % chunk:
        return (
            f"--num-layers-per-virtual-pipeline-stage {chunk} does not divide the {stage} layers of a stage "
            f"(--num-layers {layers} over --pipeline-model-parallel-size {pp}). Set it to "
            f"{divisors_near(stage, chunk)}."
        )
    if chunks is not None and pp > 1 and stage % chunks:
        return (
            f"--num-virtual-stages-per-pipeline-rank {chunks} does not divide the {stage} layers of a stage "
            f"(--num-layers {layers} over --pipeline-model-parallel-size {pp}). Set it to "
            f"{divisors_near(stage, chunks)}."
        )
    return None


def uneven_stages(args: Namespace) -> str | None:
    """With a first or last stage of its own size, the rest is shared out evenly to the stages between.

    Stock overlooks sizes that leave a negative number of layers, or that are the same stage, and builds
    another number of layers than --num-layers.
    """
    flags, layers, pp = _given(args, FIRST_LAST), args.num_layers, args.pipeline_model_parallel_size
    if not flags or one_way_to_place_layers(args) or is_hybrid(args) or not layers or pp < 1:
        return None
    sizes = {flag: getattr(args, name) for name, flag in FIRST_LAST.items() if flag in flags}
    shown = " and ".join(f"{flag} {size}" for flag, size in sizes.items())
    if min(sizes.values()) < 1:
        return f"{shown}: a stage has at least 1 layer; give a positive number, or leave the option out."
    left, stages = layers - sum(sizes.values()), pp - len(sizes)
    chunks = virtual_stages(args) or 1
    if stages < 0:
        return f"{shown} are one stage at --pipeline-model-parallel-size {pp}: keep one, or use more stages."
    if bool(left) != bool(stages) or left < 0:
        return (
            f"{shown} leave {left} of --num-layers {layers} for the {stages} other stages of "
            f"--pipeline-model-parallel-size {pp}. Choose sizes that leave "
            f"{'no layer' if stages == 0 else f'a positive multiple of {stages} layers'}."
        )
    if stages and left % stages:
        return (
            f"{shown} leave {left} of --num-layers {layers}, which cannot be shared out evenly to the "
            f"{stages} other stages. Choose sizes that leave {multiples_near(left, stages)}."
        )
    odd = [f"{flag} {size}" for flag, size in sizes.items() if size % chunks]
    if stages and left // stages % chunks:
        odd.append(f"{left // stages} layers on each stage between")
    if odd:
        return (
            f"--num-virtual-stages-per-pipeline-rank {chunks} does not divide {' and '.join(odd)}. Every "
            "stage is cut into that many equal chunks: change the sizes or the number of chunks."
        )
    return None


def interleaving_needs_pipeline(args: Namespace) -> str | None:
    """Interleaving needs a pipeline, of at least 3 stages when sends do not overlap."""
    pp, chunks = args.pipeline_model_parallel_size, virtual_stages(args)
    least = 2 if args.overlap_p2p_comm else 3
    if (chunks or 1) <= 1 or pp >= least:
        return None
    because = "" if args.overlap_p2p_comm else " under --no-overlap-p2p-communication"
    return (
        f"{chunks} virtual stages on each rank (interleaved schedule) need --pipeline-model-parallel-size "
        f"{least} or more{because}, but it is {pp}. Raise it, or remove "
        f"{' and '.join(_given(args, VIRTUAL))}."
    )


def microbatches_for_interleaving(args: Namespace) -> str | None:
    """The interleaved schedule runs microbatches in groups of at least one per stage."""
    pp, chunks, dp = args.pipeline_model_parallel_size, virtual_stages(args), data_parallel(args)
    micro = args.micro_batch_size or 0
    if (chunks or 1) <= 1 or pp < 2 or not dp or micro < 1 or args.step_batch_size_schedule is not None:
        return None
    step = micro * dp * weight_shard_factor(args)
    batch, group = args.global_batch_size or micro * dp, args.microbatch_group_size_per_vp_stage or pp
    if group < pp:
        return (
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below "
            f"--pipeline-model-parallel-size {pp}: set it to {pp} or more, or leave it out."
        )
    microbatches, rest = divmod(batch, step)
    if rest or (group <= microbatches and not 0 < microbatches % group < pp):
        return None
    default = "" if args.global_batch_size else " (the default)"
    return (
        f"The interleaved schedule runs microbatches in groups of {group}, but --global-batch-size {batch}"
        f"{default} gives {microbatches} (--micro-batch-size {micro} x data-parallel size {dp} = {step} "
        f"sequences each). Set --global-batch-size to {multiples_near(batch, group * step)}."
    )


PIPELINE_RULES = (
    one_way_to_place_layers,
    layers_by_stages,
    layers_by_virtual_stages,
    uneven_stages,
    interleaving_needs_pipeline,
    microbatches_for_interleaving,
)
