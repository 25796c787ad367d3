"""Stock's `forward_backward_func`, with the vocabulary passes in the schedule.

What every pipeline has is in pipeline/schedule.py; here are the batch that all stages share, the shards, and
their gradients.
"""

from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch.distributed import ProcessGroup

from megatron_ext import traffic
from megatron_ext.groups import device_of
from megatron_ext.pipeline.models import iterators_of
from megatron_ext.pipeline.plan import Plan, make_runtime
from megatron_ext.pipeline.schedule import PipelineSchedule
from megatron_ext.pipeline.sync import GradientSync
from megatron_ext.pipeline.weights import WeightGradients
from megatron_ext.schedules.links import Boundary
from megatron_ext.schedules.runtime import Runtime
from megatron_ext.vocab.batch import record, share
from megatron_ext.vocab.comm import FEATURE, VocabComm, VocabGroups
from megatron_ext.vocab.model import is_converted
from megatron_ext.vocab.output import OutputOptions, OutputPasses
from megatron_ext.vocab.passes import Job, Step, StepPasses
from megatron_ext.vocab.volume import step_bytes


class VocabSchedule(PipelineSchedule):
    """The schedule function of one job on one rank; lanes, links and programs are made once."""

    feature = FEATURE

    def __init__(
        self,
        plan: Plan,
        groups: VocabGroups,
        runtime: Runtime,
        weights: WeightGradients | None,
        options: OutputOptions,
        **settings: Any,
    ):
        super().__init__(plan, groups.pipe, runtime, weights, **settings)
        self._comm = VocabComm(groups)
        self._options = options

    @property
    def agreeing(self) -> ProcessGroup:
        """The ranks that must run one program."""
        return self._comm.groups.shards

    def make_job(self, models: list[Any]) -> Job:
        """What stays the same for all steps."""
        inner = [unwrap_model(model) for model in models]
        embedding, output = inner[0].embedding.word_embeddings, inner[-1].output_layer
        self._frozen_alike(embedding.weight, output.used_weight)
        fields = self.job_fields(models)
        return Job(
            **fields,
            comm=self._comm,
            embedding=embedding,
            output=OutputPasses(output, self._comm, self._options, fields["place"].last.rank),
            scatters=inner[0].vocab_scatters,
        )

    def make_passes(self, job: Job, call: dict[str, Any], sync: GradientSync) -> StepPasses:
        """The passes of one step, from what `forward_step` says about its microbatches."""
        fields = self.step_fields(job, call, sync)
        length = (call["decoder_seq_length"] or call["seq_length"]) // fields["cp_size"]
        iterators = iterators_of(call, len(job.models))
        calls = [
            record(
                call["forward_step_func"],
                iterators[chunk],
                model,
                unwrap_model(model).forward,
                call["num_microbatches"],
                last_stage=job.is_last(chunk),
            )
            for chunk, model in enumerate(job.models)
        ]
        shape = call["micro_batch_size"], length
        device = (
            torch.device(torch.cuda.current_device()) if job.embedding.weight.is_cuda else torch.device("cpu")
        )
        tokens, labels = share(self._comm, calls, shape, device, job.place)
        return StepPasses(job, Step(**fields, calls=calls, tokens=tokens, labels=labels))

    def late_weights(self, job: Job) -> list[Any]:
        """Vocabulary gradients bypass autograd, and so the hooks that would say that they are complete."""
        weights = (job.embedding.weight, job.output_shard.weight)
        return [weight for weight in weights if weight is not None]

    def expected_bytes(self, job: Job, step: Step, boundary: Boundary) -> dict[tuple[str, str], int]:
        """What this rank should have sent in the step, by kind and group."""
        return step_bytes(job.sizes(step))

    def refuse(self, call: dict[str, Any], models: list[Any]) -> None:
        """Raise RuntimeError for what shows only now that it cannot work."""
        inner = [unwrap_model(model) for model in models]
        if not is_converted(inner):
            raise RuntimeError(
                f"--vocab-parallel is on, but the model is a {type(inner[-1]).__name__} whose "
                "vocabulary layers were not shared out: only GPTModel is supported. Drop the flag."
            )
        super().refuse(call, models)

    def _frozen_alike(self, *weights: Any) -> None:
        """A parameter that is frozen on one stage only would be trained in part."""
        group = self._comm.groups.pipe
        trained = torch.tensor([int(w.requires_grad) for w in weights], device=device_of(group))
        with traffic.label("groups"):
            torch.distributed.all_reduce(trained, group=group)
        if not all(count in (0, group.size()) for count in trained.tolist()):
            raise RuntimeError(
                "the embedding or output layer is frozen on some pipeline stages only. With --vocab-parallel "
                "every stage holds rows of both: set requires_grad of model.embedding.word_embeddings.weight "
                "and model.output_layer.weight on all stages alike."
            )


def make_schedule(
    registry: Any, plan: Plan, weights: WeightGradients | None, options: OutputOptions, **settings: Any
) -> VocabSchedule:
    """The schedule of this rank, from the feature's process groups; collective.

    `settings` are those of `PipelineSchedule`.
    """
    from megatron_ext.record import on_gpu

    groups = VocabGroups(registry["vocab-pipe"], registry["vocab-tensor"], registry["vocab-shards"])
    runtime = make_runtime(registry, plan, groups.pipe, feature=FEATURE, on_gpu=on_gpu())
    return VocabSchedule(plan, groups, runtime, weights, options, **settings)
