"""--pipeline-schedule auto: the search of schedules/search.py for this job.

The limit is one of memory, in microbatches of a rank's layers. What passes leave for later ones counts, by
the plan of vocab/memory_model.py: activations, what B leaves for W, a stock cross entropy's softmax, and what
vocabulary passes keep.
"""

from argparse import Namespace
from dataclasses import replace

from megatron_ext.schedules.build import build
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.families import FAMILIES
from megatron_ext.schedules.lower import Program, lower
from megatron_ext.schedules.search import Measure, activations, search, trade_off
from megatron_ext.vocab.memory_description import Description, model_description, with_vocabulary
from megatron_ext.vocab.memory_layers import stage_kept
from megatron_ext.vocab.memory_model import held_bytes


def resolve(args: Namespace, flags: Namespace) -> None:
    """Choose a schedule for validated arguments and put it into the flags.

    Raises:
        ValueError: none fits into the memory limit.
    """
    from megatron_ext.record import on_gpu

    p, vocab = args.pipeline_model_parallel_size, flags.vocab_parallel
    m = max(1, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
    path = flags.pipeline_costs or (flags.vocab_costs if vocab != "off" else None)
    costs = Costs.read(path) if path else Costs()
    measure, counted = measure_of(args, flags, on_gpu())
    limit = flags.pipeline_memory_limit or default_limit(p, m, vocab, measure)
    even = args.num_layers % (2 * p) == 0
    names = [name for name, family in FAMILIES.items() if even or family.chunks == 1]
    found = search(p, m, costs, vocab=vocab, limit=limit, pipelines=names, measure=measure)
    best = found[0].recipe
    if args.rank == 0:
        print(
            f"[megatron_ext] schedules of {p} pipeline ranks and {m} microbatches that hold at most "
            f"{limit:.4g} microbatches, vocabulary {vocab}; {counted}:\n{trade_off(found)}\n"
            f"[megatron_ext] --pipeline-schedule auto: {best}",
            flush=True,
        )
    flags.pipeline_schedule = best.pipeline
    flags.pipeline_recipe = best
    if best.pipeline == "interleaved":
        args.virtual_pipeline_model_parallel_size = best.chunks


def default_limit(p: int, m: int, vocab: str, measure: Measure) -> float:
    """What 1F1B holds: p microbatches, or more where something else is larger than activations."""
    return max(float(p), measure(lower(build(p, min(m, 4 * p), vocab=vocab))))


def measure_of(args: Namespace, flags: Namespace, gpu: bool) -> tuple[Measure, str]:
    """How the memory of a program counts, and what to say about it."""
    try:
        described = with_vocabulary(args, "the memory of logits cannot be planned")
        d = model_description(described, gpu=gpu, vocab=flags)
    except ValueError as reason:
        return activations, f"only activations count, since there is no plan of the rest: {reason}"
    return planned(d), "activations, what B leaves for W, and what vocabulary passes keep all count"


def planned(d: Description) -> Measure:
    """The measure by the memory model.

    Its unit is the same for all schedules: what a microbatch leaves on the fullest rank of 1F1B.
    """
    plain = replace(d, schedule="1f1b", chunks=1)
    unit = max(stage_kept(plain, rank) for rank in range(d.pipeline))

    def measure(program: Program) -> float:
        schedule = program.schedule
        return held_bytes(replace(d, schedule=schedule.pipeline, chunks=schedule.chunks), program) / unit

    return measure
