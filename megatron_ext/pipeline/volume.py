"""Bytes that a rank sends between stages in one step."""

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from megatron_ext.pipeline.links import link_name
from megatron_ext.schedules.placement import Placement

if TYPE_CHECKING:
    from megatron_ext.schedules.links import Boundary


def transfer_counts(place: Placement, rank: int, training: bool = True) -> dict[str, int]:
    """Sends of a rank for one microbatch, by the name of the group."""
    found: Counter[str] = Counter()
    for chunk in range(place.chunks):
        for kind in ("SF", "SB") if training else ("SF",):
            edge = place.edge(kind, rank, chunk)
            if edge is not None:
                found[link_name(kind[1], edge.way)] += 1
    return dict(found)


def transfer_bytes(
    place: Placement, rank: int, m: int, boundary: "Boundary", *, training: bool
) -> dict[tuple[str, str], int]:
    """Bytes by (kind, group) that a rank sends for `m` microbatches."""
    size = m * prod(boundary.shape) * boundary.dtype.itemsize
    counts = transfer_counts(place, rank, training)
    return {("send", name): count * size for name, count in counts.items()}
