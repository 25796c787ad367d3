r"""Pretrain a small diffusion transformer (AdaLN-Zero) with Megatron-core, on pictures or videos.

    torchrun --nproc-per-node 2 -m megatron_ext --cpu --ext-config configs/dit-digits-cpu.yaml \
        pretrain_dit.py --dit-samples runs/dit --dit-evaluate

The model is made of Megatron's own transformer layers with attention in both directions; tensor, sequence,
pipeline and data parallelism, the distributed optimizer and checkpoints work by stock's flags.

Imports stand in the functions: to save a checkpoint, Megatron spawns a process per rank that imports this
file anew, and would otherwise load all of torch and Megatron for nothing.
"""

import sys
from functools import partial


def get_batch(data_iterator, diffusion, geometry):
    """Next microbatch: noisy patches and targets `[b, s, patch_dim]` of this rank's tokens, time and label.

    All ranks read the samples themselves, middle stages of the pipeline too: those need time and label.
    """
    from megatron.core import mpu

    from megatron_ext.dit.tokens import patchify, share_of_rank

    batch = {key: value.cuda(non_blocking=True) for key, value in next(data_iterator).items()}
    picture, noise, time = batch["picture"], batch["noise"], batch["time"]
    noisy = diffusion.noisy(picture, noise, time)
    target = diffusion.target(picture, noise, time)
    group = mpu.get_context_parallel_group()
    tokens, target = (share_of_rank(patchify(x, geometry), 1, group) for x in (noisy, target))
    return tokens, target, time, batch["label"]


def loss_func(target, prediction):
    """Summed loss of this microbatch's tokens, their number, and both as what is logged.

    A token's loss is the mean squared error of its values.
    """
    import torch
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args

    per_token_loss = (prediction.float() - target.float()).square().mean(dim=-1)
    loss = per_token_loss.sum()
    num_tokens = torch.tensor(per_token_loss.numel(), dtype=torch.int, device=loss.device)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {what} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    # The schedule scales the loss in place: what is logged must be a copy.
    reported = torch.stack([loss.detach().clone(), num_tokens.to(loss.dtype)])
    return loss, num_tokens, {"diffusion loss": reported}


def forward_step(data_iterator, model, *, diffusion, geometry):
    """One forward pass of a microbatch; returns the model's output and the loss function for it."""
    from megatron.training import get_timers

    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, target, time, label = get_batch(data_iterator, diffusion, geometry)
    timers("batch-generator").stop()
    return model(tokens=tokens, time=time, label=label), partial(loss_func, target)


def datasets_provider(num_samples, vp_stage=None):
    """Train, validation and test datasets for `num_samples` = (train, valid, test); there is no test set."""
    from megatron.core.datasets.utils import Split
    from megatron.training import get_args

    from megatron_ext.dit.config import geometry_of
    from megatron_ext.dit.data import DiffusionDataset, load_digits

    args = get_args()
    geometry = geometry_of(args)
    digits = load_digits() if args.dit_data == "digits" else (None, None)
    datasets = []
    for split, count, real in zip((Split.train, Split.valid), num_samples, digits, strict=False):
        source = {} if real is None else {"videos": real.videos(geometry), "classes": real.classes}
        seed = args.seed + (split is Split.valid)
        dataset = DiffusionDataset(
            count, geometry, args.dit_num_classes, seed, args.dit_label_dropout, **source
        )
        dataset.split = split
        datasets.append(dataset if count else None)
    return *datasets, None


def show_samples(args, models, diffusion, geometry):
    """Draw samples of the trained model, write their picture and judge them, as the flags ask for."""
    import json
    from pathlib import Path

    from megatron.training import print_rank_0

    from megatron_ext.dit import evaluation, sampling

    samples, labels = sampling.draw(models, geometry, diffusion, sampling.settings_from_args(args))
    if args.rank != 0:
        return
    folder = Path(args.dit_samples) if args.dit_samples else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        sampling.grid_picture(samples, args.dit_samples_per_class).save(folder / "samples.png")
        print_rank_0(f"samples: {folder / 'samples.png'} (a row a class)")
    if args.dit_evaluate:
        verdict = evaluation.judge(samples, labels)
        print_rank_0(f"samples: {verdict}")
        if folder:
            (folder / "samples.json").write_text(json.dumps(verdict.as_dict(), indent=1) + "\n")


def main():
    """Parse Megatron's arguments and ours, train, and draw samples."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_ext import config, problems
    from megatron_ext.dit import rules
    from megatron_ext.dit.builder import dit_config_from_args
    from megatron_ext.dit.config import DiTConfig, geometry_of
    from megatron_ext.dit.diffusion import Diffusion

    datasets_provider.is_distributed = True
    args = parse_and_validate_args(
        extra_args_provider=lambda parser: config.add_arguments(parser, [DiTConfig]),
        args_defaults=rules.stock_defaults(config.preparse(sys.argv[1:], [DiTConfig])),
    )
    if found := rules.problems_of(args):
        problems.refuse(found)
    geometry, diffusion = geometry_of(args), Diffusion(args.dit_path, args.dit_prediction)
    model_config = dit_config_from_args(args)
    models = []

    def keep(built):
        models.extend(built)
        return built

    model_config.post_wrap_hooks.append(keep)
    pretrain(
        pretrain_cfg_container_from_args(args, model_config),
        datasets_provider,
        ModelType.encoder_or_decoder,
        partial(forward_step, diffusion=diffusion, geometry=geometry),
    )
    if args.dit_samples or args.dit_evaluate:
        show_samples(args, models, diffusion, geometry)


if __name__ == "__main__":
    main()
