"""Real runs of `pretrain_dit.py` for functional tests, in forked ranks."""

import functools
from pathlib import Path

from tests.functional.runs import REPO, Run, launch, merged, read_record
from tests.ranks import preload, run_ranks

# 4 layers on 16 tokens a digit, 16 samples a step; keys have no bias (configs/dit-digits-cpu.yaml says why).
MODEL = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 4 --disable-bias-linear --normalization RMSNorm "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --lr-decay-style constant --weight-decay 0.1 "
    "--clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --log-interval 1 --seed 7 "
    "--init-method-std 0.1 --ckpt-format torch_dist"
).split()


def train(
    folder: Path, world: int, *extra: str, steps: int = 10, check: bool = True, timeout: float = 150
) -> Run:
    """Train in `world` forked ranks on CPU with the record in `folder`; `extra` flags override `MODEL`."""
    preload_packages()
    folder.mkdir(parents=True, exist_ok=True)
    args = merged(MODEL, ["--train-iters", str(steps)], list(extra), ["--ext-report", str(folder / "record")])
    body = functools.partial(launch, ["--cpu", str(REPO / "pretrain_dit.py"), *args], folder)
    ranks = run_ranks(world, body, timeout=timeout, check=check)
    return Run(folder, ranks, read_record(folder / "record", world))


@functools.cache
def preload_packages() -> None:
    """Import what the script will, in the parent of all ranks: scikit-learn takes longer than ten steps."""
    import PIL.Image  # noqa: F401
    import sklearn.datasets
    import sklearn.svm  # noqa: F401

    preload()
