"""The lab: its namespaces, the network between them, and the byte counters of its nodes."""

import itertools
import os
import subprocess
from pathlib import Path
from typing import Self

from megatron_ext.netlab import leftovers, namespaces, needs, plan
from megatron_ext.netlab.links import MAX_NODES, NIC, Links, address, mark
from megatron_ext.netlab.namespaces import Counters

FIRST_PORT = 29500


class LabError(RuntimeError):
    """The lab cannot be built here; the text says what is missing and what to do."""


class Lab:
    """A context manager: `nodes` nodes joined by `links`. Building takes about 0.1 s a node.

    Raises:
        LabError: when the machine lacks something, or a command fails.
        ValueError: for a number of nodes that cannot be.
    """

    def __init__(self, nodes: int, links: Links) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"a lab has 1 to {MAX_NODES} nodes, not {nodes}.")
        self.nodes = nodes
        self.links = links
        self.owner = os.getpid()
        self._namespaces: dict[int, int] = {}
        self.removed: list[leftovers.Leftover] = []  # what killed labs had left, found at the start
        self._ports = itertools.count(FIRST_PORT)

    def check(self) -> None:
        """Raise LabError for what the machine lacks; entering does this, too."""
        problems = needs.missing()
        if not problems and self.links.latency and not needs.has_netem():
            problems = [needs.NO_NETEM]
        if problems:
            raise LabError("\n".join(problems))

    def __enter__(self) -> Self:
        self.check()
        self.removed = leftovers.remove()
        try:
            for where in (plan.HUB, *range(self.nodes)):
                self._namespaces[where] = _create()
            for step in plan.network(self.nodes, self.links, self.owner):
                self._run(step)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the lab; the kernel then removes the network."""
        leftovers.kill_inside(self._namespaces.values())
        while self._namespaces:
            os.close(self._namespaces.popitem()[1])

    def enter(self, node: int) -> None:
        """Move the calling thread into a node for good; for processes forked for that."""
        os.setns(self._namespaces[node], os.CLONE_NEWNET)

    def door(self, node: int) -> str:
        """A path that `nsenter --net=PATH COMMAND` takes to look into a node while the lab runs."""
        return f"/proc/{self.owner}/fd/{self._namespaces[node]}"

    def counters(self) -> list[dict[str, Counters]]:
        """For every node: `nic` (between nodes) and `lo` (inside the node) since the lab was built."""
        found = []
        for node in range(self.nodes):
            with namespaces.inside(self._namespaces[node]):
                found.append(node_counters())
        return found

    def environment(self, rank: int, world: int, port: int = FIRST_PORT) -> dict[str, str]:
        """The variables that torchrun would set, and those that bind gloo and NCCL to the lab's network."""
        per_node = world // self.nodes
        node, local = divmod(rank, per_node)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(per_node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": NIC,
            "NCCL_SOCKET_IFNAME": NIC,
            # NCCL would find all ranks on one machine and use shared memory between nodes.
            "NCCL_HOSTID": f"{mark(self.owner)}-node{node}",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def new_port(self) -> int:
        """A port for the rendezvous of ranks that start now; no two worlds of a lab share one."""
        return next(self._ports)

    def _run(self, step: plan.Step) -> None:
        """Run one command of the plan where it belongs."""
        with namespaces.inside(self._namespaces[step.where]):
            if step.argv[0] == "write":
                error = _write(step.argv[2], step.argv[1])
            else:
                words = [self.door(int(word[1:-1])) if word[0] == "{" else word for word in step.argv]
                program = needs.tool(words[0])
                assert program is not None, words
                result = subprocess.run([program, *words[1:]], capture_output=True, text=True, check=False)
                error = result.stderr.strip() if result.returncode else ""
        if error:
            raise LabError(
                f"building the network failed at: {step.text()}\n{error}\n"
                "`scripts/netlab doctor` shows what this machine lacks."
            )


def node_counters() -> dict[str, Counters]:
    """`nic` and `lo` of the node that the caller is in; ranks may call it, too."""
    table = namespaces.interface_counters()
    return {"nic": table[NIC], "lo": table["lo"]}


def _create() -> int:
    try:
        return namespaces.create()
    except PermissionError as error:
        raise LabError(
            f"the kernel refuses to make a network namespace ({error}), although this process has the "
            "capabilities for it. A container's seccomp filter may forbid it: start it with --privileged."
        ) from error


def _write(file: str, value: str) -> str:
    try:
        Path(file).write_text(value)
    except OSError as error:
        return f"{error}. In a container /proc/sys may be read-only: start it with --privileged."
    return ""
