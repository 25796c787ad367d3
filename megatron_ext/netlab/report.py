"""What a run says at its end: the table of the nodes' bytes, and the same as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_ext.netlab.lab import Lab
from megatron_ext.netlab.links import rate_text
from megatron_ext.netlab.namespaces import Counters
from megatron_ext.netlab.ranks import Rank
from megatron_ext.netlab.supervise import Outcome

SCHEMA = 1
Nodes = Sequence[dict[str, Counters]]


def difference(after: Nodes, before: Nodes) -> list[dict[str, Counters]]:
    """What passed between two readings of `Lab.counters`."""
    pairs = zip(after, before, strict=True)
    return [{name: new[name].since(old[name]) for name in new} for new, old in pairs]


def table(nodes: Nodes) -> str:
    """Bytes of every node: through its NIC, and between its own ranks."""
    rows = [f"{'node':>4} {'sent':>16} {'received':>16} {'inside':>16}  bytes"]
    for node, found in enumerate(nodes):
        nic, lo = found["nic"], found["lo"]
        rows.append(f"{node:>4} {nic.tx_bytes:>16,} {nic.rx_bytes:>16,} {lo.tx_bytes:>16,}")
    return "\n".join(rows)


def headline(lab: Lab, world: int) -> str:
    """What was built."""
    links = lab.links
    parts = [
        f"{lab.nodes} nodes x {world // lab.nodes} ranks",
        f"{rate_text(links.rate)} between nodes (burst {links.bucket() // 1024} KiB)",
        f"{rate_text(links.intra_rate)} inside a node" if links.intra_rate else "no limit inside a node",
    ]
    if links.latency:
        parts.append(f"{links.latency * 1e3:g} ms between nodes")
    return ", ".join(parts)


def as_json(
    lab: Lab, ranks: Sequence[Rank], command: Sequence[str], outcome: Outcome, nodes: Nodes, seconds: float
) -> dict[str, Any]:
    """The whole run: rates in bit/s, sizes in bytes, times in seconds; `exit_code` is netlab's."""
    links = lab.links
    return {
        "schema": SCHEMA,
        "command": list(command),
        "nodes": lab.nodes,
        "ranks_per_node": len(ranks) // lab.nodes,
        "rate": links.rate,
        "burst": links.bucket(),
        "intra_rate": links.intra_rate,
        "latency": links.latency,
        "seconds": seconds,
        "exit_code": outcome.exit_code,
        "why": outcome.explain() or None,
        "first_failed_rank": None if outcome.failed is None else outcome.failed.rank,
        "ranks": [{"rank": r.rank, "node": r.node, "exit_code": r.exit_code} for r in ranks],
        "traffic": [
            {"node": node, "nic": asdict(found["nic"]), "lo": asdict(found["lo"])}
            for node, found in enumerate(nodes)
        ],
    }
