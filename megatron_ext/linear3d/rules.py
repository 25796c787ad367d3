"""What 3-D linear layers cannot do, said before any process group exists."""

import os
from argparse import Namespace
from dataclasses import fields

from megatron_ext.linear3d.config import Linear3dConfig
from megatron_ext.linear3d.grid import Grid3D, factorizations
from megatron_ext.linear3d.sizes import ModelSizes
from megatron_ext.linear3d.splits import fits, unsplit


def _set(args: Namespace, name: str) -> bool:
    return bool(getattr(args, name, None))


def given(args: Namespace) -> str:
    """The flag as the user gave it."""
    return f"--linear-3d {' '.join(args.linear_3d)}"


def is_auto(args: Namespace) -> bool:
    """Whether the planner chooses."""
    return args.linear_3d == ["auto"]


def parsed(args: Namespace) -> Grid3D | None:
    """The grid; None for auto, or where a rule says what is wrong with it."""
    if is_auto(args) or len(args.linear_3d) != 3 or not all(size.isdecimal() for size in args.linear_3d):
        return None
    sizes = [int(size) for size in args.linear_3d]
    return Grid3D(*sizes, args.linear_3d_order) if min(sizes) >= 1 else None


def vocab_mode(args: Namespace) -> str:
    """How the vocabulary layers lie: by our flag, or shared out by --vocab-parallel."""
    return "stages" if getattr(args, "vocab_parallel", "off") != "off" else args.linear_3d_vocab


def valid_grid(args: Namespace) -> str | None:
    """Three lengths, or auto."""
    if is_auto(args) or parsed(args) is not None:
        return None
    return (
        f"{given(args)}: give the lengths of three axes, each at least 1, whose product is "
        "--tensor-model-parallel-size, such as 2 2 2, or the word auto."
    )


def grid_is_the_tensor_parallel_group(args: Namespace) -> str | None:
    """X * Y * Z ranks."""
    grid, tp = parsed(args), args.tensor_model_parallel_size
    if grid is None or grid.ranks == tp or tp < 1:
        return None
    near = sorted(factorizations(tp), key=lambda g: sum(abs(a - b) for a, b in zip(g.sizes, grid.sizes)))  # noqa: B905
    choices = ", ".join(" ".join(map(str, g.sizes)) for g in near[:3])
    return (
        f"{given(args)} is a grid of {grid.ranks} ranks, but --tensor-model-parallel-size is {tp}: the grid "
        f"is the tensor-parallel group. Set --tensor-model-parallel-size {grid.ranks}, or a grid of {tp} "
        f"ranks, such as {choices}."
    )


def sizes_can_be_split(args: Namespace) -> str | None:
    """Every size that is cut, and all that are wrong at once."""
    grid = parsed(args)
    if grid is None:
        return None
    return "\n".join(u.text(grid) for u in unsplit(ModelSizes.of_args(args), grid, vocab_mode(args))) or None


def some_grid_fits(args: Namespace) -> str | None:
    """With auto there must be something to choose from."""
    tp = args.tensor_model_parallel_size
    if not is_auto(args) or tp < 1:
        return None
    sizes = ModelSizes.of_args(args)
    grids = list(factorizations(tp))
    if any(fits(sizes, grid, vocab_mode(args)) for grid in grids):
        return None
    closest = min(grids, key=lambda grid: len(unsplit(sizes, grid, vocab_mode(args))))
    reasons = "\n".join(u.text(closest) for u in unsplit(sizes, closest, vocab_mode(args)))
    return f"--linear-3d auto: no grid of {tp} ranks splits this model. The closest:\n{reasons}"


def local_layers(args: Namespace) -> str | None:
    """Transformer Engine's layers have norms and linears in one, on a tensor-parallel group of one axis."""
    if args.transformer_impl == "local":
        return None
    return (
        f"{given(args)} with --transformer-impl {args.transformer_impl}: Transformer Engine's linears and "
        "norms know one tensor-parallel axis. Use --transformer-impl local; on a GPU core attention is a "
        "fused kernel there, too."
    )


def no_fused_gradients(args: Namespace) -> str | None:
    """The fused kernel adds gradients that are not summed over axis i yet."""
    grid = parsed(args)
    if grid is None or grid.gi == 1 or not _set(args, "gradient_accumulation_fusion"):
        return None
    return (
        f"{given(args)} with --gradient-accumulation-fusion: its kernel adds weight gradients to their "
        f"buffer before they are summed over axis i of {grid.gi} ranks. Add "
        "--no-gradient-accumulation-fusion, or choose a grid that begins with 1."
    )


_REFUSED = {
    "distribute_saved_activations": (
        "--distribute-saved-activations",
        "splits activations that are equal on tensor-parallel ranks, and here none are",
    ),
    "delay_wgrad_compute": ("--delay-wgrad-compute", "moves weight gradients out of the backward pass"),
    "defer_embedding_wgrad_compute": (
        "--defer-embedding-wgrad-compute",
        "moves the output layer's weight gradient out of the backward pass",
    ),
    "tp_comm_overlap": ("--tp-comm-overlap", "is Transformer Engine's; use --linear-3d-overlap"),
    "init_model_with_meta_device": (
        "--init-model-with-meta-device",
        "builds parameters without values, which are filled in here",
    ),
    "sft": ("--sft", "packs sequences of different lengths, and every rank needs an equal part of each"),
    "qk_clip": ("--qk-clip", "scales whole heads of the QKV weight, whose rows are on several ranks"),
    "cross_entropy_loss_fusion": (
        "--cross-entropy-loss-fusion",
        "computes losses over the whole tensor-parallel group; vocabulary rows lie on the grid",
    ),
    "perform_rl_step": ("--perform-rl-step", "calls the model for logits, which are never put together"),
    "logits_save_dir": ("--logits-save-dir", "reads whole logits, which are never put together"),
    "logits_load_dir": ("--logits-load-dir", "reads whole logits, which are never put together"),
    "fine_grained_activation_offloading": (
        "--fine-grained-activation-offloading",
        "moves activations that collectives still read",
    ),
    "inprocess_restart": ("--inprocess-restart", "replaces process groups that layers hold"),
}


def no_other_cuts(args: Namespace) -> str | None:
    """Options that work on what the grid cuts."""
    found = [f"{flag} {why}" for name, (flag, why) in _REFUSED.items() if _set(args, name)]
    return f"{given(args)}: {'; '.join(found)}. Remove what is named." if found else None


def plain_optimizers(args: Namespace) -> str | None:
    """Matrices are on several ranks along both dimensions."""
    if args.optimizer in ("adam", "sgd"):
        return None
    return (
        f"--optimizer {args.optimizer} looks at whole matrices or at their columns, and {given(args)} cuts "
        "them along both dimensions. Use --optimizer adam or sgd."
    )


def distributed_checkpoints(args: Namespace) -> str | None:
    """Only distributed checkpoints describe parts that are cut along two dimensions."""
    if getattr(args, "ckpt_format", "torch_dist") == "torch_dist":
        return None
    return (
        f"--ckpt-format {args.ckpt_format} stores tensor-parallel parts as such, which another grid could "
        f"not read. Use --ckpt-format torch_dist with {given(args)}."
    )


def known_recomputation(args: Namespace) -> str | None:
    """Parts whose recomputation would repeat communication that is not accounted for."""
    modules = set(getattr(args, "recompute_modules", None) or ["core_attn"])
    if args.recompute_granularity != "selective" or modules <= {"core_attn"}:
        return None
    return (
        f"{given(args)} with --recompute-modules {' '.join(sorted(modules))}: only core_attn can be "
        "recomputed alone. Use --recompute-modules core_attn, or --recompute-granularity full."
    )


def no_weight_shards(args: Namespace) -> str | None:
    """Axis i is what stock's weight shards are."""
    shards, tp = getattr(args, "tensor_parallel_num_weight_shards", None), args.tensor_model_parallel_size
    if not shards or shards <= tp:
        return None
    return (
        f"--tensor-parallel-num-weight-shards {shards} cuts weights further, which axis i of {given(args)} "
        "does. Remove it, and make the first axis of the grid longer."
    )


def layers_to_keep(args: Namespace) -> str | None:
    """A count."""
    if args.linear_3d_keep_layers >= 0:
        return None
    return f"--linear-3d-keep-layers is {args.linear_3d_keep_layers}: give a number of layers, 0 for none."


def whole_parameters(args: Namespace) -> str | None:
    """PaRO may split gradients and optimizer states; parameters are gathered ahead of their module's turn."""
    strategy = getattr(args, "paro_strategy", "off")
    if strategy in ("off", "auto") or strategy.startswith("N"):
        return None
    return (
        f"--paro-strategy {strategy} splits parameters and brings them back when their layer begins, and "
        f"{given(args)} reads them one layer ahead. Take a strategy that begins with N, such as NNG or NIG."
    )


def bandwidths_can_be_read(args: Namespace) -> str | None:
    """The probe's file exists."""
    path = args.linear_3d_bandwidths
    if path is None or os.path.isfile(path):
        return None
    return f"--linear-3d-bandwidths {path}: there is no such file. `megatron-ext probe` writes one."


RULES = (
    valid_grid,
    grid_is_the_tensor_parallel_group,
    sizes_can_be_split,
    some_grid_fits,
    local_layers,
    no_fused_gradients,
    no_other_cuts,
    plain_optimizers,
    distributed_checkpoints,
    known_recomputation,
    no_weight_shards,
    layers_to_keep,
    whole_parameters,
    bandwidths_can_be_read,
)


def flags_need_the_grid(args: Namespace) -> str | None:
    """For every job: flags of the feature without the flag that turns it on."""
    if getattr(args, "linear_3d", None):
        return None
    changed = [
        f"--{f.name.replace('_', '-')}"
        for f in fields(Linear3dConfig)
        if f.name != "linear_3d" and getattr(args, f.name, f.default) != f.default
    ]
    if not changed:
        return None
    return f"{', '.join(changed)} without --linear-3d does nothing. Add --linear-3d X Y Z, or remove it."
