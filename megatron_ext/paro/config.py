"""Flags of PaRO."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class ParoConfig:
    """PaRO: parameters, gradients and optimizer states split over groups of data-parallel ranks."""

    paro_strategy: str = "off"
    """Three letters, for parameters, gradients and optimizer states: N not split, I split inside a group, G
    split over all data-parallel ranks (NIG, IIG, ...; `megatron-ext plan paro` compares the fourteen). auto
    lets the planner choose; off leaves data parallelism to Megatron."""

    paro_group_size: int | None = None
    """Data-parallel ranks per group; by default those on one node."""

    paro_comm: Literal["two-phase", "ho-ring", "flat"] = "two-phase"
    """How collectives run: inside and between groups one after the other (two-phase), at
    the same time in rings (ho-ring), or as one collective over all ranks (flat)."""

    paro_inter_dtype: Literal["native", "int8"] = "native"
    """What crosses between groups: values as they are, or blocks of 8-bit integers with a scale."""

    paro_reshard_after_forward: Literal["on", "off"] = "on"
    """Whether split parameters are released after the forward pass and gathered again for the backward."""

    paro_bandwidths: str | None = None
    """File of `megatron-ext probe`, which --paro-strategy auto plans with."""
