"""Training samples: what is random follows from seed and index; digits, videos, sampling order, judgement."""

import numpy as np
import torch

from megatron_ext.dit import data, evaluation
from megatron_ext.dit.tokens import Geometry

DIGIT = Geometry(channels=1, frames=1, height=8, width=8, patch=2)


def dataset(seed: int = 1, dropout: float = 0.1, length: int = 100) -> data.DiffusionDataset:
    real = data.load_digits()[0]
    return data.DiffusionDataset(length, DIGIT, 10, seed, dropout, real.videos(DIGIT), real.classes)


def same(a: dict, b: dict) -> bool:
    return all(np.array_equal(a[key], b[key]) for key in a)


def test_a_sample_only_depends_on_seed_and_index():
    first, second = dataset(), dataset()
    late = [second[i] for i in (70, 3)]  # in another order, as another rank or a resumed run asks
    assert same(first[3], late[1])
    assert same(first[70], late[0])
    assert not same(first[3], first[4])
    assert not same(first[3], dataset(seed=2)[3])


def test_fields():
    sample = dataset()[0]
    assert sample["picture"].shape == sample["noise"].shape == (1, 1, 8, 8)
    assert sample["picture"].dtype == sample["noise"].dtype == torch.float32
    assert -1 <= sample["picture"].min() < sample["picture"].max() <= 1
    assert 0 <= sample["time"] < 1


def test_every_epoch_has_every_digit_once_in_another_order():
    real = data.load_digits()[0]
    count = len(real.classes)
    samples = dataset(length=2 * count, dropout=0.0)
    videos = real.videos(DIGIT).flatten(1)
    epochs = []
    for epoch in range(2):
        seen = torch.stack([samples[epoch * count + i]["picture"].flatten() for i in range(count)])
        assert torch.equal(seen.sort(0).values, videos.sort(0).values)
        epochs.append(seen)
    assert not torch.equal(*epochs)


def test_labels_and_dropped_labels():
    kept = dataset(dropout=0.0, length=500)
    assert {kept[i]["label"] for i in range(500)} == set(range(10))
    dropped = dataset(dropout=0.5, length=500)
    share = np.mean([dropped[i]["label"] == 10 for i in range(500)])
    assert 0.4 < share < 0.6


def test_random_data_of_any_size():
    geometry = Geometry(channels=4, frames=2, height=6, width=6, patch=3)
    sample = data.DiffusionDataset(8, geometry, 3, 1, 0.0)[5]
    assert sample["picture"].shape == (4, 2, 6, 6)
    assert sample["label"] in range(3)


def test_digits_are_held_out_once():
    train, held_out = data.load_digits()
    assert (len(train.classes), len(held_out.classes)) == (1617, 180)
    assert set(held_out.classes) == set(range(10))
    assert held_out.pictures.shape[1:] == (8, 8)


def test_videos_move_and_grow():
    geometry = Geometry(channels=1, frames=3, height=16, width=16, patch=2)
    real = data.load_digits()[1]
    videos = real.videos(geometry)
    assert videos.shape == (180, 1, 3, 16, 16)
    assert torch.equal(videos[:, :, 1], videos[:, :, 0].roll(2, dims=-1))
    assert np.array_equal(evaluation.as_digits(videos), real.pictures.reshape(-1, 64))


def test_judge_tells_digits_from_wrong_ones():
    real = data.load_digits()[1]
    labels = torch.from_numpy(real.classes)
    verdict = evaluation.judge(real.videos(DIGIT), labels)
    assert verdict.on_samples == verdict.on_real_digits > 0.95
    assert len(verdict.by_class) == 10
    wrong = evaluation.judge(real.videos(DIGIT), (labels + 1) % 10)
    assert wrong.on_samples < 0.05
    assert "of 180 samples" in str(wrong)
