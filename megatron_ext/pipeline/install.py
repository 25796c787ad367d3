"""What the launcher needs from pipeline schedules: process groups and patches. Imports nothing heavy."""

import functools
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from megatron_ext.patching import Patch
from megatron_ext.pipeline.links import link_groups
from megatron_ext.schedules.families import family
from megatron_ext.schedules.placement import Placement
from megatron_ext.vocab.checkpoint import buffer_patches

if TYPE_CHECKING:
    from megatron_ext.features import Context, Group


def adjust_pipeline(args: Namespace, flags: Namespace) -> None:
    """Decide on the schedule, and let stock build the chunks that it needs."""
    if flags.pipeline_schedule == "auto":
        from megatron_ext.pipeline.auto import resolve

        resolve(args, flags)
    flags.pipeline_chunks = args.virtual_pipeline_model_parallel_size or 1
    args.pipeline_schedule = flags.pipeline_schedule
    if flags.pipeline_schedule not in ("stock", "interleaved"):
        flags.pipeline_chunks = family(flags.pipeline_schedule).chunks
        if flags.pipeline_chunks > 1:
            args.virtual_pipeline_model_parallel_size = flags.pipeline_chunks


def placement_of(args: Namespace) -> Placement:
    """Where the stages live, from validated arguments."""
    chunks = args.virtual_pipeline_model_parallel_size or 1
    return family(_name(args)).placement(args.pipeline_model_parallel_size, chunks)


def _name(flags: Namespace) -> str:
    return "1f1b" if flags.pipeline_schedule == "stock" else flags.pipeline_schedule


def plan_of(flags: Namespace) -> Any:
    """Which schedule runs, once `adjust_pipeline` has decided."""
    from megatron_ext.pipeline.plan import Plan
    from megatron_ext.schedules.costs import Costs

    vocab = flags.vocab_parallel
    costs = flags.pipeline_costs or (flags.vocab_costs if vocab != "off" else None)
    return Plan(
        _name(flags),
        getattr(flags, "pipeline_chunks", 1),
        vocab,
        Costs.read(costs) if costs else None,
        recipe=getattr(flags, "pipeline_recipe", None),
        overlap=vocab == "off" or flags.vocab_overlap == "on",
    )


def weights_of(flags: Namespace) -> Any:
    """The queues of weight gradients of this job, None where backward passes are whole."""
    if not family(_name(flags)).split:
        return None
    if not hasattr(flags, "pipeline_weights"):
        from megatron.training import get_args

        from megatron_ext.pipeline.weights import WeightGradients

        flags.pipeline_weights = WeightGradients(get_args().gradient_accumulation_fusion)
    return flags.pipeline_weights


def settings_of(flags: Namespace, stage: int) -> dict[str, Any]:
    """What the flags of the launcher say about a schedule."""
    import torch

    from megatron_ext.record import on_gpu
    from megatron_ext.schedules.trace import StepTrace

    trace = None
    if flags.ext_trace:
        rank = torch.distributed.get_rank()
        trace = StepTrace(flags.ext_trace, rank, stage, flags.ext_trace_step, on_gpu())
    return {"trace": trace, "check_bytes": "bytes" in flags.ext_check}


def pipeline_groups(args: Namespace) -> "dict[str, Group]":
    """Groups for transfers between stages."""
    return link_groups(args, placement_of(args))


def pipeline_patches(context: "Context") -> list[Patch]:
    """Chunks in a V, split backward passes, and the schedule; with vocabulary parallelism that runs it."""
    flags = context.flags
    name = flags.pipeline_schedule
    if name == "stock":  # only the contract asks then
        every = [*_chunk_patches(flags), *_weight_patches(flags), *buffer_patches("pipeline")]
        return [*every, _schedule_patch(context)]
    patches = []
    if name == "auto" or family(name).vee:
        patches += _chunk_patches(flags)
    if name == "auto" or family(name).split:
        patches += _weight_patches(flags)
    if flags.vocab_parallel == "off":
        patches += [*buffer_patches("pipeline"), _schedule_patch(context)]
    return patches


def _chunk_patches(flags: Namespace) -> list[Patch]:
    def in_a_v(make: Any) -> Any:
        """A wrap that acts if the schedule, which `auto` decides on later, is a V."""

        def wrap(original: Any) -> Any:
            wrapped = make(original)

            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                vee = flags.pipeline_schedule != "auto" and family(_name(flags)).vee
                return (wrapped if vee else original)(*args, **kwargs)

            return wrapper

        return wrap

    def make(name: str, **options: Any) -> Any:
        def deferred(original: Any) -> Any:
            from megatron_ext.pipeline import chunks

            return getattr(chunks, name)(original, **options)

        return in_a_v(deferred)

    return [
        Patch(
            "megatron.core.transformer.transformer_layer:get_transformer_layer_offset",
            make("layer_offset"),
            "wrap",
            "layers of chunk 1 in a V",
            "pipeline",
            needs=("config", "vp_stage", "pp_rank"),
        ),
        Patch(
            "megatron.core.parallel_state:is_pipeline_last_stage",
            make("last_stage"),
            "wrap",
            "in a V the last stage is on rank 0",
            "pipeline",
            needs=("ignore_virtual", "vp_stage"),
        ),
        Patch(
            "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
            make("build_chunk", ties=flags.vocab_parallel == "off"),
            "wrap",
            "embedding and output layer of a V, both on rank 0",
            "pipeline",
            needs=(
                "pre_process",
                "post_process",
                "share_embeddings_and_output_weights",
                "pg_collection",
                "vp_stage",
            ),
        ),
    ]


def _weight_patches(flags: Namespace) -> list[Patch]:
    def linear(original: Any) -> Any:
        @functools.cache
        def chosen() -> Any:
            weights = weights_of(flags)
            return original if weights is None else weights.linear(original)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return chosen()(*args, **kwargs)

        return wrapper

    return [
        Patch(
            "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
            linear,
            "wrap",
            "leave weight gradients to passes of their own",
            "pipeline",
            needs=(
                "input",
                "weight",
                "bias",
                "gradient_accumulation_fusion",
                "sequence_parallel",
                "grad_output_buffer",
                "wgrad_deferral_limit",
                "tp_group",
            ),
        )
    ]


def _schedule_patch(context: "Context") -> Patch:
    flags, registry = context.flags, context.groups

    def schedule(original: Any) -> Any:
        from megatron_ext.pipeline.schedule import choose

        return choose(functools.cache(lambda: _schedule(flags, registry)), original)

    return Patch(
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        schedule,
        "wrap",
        "pipeline schedule of ours",
        "pipeline",
    )


def _schedule(flags: Namespace, registry: Any) -> Any:
    from megatron_ext.pipeline.plan import make_runtime
    from megatron_ext.pipeline.schedule import FEATURE, PipelineSchedule
    from megatron_ext.record import on_gpu

    plan = plan_of(flags)
    pipe = registry["pipeline-forward"]
    runtime = make_runtime(registry, plan, pipe, feature=FEATURE, on_gpu=on_gpu())
    return PipelineSchedule(plan, pipe, runtime, weights_of(flags), **settings_of(flags, pipe.rank()))
