"""Paths between picture and noise, and the way back."""

import itertools

import pytest
import torch

from megatron_ext.dit.diffusion import LAST_TIME, Diffusion, sample_times

ALL = [Diffusion(path, prediction) for path in ("linear", "cosine") for prediction in ("velocity", "noise")]
each = pytest.mark.parametrize("diffusion", ALL, ids=lambda d: f"{d.path}-{d.prediction}")


@pytest.fixture
def drawn():
    """Pictures within [-1, 1] and noise, in double precision, and times of their own."""
    torch.manual_seed(0)
    picture = torch.rand(5, 1, 1, 4, 4, dtype=torch.float64) * 2 - 1
    return picture, torch.randn_like(picture), torch.tensor([0.01, 0.2, 0.5, 0.9, LAST_TIME]).double()


@each
def test_the_ends_of_the_path(diffusion, drawn):
    picture, noise, _ = drawn
    assert torch.allclose(diffusion.noisy(picture, noise, torch.zeros(5)), picture)
    assert torch.allclose(diffusion.noisy(picture, noise, torch.ones(5)), noise)


@pytest.mark.parametrize("path", ["linear", "cosine"])
def test_velocity_is_the_derivative_along_the_path(path, drawn):
    picture, noise, time = drawn
    diffusion, small = Diffusion(path, "velocity"), 1e-6
    ahead, behind = (diffusion.noisy(picture, noise, time + d) for d in (small, -small))
    assert torch.allclose(diffusion.target(picture, noise, time), (ahead - behind) / (2 * small), atol=1e-8)


def test_noise_is_the_target_of_noise_prediction(drawn):
    assert torch.equal(Diffusion("cosine", "noise").target(*drawn), drawn[1])


@each
def test_parts_invert_the_prediction(diffusion, drawn):
    picture, noise, time = drawn
    noisy, target = diffusion.noisy(picture, noise, time), diffusion.target(picture, noise, time)
    found_picture, found_noise = diffusion.parts(noisy, target, time)
    assert torch.allclose(found_picture, picture)
    assert torch.allclose(found_noise, noise)


@each
def test_a_perfect_model_comes_back_to_the_picture(diffusion, drawn):
    picture, noise, _ = drawn
    times = sample_times(3)
    noisy = diffusion.noisy(picture, noise, times[0].expand(5))
    for now, earlier in itertools.pairwise(time.expand(5) for time in times):
        noisy = diffusion.step(noisy, diffusion.target(picture, noise, now), now, earlier)
    assert torch.allclose(noisy, picture)


def test_a_step_on_the_linear_path_is_eulers(drawn):
    picture, noise, time = drawn
    diffusion = Diffusion("linear", "velocity")
    noisy, velocity = diffusion.noisy(picture, noise, time), diffusion.target(picture, noise, time)
    earlier = time / 2
    moved = noisy + (earlier - time).view(-1, 1, 1, 1, 1) * velocity
    assert torch.allclose(diffusion.step(noisy, velocity, time, earlier), moved)


def test_pictures_stay_within_their_range(drawn):
    _, noise, time = drawn
    diffusion = Diffusion("linear", "velocity")
    done = diffusion.step(noise * 9, noise, time, torch.zeros(5).double())
    assert done.abs().max() == 1


def test_sample_times():
    times = sample_times(4)
    assert times.dtype == torch.float64
    assert times[0] == LAST_TIME
    assert times[-1] == 0
    assert torch.allclose(times.diff(), torch.tensor(-LAST_TIME / 4).double())
