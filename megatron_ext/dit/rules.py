"""What `pretrain_dit.py` refuses, before any process group exists."""

from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from megatron_ext.dit.config import geometry_of
from megatron_ext.rules_files import why_not_writable
from megatron_ext.rules_sizes import multiples_near


def sizes_positive(args: Namespace) -> str | None:
    """Sizes and counts are at least 1."""
    names = ("image_size", "frames", "channels", "patch_size", "frame_patch", "num_classes")
    names += ("samples_per_class", "sample_steps")
    wrong = [f"--dit-{n.replace('_', '-')} {getattr(args, f'dit_{n}')}" for n in names]
    wrong = [text for text in wrong if int(text.split()[1]) < 1]
    return f"{', '.join(wrong)}: these count something; give 1 or more." if wrong else None


def patches_fit(args: Namespace) -> str | None:
    """A picture is a whole number of patches."""
    size, patch = args.dit_image_size, args.dit_patch_size
    frames, frame_patch = args.dit_frames, args.dit_frame_patch
    if patch >= 1 and size % patch:
        return (
            f"--dit-image-size {size} is not a whole number of patches of --dit-patch-size {patch}. Set the "
            f"size to {multiples_near(size, patch)}, or the patch to a divisor of {size}."
        )
    if frame_patch >= 1 and frames % frame_patch:
        return (
            f"--dit-frames {frames} is not a multiple of --dit-frame-patch {frame_patch}. Set --dit-frames "
            f"to {(frames // frame_patch + 1) * frame_patch}, or --dit-frame-patch to a divisor of {frames}."
        )
    return None


def sequence_is_the_picture(args: Namespace) -> str | None:
    """The sequence length is the number of patches, and context parallelism divides it."""
    if sizes_positive(args) or patches_fit(args):
        return None
    tokens, cp = geometry_of(args).num_tokens, args.context_parallel_size
    if args.seq_length != tokens:
        return (
            f"--seq-length {args.seq_length}, but the picture is {tokens} tokens (--dit-image-size, "
            f"--dit-frames, --dit-patch-size, --dit-frame-patch). Leave --seq-length out, or set it to "
            f"{tokens}."
        )
    if tokens % cp:
        return (
            f"{tokens} tokens a sample cannot be split evenly over --context-parallel-size {cp}. Choose a "
            "picture and patches whose number is a multiple of it."
        )
    return None


def digits_are_digits(args: Namespace) -> str | None:
    """The digits have one channel, ten classes, and a size that is a multiple of 8."""
    if args.dit_data != "digits":
        return None
    found = []
    if args.dit_channels != 1:
        found.append(f"--dit-channels {args.dit_channels}: digits have 1")
    if args.dit_num_classes != 10:
        found.append(f"--dit-num-classes {args.dit_num_classes}: digits have 10")
    if args.dit_image_size % 8:
        found.append(f"--dit-image-size {args.dit_image_size}: digits are 8 x 8, enlarged by whole factors")
    return "; ".join(found) + ". Correct that, or use --dit-data random." if found else None


def packages_installed(args: Namespace) -> str | None:
    """scikit-learn has the digits, Pillow writes pictures."""
    wanted = {"sklearn": args.dit_data == "digits", "PIL": args.dit_samples}
    missing = [name for name, needed in wanted.items() if needed and not is_installed(name)]
    if not missing:
        return None
    projects = {"sklearn": "scikit-learn (--dit-data digits)", "PIL": "Pillow (--dit-samples)"}
    return (
        f"Not installed: {' and '.join(projects[name] for name in missing)}. Install what pretrain_dit.py "
        "needs with pip install 'megatron_ext[dit]', or use --dit-data random without --dit-samples."
    )


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    try:
        return find_spec(package) is not None
    except ValueError:  # hidden: its entry in sys.modules is None
        return False


def samples_can_be_written(args: Namespace) -> str | None:
    """The folder is writable before hours of training end in an error."""
    if not args.dit_samples or not (why := why_not_writable(args.dit_samples)):
        return None
    return f"--dit-samples {args.dit_samples} cannot be written: {why}. Choose a folder that you can write."


def evaluation_needs_digits(args: Namespace) -> str | None:
    """Only digits have a classifier."""
    if not args.dit_evaluate or args.dit_data == "digits":
        return None
    return (
        f"--dit-evaluate judges samples by the real digits, but --dit-data {args.dit_data} is trained on. "
        "Leave --dit-evaluate out, or use --dit-data digits."
    )


def shares_make_sense(args: Namespace) -> str | None:
    """Label dropout is a share of the samples; guidance needs samples without a class."""
    dropout = args.dit_label_dropout
    if not 0 <= dropout < 1:
        return f"--dit-label-dropout {dropout:g} is no share of the samples: give 0 or more, and less than 1."
    drawn = args.dit_samples or args.dit_evaluate
    if drawn and dropout == 0 and args.dit_guidance != 1:
        return (
            f"--dit-guidance {args.dit_guidance:g} compares predictions with and without the class, and with "
            "--dit-label-dropout 0 the model never learns the latter. Set --dit-guidance 1, or a label "
            "dropout of 0.1."
        )
    return None


def stock_options_fit(args: Namespace) -> str | None:
    """Stock options that the model has no use for, or would not honour."""
    found = []
    if args.num_experts:
        found.append("--num-experts (its MLPs are dense)")
    if args.multi_latent_attention:
        found.append("--multi-latent-attention")
    if args.mtp_num_layers:
        found.append("--mtp-num-layers (it predicts no tokens)")
    if args.fp32_residual_connection:
        found.append("--fp32-residual-connection")
    if getattr(args, "vocab_parallel", "off") != "off":
        found.append(f"--vocab-parallel {args.vocab_parallel} (it has no vocabulary)")
    modules = set(args.recompute_modules or ["core_attn"]) - {"core_attn"}
    if args.recompute_granularity == "selective" and modules:
        found.append(f"--recompute-modules {' '.join(sorted(modules))} (core_attn works)")
    if not found:
        return None
    return f"The diffusion transformer does not support {', '.join(found)}. Leave it out."


def context_parallel_attention(args: Namespace) -> str | None:
    """Some attention can see the tokens of other ranks."""
    cp, kinds = args.context_parallel_size, args.cp_comm_type
    if cp == 1 or args.transformer_impl != "local" or "wallfacer" in kinds:
        return None
    return (
        f"--context-parallel-size {cp} needs attention over tokens of other ranks, which --transformer-impl "
        "local does not have. Set --cp-comm-type wallfacer, --context-parallel-size 1, or use "
        "--transformer-impl transformer_engine."
    )


def windows_need_wallfacer(args: Namespace) -> str | None:
    """A rank holds neighbouring tokens here; only WallFacer is told so, others count in zigzag order."""
    cp, window = args.context_parallel_size, args.window_size
    if cp == 1 or not window or set(args.cp_comm_type) == {"wallfacer"}:
        return None
    return (
        f"--window-size {window[0]},{window[1]} with --context-parallel-size {cp}: windows across ranks are "
        "those of Megatron's zigzag order, and pictures are dealt out in neighbouring tokens. Set "
        "--cp-comm-type wallfacer for all layers, or --context-parallel-size 1, or remove --window-size."
    )


RULES: tuple[Callable[[Namespace], str | None], ...] = (
    sizes_positive,
    patches_fit,
    sequence_is_the_picture,
    digits_are_digits,
    packages_installed,
    samples_can_be_written,
    evaluation_needs_digits,
    shares_make_sense,
    stock_options_fit,
    context_parallel_attention,
    windows_need_wallfacer,
)


def problems_of(args: Namespace) -> list[str]:
    """Everything that cannot work, each as a text."""
    return [text for rule in RULES if (text := rule(args)) is not None]


def stock_defaults(args: Namespace) -> dict[str, Any]:
    """What stock asks for, and the flags of `DiTConfig` (all that `args` holds) say or nobody needs; and what
    WallFacer must know of a model that is not a GPT."""
    out = {"tokenizer_type": "NullTokenizer", "vocab_size": 1}
    out |= {"token_split": "contiguous", "bidirectional_attention": True}
    if sizes_positive(args) or patches_fit(args):
        return out  # refused later, with all other problems
    tokens = geometry_of(args).num_tokens
    return out | {"seq_length": tokens, "max_position_embeddings": tokens}
