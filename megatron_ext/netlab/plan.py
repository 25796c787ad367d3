"""The commands that build a lab's network, as data: checked and printed without root, then run."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.netlab.links import LOOPBACK_MTU, MTU, Links, address, interface

HUB = -1  # the namespace that holds only the bridge
# A switch port holds this much before it drops; the sender's own queue is longer, and drops nothing.
PORT_QUEUE_SECONDS = 0.05
SEND_QUEUE_SECONDS = 1.0
MIN_QUEUE = 4 * 2**20  # bytes


@dataclass(frozen=True)
class Step:
    """A command in one namespace (HUB or a node's index); `{n}` in it stands for the namespace of node n."""

    where: int
    argv: tuple[str, ...]

    def text(self) -> str:
        """As printed by `--dry-run`."""
        place = "hub" if self.where == HUB else f"node {self.where}"
        return f"[{place}] {' '.join(self.argv)}"


def network(nodes: int, links: Links, owner: int, congestion: str) -> list[Step]:
    """All commands in order; `congestion` is the TCP congestion control that every node uses."""
    steps = [
        _step(HUB, "ip link set lo up"),
        _step(HUB, "ip link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0"),
        _step(HUB, f"ip link set br0 mtu {MTU} addrgenmode none up"),
    ]
    for node in range(nodes):
        steps += _node(node, links, interface(owner, node), congestion)
    return steps


def _node(node: int, links: Links, nic: str, congestion: str) -> list[Step]:
    """A veth pair: the NIC in the node's namespace limits what it sends, the port what it receives."""
    port = f"port{node}"
    steps = [
        _step(HUB, f"ip link add {port} mtu {MTU} type veth peer name {nic} mtu {MTU} netns {{{node}}}"),
        _step(HUB, f"ip link set {port} master br0 addrgenmode none up"),
        *(_step(HUB, command) for command in _port(port, links)),
        _step(node, "ip link set lo up"),
        _step(node, f"ip link set {nic} addrgenmode none up"),
        _step(node, f"ip address add {address(node)}/24 dev {nic}"),
        _step(node, f"sysctl -qw net.ipv4.tcp_congestion_control={congestion}"),
        _step(node, "sysctl -qw net.ipv4.tcp_no_metrics_save=1"),
        _step(node, f"tc qdisc add dev {nic} root handle 1: {_tbf(links.rate, links.bucket(), SEND_QUEUE_SECONDS)}"),
    ]
    if links.intra_rate is not None:
        limit = _tbf(links.intra_rate, links.intra_bucket(), SEND_QUEUE_SECONDS)
        steps.append(_step(node, f"ip link set lo mtu {LOOPBACK_MTU}"))
        steps.append(_step(node, f"tc qdisc add dev lo root {limit}"))
    return steps


def _port(port: str, links: Links) -> list[str]:
    limit = _tbf(links.rate, links.bucket(), PORT_QUEUE_SECONDS)
    if not links.latency:
        return [f"tc qdisc add dev {port} root {limit}"]
    return [
        f"tc qdisc add dev {port} root handle 1: netem delay {round(links.latency * 1e6)}us limit 100000",
        f"tc qdisc add dev {port} parent 1:1 handle 10: {limit}",
    ]


def _tbf(rate: int, burst: int, queue_seconds: float) -> str:
    queue = max(round(rate / 8 * queue_seconds), MIN_QUEUE) + burst
    return f"tbf rate {rate}bit burst {burst} limit {queue}"


def _step(where: int, command: str) -> Step:
    return Step(where, tuple(command.split()))


def dry_run(steps: Sequence[Step]) -> str:
    """The plan as text; `{n}` becomes `<node n>`."""
    lines = [step.text() for step in steps]
    return "\n".join(line.replace("{", "<node ").replace("}", ">") for line in lines)
