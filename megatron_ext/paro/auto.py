"""What `--paro-strategy auto` plans with: the model, batch and flags of a run, from Megatron's arguments."""

from argparse import Namespace
from collections.abc import Sequence

from megatron_ext.paro.model import units_of
from megatron_ext.paro.network import Network
from megatron_ext.paro.planner import Situation
from megatron_ext.paro.strategy import STRATEGIES, Strategy
from megatron_ext.paro.volume import Wire


def situation_of_run(
    args: Namespace,
    flags: Namespace,
    *,
    k: int,
    m: int,
    network: Network,
    gpu: bool,
    memory_limit: int | None,
    strategies: Sequence[Strategy] = STRATEGIES,
) -> Situation:
    """The planner's question for a run; `choose` answers it.

    All parameters count as trained, since which ones a model provider freezes shows only when there is a
    model. Compute is left out, so of the strategies that fit the one that communicates fastest is chosen.

    Args:
        args: Megatron's, after validation.
        flags: ours.
        k, m: groups of data x context ranks, and members of each.
        network: measured, in this world or in another of the same kind.
        gpu: whether ranks are GPUs.
        memory_limit: bytes that a rank may use, None for no limit.
        strategies: those to choose from.

    Raises:
        ValueError: the size or the activations of the model cannot be planned; the text says why.
    """
    from megatron_ext.vocab.memory_description import model_description
    from megatron_ext.vocab.memory_model import plan_memory, planned_program

    d = model_description(args, gpu=gpu, vocab=flags)
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    plans = plan_memory(d, planned_program(d, microbatches))
    return Situation(
        units=units_of(d),
        wire=Wire(k, m, flags.paro_comm, flags.paro_inter_dtype, "nccl" if gpu else "gloo"),
        microbatches=microbatches,
        network=network,
        strategies=tuple(strategies),
        overlap_params=args.overlap_param_gather,
        overlap_grads=args.overlap_grad_reduce,
        reshard_after_forward=flags.paro_reshard_after_forward == "on",
        state_itemsize=d.state_itemsize,
        memory_limit=memory_limit,
        other_bytes=max(plan.activations + plan.vocabulary for plan in plans),
    )
