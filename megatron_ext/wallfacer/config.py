"""Flags of WallFacer."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class WallfacerConfig:
    """WallFacer: context-parallel attention in teams and rings, switched on by --cp-comm-type wallfacer."""

    wallfacer_team_size: str = "auto"
    """C, ranks that gather their queries: point-to-point traffic falls by C. A number, or auto, which lets
    the planner choose C, K, the order, what travels and how keys move (`megatron-ext plan wallfacer` shows
    its table)."""

    wallfacer_kv_bundle: int | None = None
    """K, shares of keys and values that travel together; C if not given. C times K must divide
    --context-parallel-size. 1 and 1 is plain ring attention, C and 1 teams without a gather of keys."""

    wallfacer_order: Literal["gpa", "gap", "pga", "pag", "agp", "apg"] | None = None
    """Placement on ranks: axes g (groups of teams), p (positions in a ring), a (members of a team), the one
    over neighbouring ranks last. gpa if not given: teams of neighbours."""

    wallfacer_backward: Literal["auto", "keys", "queries"] = "auto"
    """What travels in the backward pass: keys and values with their gradients, queries with theirs, or (auto)
    whichever sends less."""

    wallfacer_keep: Literal["own", "team"] = "own"
    """What is kept for the backward pass: a rank's own queries and keys, or (team) also those of its team and
    its first bundle, which are then not gathered again."""

    wallfacer_movement: Literal["relocate", "direct"] | None = None
    """How keys reach the rings: gathered by the owners of a bundle and sent on (relocate, the paper's), or
    sent by each owner to all holders (direct), which sends less. relocate if not given, where the team size
    is."""

    wallfacer_head_chunks: int = 1
    """Parts of the key heads, each gathered while the one before is computed; divides buffers, too."""

    wallfacer_sum_dtype: Literal["fp32", "model"] = "fp32"
    """Type in which partial outputs are sent to be summed."""

    wallfacer_grad_dtype: Literal["fp32", "model"] = "fp32"
    """Type in which partial gradients are sent to be summed."""

    wallfacer_kernel: Literal["auto", "cpu-flash", "torch-flash", "flash-attn", "reference"] = "auto"
    """Attention kernel; auto takes the fastest that can run, and never the reference."""

    wallfacer_bandwidths: str | None = None
    """File of `megatron-ext probe`, which --wallfacer-team-size auto plans with."""

    wallfacer_memory: str | None = None
    """Memory that attention may take on a rank (buffers of a layer, and what all layers keep), such as 8GB:
    --wallfacer-team-size auto takes nothing that needs more."""
