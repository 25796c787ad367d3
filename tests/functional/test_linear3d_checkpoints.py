"""Checkpoints of 3-D linear layers: stock and all grids go on from each other's."""

from pathlib import Path

import pytest

from tests.functional.linear3d_runs import BATCH, WIDE, grid_flags, seed
from tests.functional.parity import DISTOPT, PP, TP
from tests.functional.runs import LLAMA, assert_close, train
from tests.ranks import run_ranks

full = pytest.mark.full


@pytest.mark.parametrize("sharding", ["plain", pytest.param("distopt", marks=full)])
def test_checkpoints_interchange(tmp_path, sharding):
    """Stock, a grid, and another grid go on from each other's checkpoints, optimizer states included."""
    distopt = [*DISTOPT, "--dist-ckpt-optim-fully-reshardable"] if sharding == "distopt" else []
    first = [*LLAMA, "--num-query-groups", "4", *BATCH, *distopt]
    arch = (*LLAMA, "--num-query-groups", "4")
    store = tmp_path / "store"
    whole = train(tmp_path / "whole", 1, *first, *seed(arch), steps=5)
    runs = [
        (1, []),
        (8, grid_flags((2, 2, 2))),
        (4, grid_flags((1, 2, 1), 2)),
        (4, [TP, "2", PP, "2"]),
        (2, grid_flags((2, 1, 1))),
    ]
    losses = {}
    for number, (world, flags) in enumerate(runs, start=1):
        source = seed(arch) if number == 1 else ["--load", str(store)]
        save = ["--save", str(store), "--save-interval", "1", "--exit-interval", str(number)]
        folder = tmp_path / str(number)
        run = train(folder, world, *first, *flags, *source, *save, steps=5, timeout=400.0)
        losses |= run.losses()
    assert_close(whole.losses(), losses, 1e-5)


@full
@pytest.mark.parametrize("arch", [WIDE, [*LLAMA, *WIDE, "--num-query-groups", "8"]], ids=["gpt", "llama"])
def test_checkpoints_keep_every_bit(tmp_path, arch):
    """Acceptance check 8: a grid's checkpoint, loaded and saved by stock and by other grids."""
    layouts = {
        "stock": [TP, "8", "--sequence-parallel"],
        "2x4x1": grid_flags((2, 4, 1)),
        "1x4x2": grid_flags((1, 4, 2)),
    }
    save = ["--save", str(tmp_path / "2x2x2"), "--save-interval", "2"]
    train(tmp_path / "run", 8, *arch, *BATCH, *grid_flags((2, 2, 2)), *save, steps=2)
    expected = tensors(tmp_path / "2x2x2" / "iter_0000002")
    states = [name for name in expected if "exp_avg" in name]
    assert len(states) >= len(expected) // 2
    source = tmp_path / "2x2x2"
    for name, flags in layouts.items():
        target = tmp_path / name
        passed_on = ["--load", str(source), "--save", str(target), "--save-interval", "100"]
        train(tmp_path / f"run-{name}", 8, *arch, *BATCH, *flags, *passed_on, steps=2)
        found = tensors(target / "iter_0000002")
        assert found.keys() == expected.keys()
        assert [key for key, value in found.items() if not value.equal(expected[key])] == []
        source = target


def tensors(checkpoint: Path) -> dict:
    """Every whole tensor of a checkpoint by name; random states differ between ranks, and are left out."""

    def body() -> dict:
        import torch
        from megatron.core.dist_checkpointing import load_plain_tensors

        torch.distributed.init_process_group("gloo")
        found = load_plain_tensors(str(checkpoint))
        return {key: value.numpy() for key, value in found.items() if isinstance(value, torch.Tensor)}

    import torch

    found = run_ranks(1, body)[0].value
    return {key: torch.from_numpy(value) for key, value in found.items() if "rng" not in key}


def test_flat_buffers_of_another_layout_are_refused(tmp_path):
    """The distributed optimizer's other format stores buffers, which a grid must not take for its own."""
    store = tmp_path / "store"
    flags = [*BATCH, *DISTOPT, "--save", str(store), "--save-interval", "1"]
    train(tmp_path / "stock", 4, *flags, TP, "4", steps=1)
    run = train(
        tmp_path / "grid", 4, *flags, "--load", str(store), *grid_flags((2, 1, 2)), steps=2, check=False
    )
    assert "linear3d-2x1x2-ijl-plane" in "".join(str(r.error) for r in run.ranks)
