"""Vocabulary shards in torch_dist checkpoints: bit for bit stock's tensors, in both directions."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from megatron_ext import cpu, patching
from megatron_ext.vocab.checkpoint import vocab_sharded_state_dict
from megatron_ext.vocab.shard import vocab_range
from tests.ranks import ranks, run_ranks

HIDDEN = 3
KEYS = {"embedding": "embedding.word_embeddings.weight", "output": "output_layer.weight"}
STATES = ("exp_avg", "exp_avg_sq")


def full(name, rows, state=""):
    """What stock would hold: every element of every tensor and optimizer state is another number."""
    kind = (list(KEYS).index(name) * 3 + ["", *STATES].index(state)) * 1e5
    return kind + torch.arange(rows * HIDDEN, dtype=torch.float32).reshape(rows, HIDDEN)


def expected(name, saved, rows, state=""):
    """The whole tensor of a run with `rows` rows that has loaded `saved` rows."""
    out = torch.zeros(rows, HIDDEN)
    out[: min(rows, saved)] = full(name, saved, state)[:rows]
    return out


def patched(body):
    """Megatron's checkpoint code creates CUDA tensors; in a rank it gets the patches of `--cpu`."""

    @functools.wraps(body)
    def wrapper(*args, **kwargs):
        patching.apply(cpu.catalogue(), contract=None, log=lambda line: None)
        body(*args, **kwargs)

    return wrapper


def adam(params, fill):
    """Megatron's optimizer for fp32 and its Adam, with `fill(name, state)` as the state."""
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    inner = torch.optim.Adam(list(params.values()))

    def set_state(inner, config):
        for name, param in params.items():
            state = {key: fill(name, key) for key in STATES}
            inner.state[param] = {"step": torch.tensor(7.0), **state}

    set_state(inner, None)
    return FP32Optimizer(inner, OptimizerConfig(), set_state)


def save(folder, params, described, fill):
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    optimizer = adam(params, fill).sharded_state_dict(described)
    dist_checkpointing.save({"model": described, "optimizer": optimizer}, str(folder), async_strategy="mcore")


def check_load(folder, params, described, saved, rows, lo, hi):
    from megatron.core import dist_checkpointing

    empty = adam(params, lambda name, key: torch.full_like(params[name], float("nan")).detach())
    asked = {"model": described, "optimizer": empty.sharded_state_dict(described, is_loading=True)}
    loaded = dist_checkpointing.load(asked, str(folder))
    for index, name in enumerate(params):
        weight = loaded["model"][f"{name}.weight"]
        assert torch.equal(weight, expected(name, saved, rows)[lo:hi]), name
        for state in STATES:
            value = loaded["optimizer"]["state"][index][state]
            assert torch.equal(value, expected(name, saved, rows, state)[lo:hi]), (name, state)
    assert loaded["optimizer"]["state"]["common_step"] == 7


def shards(p, t, rows, names, value):
    """This rank's shards in Megatron's order of ranks, tp-dp-pp: (params, description, lo, hi, dp rank)."""
    dp = dist.get_world_size() // (p * t)
    rank = dist.get_rank()
    tp_rank, dp_rank, pp_rank = rank % t, rank // t % dp, rank // (t * dp)
    lo, hi = vocab_range(rows, t, tp_rank, p, pp_rank)
    params = {name: Parameter(value(name)[lo:hi].clone()) for name in names}
    named = {f"{name}.weight": (param, KEYS[name]) for name, param in params.items()}
    return params, vocab_sharded_state_dict("", named, rows, (lo, hi), dp_rank), lo, hi, dp_rank


@patched
def save_shards(folder, p, t, rows, names):
    params, described, lo, hi, dp_rank = shards(p, t, rows, names, lambda name: full(name, rows))
    if dp_rank:  # a copy: what it holds must not reach the file
        for param in params.values():
            param.data.fill_(float("nan"))
    save(folder, params, described, lambda name, key: full(name, rows, key)[lo:hi])


@patched
def load_shards(folder, p, t, sizes, names, saved):
    for rows in sizes:
        nan = torch.full((rows, HIDDEN), float("nan"))
        params, described, lo, hi, _ = shards(p, t, rows, names, lambda name, nan=nan: nan)
        assert [*described] == [f"{name}.weight" for name in names]
        check_load(folder, params, described, saved, rows, lo, hi)


def stock(rows, names, value):
    """Stock's tensor-parallel slices; all ranks are one tensor-parallel group."""
    from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

    tp, rank = dist.get_world_size(), dist.get_rank()
    lo, hi = rows // tp * rank, rows // tp * (rank + 1)
    alone = [dist.new_group([r]) for r in range(tp)][rank]
    params = {name: Parameter(value(name)[lo:hi].clone()) for name in names}
    described = {
        f"{name}.weight": make_tp_sharded_tensor_for_checkpoint(
            param, KEYS[name], allow_shape_mismatch=True, tp_group=dist.group.WORLD, dp_cp_group=alone
        )
        for name, param in params.items()
    }
    return params, described, lo, hi


@patched
def save_stock(folder, rows, names):
    params, described, lo, hi = stock(rows, names, lambda name: full(name, rows))
    save(folder, params, described, lambda name, key: full(name, rows, key)[lo:hi])


@patched
def load_stock(folder, sizes, names, saved):
    for rows in sizes:
        nan = torch.full((rows, HIDDEN), float("nan"))
        params, described, lo, hi = stock(rows, names, lambda name, nan=nan: nan)
        check_load(folder, params, described, saved, rows, lo, hi)


UNTIED, TIED = ("embedding", "output"), ("embedding",)
LAYOUTS = [(4, 1, 4), (2, 2, 4), (3, 1, 3), (1, 1, 1), (2, 1, 2), (2, 1, 4)]  # p, t, ranks
FOUR, SQUARE, THREE, ONE, TWO, COPIES = LAYOUTS


def mostly_full(*fast, cases):
    """The cases as parameters; those that are not in `fast` run with the whole matrix only."""
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.full) for case in cases]


@pytest.mark.parametrize(
    ("layout", "rows", "names"),
    mostly_full(
        (FOUR, 192, UNTIED),
        (COPIES, 208, TIED),
        cases=[(layout, *size) for layout in LAYOUTS for size in ((192, UNTIED), (208, TIED))],
    ),
)
def test_shards_to_stock(tmp_path, layout, rows, names):
    """192 rows are even over 3 and uneven over 4 (blocks of 32), 208 (blocks of 16) uneven over both."""
    (p, t, world), folder = layout, tmp_path / "ckpt"
    ranks(world)(save_shards)(folder, p, t, rows, names)
    ranks(2)(load_stock)(folder, (rows, rows + 64, rows - 64), names, saved=rows)
    ranks(1)(load_stock)(folder, (rows,), names, saved=rows)


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=() if x == SQUARE else pytest.mark.full) for x in LAYOUTS]
)
def test_stock_to_shards(tmp_path, layout):
    (p, t, world), folder = layout, tmp_path / "ckpt"
    ranks(2)(save_stock)(folder, 208, UNTIED)
    ranks(world)(load_shards)(folder, p, t, (208, 320, 136), UNTIED, saved=208)


@pytest.mark.parametrize(
    ("before", "after"), mostly_full((FOUR, THREE), cases=[(FOUR, THREE), (THREE, SQUARE), (SQUARE, TWO)])
)
def test_shards_to_other_shards(tmp_path, before, after):
    """Other p, t and padding at once; ranks that hold nothing but new rows get zeros."""
    folder = tmp_path / "ckpt"
    ranks(before[2])(save_shards)(folder, *before[:2], 208, UNTIED)
    ranks(after[2])(load_shards)(folder, *after[:2], (208, 640, 64), UNTIED, saved=208)


@patched
def save_with_a_gap(folder):
    from megatron.core import dist_checkpointing

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    lo = 40 * dist.get_rank()
    params = {"weight": (Parameter(torch.zeros(32, HIDDEN)), KEYS["embedding"])}
    described = vocab_sharded_state_dict("", params, 72, (lo, lo + 32), 0)
    dist_checkpointing.save({"model": described}, str(folder), async_strategy="mcore")


def test_rows_that_nobody_saves_are_noticed(tmp_path):
    """Megatron leaves the check of uneven shards to torch, and torch makes it."""
    results = run_ranks(2, functools.partial(save_with_a_gap, tmp_path / "ckpt"), check=False)
    assert "Failed to validate global plan" in results[0].error


def test_rows_of_the_parameter_are_checked():
    with pytest.raises(AssertionError, match=r"output_layer.weight: 3 rows for \[4, 8\)"):
        vocab_sharded_state_dict("", {"weight": (Parameter(torch.zeros(3, 2)), KEYS["output"])}, 8, (4, 8), 0)
