"""--pipeline-schedule auto: the search of schedules/search.py for this job."""

from argparse import Namespace

from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.families import FAMILIES
from megatron_ext.schedules.search import search, trade_off


def resolve(args: Namespace, flags: Namespace) -> None:
    """Choose a schedule for validated arguments and put it into the flags.

    Raises:
        ValueError: none fits into the memory limit.
    """
    p = args.pipeline_model_parallel_size
    m = max(1, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
    path = flags.pipeline_costs or (flags.vocab_costs if flags.vocab_parallel != "off" else None)
    costs = Costs.read(path) if path else Costs()
    limit = flags.pipeline_memory_limit or float(p)
    even = args.num_layers % (2 * p) == 0
    names = [name for name, family in FAMILIES.items() if even or family.chunks == 1]
    found = search(p, m, costs, vocab=flags.vocab_parallel, limit=limit, pipelines=names)
    best = found[0].recipe
    if args.rank == 0:
        print(
            f"[megatron_ext] schedules of {p} pipeline ranks and {m} microbatches that hold at most "
            f"{limit:g} "
            f"microbatches, vocabulary {flags.vocab_parallel}:\n{trade_off(found)}\n"
            f"[megatron_ext] --pipeline-schedule auto: {best}",
            flush=True,
        )
    flags.pipeline_schedule = best.pipeline
    flags.pipeline_recipe = best
    if best.pipeline == "interleaved":
        args.virtual_pipeline_model_parallel_size = best.chunks
