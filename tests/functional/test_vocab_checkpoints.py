"""Checkpoints between stock and vocabulary parallelism: weights and optimizer state, in both directions."""

import pytest

from tests.functional.runs import LLAMA, Run, assert_close, merged, train

PP, TP = "--pipeline-model-parallel-size", "--tensor-model-parallel-size"
VOCAB = ["--vocab-parallel", "vocab-2"]
DISTOPT = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
BY_PARAMETER = "--dist-ckpt-optim-fully-reshardable"
SIX_LAYERS = ["--num-layers", "6"]
PAD_384 = ["--make-vocab-size-divisible-by", "192"]  # 384 rows instead of 256; uneven over 4 ranks, or 2 x 2
LAYOUTS = {
    "stock": (1, []),
    "stock-pp4": (4, [PP, "4"]),
    "stock-tp2": (2, [TP, "2"]),
    "stock-dp2": (2, []),
    "stock-pp2-dp2": (4, [PP, "2"]),
    "vocab-pp2": (2, [PP, "2", *VOCAB]),
    "vocab-pp3": (3, [PP, "3", *VOCAB]),
    "vocab-pp4": (4, [PP, "4", *VOCAB]),
    "vocab-tp2-pp2": (4, [TP, "2", PP, "2", "--sequence-parallel", *VOCAB]),
    "vocab-pp2-dp2": (4, [PP, "2", *VOCAB]),
}
TIED: list[str] = []
full = pytest.mark.full


def run(folder, layout: str, *flags: str, check: bool = True) -> Run:
    world, own = LAYOUTS[layout]
    return train(folder, world, *own, *flags, check=check)


def after(step: int, values: dict[int, float]) -> dict[int, float]:
    return {at: value for at, value in values.items() if at > step}


def assert_vocabulary_is_shared_out(run: Run) -> None:
    """A run whose flag was ignored proves nothing."""
    assert run.start()["features"] == ["vocab"]
    assert sum(entry["bytes"] for entry in run.steps(0)[0]["traffic"] if entry["feature"] == "vocab") > 0


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("vocab-pp2-dp2", [*LLAMA, *DISTOPT]),
        pytest.param("vocab-pp2", TIED, marks=full),
        pytest.param("vocab-pp4", LLAMA, marks=full),
        pytest.param("vocab-pp4", PAD_384, marks=full),
        pytest.param("vocab-pp3", SIX_LAYERS, marks=full),
        pytest.param("vocab-tp2-pp2", [*LLAMA, *DISTOPT], marks=full),
        pytest.param("vocab-tp2-pp2", [*DISTOPT, BY_PARAMETER], marks=full),
        pytest.param("vocab-pp2-dp2", [*DISTOPT, "--bf16", BY_PARAMETER], marks=full),
        pytest.param("vocab-pp2", [*LLAMA, "--bf16"], marks=full),
    ],
)
def test_resume_is_bit_for_bit(tmp_path, layout, flags):
    """Stop at step 5, resume to 10: losses and grad norms equal those of 10 steps in one go, with dropout."""
    flags = [*flags, "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "5"]
    straight = run(tmp_path / "straight", layout, *flags, *save)
    second = run(tmp_path / "second", layout, *flags, "--load", str(tmp_path / "ckpt"), "--ckpt-step", "5")
    assert_vocabulary_is_shared_out(second)
    assert sorted(second.losses()) == [6, 7, 8, 9, 10]
    assert second.losses() == after(5, straight.losses())
    assert second.grad_norms() == after(5, straight.grad_norms())


@pytest.mark.parametrize(
    ("saved", "loaded", "flags"),
    [
        ("vocab-pp3", "vocab-tp2-pp2", SIX_LAYERS),
        *(
            pytest.param(*case, marks=full)
            for case in [
                ("stock", "vocab-pp2", LLAMA),
                ("stock-dp2", "vocab-pp2-dp2", [*LLAMA, *DISTOPT, BY_PARAMETER]),
                ("vocab-pp4", "stock-pp4", LLAMA),
                ("stock", "vocab-pp4", TIED),
                ("stock-pp4", "vocab-pp4", TIED),
                ("vocab-pp2-dp2", "stock-dp2", [*DISTOPT, BY_PARAMETER]),
                ("stock-dp2", "vocab-pp2-dp2", [*DISTOPT, BY_PARAMETER, "--ckpt-fully-parallel-load"]),
                ("stock", "vocab-pp3", [*SIX_LAYERS, *LLAMA]),
                ("stock-pp4", "vocab-pp2", LLAMA),
                ("stock-pp4", "vocab-tp2-pp2", LLAMA),
                ("stock-tp2", "vocab-pp2", TIED),
                ("vocab-pp2", "stock", TIED),
                ("vocab-pp2", "stock-pp4", TIED),
                ("vocab-pp3", "stock", [*SIX_LAYERS, *LLAMA]),
                ("vocab-tp2-pp2", "stock-pp4", LLAMA),
                ("vocab-tp2-pp2", "stock-tp2", TIED),
                ("vocab-pp4", "vocab-tp2-pp2", LLAMA),
                ("vocab-pp2", "vocab-pp4", TIED),
                ("stock-dp2", "vocab-tp2-pp2", [*DISTOPT, BY_PARAMETER]),
                ("stock-pp2-dp2", "vocab-pp2-dp2", [*LLAMA, *DISTOPT, BY_PARAMETER]),
                ("vocab-pp3", "stock-dp2", [*SIX_LAYERS, *LLAMA, *DISTOPT, BY_PARAMETER]),
                ("vocab-tp2-pp2", "stock-pp2-dp2", [*LLAMA, *DISTOPT, BY_PARAMETER]),
                ("vocab-pp2", "vocab-pp3", [*SIX_LAYERS, *DISTOPT, BY_PARAMETER]),
                ("stock-pp4", "vocab-pp2", [*LLAMA, "--decoupled-lr", "5e-4"]),
                ("vocab-pp2", "stock-pp4", [*LLAMA, "--decoupled-lr", "5e-4"]),
            ]
        ),
    ],
)
def test_layouts_interchange(tmp_path, saved, loaded, flags):
    """Save with one layout, resume with another, optimizer state included: as if nothing had changed.

    Adam's state must have come along: without it the resumed steps differ by far more than 1e-4.
    """
    ckpt = str(tmp_path / "ckpt")
    straight = run(tmp_path / "straight", saved, *flags, "--save", ckpt, "--save-interval", "5")
    second = run(tmp_path / "second", loaded, *flags, "--load", ckpt, "--ckpt-step", "5", "--no-load-rng")
    assert_vocabulary_is_shared_out(straight if saved.startswith("vocab") else second)
    losses, norms = after(5, straight.losses()), after(5, straight.grad_norms())
    assert sorted(losses) == [6, 7, 8, 9, 10]
    # The first loss sees the loaded weights and nothing else.
    assert_close({6: losses[6]}, {6: second.losses()[6]}, 1e-6)
    assert_close(losses, second.losses(), 1e-5)
    assert_close(norms, second.grad_norms(), 1e-4)


@pytest.mark.parametrize(
    ("saved", "loaded", "like", "flags"),
    [
        ("stock-pp4", "vocab-pp4", "stock", LLAMA),
        pytest.param("stock", "vocab-pp2", "stock", TIED, marks=full),
        pytest.param("vocab-pp4", "stock-pp4", "vocab-pp4", TIED, marks=full),
        pytest.param("vocab-tp2-pp2", "vocab-pp4", "stock", LLAMA, marks=full),
        pytest.param("stock-dp2", "vocab-tp2-pp2", "stock-tp2", [*LLAMA, *DISTOPT, BY_PARAMETER], marks=full),
    ],
)
@pytest.mark.parametrize("grows", [True, pytest.param(False, marks=full)])
def test_padding_may_change(tmp_path, saved, loaded, like, flags, grows):
    """Padded rows take part in the softmax, so the run to compare with has loaded into the same padding."""
    before, then = ([], PAD_384) if grows else (PAD_384, [])
    ckpt = str(tmp_path / "ckpt")
    run(
        tmp_path / "first",
        saved,
        *flags,
        *before,
        "--save",
        ckpt,
        "--save-interval",
        "5",
        "--exit-interval",
        "5",
    )
    resume = [*flags, *then, "--load", ckpt, "--no-load-rng"]
    reference = run(tmp_path / "reference", like, *resume)
    second = run(tmp_path / "second", loaded, *resume)
    assert sorted(second.losses()) == [6, 7, 8, 9, 10]
    assert_close(reference.losses(), second.losses(), 1e-5)
    assert_close(reference.grad_norms(), second.grad_norms(), 1e-4)


def tensors(folder):
    """Every tensor of a checkpoint, as stock names and shapes it."""
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = checkpoint.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    out = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    checkpoint.load(out, storage_reader=reader, no_dist=True)
    return out


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("first", "second", "flags"),
    [
        ("stock-pp4", "vocab-pp2", LLAMA),
        pytest.param("stock-pp4", "vocab-pp4", TIED, marks=full),
        pytest.param("stock", "vocab-pp3", SIX_LAYERS, marks=full),
        pytest.param("stock-pp4", "vocab-tp2-pp2", [*LLAMA, *PAD_384], marks=full),
    ],
)
def test_checkpoints_are_the_same_files_to_a_reader(tmp_path, first, second, flags):
    """Names, shapes and, after a step with learning rate 0, all weights: bit for bit those of stock."""
    save = ["--save-interval", "1", "--train-iters", "1"]
    run(tmp_path / "a", first, *flags, "--save", str(tmp_path / "stock"), *save)
    still = ["--lr", "0", "--min-lr", "0", "--load", str(tmp_path / "stock")]
    still += ["--finetune", "--no-load-optim", "--no-load-rng"]
    run(tmp_path / "b", second, *merged(flags, still, ["--save", str(tmp_path / "vocab")], save))
    stock, vocab = (tensors(tmp_path / name / "iter_0000001") for name in ("stock", "vocab"))
    assert {key: value.shape for key, value in vocab.items()} == {key: v.shape for key, v in stock.items()}
    assert "optimizer.state.exp_avg.embedding.word_embeddings.weight" in vocab
    weights = [key for key in stock if not key.startswith("optimizer")]
    assert "embedding.word_embeddings.weight" in weights
    for key in weights:
        assert vocab[key].equal(stock[key]), key


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("stock-pp2", "vocab-pp2"), pytest.param("vocab-pp2", "stock-pp2", marks=full)],
)
def test_flat_buffers_of_the_other_kind_are_refused(tmp_path, monkeypatch, saved, loaded):
    """Untied with two stages the buffers have one size; read as they are, they would be silently wrong."""
    monkeypatch.setitem(LAYOUTS, "stock-pp2", (2, [PP, "2"]))
    ckpt = str(tmp_path / "ckpt")
    flags = [*LLAMA, "--use-distributed-optimizer", "--train-iters", "2"]
    run(tmp_path / "first", saved, *flags, "--save", ckpt, "--save-interval", "1", "--exit-interval", "1")
    second = run(tmp_path / "second", loaded, *flags, "--load", ckpt, "--no-load-rng", check=False)
    assert not second.losses()
    for rank in second.ranks:
        if loaded == "vocab-pp2":
            assert "was saved without --vocab-parallel" in rank.error
            assert "--dist-ckpt-optim-fully-reshardable, or load the weights alone" in rank.error
        else:
            assert "optimizer.distributed.dp_group_idx_0.vocab." in rank.error  # what there is instead
    weights = run(tmp_path / "third", loaded, *flags, "--load", ckpt, "--no-load-rng", "--no-load-optim")
    assert sorted(weights.losses()) == [2]
