"""What pipeline schedules cannot do, said before any process group exists."""

from argparse import Namespace
from dataclasses import fields

from megatron_ext.pipeline.config import PipelineConfig
from megatron_ext.rules_pipeline import ACCOUNT_FOR, FIRST_LAST, VIRTUAL, _given, virtual_stages
from megatron_ext.schedules.families import FAMILIES


def _family(args: Namespace):
    """The family that is asked for; None for stock's and for auto, which chooses what fits."""
    return FAMILIES.get(args.pipeline_schedule)


def _chunks(args: Namespace) -> int:
    return virtual_stages(args) or 1


def ranks_to_schedule(args: Namespace) -> str | None:
    """A pipeline has at least two ranks."""
    pp = args.pipeline_model_parallel_size
    if pp != 1:
        return None
    return (
        f"--pipeline-schedule {args.pipeline_schedule} orders the passes of a pipeline, but "
        "--pipeline-model-parallel-size is 1. Set it to at least 2, or drop --pipeline-schedule."
    )


def chunks_fit_the_schedule(args: Namespace) -> str | None:
    """Only interleaved leaves the number of chunks to the user."""
    given = _given(args, VIRTUAL)
    name = args.pipeline_schedule
    if name == "interleaved":
        if VIRTUAL["pipeline_model_parallel_layout"] in given:
            return "--pipeline-model-parallel-layout with --pipeline-schedule interleaved: " + _LAYOUT
        if not given or _chunks(args) < 2:
            return (
                "--pipeline-schedule interleaved needs the number of chunks per rank. Add "
                "--num-virtual-stages-per-pipeline-rank 2."
            )
        return None
    if not given:
        return None
    if VIRTUAL["pipeline_model_parallel_layout"] in given and len(given) == 1 and name in ("1f1b", "zb-h1"):
        return f"--pipeline-model-parallel-layout with --pipeline-schedule {name}: {_LAYOUT}"
    return (
        f"{' and '.join(given)} with --pipeline-schedule {name}, which decides the number of chunks by "
        "itself. "
        f"Remove {' and '.join(given)}, or use --pipeline-schedule interleaved."
    )


_LAYOUT = "layers are shared out evenly by it. Remove --pipeline-model-parallel-layout."


def layers_for_two_chunks(args: Namespace) -> str | None:
    """Every rank of a V has two chunks of equal size."""
    family, layers, pp = _family(args), args.num_layers, args.pipeline_model_parallel_size
    if family is None or not family.vee or pp < 2:
        return None
    uneven = _given(args, FIRST_LAST | ACCOUNT_FOR)
    if uneven:
        return (
            f"{' and '.join(uneven)} with --pipeline-schedule {args.pipeline_schedule}: both chunks of all "
            "ranks have the same number of layers. Remove it; --vocab-parallel balances the vocabulary "
            "layers."
        )
    if not layers or layers % (2 * pp) == 0:
        return None
    fits = max(1, round(layers / (2 * pp))) * 2 * pp
    return (
        f"--num-layers {layers} cannot be shared out to two chunks on each of {pp} pipeline ranks, which "
        f"--pipeline-schedule {args.pipeline_schedule} has. Set --num-layers to a multiple of {2 * pp}, "
        "such as "
        f"{fits}."
    )


def weight_gradients_can_wait(args: Namespace) -> str | None:
    """Split backward passes need layers whose weight gradients can be left out of B."""
    family = _family(args)
    if args.pipeline_schedule != "auto" and (family is None or not family.split):
        return None
    found = []
    if args.transformer_impl != "local":
        found.append(
            f"--transformer-impl {args.transformer_impl} computes weight gradients inside its layers' "
            "backward "
            "passes: use --transformer-impl local"
        )
    if getattr(args, "delay_wgrad_compute", False):
        found.append("--delay-wgrad-compute has another schedule delay them: remove it")
    if getattr(args, "defer_embedding_wgrad_compute", False):
        found.append("--defer-embedding-wgrad-compute delays those of the output layer: remove it")
    if not found:
        return None
    return (
        f"--pipeline-schedule {args.pipeline_schedule} runs weight gradients in passes of their own, and "
        f"{'; '.join(found)}. Or use --pipeline-schedule 1f1b or interleaved."
    )


def parameters_are_whole(args: Namespace) -> str | None:
    """Chunks and W passes use parameters that PaRO may have taken apart."""
    strategy = getattr(args, "paro_strategy", "off")
    if strategy in ("off", "auto") or strategy[0] == "N":
        return None
    return (
        f"--paro-strategy {strategy} splits parameters, which --pipeline-schedule "
        f"{args.pipeline_schedule} needs "
        "whole between its passes. Use a strategy that starts with N, such as NNG."
    )


_REFUSED = {
    "inprocess_restart": ("--inprocess-restart", "replaces process groups that the schedule's lanes hold"),
    "fine_grained_activation_offloading": (
        "--fine-grained-activation-offloading",
        "counts forward and backward passes of stock's schedule",
    ),
    "perform_rl_step": ("--perform-rl-step", "calls the model outside the pipeline schedule"),
    "sft": ("--sft", "gives microbatches of different lengths, and transfers between stages have one shape"),
    "overlap_moe_expert_parallel_comm": (
        "--overlap-moe-expert-parallel-comm",
        "is a schedule of its own",
    ),
}


def no_other_schedules(args: Namespace) -> str | None:
    """Options that hang on stock's schedules."""
    found = [(flag, why) for name, (flag, why) in _REFUSED.items() if getattr(args, name, None)]
    if not found:
        return None
    words = "; ".join(f"{flag} {why}" for flag, why in found)
    return (
        f"{words} with --pipeline-schedule {args.pipeline_schedule}. Remove "
        f"{' and '.join(flag for flag, _ in found)}."
    )


def vocabulary_mode_fits(args: Namespace) -> str | None:
    """Interlaced passes are a 1F1B of their own."""
    family, mode = _family(args), getattr(args, "vocab_parallel", "off")
    if mode == "interlaced" and (family is None or mode not in family.modes):
        return (
            f"--vocab-parallel interlaced runs only in 1F1B, not with --pipeline-schedule "
            f"{args.pipeline_schedule}. Use --vocab-parallel vocab-2, or --pipeline-schedule 1f1b."
        )
    return None


def flags_need_auto(args: Namespace) -> str | None:
    """What a search is told does nothing without one; a rule for every job."""
    name = getattr(args, "pipeline_schedule", None)
    if name is None or name == "auto":
        return None
    changed = [
        f"--{field.name.replace('_', '-')}"
        for field in fields(PipelineConfig)
        if field.name != "pipeline_schedule" and getattr(args, field.name) != field.default
    ]
    if not changed:
        return None
    return (
        f"{' and '.join(changed)} given, but --pipeline-schedule is {name}, so there is no search. Set "
        "--pipeline-schedule auto, or remove the rest."
    )


def search_input_is_valid(args: Namespace) -> str | None:
    """The limit and the file of costs."""
    limit, path = args.pipeline_memory_limit, args.pipeline_costs
    if limit is not None and not 1 <= limit < float("inf"):
        return f"--pipeline-memory-limit is {limit}: a rank holds at least 1 microbatch. Give 1 or more."
    if path is None:
        return None
    from megatron_ext.schedules.costs import Costs

    try:
        Costs.read(path).check(args.pipeline_model_parallel_size)
    except OSError as error:
        return (
            f"--pipeline-costs {path}: cannot be read ({error.strerror}). `megatron-ext trace --measured "
            "DIR` "
            "writes costs.json from a run with --ext-trace DIR."
        )
    except ValueError as error:
        return f"--pipeline-costs {path}: {error}"
    return None


RULES = (
    ranks_to_schedule,
    chunks_fit_the_schedule,
    layers_for_two_chunks,
    weight_gradients_can_wait,
    parameters_are_whole,
    no_other_schedules,
    vocabulary_mode_fits,
    search_input_is_valid,
)
