"""The commands that build a lab's network, as data: they are checked and printed without root."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.netlab.links import HEADERS, MTU, NIC, PORTION, Links, address, mark

HUB = -1  # the namespace that holds only the bridge, a switch
# What a switch port holds before it drops, and what a node holds (its sockets stop writing before that).
PORT_QUEUE = (0.02, 256 * 1024)  # seconds at the link's rate, and at least so many bytes
SEND_QUEUE = (1.0, 4 * 2**20)
# Linux lets a namespace always use reno, other algorithms only where the machine says so. It fills the links.
CONGESTION_CONTROL = "reno"


@dataclass(frozen=True)
class Step:
    """A command in one namespace (HUB or a node's index); the word `{n}` stands for the namespace of node n.

    `write VALUE FILE` sets a kernel parameter; every other command is `ip` or `tc`.
    """

    where: int
    argv: tuple[str, ...]

    def text(self) -> str:
        """As `--dry-run` prints it."""
        words = " ".join(re.sub(r"^\{(\d+)\}$", r"NODE\1", word) for word in self.argv)
        if self.argv[0] == "write":
            words = f"echo {self.argv[1]} > {self.argv[2]}"
        return f"[{place(self.where)}] {words}"


def place(where: int) -> str:
    """Name of a namespace in messages."""
    return "hub" if where == HUB else f"node {where}"


def network(nodes: int, links: Links, owner: int) -> list[Step]:
    """All commands that build the network, in order; `owner` is the lab's process id."""
    steps = [
        _step(HUB, "ip link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0"),
        _step(HUB, f"ip link set br0 mtu {MTU} addrgenmode none up"),
    ]
    for node in range(nodes):
        steps += _node(node, links, owner)
    return steps


def _node(node: int, links: Links, owner: int) -> list[Step]:
    """A pair of interfaces: the NIC limits what the node sends, the switch port what it receives."""
    port = f"port{node}"
    sending = _tbf(links.rate, links.bucket(), SEND_QUEUE)
    steps = [
        _step(HUB, f"ip link add {port} mtu {MTU} type veth peer name {NIC} mtu {MTU} netns {{{node}}}"),
        _step(HUB, f"ip link set {port} master br0 addrgenmode none up"),
        *_port(port, links),
        _step(node, f"write {CONGESTION_CONTROL} /proc/sys/net/ipv4/tcp_congestion_control"),
        # What one transfer learned about the path must not change the next one.
        _step(node, "write 1 /proc/sys/net/ipv4/tcp_no_metrics_save"),
        _step(node, f"ip link add {mark(owner)} type bridge"),
        _step(node, "ip link set lo up"),
        _step(node, f"ip link set {NIC} gso_max_size {PORTION} addrgenmode none up"),
        _step(node, f"ip address add {address(node)}/24 dev {NIC}"),
        _step(node, f"tc qdisc add dev {NIC} root {sending}"),
    ]
    if links.intra_rate is not None:
        inside = _tbf(links.intra_rate, links.intra_bucket(), SEND_QUEUE)
        steps.append(_step(node, f"tc qdisc add dev lo root {inside}"))
    return steps


def _port(port: str, links: Links) -> list[Step]:
    """The limit of a switch port, behind a delay where there is a latency."""
    receiving = _tbf(links.rate, links.bucket(), PORT_QUEUE)
    if not links.latency:
        return [_step(HUB, f"tc qdisc add dev {port} root {receiving}")]
    # Everything that is on its way at the link's rate has to fit, in the smallest portions there are.
    packets = 1000 + round(2 * links.rate * links.latency / 8 / 64)
    delay = f"netem delay {round(links.latency * 1e6)}us limit {packets}"
    return [
        _step(HUB, f"tc qdisc add dev {port} root handle 1: {delay}"),
        _step(HUB, f"tc qdisc add dev {port} parent 1:1 handle 10: {receiving}"),
    ]


def _tbf(rate: int, bucket: int, queue: tuple[float, int]) -> str:
    seconds, least = queue
    assert bucket >= PORTION + HEADERS, "a portion larger than the bucket never gets through"
    return f"tbf rate {rate}bit burst {bucket} limit {max(round(rate / 8 * seconds), least) + bucket}"


def _step(where: int, command: str) -> Step:
    return Step(where, tuple(command.split()))


def dry_run(steps: Sequence[Step]) -> str:
    """The whole plan as text."""
    return "\n".join(step.text() for step in steps)
