"""Flags of pipeline schedules."""

from dataclasses import dataclass
from typing import Literal

SCHEDULES = ("stock", "1f1b", "interleaved", "zb-h1", "v-half", "v-min", "v-zb", "auto")


@dataclass(kw_only=True)
class PipelineConfig:
    """Pipeline schedules, with and without vocabulary parallelism."""

    pipeline_schedule: Literal["stock", "1f1b", "interleaved", "zb-h1", "v-half", "v-min", "v-zb", "auto"] = (
        "stock"
    )
    """Order of the pipeline's passes: 1f1b; interleaved, with --num-virtual-stages-per-pipeline-rank; zb-h1
    (weight gradients fill the bubble, 1F1B's memory); v-half, v-min and v-zb (two chunks per rank in a V:
    half, a third and all of 1F1B's memory, equal on all ranks); auto: the fastest of them within
    --pipeline-memory-limit. stock: Megatron's own, or with --vocab-parallel 1f1b."""

    pipeline_memory_limit: float | None = None
    """For auto: memory that a rank may hold between passes, in microbatches of its layers' activations; what
    split backward passes and vocabulary passes keep counts, too. Not given: what 1F1B holds in this job, and
    at least as many as there are pipeline ranks."""

    pipeline_costs: str | None = None
    """For auto: file with measured pass times (costs.json of `megatron-ext trace --measured`) to search with;
    not given: a backward pass takes twice a forward pass, of which half are weight gradients."""
