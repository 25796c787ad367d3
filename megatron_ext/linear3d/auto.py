"""`--linear-3d auto`: the planner's first choice for a run, from Megatron's arguments."""

import os
from argparse import Namespace

from megatron_ext.linear3d.planner import Situation, one_axis, ranking
from megatron_ext.linear3d.rules import vocab_mode
from megatron_ext.linear3d.sizes import ModelSizes
from megatron_ext.paro.network import Link, Network

EQUAL = Link(0.0, 1e9)
"""Without measurements all links are equal, so that the fewest bytes win."""


def situation_of_run(args: Namespace) -> Situation:
    """The planner's question.

    Raises:
        ValueError: the bandwidth file cannot be read.
    """
    inside = between = EQUAL
    if args.linear_3d_bandwidths:
        with open(args.linear_3d_bandwidths, encoding="utf-8") as file:
            network = Network.from_json(file.read())
        inside = network.link("members", "gather")
        between = network.link("groups", "gather") if network.covers("groups") else inside
    tp = args.tensor_model_parallel_size
    node = min(tp, int(os.environ.get("LOCAL_WORLD_SIZE", tp)))
    return Situation(
        sizes=ModelSizes.of_args(args),
        ranks=tp,
        layers=max(1, args.num_layers // args.pipeline_model_parallel_size),
        node=node,
        inside=inside,
        between=between,
        save=args.linear_3d_save,
        vocab=vocab_mode(args),
        order=args.linear_3d_order,
    )


def choose(args: Namespace) -> list[str]:
    """The grid as the flag would name it; rank 0 says why.

    Raises:
        ValueError: no grid splits the model, or the bandwidth file cannot be read.
    """
    s = situation_of_run(args)
    found, refused = ranking(s)
    if not found:
        reasons = "; ".join(f"{r.grid}: {', '.join(r.reasons)}" for r in refused[:3])
        raise ValueError(f"--linear-3d auto: no grid of {s.ranks} ranks splits this model ({reasons}).")
    best, stock = found[0], one_axis(s, found)
    if int(os.environ.get("RANK", "0")) == 0:
        against = ""
        if stock is not None and best is not stock:
            against = (
                f", against {stock.bytes / 1e6:.4g} MB on 1 x {s.ranks} x 1 (stock's tensor parallelism)"
            )
        links = args.linear_3d_bandwidths or "no measurements: all links count as equal"
        print(
            f"[megatron_ext] --linear-3d auto: {best.grid}, {best.bytes / 1e6:.4g} MB a layer and microbatch "
            f"on each rank{against} ({links})",
            flush=True,
        )
    return [str(size) for size in best.grid.sizes]
