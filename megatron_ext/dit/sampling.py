"""Samples from a trained model, in the layout in which it was trained.

Data-parallel ranks draw different samples and share them at the end. Within one copy of the model every rank
holds the whole noisy pictures; each denoising step sends them through Megatron's own pipeline schedule.
"""

import itertools
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_ext import traffic
from megatron_ext.dit.data import keyed_rng
from megatron_ext.dit.diffusion import Diffusion, sample_times
from megatron_ext.dit.tokens import Geometry, patchify, share_of_rank, unpatchify

FEATURE = "dit"
SAMPLES = 1 << 40  # sample n has the random numbers of training index SAMPLES + n, which no run reaches


@dataclass(frozen=True)
class SampleSettings:
    """What to draw: `per_class` samples of each class, in `steps`, with this weight of guidance."""

    num_classes: int
    per_class: int
    steps: int
    guidance: float
    seed: int

    @property
    def labels(self) -> Tensor:
        """Class of every sample, class after class."""
        return torch.arange(self.num_classes).repeat_interleave(self.per_class)


def settings_from_args(args: Namespace) -> SampleSettings:
    """What the arguments ask for."""
    return SampleSettings(
        num_classes=args.dit_num_classes,
        per_class=args.dit_samples_per_class,
        steps=args.dit_sample_steps,
        guidance=args.dit_guidance,
        seed=args.seed,
    )


def draw(
    models: list[Any], geometry: Geometry, diffusion: Diffusion, settings: SampleSettings
) -> tuple[Tensor, Tensor]:
    """Samples `[n, c, frames, height, width]` on the CPU and their classes `[n]`, the same on every rank.

    `models` are the (wrapped) stages of this rank. Collective over all ranks.
    """
    groups = get_attr_wrapped_model(models[0], "pg_collection")
    labels = settings.labels
    # Equal shares for data-parallel ranks, and as many equal microbatches as the pipeline has stages.
    shares, parts = groups.dp.size(), groups.pp.size()
    per_rank = math.ceil(len(labels) / (shares * parts)) * parts
    mine = [groups.dp.rank() * per_rank + i for i in range(per_rank)]
    own_labels = torch.tensor([int(labels[i % len(labels)]) for i in mine]).cuda()
    noise = [keyed_rng(settings.seed, SAMPLES + i).standard_normal(geometry.shape, dtype="f4") for i in mine]
    pictures = torch.stack([torch.from_numpy(one) for one in noise]).cuda()
    with evaluating(models):
        predict = Predictor(models, groups, geometry)
        pictures = denoise(predict, pictures, own_labels, diffusion, settings)
    every = torch.empty(shares * per_rank, *geometry.shape, device=pictures.device)
    traffic.all_gather_into_tensor(every, pictures, group=groups.dp, feature=FEATURE)
    return every[: len(labels)].cpu(), labels


def denoise(
    predict: Callable[[Tensor, Tensor, Tensor], Tensor],
    pictures: Tensor,
    labels: Tensor,
    diffusion: Diffusion,
    settings: SampleSettings,
) -> Tensor:
    """From noise `[n, ...]` to pictures; `predict(pictures, times, labels)` is the model."""
    times = sample_times(settings.steps)
    none = torch.full_like(labels, settings.num_classes)
    for now, earlier in itertools.pairwise(times):
        time = now.expand(len(labels)).to(pictures.device)
        if settings.guidance == 1.0:
            predicted = predict(pictures, time, labels)
        else:
            # Interleaved, so that each part of the batch holds samples with and without their class.
            both = torch.stack([labels, none], dim=1).flatten()
            guided = predict(pictures.repeat_interleave(2, 0), time.repeat_interleave(2), both)
            with_class, without = guided[0::2], guided[1::2]
            predicted = without + settings.guidance * (with_class - without)
        pictures = diffusion.step(pictures, predicted, time, earlier.expand(len(labels)).to(pictures.device))
    return pictures


@contextmanager
def evaluating(models: list[Any]) -> Iterator[None]:
    """No gradients and no dropout."""
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for model in models:
            model.train()


class Predictor:
    """The model as one function, through the pipeline schedule; the result is on every rank of the copy."""

    def __init__(self, models: list[Any], groups: ProcessGroupCollection, geometry: Geometry):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.models = models
        self.groups = groups
        self.geometry = geometry
        self.schedule = get_forward_backward_func()

    def __call__(self, pictures: Tensor, time: Tensor, label: Tensor) -> Tensor:
        """Prediction for `pictures` `[n, ...]`; n is a multiple of the number of stages."""
        stages = self.groups.pp.size()
        tokens = share_of_rank(patchify(pictures, self.geometry), 1, self.groups.cp)
        parts = list(zip(*(value.chunk(stages) for value in (tokens, time, label)), strict=True))
        outputs = self.schedule(
            forward_step_func=_forward_step,
            data_iterator=[iter(parts) for _ in self.models],
            model=self.models,
            num_microbatches=stages,
            seq_length=self.geometry.num_tokens,
            micro_batch_size=len(pictures) // stages,
            forward_only=True,
        )
        predicted = torch.cat(outputs) if outputs else torch.empty_like(tokens)
        predicted = predicted.float().contiguous()
        traffic.broadcast(predicted, group_src=stages - 1, group=self.groups.pp, feature=FEATURE)
        return unpatchify(self._whole(predicted), self.geometry)

    def _whole(self, tokens: Tensor) -> Tensor:
        """The tokens of all context-parallel ranks."""
        size = self.groups.cp.size()
        chunks = torch.empty(size * len(tokens), *tokens.shape[1:], device=tokens.device)
        traffic.all_gather_into_tensor(chunks, tokens, group=self.groups.cp, feature=FEATURE)
        return torch.cat(chunks.chunk(size), dim=1)


def _forward_step(parts: Iterator[tuple[Tensor, Tensor, Tensor]], model: Any) -> tuple[Tensor, None]:
    """No loss function: the schedule returns the last stage's outputs."""
    tokens, time, label = next(parts)
    return model(tokens=tokens, time=time, label=label), None


def grid_picture(samples: Tensor, per_row: int, scale: int = 4) -> Any:
    """A Pillow picture of samples `[n, c, frames, height, width]` in [-1, 1], `per_row` in a row.

    The frames of a video stand side by side. Of three channels the picture is in colour, else the first is
    shown in grey.
    """
    from PIL import Image

    colour = samples.shape[1] == 3
    shown = samples if colour else samples[:, :1]
    border = torch.nn.functional.pad(shown, (1, 1, 1, 1), value=-1.0)
    cells = border.permute(0, 1, 3, 2, 4).flatten(3)  # [n, c, height, frames * width]
    rows = [torch.cat(list(cells[i : i + per_row]), dim=-1) for i in range(0, len(cells), per_row)]
    values = ((torch.cat(rows, dim=-2).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    array = values.permute(1, 2, 0).numpy() if colour else values[0].numpy()
    picture = Image.fromarray(array)
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
