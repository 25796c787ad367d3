"""`--wallfacer-team-size auto`: the planner's choice for a run, before any process group exists.

Every rank plans for itself, from its arguments, its file of bandwidths and the number of ranks on its node;
the launcher compares the choice over all ranks (`wallfacer_agreement`) and stops a job in which they differ.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.paro.groups import ranks_per_node
from megatron_ext.paro.network import Link, Network
from megatron_ext.tools.compare_units import human_bytes
from megatron_ext.tools.plan_units import parse_size
from megatron_ext.wallfacer.cost import Links
from megatron_ext.wallfacer.install import options_of
from megatron_ext.wallfacer.planner import Candidate, Situation, ranking, reason
from megatron_ext.wallfacer.recompute import kept_of_run
from megatron_ext.wallfacer.rules_effect import idle_flags
from megatron_ext.wallfacer.sequence import whole
from megatron_ext.wallfacer.tiles import Mask
from megatron_ext.wallfacer.volume import Shape

GPU_INSIDE, GPU_NIC, GPU_RATE = 300e9, 50e9, 300e12
"""Bytes/s assumed of a GPU inside its node, and of a NIC, one for each GPU, when nothing was measured; and
operations/s that it reaches in attention."""
CPU_INSIDE, CPU_NIC, CPU_RATE = 2e9, 1.25e9, 2e10
"""The same for CPU processes that share one NIC."""


def resolve(args: Namespace, flags: Namespace) -> None:
    """Set team size, bundle, order, movement and backward pass in both sets of arguments, and say on rank 0
    why.

    Raises:
        ValueError: the file of bandwidths cannot be used, or nothing fits into --wallfacer-memory.
    """
    from megatron_ext.record import on_gpu

    situation, source = situation_of_run(args, flags, gpu=on_gpu())
    found = ranking(situation)
    best = found[0]
    if not best.fits:
        raise ValueError(
            f"--wallfacer-memory {flags.wallfacer_memory}: no team size and bundle of --wallfacer-team-size "
            f"auto needs so little; the least is {human_bytes(float(best.needed))}. Allow that, use more "
            "context-parallel ranks, full recomputation or --wallfacer-head-chunks."
        )
    idle = without_effect(flags, best)
    for name, value in chosen(best).items():
        setattr(args, name, value)
        setattr(flags, name, value)
    flags.wallfacer_chosen_by = f"auto ({source})"
    if int(os.environ.get("RANK", "0")) == 0:
        words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in best.choices().items())
        lines = [f"{words} ({source}): {reason(found)}. {memory_words(situation, found)}", *idle]
        for line in lines:
            print(f"[megatron_ext] --wallfacer-team-size auto: {line}", file=sys.stderr, flush=True)


def chosen(candidate: Candidate) -> dict[str, str | int | None]:
    """Flags that a candidate stands for, by destination, those that change nothing included."""
    geometry = candidate.geometry
    return {
        "wallfacer_team_size": str(geometry.team_size),
        "wallfacer_kv_bundle": geometry.bundle_size,
        "wallfacer_order": geometry.order,
        "wallfacer_backward": candidate.backward,
        "wallfacer_movement": candidate.movement if geometry.bundle_size > 1 else None,
    }


def memory_words(situation: Situation, found: Sequence[Candidate]) -> str:
    """What the first of a ranking takes, beside a plain ring, as a sentence."""
    best, kept = found[0], situation.kept
    layers = kept.whole + kept.recomputed
    text = f"Attention of {layers} layers in flight takes about {human_bytes(float(best.needed))} of a rank"
    ring = next((c for c in found if c.is_ring), None)
    if ring is not None and ring is not best:
        text += f", {human_bytes(float(ring.needed))} as a plain ring"
    limit = situation.memory_limit
    return f"{text}." if limit is None else f"{text}; {human_bytes(float(limit))} are allowed."


def without_effect(flags: Namespace, best: Candidate) -> list[str]:
    """Flags that were given and change nothing in what was chosen, each as a sentence. With sizes that are
    given they are refused (`rules.flags_change_something`); here they were there for other choices."""
    return [f"{flag} changes nothing here: {why}." for flag, why in idle_flags(flags, best.geometry)]


def situation_of_run(args: Namespace, flags: Namespace, *, gpu: bool) -> tuple[Situation, str]:
    """The planner's question for a run, and where its bandwidths come from.

    Args:
        args: Megatron's, after validation.
        flags: ours.
        gpu: whether ranks are GPUs.
    """
    tensor = args.tensor_model_parallel_size
    heads = args.num_attention_heads
    keys = args.num_query_groups if args.group_query_attention else heads
    itemsize = 2 if args.bf16 or args.fp16 else 4
    shape = Shape(args.micro_batch_size, heads // tensor, max(1, keys // tensor), args.kv_channels, itemsize)
    links, source = _links(args, flags, gpu)
    # What a model says that is not causal, or deals out its tokens in another way: see dit/rules.py.
    causal = not getattr(args, "bidirectional_attention", False)
    split = getattr(args, "token_split", None) or "zigzag"
    left, right = (None if side < 0 else side for side in args.window_size or (-1, -1))
    situation = Situation(
        size=args.context_parallel_size,
        layout=whole(args.seq_length, split),
        shape=shape,
        links=links,
        mask=Mask(left, 0 if causal else right),
        options=options_of(flags),
        rate=GPU_RATE if gpu else CPU_RATE,
        bundle_size=flags.wallfacer_kv_bundle,
        order=flags.wallfacer_order,
        movement=flags.wallfacer_movement,
        kept=kept_of_run(args),
        memory_limit=None if flags.wallfacer_memory is None else parse_size(flags.wallfacer_memory),
        native_sums=gpu,
    )
    return situation, source


def _links(args: Namespace, flags: Namespace, gpu: bool) -> tuple[Links, str]:
    tensor = args.tensor_model_parallel_size
    try:
        per_node = ranks_per_node(os.environ, args.world_size)
    except ValueError as error:
        raise ValueError(
            f"--wallfacer-team-size auto: {error}, or give --wallfacer-team-size a number."
        ) from None
    on_node = max(1, per_node // tensor)
    if flags.wallfacer_bandwidths is not None:
        network = _read(flags.wallfacer_bandwidths)
        return links_of(network, on_node, args.context_parallel_size), flags.wallfacer_bandwidths
    inside, nic = (GPU_INSIDE, GPU_NIC) if gpu else (CPU_INSIDE, CPU_NIC)
    # A GPU has a NIC of its own; processes on CPU share one, also those of other tensor-parallel ranks.
    sharing = 1 if gpu else on_node
    rate = nic if gpu else nic / max(1, per_node // on_node)
    rates = f"{inside / 1e9:g} GB/s inside and {nic / 1e9:g} GB/s per NIC assumed"
    return Links(Link(0.0, inside), Link(0.0, rate), on_node, sharing), rates


def links_of(network: Network, ranks_per_node: int, size: int) -> Links:
    """What `megatron-ext probe` measured: rates of a rank while all send.

    Raises:
        ValueError: it lacks a link that is needed.
    """
    needed = {"members": ranks_per_node > 1, "groups": ranks_per_node < size}
    missing = [scope for scope, used in needed.items() if used and not network.covers(scope)]
    if missing:
        words = {"members": "inside groups", "groups": "between groups"}
        raise ValueError(
            f"the bandwidths have no links {' and '.join(words[scope] for scope in missing)}: they were "
            f"measured with {network.groups} groups of {network.members}. Probe with two groups or more of "
            "two ranks or more"
        )
    of = {
        scope: network.link(scope, "gather") if used else Link(0.0, float("inf"))
        for scope, used in needed.items()
    }
    return Links(of["members"], of["groups"], ranks_per_node, 1)


def _read(path: str) -> Network:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--wallfacer-bandwidths {path}: {error.strerror}") from None
    try:
        return Network.from_json(text)
    except ValueError as error:
        raise ValueError(f"--wallfacer-bandwidths {path}: {error}") from None
