"""When gradients may be reduced: not before a chunk's last backward pass, or where it is split, its last "
"W."""

import contextlib
from collections.abc import Iterable
from typing import Any

from megatron_ext.pipeline.passes import Job


class GradientSync:
    """Holds the reductions of one step back, as stock's schedules do.

    With a sync function (--overlap-grad-reduce, aligned) a rank starts its reductions after its last pass; in
    1F1B stock's first stage starts them as gradients come, since no other rank is behind it. Without one all
    chunks do so.
    """

    def __init__(self, config: Any, job: Job):
        self._job = job
        no_sync = config.no_sync_func
        self._no_sync = [] if no_sync is None else no_sync if isinstance(no_sync, list) else [no_sync]
        self._held = [contextlib.ExitStack() for _ in job.models]
        sync = config.grad_sync_func
        aligned = sync is not None and not (job.has_first and len(job.models) == 1)
        self._sync = None if not aligned else sync if isinstance(sync, list) else [sync]

    def __enter__(self) -> "GradientSync":
        for stack, no_sync in zip(self._held, self._no_sync, strict=False):
            stack.enter_context(no_sync())
        return self

    def __exit__(self, *exc: object) -> None:
        for stack in self._held:
            stack.close()

    def before_last_backward(self, chunk: int) -> None:
        """From here on hooks may start the reductions of a chunk."""
        if self._sync is None:
            self._held[chunk].close()

    def after_last_weights(self, chunk: int) -> None:
        """Weight gradients of a chunk are complete; they bypass autograd, and so the hooks."""
        if self._sync is None and self._job.weights is not None:
            self.announce(self._job.weights.weights(chunk))

    def announce(self, weights: Iterable[Any]) -> None:
        """Gradients that bypass the hooks are complete, of weights of any chunk."""
        for weight in weights:
            for ddp in self._job.models:
                overlaps = getattr(getattr(ddp, "ddp_config", None), "overlap_grad_reduce", False)
                if overlaps and weight in ddp.param_to_bucket_group:
                    ddp.param_to_bucket_group[weight].register_grad_ready(weight, ddp.force_all_reduce)

    def finish(self, late: Iterable[Any] = ()) -> None:
        """All passes have run; `late` are weights that bypass the hooks and were not announced."""
        for stack in self._held:
            stack.close()
        if self._sync is None:
            self.announce(late)
            return
        for sync, model in zip(self._sync, self._job.models, strict=True):
            sync(model.parameters())
