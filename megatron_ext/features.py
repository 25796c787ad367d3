"""The feature table: what each feature adds to stock Megatron, as data. docs/adding-a-feature.md explains it.

The launcher reads it: flags of every feature go into Megatron's parser, rules and conflicts of the enabled
ones are checked before any process group exists, and their patches are applied, all or none. Functions take
the table as an argument so that tests can use one of their own.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from megatron_ext.compositions import STOCK_OPTIONS, UNTESTED, WORKS
from megatron_ext.config import RunConfig
from megatron_ext.linear3d import rules as linear3d_rules
from megatron_ext.linear3d.config import Linear3dConfig
from megatron_ext.linear3d.groups import linear3d_groups
from megatron_ext.linear3d.install import linear3d_adjust, linear3d_describe, linear3d_patches
from megatron_ext.paro import rules as paro_rules
from megatron_ext.paro.config import ParoConfig
from megatron_ext.paro.groups import paro_groups
from megatron_ext.paro.install import paro_adjust, paro_agreement, paro_patches
from megatron_ext.pipeline import rules as pipeline_rules
from megatron_ext.pipeline.config import PipelineConfig
from megatron_ext.pipeline.install import adjust_pipeline, pipeline_groups, pipeline_patches
from megatron_ext.vocab import rules as vocab_rules
from megatron_ext.vocab.config import VocabConfig
from megatron_ext.vocab.install import vocab_groups, vocab_patches
from megatron_ext.wallfacer import rules as wallfacer_rules
from megatron_ext.wallfacer.config import WallfacerConfig
from megatron_ext.wallfacer.install import (
    wallfacer_adjust,
    wallfacer_agreement,
    wallfacer_describe,
    wallfacer_groups,
    wallfacer_patches,
)

if TYPE_CHECKING:
    from megatron_ext.groups import GroupRegistry
    from megatron_ext.patching import Patch

Rule = Callable[[Namespace], str | None]


@dataclass(frozen=True)
class Group:
    """A process group that a feature asks for: the rank lists of all its instances (layout.py makes them)."""

    rank_lists: Sequence[tuple[int, ...]]
    communicator: str = ""
    """Name of a communicator of its own, for collectives that overlap with others; "" may share one."""


@dataclass(frozen=True)
class Context:
    """What a feature's patches get: its flags, and the registry that holds its groups once they exist."""

    flags: Namespace
    groups: "GroupRegistry"
    step_fields: dict[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    """By feature, filled by its patches: what a step's line of the run record says under its name."""


@dataclass(frozen=True)
class Feature:
    """One feature; everything it needs from Megatron and everything Megatron gets from it."""

    name: str
    title: str
    what: str
    """One line for the README's table."""
    status: Literal["planned", "ready"]
    config: type | None = None
    """Dataclass of its flags, see config.py."""
    enabled: Callable[[Namespace], bool] = lambda namespace: False
    """Whether the flags turn it on. Sees the feature flags, and of stock's only `stock_flags`."""
    stock_flags: tuple[str, ...] = ()
    """Stock options that `enabled` reads too, as a list of strings or None."""
    rules: tuple[Rule, ...] = ()
    """What must hold when it is on, see rules.py."""
    patches: Callable[[Context], "list[Patch]"] = lambda context: []
    """What it changes in Megatron, see patching.py."""
    agreement: Callable[[Namespace], Mapping[str, object]] = lambda args: {}
    """What each rank finds by itself and must be equal on all; the launcher compares it before groups."""
    groups: Callable[[Namespace], Mapping[str, Group]] = lambda args: {}
    """Its process groups by name, from Megatron's validated arguments; pure. The launcher makes them."""
    adjust: Callable[[Namespace, Namespace], None] = lambda args, flags: None
    """What it sets in Megatron's validated arguments, and in its own flags: what only they decide."""
    describe: Callable[[Namespace, Namespace], dict[str, Any]] = lambda args, flags: {}
    """What the run record's start line says under its name, from the same after `adjust`; pure."""
    checks: tuple[str, ...] = ()
    """Names of --ext-check that it implements."""
    conflicts: Mapping[str, str] = field(default_factory=dict)
    """Other feature or stock option (a name of STOCK_OPTIONS) -> WORKS, UNTESTED, or why it is refused."""
    cpu: str = WORKS
    """WORKS or UNTESTED under --cpu, or why it needs a GPU."""
    doc: str | None = None
    """Its page."""


FEATURES: tuple[Feature, ...] = (
    Feature(
        name="pipeline",
        title="Pipeline schedules",
        what="zero-bubble and V-shaped pipelines: smaller bubbles, or half the activation memory",
        status="ready",
        config=PipelineConfig,
        enabled=lambda flags: flags.pipeline_schedule != "stock",
        rules=pipeline_rules.RULES,
        patches=pipeline_patches,
        groups=pipeline_groups,
        adjust=adjust_pipeline,
        checks=("bytes",),
        conflicts={
            "vocab": WORKS,
            "wallfacer": UNTESTED,
            "paro": WORKS,
            "tp": WORKS,
            "sp": WORKS,
            "pp": WORKS,
            "interleaved": WORKS,
            "dp": WORKS,
            "distopt": WORKS,
            "instances": UNTESTED,
            "overlap": WORKS,
            "cp": UNTESTED,
            "recompute": WORKS,
            "bf16": WORKS,
            "fp16": WORKS,
            "fp8": UNTESTED,
            "moe": "weight gradients of experts have no passes of their own yet. Remove --num-experts.",
            "mla": UNTESTED,
            "mtp": "a second prediction head has no place in its chunks yet. Remove --mtp-num-layers.",
            "hybrid": "only GPTModel's layers are placed. Remove --hybrid-layer-pattern.",
            "fsdp": "it shards parameters that W passes use directly. Remove --use-megatron-fsdp; "
            "--use-distributed-optimizer works.",
            "fsdp2": "it shards parameters that W passes use directly. Remove --use-torch-fsdp2; "
            "--use-distributed-optimizer works.",
            "graphs": "its passes are not captured. Remove the CUDA graph options.",
        },
        doc="docs/pipeline-schedules.md",
    ),
    Feature(
        name="vocab",
        title="Vocabulary parallelism",
        what="shares the embedding and the output layer out to all pipeline stages, which balances them",
        status="ready",
        config=VocabConfig,
        enabled=lambda flags: flags.vocab_parallel != "off",
        rules=vocab_rules.RULES,
        patches=vocab_patches,
        groups=vocab_groups,
        checks=("bytes",),
        conflicts={
            "tp": WORKS,
            "sp": WORKS,
            "pp": WORKS,
            "interleaved": WORKS,
            "dp": WORKS,
            "distopt": WORKS,
            "instances": UNTESTED,
            "overlap": WORKS,
            "cp": UNTESTED,
            "recompute": WORKS,
            "bf16": WORKS,
            "fp16": WORKS,
            "fp8": UNTESTED,
            "moe": "losses of experts are not placed in its schedule yet. Remove --num-experts.",
            "mla": UNTESTED,
            "mtp": "a second prediction head has no passes in the schedule yet. Remove --mtp-num-layers.",
            "hybrid": "only GPTModel's vocabulary layers are shared out. Remove --hybrid-layer-pattern.",
            "fsdp": "it shards parameters that the vocabulary passes use directly. Remove "
            "--use-megatron-fsdp; --use-distributed-optimizer works.",
            "fsdp2": "it shards parameters that the vocabulary passes use directly. Remove "
            "--use-torch-fsdp2; --use-distributed-optimizer works.",
            "graphs": "its passes are not captured. Remove the CUDA graph options.",
        },
        doc="docs/vocabulary-parallelism.md",
    ),
    Feature(
        name="linear3d",
        title="3-D linear partitioning",
        what="cuts every linear layer along three axes, to send less than tensor parallelism does",
        status="ready",
        config=Linear3dConfig,
        enabled=lambda flags: bool(flags.linear_3d),
        rules=linear3d_rules.RULES,
        patches=linear3d_patches,
        groups=linear3d_groups,
        adjust=linear3d_adjust,
        describe=linear3d_describe,
        checks=("bytes", "layouts"),
        conflicts={
            "pipeline": "zb-h1 and the V schedules run weight gradients in passes of their own, and its "
            "linears compute them in the backward pass; 1f1b and interleaved have not been tried with it. "
            "Remove --pipeline-schedule: stock's 1F1B works, with --vocab-parallel, too.",
            "vocab": WORKS,
            "paro": WORKS,
            "wallfacer": WORKS,
            "tp": WORKS,
            "sp": WORKS,
            "pp": WORKS,
            "interleaved": "shapes between virtual stages are not exchanged yet. Remove "
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank.",
            "dp": WORKS,
            "distopt": WORKS,
            "instances": WORKS,
            "overlap": WORKS,
            "cp": UNTESTED,
            "recompute": WORKS,
            "bf16": WORKS,
            "fp16": WORKS,
            "fp8": "its linears compute in the model's type. Remove --fp8-format and --fp4-format.",
            "moe": "experts are not split along three axes yet. Remove --num-experts.",
            "mla": "latent projections are not split along three axes yet. Remove --multi-latent-attention.",
            "mtp": "a second prediction head is not split along three axes yet. Remove --mtp-num-layers.",
            "hybrid": "only GPTModel's layers are split. Remove --hybrid-layer-pattern.",
            "fsdp": "both split weights. Remove --use-megatron-fsdp; --use-distributed-optimizer works.",
            "fsdp2": "both split weights. Remove --use-torch-fsdp2; --use-distributed-optimizer works.",
            "graphs": "its collectives are not captured. Remove the CUDA graph options.",
        },
        doc="docs/linear-3d.md",
    ),
    Feature(
        name="wallfacer",
        title="WallFacer",
        what="context-parallel attention that sends less than a ring does on long sequences",
        status="ready",
        config=WallfacerConfig,
        enabled=lambda flags: "wallfacer" in (flags.cp_comm_type or ()),
        stock_flags=("--cp-comm-type",),
        rules=wallfacer_rules.RULES,
        patches=wallfacer_patches,
        groups=wallfacer_groups,
        adjust=wallfacer_adjust,
        agreement=wallfacer_agreement,
        describe=wallfacer_describe,
        checks=("bytes",),
        conflicts={
            "vocab": WORKS,
            "paro": WORKS,
            "tp": WORKS,
            "sp": WORKS,
            "pp": WORKS,
            "interleaved": WORKS,
            "dp": WORKS,
            "distopt": WORKS,
            "instances": UNTESTED,
            "overlap": WORKS,
            "cp": WORKS,
            "recompute": WORKS,
            "bf16": WORKS,
            "fp16": WORKS,
            "fp8": UNTESTED,
            "moe": UNTESTED,
            "mla": "its keys and values have heads of different sizes, which are not sent together yet. "
            "Remove --multi-latent-attention.",
            "mtp": UNTESTED,
            "hybrid": UNTESTED,
            "fsdp": UNTESTED,
            "fsdp2": UNTESTED,
            "graphs": "a captured graph repeats the transfers of one step. Remove the CUDA graph options.",
        },
        doc="docs/wallfacer.md",
    ),
    Feature(
        name="paro",
        title="PaRO",
        what="shards parameters, gradients and optimizer state each over a group of its own size",
        status="ready",
        config=ParoConfig,
        enabled=lambda flags: flags.paro_strategy != "off",
        rules=paro_rules.RULES,
        patches=paro_patches,
        agreement=paro_agreement,
        groups=paro_groups,
        adjust=paro_adjust,
        checks=("bytes",),
        conflicts={
            "vocab": WORKS,
            "tp": WORKS,
            "sp": WORKS,
            "pp": WORKS,
            "interleaved": WORKS,
            "dp": WORKS,
            "distopt": WORKS,
            "instances": "--paro-strategy NNI is what --num-distributed-optimizer-instances does, with "
            "--paro-group-size for the size of an instance. Remove --num-distributed-optimizer-instances.",
            "overlap": WORKS,
            "cp": WORKS,
            "recompute": WORKS,
            "bf16": WORKS,
            "fp16": WORKS,
            "fp8": UNTESTED,
            "moe": "expert parameters are split over ranks of their own, which its groups do not follow yet. "
            "Remove --num-experts.",
            "mla": UNTESTED,
            "mtp": UNTESTED,
            "hybrid": "units of a hybrid model are not known to it. Remove --hybrid-layer-pattern.",
            "fsdp": "both split parameters, --paro-strategy GGG as it does. Remove --use-megatron-fsdp.",
            "fsdp2": "both split parameters, --paro-strategy GGG as it does. Remove --use-torch-fsdp2.",
            "graphs": "a captured graph repeats the collectives of one step. Remove the CUDA graph options.",
        },
        doc="docs/paro.md",
    ),
)


def configs(table: Sequence[Feature] = FEATURES) -> list[type]:
    """The flag dataclasses of the launcher and of every feature that has one."""
    return [RunConfig, *(f.config for f in table if f.config is not None)]


def stock_flags(table: Sequence[Feature] = FEATURES) -> list[str]:
    """Stock options that decide whether a feature is on, for `config.preparse`."""
    return list(dict.fromkeys(flag for f in table for flag in f.stock_flags))


def enabled_features(namespace: Namespace, table: Sequence[Feature] = FEATURES) -> list[Feature]:
    """The features that the flags turn on, in table order."""
    return [f for f in table if f.status == "ready" and f.enabled(namespace)]


def composition(feature: Feature, other: str, table: Sequence[Feature] = FEATURES) -> str:
    """WORKS, UNTESTED or the reason for a refusal, of a feature with a stock option or another feature.

    Two features need to say it once. Raises KeyError when neither does.
    """
    if other in feature.conflicts:
        return feature.conflicts[other]
    return next(f for f in table if f.name == other).conflicts[feature.name]


def conflicts(
    args: Namespace, on: Sequence[Feature], cpu: bool = False, table: Sequence[Feature] = FEATURES
) -> list[str]:
    """Problems of the enabled features with stock options that are set, with each other and with --cpu."""
    found = []
    for position, feature in enumerate(on):
        others = [(o.name, o.title) for o in STOCK_OPTIONS if o.on(args)]
        others += [(f.name, f.title) for f in on[position + 1 :]]
        for name, title in others:
            verdict = composition(feature, name, table)
            if verdict not in (WORKS, UNTESTED):
                found.append(f"{feature.title} is on together with {title}: {verdict}")
        if cpu and feature.cpu not in (WORKS, UNTESTED):
            found.append(f"{feature.title} is on together with --cpu: {feature.cpu}")
    return found + _checks_not_offered(args, on)


def _checks_not_offered(args: Namespace, on: Sequence[Feature]) -> list[str]:
    """--ext-check replicas works for every job; other checks need a feature that implements them."""
    offered = {"replicas", *(name for f in on for name in f.checks)}
    missing = [name for name in getattr(args, "ext_check", ()) if name not in offered]
    if not missing:
        return []
    enabled = ", ".join(f.title for f in on) or "none"
    return [
        f"--ext-check {','.join(missing)} is not offered by any feature that is on ({enabled}). "
        f"This job can check: {','.join(sorted(offered))}."
    ]


def patch_catalogue(table: Sequence[Feature] = FEATURES) -> "list[Patch]":
    """Every patch that any switch can install: what `megatron-ext lock` writes down. Imports megatron."""
    from megatron_ext import compat, config, cpu, groups, launcher, record

    context = Context(config.preparse([], configs(table), stock_flags(table)), groups.GroupRegistry())
    parts: Iterable[list[Patch]] = (
        compat.workarounds_catalogue(),
        cpu.catalogue(),
        launcher.catalogue(),
        record.catalogue(),
        groups.catalogue(),
        *(f.patches(context) for f in table),
    )
    return [patch for part in parts for patch in part]
