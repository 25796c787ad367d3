"""Flags of `pretrain_dit.py`, and the picture that they describe."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Literal

from megatron_ext.dit.tokens import Geometry


@dataclass(kw_only=True)
class DiTConfig:
    """Diffusion transformer: pictures or videos in, denoised ones out."""

    dit_data: Literal["digits", "random"] = "digits"
    """What is learnt: the handwritten digits that scikit-learn ships (with --dit-frames above 1, videos in
    which a digit moves to the right), or random values of any size, to measure speed."""

    dit_image_size: int = 8
    """Height and width of a picture. Digits are 8 x 8; a multiple of 8 enlarges them."""

    dit_frames: int = 1
    """Frames of a video; 1 for pictures."""

    dit_channels: int = 1
    """Values of a pixel; digits have 1."""

    dit_patch_size: int = 2
    """Height and width of the patch that becomes one token."""

    dit_frame_patch: int = 1
    """Frames of the patch that becomes one token."""

    dit_num_classes: int = 10
    """Classes that the pictures are conditioned on; digits have 10."""

    dit_path: Literal["linear", "cosine"] = "linear"
    """From picture to noise: straight lines (rectified flow), or with constant variance."""

    dit_prediction: Literal["velocity", "noise"] = "velocity"
    """What the model predicts: the velocity along the path, or the noise."""

    dit_label_dropout: float = 0.1
    """Share of the samples that are trained without their class, for classifier-free guidance."""

    dit_samples: str | None = None
    """Folder for samples at the end of training: samples.png has a row a class."""

    dit_samples_per_class: int = 8
    """Samples drawn of each class."""

    dit_sample_steps: int = 40
    """Steps from noise to picture."""

    dit_guidance: float = 2.0
    """Weight of classifier-free guidance; 1 is none."""

    dit_evaluate: bool = False
    """Draw samples at the end of training and say how many of them a classifier, fitted on the real digits,
    takes for their class."""


def geometry_of(args: Namespace) -> Geometry:
    """The pictures that the flags describe."""
    return Geometry(
        channels=args.dit_channels,
        frames=args.dit_frames,
        height=args.dit_image_size,
        width=args.dit_image_size,
        patch=args.dit_patch_size,
        frame_patch=args.dit_frame_patch,
    )
