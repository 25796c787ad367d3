"""A slow network on one machine: nodes as network namespaces, joined by links whose rates are limited.

`scripts/netlab` is the command; a script or a test uses `Lab` and `run_in_lab`:

    with Lab(2, Links(rate=parse_rate("100mbit"), intra_rate=parse_rate("400mbit"))) as lab:
        results = run_in_lab(lab, 4, body)  # ranks 0 and 1 on node 0, ranks 2 and 3 on node 1

Only Python's standard library and the programs `ip` and `tc` are used.
"""

from megatron_ext.netlab.forked import RankResult, RanksFailed, preload, run_in_lab
from megatron_ext.netlab.lab import Lab, LabError, node_counters
from megatron_ext.netlab.links import Links, parse_rate, parse_size, parse_time
from megatron_ext.netlab.namespaces import Counters

__all__ = [
    "Counters",
    "Lab",
    "LabError",
    "Links",
    "RankResult",
    "RanksFailed",
    "node_counters",
    "parse_rate",
    "parse_size",
    "parse_time",
    "preload",
    "run_in_lab",
]
