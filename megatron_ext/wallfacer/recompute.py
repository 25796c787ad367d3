"""What attention layers keep from the forward to the backward pass, by the flags of recomputation. No torch.

A recomputed layer keeps its output and the log-sum-exps of its team's rows; queries, keys and values are
computed again, those of the layers that are recomputed together. Where attention alone is recomputed they are
kept, since it starts from them. Neither repeats attention or its communication.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """Layers of a rank times microbatches in flight."""

    whole: int = 1
    """That keep all that the backward pass needs."""
    recomputed: int = 0
    """That keep their results."""
    at_once: int = 0
    """That are recomputed together."""
    attention_again: bool = False
    """Whether the attention of `whole` ones is recomputed by itself."""

    @property
    def attached(self) -> bool:
        """Whether results come from `Rings.attach`, so that `--wallfacer-keep team` keeps nothing."""
        return self.attention_again or not self.whole


def kept(
    layers: int,
    microbatches: int = 1,
    *,
    granularity: str | None = None,
    method: str | None = None,
    number: int | None = None,
    modules: Sequence[str] | None = None,
) -> Kept:
    """By stock's flags.

    Args:
        layers: of a pipeline stage, or of a virtual one.
        microbatches: that are in flight in it.
        granularity, method, number, modules: --recompute-granularity, -method, -num-layers and -modules.
    """
    if granularity == "full":
        together = min(number or 1, layers)
        if method == "block":
            return Kept((layers - together) * microbatches, together * microbatches, 1)
        return Kept(0, layers * microbatches, together)
    alone = granularity == "selective" and "core_attn" in (modules or ("core_attn",))
    return Kept(layers * microbatches, attention_again=alone)


def kept_of_run(args: Namespace) -> Kept:
    """Of the first pipeline stage, which has most in flight, under stock's schedules.

    Args:
        args: Megatron's, after validation or before (then `data_parallel_size` may be missing, and stages are
            taken to be full of microbatches).
    """
    stages, virtual = max(1, args.pipeline_model_parallel_size), _virtual_stages(args)
    layers = max(1, -(-(args.num_layers or 1) // (stages * virtual)))
    if virtual == 1:
        flying = stages
    else:
        group = getattr(args, "microbatch_group_size_per_vp_stage", None) or stages
        flying = 2 * (stages - 1) + (virtual - 1) * group + 1
    ranks = getattr(args, "data_parallel_size", None)
    if ranks and args.global_batch_size and args.micro_batch_size:
        flying = min(flying, virtual * (args.global_batch_size // (args.micro_batch_size * ranks)))
    granularity = args.recompute_granularity
    if granularity is None and getattr(args, "recompute_activations", False):
        granularity = "selective"
    return kept(
        layers,
        max(1, flying),
        granularity=granularity,
        method=getattr(args, "recompute_method", None),
        number=getattr(args, "recompute_num_layers", None),
        modules=getattr(args, "recompute_modules", None),
    )


def _virtual_stages(args: Namespace) -> int:
    found = getattr(args, "virtual_pipeline_model_parallel_size", None)
    if found is None:
        found = getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    per_virtual = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    if found is None and per_virtual and args.num_layers:
        found = args.num_layers // max(1, args.pipeline_model_parallel_size * per_virtual)
    return max(1, found or 1)
