"""Real runs of `pretrain_dit.py` for functional tests, in forked ranks."""

import functools
from pathlib import Path

from megatron_ext.wallfacer.geometry import Geometry
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.plan import make_plan
from megatron_ext.wallfacer.sequence import whole
from megatron_ext.wallfacer.tiles import BIDIRECTIONAL, Mask
from megatron_ext.wallfacer.volume import Cost, Shape
from tests.functional.runs import REPO, Run, launch, merged, read_record
from tests.functional.wallfacer_runs import assert_calls
from tests.ranks import preload, run_ranks

TOKENS, LAYERS, HEADS, HEAD_DIM, BATCH, MICRO_BATCH = 16, 4, 4, 12, 16, 2
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


def assert_context_parallel(
    run: Run,
    cp: int,
    team: int,
    bundle: int,
    *,
    tp: int = 1,
    pp: int = 1,
    recomputed: bool = False,
    mask: Mask = BIDIRECTIONAL,
) -> None:
    """WallFacer ran, in both directions over contiguous chunks: bytes of every step and rank by formula."""
    plan = make_plan(Geometry(cp, team, bundle), whole(TOKENS, "contiguous"), mask)
    heads = HEADS // tp
    cost = Cost(plan, Shape(MICRO_BATCH, heads, heads, HEAD_DIM, 4), Options())
    microbatches = BATCH // MICRO_BATCH // (len(run.lines) // (cp * tp * pp))
    assert_calls(run, cost, LAYERS // pp * microbatches, recomputed)


@functools.cache
def preload_packages() -> None:
    """Import what the script will, in the parent of all ranks: scikit-learn takes longer than ten steps."""
    import PIL.Image  # noqa: F401
    import sklearn.datasets
    import sklearn.svm  # noqa: F401

    preload()
