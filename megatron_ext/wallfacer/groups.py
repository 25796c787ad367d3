"""Process groups of multi-ring attention: rank lists by name, and the groups of a rank. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from megatron_ext.layout import Groups, within
from megatron_ext.wallfacer.geometry import Geometry

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PREFIX = "wallfacer-"


@dataclass(frozen=True)
class TrafficGroups:
    """This rank's process groups, each with a communicator of its own, since several are in use at once.

    A group is None where nothing of its kind moves. Nothing else may communicate over them.
    """

    team: "ProcessGroup | None" = None
    """Gathers of a team's queries, and of their gradients and statistics in the backward pass."""
    team_sums: "ProcessGroup | None" = None
    """Sums of partial outputs and query gradients; the log-sum-exps that weight them."""
    bundle: "ProcessGroup | None" = None
    """Gathers of keys and values by the owners of a bundle."""
    bundle_sums: "ProcessGroup | None" = None
    """Sums of key and value gradients."""
    ring: "ProcessGroup | None" = None
    """Hops of keys and values, or of queries; group rank = position."""
    ring_grads: "ProcessGroup | None" = None
    """Hops of gradients."""
    move: "ProcessGroup | None" = None
    """Bundles from owners to holders; all context-parallel ranks."""
    move_grads: "ProcessGroup | None" = None
    """Gradients of bundles back to the owners; all context-parallel ranks."""


def rank_lists(geometry: Geometry, context_groups: Sequence[Sequence[int]]) -> dict[str, Groups]:
    """Rank lists of all groups that are needed, by name, for every context-parallel group of the job.

    Names are those of the fields of TrafficGroups, such as wallfacer-team-sums.
    """
    alone = geometry.size == 1
    teams = [] if geometry.team_size == 1 else [geometry.team(t) for t in range(geometry.num_teams)]
    bundles = [] if geometry.bundle_size == 1 else [geometry.bundle(b) for b in range(geometry.num_bundles)]
    rings = [] if geometry.ring_length == 1 else [geometry.ring(*ring) for ring in geometry.rings()]
    everyone = [] if alone else [tuple(range(geometry.size))]
    places = {
        "team": teams,
        "team-sums": teams,
        "bundle": bundles,
        "bundle-sums": bundles,
        "ring": rings,
        "ring-grads": rings,
        "move": everyone if geometry.bundle_size > 1 else [],
        "move-grads": everyone,
    }
    return {PREFIX + name: within(context_groups, lists) for name, lists in places.items() if lists}


def groups_of(get: "Callable[[str], ProcessGroup | None]", geometry: Geometry) -> TrafficGroups:
    """The groups of this rank, `get` being a registry's look-up by name."""
    names = rank_lists(geometry, [tuple(range(geometry.size))])
    found = {}
    for field in fields(TrafficGroups):
        name = PREFIX + field.name.replace("_", "-")
        found[field.name] = get(name) if name in names else None
    return TrafficGroups(**found)
