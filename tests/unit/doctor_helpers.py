"""What the doctor's tests share."""

import os


def clear_environment(monkeypatch):
    """Unset what doctor looks at, so that no variable of the caller's decides a test."""
    prefixes = ("NCCL_", "TORCH_NCCL_", "GLOO_", "SLURM_", "MASTER_", "LOCAL_", "CUDA_")
    names = ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONPATH")
    for name in list(os.environ):
        if name.startswith(prefixes) or name in names:
            monkeypatch.delenv(name)


def only(findings, name):
    """The one finding of that name."""
    (finding,) = [finding for finding in findings if finding.name == name]
    return finding
