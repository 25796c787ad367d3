"""Run record `--ext-report DIR`: one JSON-lines file per rank, `DIR/rank-NNNN.jsonl`.

Lines have `event`: `start` (versions, paths, argv, features, patches, groups), `step` (one per training
step) and `end`. Every line is written whole and at once, so the record is complete up to the last finished
step even when the rank is killed. Non-finite numbers are the strings "nan", "inf", "-inf" (JSON has none).
"""

import functools
import json
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ext import __version__, traffic
from megatron_ext.hooks import bound
from megatron_ext.patching import Patch

SCHEMA = 1


def _plain(value: Any) -> Any:
    """A JSON value: tensors become numbers, non-finite numbers become strings."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def on_gpu() -> bool:
    """Whether torch's CUDA is the real one; under `--cpu` it has no compute capability."""
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).major > 0


class RunRecord:
    """Writer of one rank's record.

    `info` holds what the launcher knows before the run (argv, features, patches). Peak memory is what torch
    allocated at most on a GPU since the first step; on CPU it is the resident set's peak since then, minus
    its size when the launcher had imported everything, since torch does not count CPU memory.
    """

    def __init__(self, folder: str, rank: int, info: dict[str, Any]):
        self.path = Path(folder) / f"rank-{rank:04d}.jsonl"
        self.rank = rank
        self.info = info
        self.last_step = 0
        self._counting = traffic.count_stock()
        self._fd: int | None = None  # opened at the first line, once the arguments are known to be good
        self._base_rss = _rss_bytes()
        self._on_gpu = False
        self._startup_peak: int | None = None
        self.memory: Any = None
        """A `memory_step.StepMemory`, when memory is measured by category."""
        self.step_fields: dict[str, Callable[[], dict[str, Any]]] = {}
        """What features say about a step that has ended, by their names."""

    def write(self, event: str, **fields: Any) -> None:
        """Append one line in a single system call."""
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        line = json.dumps({"event": event, **fields}, allow_nan=False, separators=(",", ":"))
        os.write(self._fd, (line + "\n").encode())

    def start(self) -> None:
        """Write the start line; model-parallel groups must exist. Communication is counted from here on."""
        import torch
        from megatron.core import parallel_state
        from megatron.training import get_args

        from megatron_ext import compat, groups

        args = get_args()
        self._on_gpu = on_gpu()
        self.write(
            "start",
            schema=SCHEMA,
            rank=self.rank,
            world_size=torch.distributed.get_world_size(),
            time=time.time(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            versions={
                "megatron_ext": __version__,
                "megatron_core": compat.megatron_version(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            paths={name: _path_of(name) for name in ("megatron.core", "megatron.training")},
            device=torch.cuda.get_device_name() if self._on_gpu else "cpu",
            memory=self._memory_text(),
            layout={
                "tp": args.tensor_model_parallel_size,
                "pp": args.pipeline_model_parallel_size,
                "cp": args.context_parallel_size,
                "dp": args.data_parallel_size,
                "ep": args.expert_model_parallel_size,
                "vpp": args.virtual_pipeline_model_parallel_size,
            },
            coords={
                "tp": parallel_state.get_tensor_model_parallel_rank(),
                "pp": parallel_state.get_pipeline_model_parallel_rank(),
                "cp": parallel_state.get_context_parallel_rank(),
                "dp": parallel_state.get_data_parallel_rank(),
            },
            groups=groups.describe(),
            **self._planned_memory(args),
            **self.info,
        )
        self._counting.start()
        traffic.ledger().drain()

    def _planned_memory(self, args: Any) -> dict[str, Any]:
        """What the memory model says for this rank, beside what `--ext-memory` will measure."""
        if self.memory is None:
            return {}
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        from megatron_ext.vocab.memory_model import plan_of_run

        flags = args if args.vocab_parallel != "off" else None
        try:
            plans = plan_of_run(args, gpu=self._on_gpu, vocab=flags, microbatches=get_num_microbatches())
        except ValueError as reason:
            return {"no_planned_memory": str(reason)}
        return {"planned_memory": plans[parallel_state.get_pipeline_model_parallel_rank()].as_dict()}

    def before_first_step(self) -> None:
        """Let the peak start anew: building the model and loading a checkpoint would hide what steps need."""
        import torch

        if self._startup_peak is not None:
            return
        self._startup_peak = self._peak_memory()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        elif _can_reset_rss():
            _RSS_RESET.write_text("5")  # resets VmHWM of this process

    def step(self, step: int, seconds: float, result: tuple, args, optimizer, learning_rate) -> None:
        """Write the line of a finished step; `result` is what stock `train_step` returned."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        losses = {name: _plain(value) for name, value in result[0].items()}
        fields: dict[str, Any] = {"step": step}
        if losses:
            fields["loss"] = losses.get("lm loss", next(iter(losses.values())))
            fields["losses"] = losses
        if self.memory is not None and (measured := self.memory.take()):
            fields["memory"] = measured
        for name, take in self.step_fields.items():
            if found := take():
                fields[name] = found
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            if hasattr(part, "record_fields"):
                fields.update(part.record_fields())
        tokens = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size * args.seq_length
        self.write(
            "step",
            **fields,
            grad_norm=_plain(result[5]),
            step_time_s=seconds,
            tokens=tokens,
            peak_memory_bytes=self._peak_memory(),
            startup_peak_memory_bytes=self._startup_peak,
            skipped=bool(result[1]),
            learning_rate=_plain(learning_rate),
            loss_scale=_plain(optimizer.get_loss_scale()),
            traffic=traffic.ledger().drain(),
        )
        self.last_step = step

    def end(self, error: str | None = None) -> None:
        """Stop counting and write the end line, unless the run was refused before it started."""
        self._counting.stop()
        if self._fd is not None:
            self.write("end", step=self.last_step, status="error" if error else "ok", error=error)
            os.close(self._fd)
            self._fd = None

    def _memory_text(self) -> str:
        """What `peak_memory_bytes` counts."""
        if self._on_gpu:
            return "allocated on the GPU, peak since the first step"
        since = "peak since the first step" if _can_reset_rss() else "peak, start-up included"
        return f"resident above what imports take, {since}"

    def _peak_memory(self) -> int:
        import torch

        if self._on_gpu:
            return torch.cuda.max_memory_allocated()
        return max(0, _peak_rss_bytes() - self._base_rss)


def _path_of(name: str) -> str | None:
    module = sys.modules.get(name)
    return str(Path(module.__file__).parent) if module is not None and module.__file__ else None


_RSS_RESET = Path("/proc/self/clear_refs")


def _can_reset_rss() -> bool:
    return os.access(_RSS_RESET, os.W_OK)  # not in every container


def _status_bytes(key: str) -> int:
    # /proc knows this process alone; getrusage's peak is inherited from the parent over fork.
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def _rss_bytes() -> int:
    return _status_bytes("VmRSS")


def _peak_rss_bytes() -> int:
    return _status_bytes("VmHWM")


# --- hooks -------------------------------------------------------------------------------------------------


def patches(record: RunRecord) -> list[Patch]:
    """The two places of stock training that the record listens to."""
    return [
        Patch(
            "megatron.training.initialize:initialize_megatron",
            functools.partial(_after_initialize, record),
            "wrap",
            "write the start line once process groups exist",
            "record",
        ),
        Patch(
            "megatron.training.training:train_step",
            functools.partial(_around_train_step, record),
            "wrap",
            "write one line per step",
            "record",
            needs=("optimizer", "iteration"),
        ),
    ]


def catalogue() -> list[Patch]:
    """Patches of the record, for the contract."""
    return patches(None)  # type: ignore[arg-type]


def _after_initialize(record: RunRecord, original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        result = original(*args, **kwargs)
        record.start()
        return result

    return wrapper


def _around_train_step(record: RunRecord, original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        from megatron.training import get_args

        call = bound(original, args, kwargs)
        record.before_first_step()
        optimizer = call["optimizer"]
        learning_rate = next((g["lr"] for g in optimizer.param_groups if g.get("lr") is not None), None)
        begin = time.perf_counter()
        result = original(*args, **kwargs)
        losses = {name: _plain(value) for name, value in result[0].items()}  # waits for the device
        seconds = time.perf_counter() - begin
        record.step(
            call["iteration"] + 1, seconds, (losses, *result[1:]), get_args(), optimizer, learning_rate
        )
        return result

    return wrapper
