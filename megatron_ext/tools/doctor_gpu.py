"""Doctor's checks of the GPUs, and of the one variable that decides what Megatron lets them do."""

import contextlib
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator

from megatron_ext.tools.doctor_report import Finding

GIB = 1 << 30
SMI_TIMEOUT_S = 60.0


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
    findings: list[Finding] = []
    try:
        seen, unseen = nvidia_smi(), "no nvidia-smi"
    except subprocess.TimeoutExpired as error:
        seen, unseen = [], "nvidia-smi hangs"
        what = f"gave no answer within {error.timeout:g} s, so the driver or a GPU hangs"
        findings.append(Finding("FAIL", "nvidia-smi", what, "use another node; this one needs a reset"))
    if count == 0:
        message = " ".join(str(warning.message) for warning in caught)
        return None, [*findings, _no_gpu(required, seen, message)]
    lowest = (99, 0)
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
            findings.append(_computes(index, value))
    driver = f"driver {seen[0][1]}" if seen else f"driver unknown ({unseen})"
    findings.append(Finding("ok", "CUDA", f"{driver}, torch is built for CUDA {torch.version.cuda}"))
    return lowest, findings


def _computes(index: int, value: str) -> Finding:
    """Whether a GPU, `value` in words, can do what it is there for."""
    try:
        matmul(index)
    except Exception as error:
        # Out of memory, a driver that is too old, a sick GPU: whatever comes up is what doctor has to report.
        what = f"{value}: cannot do a small matmul: {type(error).__name__}: {error}"
        fix = "see whether other processes hold it (nvidia-smi); if none does, leave it out or reset it"
        return Finding("FAIL", f"GPU {index}", what, fix)
    return Finding("ok", f"GPU {index}", value)


def matmul(index: int) -> None:
    """Multiply two small matrices on a GPU, and wait for it; raises what torch raises."""
    import torch

    ones = torch.ones(16, 16, device=torch.device("cuda", index))
    torch.matmul(ones, ones)
    torch.cuda.synchronize(index)


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
    """(name, driver version) of every GPU that the driver shows; empty without a driver.

    Raises:
        subprocess.TimeoutExpired: no answer within SMI_TIMEOUT_S seconds.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    # Not subprocess.run: after its timeout it waits for the process, which never ends where the driver hangs.
    process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        output, _ = process.communicate(timeout=SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        raise
    if process.returncode != 0:
        return []
    return [tuple(map(str.strip, line.rsplit(",", 1))) for line in output.splitlines() if "," in line]


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
