"""Write run records as `--ext-report` does, for the tests of `megatron-ext compare`."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MIB = 1 << 20
LAYOUT = {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "ep": 1, "vpp": None}


def start(rank: int = 0, world_size: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "event": "start",
        "schema": 1,
        "rank": rank,
        "world_size": world_size,
        "time": 1790000000.0,
        "hostname": "n0",
        "versions": {
            "megatron_ext": "0.1.0",
            "megatron_core": "0.19.2",
            "torch": "2.11.0",
            "python": "3.12.1",
        },
        "paths": {"megatron.core": "/site/megatron/core"},
        "device": "cpu",
        "argv": ["pretrain_gpt.py", "--num-layers", "4", "--ext-report", "somewhere"],
        "features": [],
        "patches": [{"target": "a.b:C.d", "kind": "wrap", "feature": "record", "sites": ["a.b"]}],
        "layout": LAYOUT | {"pp": world_size},
        "groups": {},
        "coords": {},
    } | changes


def loss_at(step: int) -> float:
    return 3.0 + 7.0 / step


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "event": "step",
        "step": number,
        "loss": loss_at(number),
        "losses": {"lm loss": loss_at(number)},
        "grad_norm": 1.0 + 1.0 / number,
        "step_time_s": 0.5,
        "tokens": 1024,
        "peak_memory_bytes": 100 * MIB,
        "skipped": False,
        "learning_rate": 1e-3,
        "loss_scale": 1.0,
        "traffic": [],
    } | changes


def end(number: int, **changes: Any) -> dict[str, Any]:
    return {"event": "end", "step": number, "status": "ok", "error": None} | changes


def _recordable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _recordable(inner) for key, inner in value.items()}
    return value


def write_rank(folder: Path, rank: int, lines: Iterable[dict[str, Any]], tail: str = "") -> Path:
    """Append lines to a rank's file, and a `tail` as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank:04d}.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(_recordable(line)) + "\n" for line in lines)
        file.write(tail)
    return path


def write_run(
    folder: Path,
    steps: Iterable[int] = range(1, 6),
    world_size: int = 1,
    change: Callable[[int, int], dict[str, Any]] = lambda rank, number: {},
    **start_changes: Any,
) -> Path:
    """A whole run; `change(rank, step)` gives the fields in which a step line differs from the usual one."""
    steps = list(steps)
    for rank in range(world_size):
        lines = [step(number, **change(rank, number)) for number in steps]
        first = start(rank, world_size, **start_changes)
        write_rank(folder, rank, [first, *lines, end(steps[-1] if steps else 0)])
    return folder
