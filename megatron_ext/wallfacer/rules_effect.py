"""Flags that would be accepted and change nothing: each is refused, with why. No torch."""

from argparse import Namespace
from dataclasses import replace

from megatron_ext.wallfacer.geometry import Geometry
from megatron_ext.wallfacer.recompute import kept_of_run

OURS_ALONE = {
    "attention_backend": ("--attention-backend", "chooses among the kernels of Transformer Engine"),
    "hierarchical_context_parallel_sizes": (
        "--hierarchical-context-parallel-sizes",
        "is for layers with --cp-comm-type a2a+p2p",
    ),
}
"""Stock options of other attention than ours, by destination."""


def idle_flags(flags: Namespace, geometry: Geometry) -> list[tuple[str, str]]:
    """(flag with its value, why it changes nothing) of those of ours that are given, for these sizes."""
    alone, shares = geometry.team_size == 1, geometry.bundle_size
    same = geometry.places == replace(geometry, order="gpa").places
    named = f"C={geometry.team_size} and K={geometry.bundle_size}"
    found = []
    if flags.wallfacer_order not in (None, "gpa") and same:
        found.append(("order", f"with {named} it places ranks as gpa does"))
    if flags.wallfacer_backward != "auto" and geometry.ring_length == 1:
        found.append(("backward", f"with {named} on {geometry.size} ranks nothing goes round"))
    if flags.wallfacer_movement == "direct" and shares == 1:
        found.append(("movement", "with K=1 keys start where they are"))
    if flags.wallfacer_keep == "team" and alone and shares == 1:
        found.append(("keep", "with C=1 and K=1 nothing is gathered that could be kept"))
    if flags.wallfacer_sum_dtype == "model" and alone:
        found.append(("sum_dtype", "with C=1 no outputs are sent to be summed"))
    return [(_flag(flags, name), why) for name, why in found]


def _flag(flags: Namespace, name: str) -> str:
    return f"--wallfacer-{name.replace('_', '-')} {getattr(flags, 'wallfacer_' + name)}"


def flags_change_something(args: Namespace) -> str | None:
    """Sizes that are given leave each flag something to do. With auto the planner says which have none."""
    team, bundle = args.wallfacer_team_size, args.wallfacer_kv_bundle
    if not team.isdecimal():
        return None
    try:
        geometry = Geometry(
            args.context_parallel_size,
            int(team),
            int(team) if bundle is None else bundle,
            args.wallfacer_order or "gpa",
        )
    except ValueError:
        return None  # other rules say it
    if geometry.size == 1:
        return None
    return _nothing(idle_flags(args, geometry))


def kept_is_used(args: Namespace) -> str | None:
    """Recomputed layers keep their results, and nothing that was gathered for them."""
    if args.wallfacer_keep != "team" or not kept_of_run(args).attached:
        return None
    granularity = args.recompute_granularity or "selective"
    why = (
        f"with --recompute-granularity {granularity} attention of all layers is recomputed: its result is "
        "kept instead, and what was gathered is gathered again. Without recomputation, or with "
        "--recompute-modules that leave out core_attn, it is kept"
    )
    return _nothing([("--wallfacer-keep team", why)])


def types_differ(args: Namespace) -> str | None:
    """The type of the model is not that of the sums already."""
    if args.bf16 or args.fp16:
        return None
    names = [name for name in ("sum_dtype", "grad_dtype") if getattr(args, f"wallfacer_{name}") == "model"]
    why = "without --bf16 or --fp16 the model's type is fp32"
    return _nothing([(_flag(args, name), why) for name in names])


def options_of_other_attention(args: Namespace) -> str | None:
    """Options that only other core attentions read, where no layer has one."""
    if set(args.cp_comm_type) != {"wallfacer"}:
        return None
    found = []
    for name, (flag, why) in OURS_ALONE.items():
        value = getattr(args, name, None)
        text = getattr(value, "name", value)  # of an enum
        if not text or text in ("auto", "local"):  # local chooses layers, too
            continue
        if text == "unfused" and args.distributed_backend == "gloo":
            continue  # the default of --cpu
        text = " ".join(map(str, text)) if isinstance(text, (list, tuple)) else text
        found.append((f"{flag} {text}", f"it {why}, and all layers have --cp-comm-type wallfacer"))
    advice = " --wallfacer-kernel names a kernel of ours." if any("backend" in f for f, _ in found) else ""
    text = _nothing(found)
    return None if text is None else text + advice


def _nothing(found: list[tuple[str, str]]) -> str | None:
    if not found:
        return None
    texts = "; ".join(f"{flag} changes nothing: {why}" for flag, why in found)
    return f"{texts}. Remove what is named."


EFFECT_RULES = (flags_change_something, kept_is_used, types_differ, options_of_other_attention)
