"""What pretrain_dit.py refuses: every message, and that a good job is not refused."""

from argparse import Namespace
from typing import Any

import pytest

from megatron_ext import config
from megatron_ext.dit import rules
from megatron_ext.dit.config import DiTConfig, geometry_of

STOCK = {
    "context_parallel_size": 1,
    "cp_comm_type": ["p2p"],
    "transformer_impl": "local",
    "num_experts": None,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "fp32_residual_connection": False,
    "recompute_granularity": None,
    "recompute_modules": None,
    "seq_length": 16,
    "window_size": None,
}


def job(**changes: Any) -> Namespace:
    """A job on digits, with some arguments changed; the sequence length follows unless given."""
    args = vars(config.preparse([], [DiTConfig])) | STOCK
    args["seq_length"] = changes.get("seq_length", 16)
    return Namespace(**(args | changes))


def test_good_jobs():
    assert rules.problems_of(job()) == []
    assert rules.problems_of(job(dit_patch_size=1, seq_length=64)) == []
    video = job(dit_frames=4, dit_frame_patch=2, dit_image_size=16, seq_length=128, dit_evaluate=True)
    assert rules.problems_of(video) == []
    parallel = {"context_parallel_size": 4, "dit_samples": "out"}
    assert rules.problems_of(job(**parallel, transformer_impl="transformer_engine")) == []
    assert rules.problems_of(job(**parallel, cp_comm_type=["wallfacer"])) == []
    assert rules.problems_of(job(**parallel, cp_comm_type=["wallfacer"], window_size=(3, 2))) == []
    selective = job(recompute_granularity="selective", recompute_modules=["core_attn"])
    assert rules.problems_of(selective) == []
    assert rules.problems_of(job(dit_label_dropout=0.0, dit_samples="out", dit_guidance=1.0)) == []
    assert rules.problems_of(job(dit_data="random", dit_channels=4, dit_num_classes=1000)) == []


REFUSED = [
    ({"dit_frames": 0, "dit_sample_steps": 0}, "--dit-frames 0, --dit-sample-steps 0: these count something"),
    ({"dit_patch_size": 3}, "Set the size to 6 or 9, or the patch to a divisor of 8"),
    ({"dit_patch_size": 9}, "Set the size to 9, or the patch to a divisor of 8"),
    (
        {"dit_frames": 3, "dit_frame_patch": 2},
        "Set --dit-frames to 4, or --dit-frame-patch to a divisor of 3",
    ),
    ({"seq_length": 64}, "--seq-length 64, but the picture is 16 tokens"),
    (
        {"context_parallel_size": 3, "cp_comm_type": ["wallfacer"]},
        "16 tokens a sample cannot be split evenly",
    ),
    (
        {
            "context_parallel_size": 2,
            "cp_comm_type": ["wallfacer", "p2p"],
            "transformer_impl": "transformer_engine",
            "window_size": (3, 0),
        },
        "--window-size 3,0 with --context-parallel-size 2: windows across ranks are those of Megatron's",
    ),
    ({"dit_channels": 3}, "--dit-channels 3: digits have 1"),
    ({"dit_num_classes": 4}, "--dit-num-classes 4: digits have 10"),
    ({"dit_image_size": 12, "seq_length": 36}, "--dit-image-size 12: digits are 8 x 8"),
    ({"dit_evaluate": True, "dit_data": "random"}, "--dit-evaluate judges samples by the real digits"),
    ({"dit_label_dropout": 1.0}, "--dit-label-dropout 1 is no share"),
    ({"dit_label_dropout": 0.0, "dit_evaluate": True}, "--dit-guidance 2 compares predictions"),
    ({"num_experts": 8}, "does not support --num-experts (its MLPs are dense)"),
    ({"multi_latent_attention": True}, "--multi-latent-attention"),
    ({"mtp_num_layers": 1}, "--mtp-num-layers (it predicts no tokens)"),
    ({"fp32_residual_connection": True}, "--fp32-residual-connection"),
    ({"vocab_parallel": "vocab-2"}, "--vocab-parallel vocab-2 (it has no vocabulary)"),
    (
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "core_attn", "layernorm"]},
        "--recompute-modules layernorm mlp (core_attn works)",
    ),
    ({"context_parallel_size": 2}, "--context-parallel-size 2 needs attention over tokens of other ranks"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_refused(changes, text):
    (problem,) = rules.problems_of(job(**changes))
    assert text in problem


def test_stock_defaults_follow_from_the_picture():
    flags = config.preparse("--dit-frames 4 --dit-image-size 16 --num-layers 3".split(), [DiTConfig])
    assert geometry_of(flags).shape == (1, 4, 16, 16)
    defaults = rules.stock_defaults(flags)
    assert defaults["seq_length"] == defaults["max_position_embeddings"] == 4 * 8 * 8
    assert defaults["tokenizer_type"] == "NullTokenizer"
    bad = config.preparse(["--dit-patch-size", "5"], [DiTConfig])
    assert "seq_length" not in rules.stock_defaults(bad)


def test_packages_that_are_missing(monkeypatch):
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    (problem,) = rules.problems_of(job(dit_samples="out"))
    assert "Not installed: scikit-learn (--dit-data digits) and Pillow (--dit-samples)." in problem
    assert "pip install 'megatron_ext[dit]'" in problem
    assert rules.problems_of(job(dit_data="random")) == []


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    (problem,) = rules.problems_of(job(dit_samples=str(tmp_path / "file")))
    assert f"--dit-samples {tmp_path / 'file'} cannot be written: " in problem
