"""What the launcher needs from PaRO: patches that put its wrapper and optimizer in place of Megatron's."""

import functools
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megatron_ext.hooks import bound
from megatron_ext.paro.check import bytes_patch
from megatron_ext.paro.checkpoint_patches import checkpoint_patches
from megatron_ext.paro.config import ParoConfig
from megatron_ext.paro.groups import data_parallel_groups, group_size
from megatron_ext.paro.resolve import resolve
from megatron_ext.patching import Patch

if TYPE_CHECKING:
    from megatron_ext.features import Context


def paro_patches(context: "Context") -> list[Patch]:
    """The data-parallel wrapper, the optimizer, and checkpoints."""
    setup = functools.cache(lambda: make_setup(context.flags, context.groups))
    checks = [bytes_patch()] if "bytes" in context.flags.ext_check else []
    return [
        *checks,
        Patch(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            functools.partial(_our_wrapper, setup),
            "wrap",
            "models are wrapped in PaRO's data-parallel engine",
            "paro",
            needs=("config", "ddp_config", "module", "disable_bucketing", "pg_collection"),
        ),
        Patch(
            "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
            functools.partial(_our_optimizer, context),
            "wrap",
            "an optimizer over the parts of parameters that a rank updates",
            "paro",
            needs=("config", "model_chunks", "param_groups", "skip_megatron_wrapping"),
        ),
        *checkpoint_patches(),
    ]


def paro_adjust(args: Namespace, flags: Namespace) -> None:
    """PaRO stands in for the distributed optimizer: nothing else may look for its buffers or checkpoints."""
    if flags.paro_strategy == "auto":
        resolve(args, flags)
    if int(os.environ.get("RANK", "0")) == 0:
        for line in announcement(args):
            print(f"[megatron_ext] {line}", file=sys.stderr, flush=True)
    args.use_distributed_optimizer = False
    flags.paro_broadcast = args.data_parallel_random_init


def paro_agreement(args: Namespace) -> dict[str, object]:
    """What ranks must agree on. Each reads the file of bandwidths and its own memory for `auto`."""
    flags = {field.name: getattr(args, field.name) for field in fields(ParoConfig)}
    del flags["paro_bandwidths"]  # how a strategy was found does not matter, if it is the same
    flags["paro_group_size"] = group_size(args)
    return {f"--{name.replace('_', '-')}": value for name, value in flags.items()}


def announcement(args: Namespace) -> list[str]:
    """The groups, and warnings of flags that change nothing with them."""
    strategy, n, m = args.paro_strategy, len(data_parallel_groups(args)[0]), group_size(args)
    k = n // m
    whose = (
        "by --paro-group-size" if args.paro_group_size is not None else "the data-parallel ranks of a node"
    )
    lines = [f"PaRO {strategy}: {n} data-parallel ranks = {k} groups x {m} members ({whose})"]
    if "I" in strategy and n > 1 and 1 in (k, m):
        same = strategy.replace("I", "G" if k == 1 else "N")
        lines.append(
            f"warning: with {'one group' if k == 1 else 'groups of one rank'}, --paro-strategy {strategy} is "
            f"{same}. Set --paro-group-size if that is not meant."
        )
    if args.paro_reshard_after_forward == "off" and strategy[0] == "N":
        lines.append(
            f"warning: --paro-reshard-after-forward off changes nothing, since {strategy} does not split "
            "parameters."
        )
    if args.paro_inter_dtype != "native" and k == 1:
        lines.append(
            f"warning: --paro-inter-dtype {args.paro_inter_dtype} changes nothing, since there is one group."
        )
    return lines


def make_setup(flags: Namespace, registry: Any) -> Any:
    """The engine's parts that all model chunks share."""
    from megatron_ext.paro.blocks import Grid
    from megatron_ext.paro.collectives import HybridGroups, make_collectives
    from megatron_ext.paro.data_parallel import Setup
    from megatron_ext.paro.strategy import Strategy
    from megatron_ext.paro.volume import Wire
    from megatron_ext.record import on_gpu
    from megatron_ext.schedules.lane import make_lane

    gpu = on_gpu()

    @functools.cache
    def lane(name: str, overlap: bool) -> Any:
        return make_lane(name, overlap=overlap, on_gpu=gpu)

    def collectives(direction: str, inter_dtype: str = flags.paro_inter_dtype, feature: str = "paro") -> Any:
        names = ("members", "groups", "flat") if flags.paro_comm == "flat" else ("members", "groups")
        groups = HybridGroups(*(registry[f"paro-{name}{direction}"] for name in names))
        return make_collectives(flags.paro_comm, groups, inter_dtype=inter_dtype, feature=feature)

    groups, members = registry["paro-groups"], registry["paro-members"]
    grid = Grid(groups.size(), members.size(), groups.rank(), members.rank())
    return Setup(
        strategy=Strategy.parse(flags.paro_strategy),
        grid=grid,
        params=collectives(""),
        grads=collectives("-grads"),
        exact=collectives("", "native", "paro:whole"),
        make_lane=lane,
        wire=Wire(grid.k, grid.m, flags.paro_comm, flags.paro_inter_dtype, "nccl" if gpu else "gloo"),
        reshard=flags.paro_reshard_after_forward == "on",
        broadcast=getattr(flags, "paro_broadcast", False),
        late=LATE if getattr(flags, "vocab_parallel", "off") != "off" else frozenset(),
    )


LATE = frozenset(("embedding.word_embeddings.weight", "output_layer.weight"))
"""Parameters to whose gradients vocabulary passes add outside of autograd."""


def _our_wrapper(setup: Callable[[], Any], original: Callable) -> Callable:
    """Megatron names its class in several places, so the object that it has just made becomes one of ours."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron_ext.paro.data_parallel import ParoDataParallel

        call = bound(original, (self, *args), kwargs)
        names = ("config", "ddp_config", "module", "disable_bucketing", "pg_collection")
        self.__class__ = ParoDataParallel
        self.__init__(*(call[name] for name in names), setup=setup())

    return __init__


def _our_optimizer(context: "Context", original: Callable) -> Callable:
    @functools.wraps(original)
    def _get_megatron_optimizer_based_on_param_groups(*args: Any, **kwargs: Any) -> Any:
        from megatron_ext.paro.optimizer import ParoOptimizer, make_shards

        call = dict(bound(original, args, kwargs))
        chunks, groups, config = call["model_chunks"], call["param_groups"], call["config"]
        shards = make_shards(groups, chunks)
        ours = [
            {**group, "params": [shard.main for shard in members]}
            for group, members in zip(groups, shards, strict=True)
        ]
        inner, init_state = original(**{**call, "param_groups": ours, "skip_megatron_wrapping": True})
        optimizer = ParoOptimizer(
            inner,
            config,
            _grad_scaler(config),
            init_state,
            shards=shards,
            members=[list(group["params"]) for group in groups],
            chunks=chunks,
            stats=context.groups["paro-stats"],
        )
        optimizer.tp_group = chunks[0].tp_group
        optimizer.expert_tp_group = chunks[0].tp_group
        return optimizer

    return _get_megatron_optimizer_based_on_param_groups


def _grad_scaler(config: Any) -> Any:
    """The loss scaler that Megatron would take: constant, dynamic for fp16, or none."""
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler

    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
