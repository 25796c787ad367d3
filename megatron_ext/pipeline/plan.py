"""Which pipeline schedule runs, and what executes it on this rank."""

import functools
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup

from megatron_ext.pipeline.links import link_names
from megatron_ext.schedules.build import Schedule, build, build_listed
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.families import family
from megatron_ext.schedules.lane import make_lane
from megatron_ext.schedules.links import Links
from megatron_ext.schedules.runtime import Runtime
from megatron_ext.schedules.search import Recipe


@dataclass(frozen=True)
class Plan:
    """Which schedule runs."""

    pipeline: str
    chunks: int
    vocab: str = "off"
    costs: Costs | None = None
    """For orders made from measured times; None: the static order."""
    recipe: Recipe | None = None
    """What `auto` has found."""
    overlap: bool = True

    @property
    def place(self):
        """Where the stages live is known once the number of ranks is."""
        return functools.partial(family(self.pipeline).placement, chunks=self.chunks)

    def schedule(self, p: int, m: int, forward_only: bool) -> Schedule:
        """The schedule of `m` microbatches on `p` ranks."""
        if self.recipe is not None:
            return self.recipe.build(p, m, self.vocab, self.costs or Costs(), forward_only)
        chunks = self.chunks if family(self.pipeline).chunks is None else None
        options = {"pipeline": self.pipeline, "vocab": self.vocab, "chunks": chunks}
        if self.costs is None:
            return build(p, m, forward_only=forward_only, **options)
        return build_listed(p, m, costs=self.costs, forward_only=forward_only, **options)

    def flags(self) -> str:
        """How a user asks for it."""
        words = [] if self.pipeline == "1f1b" else [f"--pipeline-schedule {self.pipeline}"]
        words += [] if self.vocab == "off" else ["--vocab-parallel"]
        return " ".join(words) or "--pipeline-schedule 1f1b"


def make_runtime(registry: Any, plan: Plan, pipe: ProcessGroup, *, feature: str, on_gpu: bool) -> Runtime:
    """Links and lanes of this rank; collective."""
    place = plan.place(pipe.size())
    groups = {key: registry[name] for key, name in link_names(place).items()}
    links = Links(groups, place, feature=feature, overlap=plan.overlap, on_gpu=on_gpu)
    return Runtime(pipe.rank(), links, make_lane("comm", overlap=plan.overlap, on_gpu=on_gpu))
