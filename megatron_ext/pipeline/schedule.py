"""Stock's `forward_backward_func` with a pipeline schedule of ours.

Called and returning as stock's schedules are: it takes the user's `forward_step`, runs the program of this
rank, reduces gradients through the same `config` hooks, and returns the loss function's reports on the last
pipeline rank.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules as stock
from megatron.core.utils import get_model_config, unwrap_model
from torch.distributed import ProcessGroup

from megatron_ext import traffic
from megatron_ext.groups import device_of
from megatron_ext.hooks import bound
from megatron_ext.pipeline import reports
from megatron_ext.pipeline.models import as_list, device_of_model, half_module, iterators_of, weights_of_b
from megatron_ext.pipeline.passes import Job, Step, TransformerPasses
from megatron_ext.pipeline.plan import Plan
from megatron_ext.pipeline.sync import GradientSync
from megatron_ext.pipeline.volume import transfer_bytes
from megatron_ext.pipeline.weights import WeightGradients
from megatron_ext.schedules.check import checked
from megatron_ext.schedules.links import Boundary
from megatron_ext.schedules.lower import Program
from megatron_ext.schedules.runtime import Runtime
from megatron_ext.schedules.trace import StepTrace

FEATURE = "pipeline"


class PipelineSchedule:
    """The schedule function of one job on one rank; links and programs are made once."""

    feature = FEATURE

    def __init__(
        self,
        plan: Plan,
        pipe: ProcessGroup,
        runtime: Runtime,
        weights: WeightGradients | None,
        *,
        trace: StepTrace | None,
        check_bytes: bool,
    ):
        self.plan = plan
        self._pipe = pipe
        self._runtime = runtime
        self._weights = weights
        self._trace = trace
        self._check_bytes = check_bytes
        self._programs: dict[tuple[int, bool], Program] = {}
        self._job: Job | None = None
        self._job_models: list[Any] = []
        self.said = False

    def __call__(self, **kwargs: Any) -> list[Any]:
        """Run all microbatches; keyword arguments and result are those of stock's schedules."""
        call = bound(stock.forward_backward_pipelining_without_interleaving, (), kwargs)
        models = as_list(call["model"])
        if len(models) != self.plan.chunks:
            raise RuntimeError(
                f"{self.plan.flags()} runs {self.plan.chunks} model chunks per rank, but the model has "
                f"{len(models)}. Let Megatron's get_model build it."
            )
        self.refuse(call, models)
        if self._job_models != models:
            self._job_models, self._job = models, self.make_job(models)
        job = self._job
        config = job.config
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        before = traffic.ledger().totals()
        step, passes = self._run(call, job)
        if self._check_bytes:
            self._compare_bytes(before, job, step)
        self._report(passes, step)
        del passes
        losses = self._reports_on_last_rank(step)
        if not call["forward_only"]:
            self._finalize(call, job, step)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return losses

    def program(self, microbatches: int, forward_only: bool) -> Program:
        """The checked program for a number of microbatches."""
        key = microbatches, forward_only
        if key not in self._programs:
            schedule = self.plan.schedule(self._pipe.size(), microbatches, forward_only)
            program = checked(schedule, overlap=self.plan.overlap)
            self._agree(program)
            self._programs[key] = program
        return self._programs[key]

    # --- what vocabulary parallelism adds to ---------------------------------------------------------------

    def refuse(self, call: dict[str, Any], models: list[Any]) -> None:
        """Raise RuntimeError for what shows only now that it cannot work."""
        config = get_model_config(models[0])
        flags = self.plan.flags()
        if config.num_microbatches_with_partial_activation_checkpoints is not None:
            raise RuntimeError(
                "num_microbatches_with_partial_activation_checkpoints counts microbatches in the window of "
                f"stock's 1F1B, and {flags} has another one. Leave it out of the model's config."
            )
        if config.variable_seq_lengths:
            raise RuntimeError(
                f"{flags} needs microbatches of one shape [micro-batch-size, seq-length]: leave "
                "variable_seq_lengths out of the model's config."
            )
        if call["collect_non_loss_data"]:
            raise RuntimeError(
                f"{flags} is on, and this job collects data other than losses from the model: logits "
                "are never put together. Drop the flag, or the script's non-loss data function."
            )
        if call["adjust_tensor_shapes_fn"] is not None:
            raise RuntimeError(f"{flags} needs stock's tensor shapes between stages; this job changes them.")

    def make_job(self, models: list[Any]) -> Job:
        """What stays the same for all steps."""
        return Job(**self.job_fields(models))

    def job_fields(self, models: list[Any]) -> dict[str, Any]:
        """Fields of a `Job`."""
        place = self.plan.place(self._pipe.size())
        if self._weights is not None:
            self._weights.kept = weights_of_b(models)
        half = [module for model in models if (module := half_module(model)) is not None]
        if place.vee:
            for module in half:
                # Stock would return fp32 from chunk 1 of the last rank, which is not the last stage here.
                # Losses on rank 0 are fp32 anyway.
                if not isinstance(module.forward, functools.partial):
                    module.forward = functools.partial(module.forward, fp32_output=False)
        return {
            "models": models,
            "config": get_model_config(models[0]),
            "place": place,
            "rank": self._pipe.rank(),
            "half_outputs": bool(half),
            "weights": self._weights,
        }

    def make_passes(self, job: Job, call: dict[str, Any], sync: GradientSync) -> TransformerPasses:
        """The passes of one step."""
        return TransformerPasses(job, Step(**self.step_fields(job, call, sync)))

    def step_fields(self, job: Job, call: dict[str, Any], sync: GradientSync) -> dict[str, Any]:
        """Fields of a `Step`."""
        inner = unwrap_model(job.models[0])
        return {
            "microbatches": call["num_microbatches"],
            "forward_only": call["forward_only"],
            "first_val_step": call["first_val_step"],
            "cp_size": inner.pg_collection.cp.size(),
            "before_last_backward": sync.before_last_backward,
            "after_last_weights": sync.after_last_weights,
            "forward_step": call["forward_step_func"],
            "iterators": iterators_of(call, len(job.models)),
        }

    def late_weights(self, job: Job) -> list[Any]:
        """Weights whose gradients bypass the hooks and are complete at the end of the step."""
        return []

    def expected_bytes(self, job: Job, step: Step, boundary: Boundary) -> dict[tuple[str, str], int]:
        """What this rank should have sent in the step, by kind and group."""
        return transfer_bytes(
            job.place, job.rank, step.microbatches, boundary, training=not step.forward_only
        )

    # --- one step ------------------------------------------------------------------------------------------

    def _run(self, call: dict[str, Any], job: Job) -> tuple[Step, TransformerPasses]:
        config, inner = job.config, unwrap_model(job.models[0])
        (shape,) = stock.get_tensor_shapes(
            seq_length=call["seq_length"],
            micro_batch_size=call["micro_batch_size"],
            decoder_seq_length=call["decoder_seq_length"],
            config=config,
            tp_group=inner.pg_collection.tp,
            cp_group=inner.pg_collection.cp,
        )
        device = device_of_model(job.models)
        self._boundary = Boundary(tuple(shape), config.pipeline_dtype or config.params_dtype, device)
        sync = GradientSync(config, job)
        passes = self.make_passes(job, call, sync)
        program = self.program(call["num_microbatches"], call["forward_only"])
        if not call["forward_only"]:
            self._gather_parameters(config, job)
        with sync, self._traced(program):
            self._runtime.run(program, passes, self._boundary)
            if not call["forward_only"]:
                sync.finish(self.late_weights(job))
        if self._weights is not None and call["forward_only"]:
            self._weights.forget()
        return passes.step, passes

    def _gather_parameters(self, config: Any, job: Job) -> None:
        """With an aligned --overlap-param-gather stock starts gathering at the beginning of the step."""
        if config.param_sync_func is None:
            return
        funcs = as_list(config.param_sync_func)
        for func, model in zip(funcs, job.models, strict=True):
            func(model.parameters())

    def _report(self, passes: TransformerPasses, step: Step) -> None:
        """Say once what ran: chunk activations that were held are what the schedule says."""
        if step.forward_only:
            return
        schedule = self.program(step.microbatches, False).schedule
        rank = self._pipe.rank()
        assert passes.most_held == schedule.in_flight(rank), (passes.most_held, schedule.in_flight(rank))
        if self.said:
            return
        self.said = True
        split = f", {self._weights.count} weight gradients in W passes" if self._weights is not None else ""
        print(
            f"[megatron_ext] pipeline schedule {schedule.pipeline} with vocabulary {schedule.vocab}, rank "
            f"{rank} "
            f"of {schedule.p}: {step.microbatches} microbatches, {passes.most_held} activations of "
            f"{schedule.chunks} chunk{'s' * (schedule.chunks > 1)} held at most{split}",
            flush=True,
        )

    def _reports_on_last_rank(self, step: Step) -> list[Any]:
        """The loss reports, where stock looks for them: on the last rank, which in a V is not that of the
        loss."""
        source, target = self.plan.place(self._pipe.size()).last.rank, self._pipe.size() - 1
        rank = self._pipe.rank()
        if source == target or rank not in (source, target):
            return step.losses if rank == target else []
        with traffic.label("loss-reports"):
            if rank == source:
                reports.send((step.losses, step.num_tokens), target, self._pipe)
                return []
            device = device_of_model(self._job.models)
            step.losses, step.num_tokens = reports.receive(source, self._pipe, device)
        return step.losses

    def _agree(self, program: Program) -> None:
        """All ranks run parts of one program; each has built its own copy, maybe from a file of its node."""
        digest = hashlib.blake2b(program.text.encode(), digest_size=7).digest()
        group = self.agreeing
        mine = torch.tensor([int.from_bytes(digest)], dtype=torch.int64, device=device_of(group))
        every = torch.empty(group.size(), dtype=torch.int64, device=mine.device)
        with traffic.label("groups"):
            torch.distributed.all_gather_into_tensor(every, mine, group=group)
        if not (every == mine).all():
            raise RuntimeError(
                "pipeline ranks have built different schedules, so they would wait for each other for ever. "
                "Give all of them the same flags and the same file for --vocab-costs or --pipeline-costs."
            )

    @property
    def agreeing(self) -> ProcessGroup:
        """The ranks that must run one program."""
        return self._pipe

    def _compare_bytes(self, before: dict, job: Job, step: Step) -> None:
        """--ext-check bytes: what this rank has sent in the step is what the formulas say."""
        after = traffic.ledger().totals()
        sent = {
            (kind, group): count - before.get((feature, kind, group), (0, 0))[0]
            for (feature, kind, group), (count, _) in after.items()
            if feature == self.feature
        }
        sent = {key: count for key, count in sent.items() if count}
        expected = self.expected_bytes(job, step, self._boundary)
        if sent != expected:
            raise RuntimeError(
                f"--ext-check bytes: stage {self._pipe.rank()} sent {sent} in this step, and the "
                f"formulas of {self.plan.flags()} {self.plan.vocab} give {expected}."
            )

    def _traced(self, program: Program) -> contextlib.AbstractContextManager:
        if self._trace is None:
            return contextlib.nullcontext()
        return self._trace.around(self._runtime, program)

    def _finalize(self, call: dict[str, Any], job: Job, step: Step) -> None:
        config = job.config
        if config.finalize_model_grads_func is None:
            return
        total = None
        if config.calculate_per_token_loss:
            total = step.num_tokens
            if total is None:  # stock broadcasts the last stage's number
                total = torch.zeros([], dtype=torch.int)
            total = total.to(device_of_model(job.models))
        groups = call["pg_collection"] or stock._build_default_pg_collection()
        config.finalize_model_grads_func(
            job.models, total, pg_collection=groups, force_all_reduce=call["force_all_reduce"]
        )


def choose(schedule: Callable[[], PipelineSchedule], original: Callable) -> Callable:
    """Wrap of `get_forward_backward_func`: ours for every job, since rules refused what it cannot run."""

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable:
        return schedule()

    return get_forward_backward_func
