"""Doctor's checks of the GPUs, and of the one variable that decides what Megatron lets them do."""

import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator

from megatron_ext.tools.doctor_report import Finding

GIB = 1 << 30


def check(cpu: bool, require_gpu: bool) -> Iterator[Finding]:
    """All checks of this file; imports torch."""
    capability: tuple[int, int] | None = None
    if cpu:
        yield Finding("ok", "GPU", "not looked at: --cpu")
    else:
        capability, findings = gpus(require_gpu)
        yield from findings
    yield cuda_connections(capability)


def gpus(required: bool) -> tuple[tuple[int, int] | None, list[Finding]]:
    """The lowest compute capability (None without a usable GPU), and what to say about the GPUs."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = nvidia_smi()
    if count == 0:
        return None, [_no_gpu(required, seen, " ".join(str(warning.message) for warning in caught))]
    findings, lowest = [], (99, 0)
    for index in range(count):
        info = torch.cuda.get_device_properties(index)
        capability = (info.major, info.minor)
        lowest = min(lowest, capability)
        value = (
            f"{info.name}, {info.total_memory / GIB:.0f} GiB, compute capability {info.major}.{info.minor}"
        )
        built = [int(arch.split("_")[1].rstrip("af")) for arch in torch.cuda.get_arch_list()]
        if built and info.major * 10 + info.minor < min(built):
            fix = "install a torch that is built for this GPU"
            findings.append(Finding("FAIL", f"GPU {index}", f"{value}: older than this torch supports", fix))
        else:
            findings.append(Finding("ok", f"GPU {index}", value))
    driver = f"driver {seen[0][1]}" if seen else "driver unknown (no nvidia-smi)"
    findings.append(Finding("ok", "CUDA", f"{driver}, torch is built for CUDA {torch.version.cuda}"))
    return lowest, findings


def _no_gpu(required: bool, seen: list[tuple[str, str]], message: str) -> Finding:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen and hidden not in ("", "-1"):
        import torch

        return Finding(
            "FAIL",
            "GPU",
            f"nvidia-smi shows {len(seen)} ({seen[0][0]}, driver {seen[0][1]}), but torch {torch.__version__}"
            f" can use none. {message}".strip(),
            "install a torch whose CUDA version the driver supports, or check CUDA_VISIBLE_DEVICES",
        )
    why = f"none: CUDA_VISIBLE_DEVICES={hidden!r} hides them" if seen else "none"
    if required:
        return Finding(
            "FAIL", "GPU", why, "ask the scheduler for GPUs, or leave --require-gpu out for a CPU run"
        )
    return Finding("warn", "GPU", why, "only CPU runs work here: -m megatron_ext --cpu SCRIPT ...")


def nvidia_smi() -> list[tuple[str, str]]:
    """(name, driver version) of every GPU that the driver shows; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        return []
    return [tuple(map(str.strip, line.rsplit(",", 1))) for line in done.stdout.splitlines() if "," in line]


def cuda_connections(capability: tuple[int, int] | None) -> Finding:
    """CUDA_DEVICE_MAX_CONNECTIONS: Megatron asserts 1 for TP and CP before Blackwell, and not 1 for FSDP."""
    name, value = "CUDA connections", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    shown = f"CUDA_DEVICE_MAX_CONNECTIONS is {'not set' if value is None else value}"
    if capability is None:
        return Finding("ok", name, f"{shown}; it does not matter without a GPU")
    if value == "1":
        fits = "as tensor and context parallelism want it; FSDP refuses 1"
        return Finding("ok", name, f"{shown}, {fits}")
    if capability >= (10, 0):
        return Finding("ok", name, f"{shown}; Blackwell does not need it")
    return Finding(
        "warn",
        name,
        f"{shown}: stock Megatron refuses tensor or context parallelism on these GPUs",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1, except with --use-megatron-fsdp or --use-torch-fsdp2, "
        "which refuse 1",
    )
