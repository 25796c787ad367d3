"""Stock's `forward_backward_func`, with the vocabulary passes in the schedule.

Called and returning as stock's schedules are: it takes the user's `forward_step`, runs the program of this
rank, reduces gradients through the same `config` hooks, and returns the loss function's reports on the last
stage.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules as stock
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config, unwrap_model

from megatron_ext import traffic
from megatron_ext.groups import device_of
from megatron_ext.hooks import bound
from megatron_ext.schedules.build import build, build_listed
from megatron_ext.schedules.check import checked
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lane import make_lane
from megatron_ext.schedules.links import Boundary, Links
from megatron_ext.schedules.lower import Program
from megatron_ext.schedules.runtime import Runtime
from megatron_ext.schedules.trace import StepTrace
from megatron_ext.vocab.batch import record, share
from megatron_ext.vocab.comm import FEATURE, VocabComm, VocabGroups
from megatron_ext.vocab.model import is_converted
from megatron_ext.vocab.output import OutputOptions, OutputPasses
from megatron_ext.vocab.passes import Job, Step, StepPasses
from megatron_ext.vocab.volume import step_bytes


class VocabSchedule:
    """The schedule function of one job on one rank; lanes, links and programs are made once."""

    def __init__(
        self,
        groups: VocabGroups,
        links: Callable[[], Links],
        options: OutputOptions,
        *,
        overlap: bool,
        costs: Costs | None,
        trace: StepTrace | None,
        check_bytes: bool,
        on_gpu: bool,
    ):
        self._comm = VocabComm(groups)
        self._options = options
        self._overlap = overlap
        self._costs = costs
        self._trace = trace
        self._check_bytes = check_bytes
        lane = make_lane("comm", overlap=overlap, on_gpu=on_gpu)
        self._runtime = Runtime(groups.pipe.rank(), links(), lane)
        self._programs: dict[tuple[int, bool], Program] = {}
        self._job: Job | None = None
        self._job_model: Any = None

    def __call__(self, **kwargs: Any) -> list[Any]:
        """Run all microbatches; keyword arguments and result are those of stock's schedules."""
        call = bound(stock.forward_backward_pipelining_without_interleaving, (), kwargs)
        model = _only(call["model"])
        self._refuse(call, model)
        job = self._job_of(model)
        config = job.config
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        before = traffic.ledger().totals()
        step, passes = self._run(call, job)
        if self._check_bytes:
            self._compare_bytes(before, job, step)
        del passes
        if not call["forward_only"]:
            self._finalize(call, job, step)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return step.losses

    def program(self, microbatches: int, forward_only: bool) -> Program:
        """The checked program for a number of microbatches."""
        key = microbatches, forward_only
        if key not in self._programs:
            made = functools.partial(build, costs=None) if self._costs is None else build_listed
            costs = {} if self._costs is None else {"costs": self._costs}
            schedule = made(
                self._comm.pp, microbatches, vocab=self._options.mode, forward_only=forward_only, **costs
            )
            program = checked(schedule, overlap=self._overlap)
            self._agree(program)
            self._programs[key] = program
        return self._programs[key]

    def _agree(self, program: Program) -> None:
        """All ranks run parts of one program; each has built its own copy, maybe from a file of its node."""
        digest = hashlib.blake2b(program.text.encode(), digest_size=7).digest()
        group = self._comm.groups.shards
        mine = torch.tensor([int.from_bytes(digest)], dtype=torch.int64, device=device_of(group))
        every = torch.empty(group.size(), dtype=torch.int64, device=mine.device)
        with traffic.label("groups"):
            torch.distributed.all_gather_into_tensor(every, mine, group=group)
        if not (every == mine).all():
            raise RuntimeError(
                "pipeline ranks have built different schedules, so they would wait for each other for ever. "
                "Give all of them the same flags and the same file for --vocab-costs."
            )

    def _job_of(self, model: Any) -> Job:
        if self._job_model is not model:
            inner = unwrap_model(model)
            self._frozen_alike(inner)
            self._job_model = model
            self._job = Job(
                model=model,
                config=get_model_config(model),
                comm=self._comm,
                embedding=inner.embedding.word_embeddings,
                output=OutputPasses(inner.output_layer, self._comm, self._options),
                scatters=inner.vocab_scatters,
                half_outputs=_runs_in_half(model),
            )
        return self._job

    def _frozen_alike(self, inner: Any) -> None:
        """A parameter that is frozen on one stage only would be trained in part."""
        group = self._comm.groups.pipe
        flags = [inner.embedding.word_embeddings.weight, inner.output_layer.used_weight]
        trained = torch.tensor([int(w.requires_grad) for w in flags], device=device_of(group))
        with traffic.label("groups"):
            torch.distributed.all_reduce(trained, group=group)
        if not all(count in (0, group.size()) for count in trained.tolist()):
            raise RuntimeError(
                "the embedding or output layer is frozen on some pipeline stages only. With --vocab-parallel "
                "every stage holds rows of both: set requires_grad of model.embedding.word_embeddings.weight "
                "and model.output_layer.weight on all stages alike."
            )

    def _refuse(self, call: dict[str, Any], model: Any) -> None:
        if not is_converted(unwrap_model(model)):
            raise RuntimeError(
                f"--vocab-parallel is on, but the model is a {type(unwrap_model(model)).__name__} whose "
                "vocabulary layers were not shared out: only GPTModel is supported. Drop the flag."
            )
        config = get_model_config(model)
        if config.num_microbatches_with_partial_activation_checkpoints is not None:
            raise RuntimeError(
                "num_microbatches_with_partial_activation_checkpoints counts microbatches in the window of "
                "stock's 1F1B, and --vocab-parallel has a longer one. Leave it out of the model's config."
            )
        if config.variable_seq_lengths:
            raise RuntimeError(
                "--vocab-parallel needs microbatches of one shape [micro-batch-size, seq-length]: leave "
                "variable_seq_lengths out of the model's config."
            )
        if call["collect_non_loss_data"]:
            raise RuntimeError(
                "--vocab-parallel is on, and this job collects data other than losses from the model: logits "
                "are never put together. Drop the flag, or the script's non-loss data function."
            )
        if call["adjust_tensor_shapes_fn"] is not None:
            raise RuntimeError(
                "--vocab-parallel needs stock's tensor shapes between stages; this job changes them."
            )

    def _run(self, call: dict[str, Any], job: Job) -> tuple[Step, StepPasses]:
        config, inner = job.config, unwrap_model(job.model)
        cp_size = inner.pg_collection.cp.size()
        shape = call["micro_batch_size"], (call["decoder_seq_length"] or call["seq_length"]) // cp_size
        (boundary_shape,) = stock.get_tensor_shapes(
            seq_length=call["seq_length"],
            micro_batch_size=call["micro_batch_size"],
            decoder_seq_length=call["decoder_seq_length"],
            config=config,
            tp_group=inner.pg_collection.tp,
            cp_group=inner.pg_collection.cp,
        )
        device = torch.device(torch.cuda.current_device()) if _on_gpu(job) else torch.device("cpu")
        iterator = _only(call["data_iterator"])
        calls = record(
            call["forward_step_func"],
            iterator,
            job.model,
            inner.forward,
            call["num_microbatches"],
            last_stage=job.on_last,
        )
        tokens, labels = share(self._comm, calls, shape, device)
        sync = _GradientSync(config, job)
        step = Step(
            calls,
            tokens,
            labels,
            forward_only=call["forward_only"],
            first_val_step=call["first_val_step"],
            cp_size=cp_size,
            before_last_backward=sync.before_last_backward,
        )
        passes = StepPasses(job, step)
        program = self.program(call["num_microbatches"], call["forward_only"])
        boundary = Boundary(tuple(boundary_shape), config.pipeline_dtype or config.params_dtype, device)
        with sync, self._traced(program):
            self._runtime.run(program, passes, boundary)
            if not call["forward_only"]:
                sync.vocabulary_is_ready()
        return step, passes

    def _compare_bytes(self, before: dict, job: Job, step: Step) -> None:
        """--ext-check bytes: what this rank has sent in the step is what the formulas say."""
        after = traffic.ledger().totals()
        sent = {
            (kind, group): count - before.get((feature, kind, group), (0, 0))[0]
            for (feature, kind, group), (count, _) in after.items()
            if feature == FEATURE
        }
        sent = {key: count for key, count in sent.items() if count}
        expected = step_bytes(job.sizes(step))
        if sent != expected:
            raise RuntimeError(
                f"--ext-check bytes: stage {job.comm.groups.pipe.rank()} sent {sent} in this step, and the "
                f"formulas of --vocab-parallel {self._options.mode} give {expected}."
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
                total = torch.zeros([], dtype=torch.int, device=step.tokens.device)
            total = total.to(step.tokens.device)
        groups = call["pg_collection"] or stock._build_default_pg_collection()
        config.finalize_model_grads_func(
            [job.model], total, pg_collection=groups, force_all_reduce=call["force_all_reduce"]
        )


class _GradientSync:
    """When gradients may be reduced, as stock's 1F1B decides it: not before the last microbatch's
    backward."""

    def __init__(self, config: Any, job: Job):
        self._config = config
        self._job = job
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "_GradientSync":
        if self._config.no_sync_func is not None:
            self._held.enter_context(self._config.no_sync_func())
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.close()

    def before_last_backward(self) -> None:
        """With a sync function stages other than the first start all reductions after their last pass."""
        if self._config.grad_sync_func is None or self._job.first:
            self._held.close()

    def vocabulary_is_ready(self) -> None:
        """Vocabulary gradients are complete; they bypass autograd, and so the hooks that would say so."""
        aligned = self._config.grad_sync_func is not None and not self._job.first
        self._held.close()
        if aligned:
            self._config.grad_sync_func(self._job.model.parameters())
            return
        ddp = self._job.model
        if getattr(getattr(ddp, "ddp_config", None), "overlap_grad_reduce", False):
            for weight in (self._job.embedding.weight, self._job.output_shard.weight):
                if weight is not None and weight in ddp.param_to_bucket_group:
                    ddp.param_to_bucket_group[weight].register_grad_ready(weight, ddp.force_all_reduce)


def choose(schedule: Callable[[], VocabSchedule], original: Callable) -> Callable:
    """Wrap of `get_forward_backward_func`: ours for every job, since rules refused what it cannot run."""

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable:
        return schedule()

    return get_forward_backward_func


def make_schedule(registry: Any, options: OutputOptions, *, overlap: bool, **settings: Any) -> VocabSchedule:
    """The schedule of this rank, from the feature's process groups; collective.

    `settings` are those of `VocabSchedule`.
    """
    from megatron_ext.record import on_gpu

    gpu = on_gpu()
    groups = VocabGroups(registry["vocab-pipe"], registry["vocab-tensor"], registry["vocab-shards"])

    def links() -> Links:
        forward, backward = registry["pipeline-forward"], registry["pipeline-backward"]
        return Links(forward, backward, feature=FEATURE, overlap=overlap, on_gpu=gpu)

    return VocabSchedule(groups, links, options, overlap=overlap, on_gpu=gpu, **settings)


def _only(value: Any) -> Any:
    """Stock passes models and iterators as lists of one."""
    if not isinstance(value, list):
        return value
    assert len(value) == 1, "--vocab-parallel runs one model chunk per rank"
    return value[0]


def _runs_in_half(model: Any) -> bool:
    while hasattr(model, "module"):
        if isinstance(model, Float16Module):
            return True
        model = model.module
    return False


def _on_gpu(job: Job) -> bool:
    return job.embedding.weight.is_cuda
