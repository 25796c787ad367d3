"""Network namespaces without names: each lives as long as a process is in it or holds its descriptor.

Nothing is mounted and nothing appears in the machine's own namespace, so that a lab which is killed leaves
nothing behind: the kernel removes namespace, interfaces and limits with their last user.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

_OWN = "/proc/thread-self/ns/net"


def create() -> int:
    """Make a network namespace and return its descriptor; the caller stays where it is."""
    home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.unshare(os.CLONE_NEWNET)
        try:
            return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.setns(home, os.CLONE_NEWNET)
    finally:
        os.close(home)


@contextlib.contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Run the body in a namespace; processes that it starts stay there. Only this thread moves."""
    home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.setns(namespace, os.CLONE_NEWNET)
        try:
            yield
        finally:
            os.setns(home, os.CLONE_NEWNET)
    finally:
        os.close(home)


@dataclass(frozen=True)
class Counters:
    """Bytes and packets of one interface since it was made."""

    tx_bytes: int
    rx_bytes: int
    tx_packets: int
    rx_packets: int

    def since(self, before: "Counters") -> "Counters":
        """What came after `before`."""
        return Counters(
            self.tx_bytes - before.tx_bytes,
            self.rx_bytes - before.rx_bytes,
            self.tx_packets - before.tx_packets,
            self.rx_packets - before.rx_packets,
        )


def interface_counters() -> dict[str, Counters]:
    """Counters of every interface in the caller's namespace."""
    with open("/proc/thread-self/net/dev") as table:
        return parse_counters(table.read())


def parse_counters(table: str) -> dict[str, Counters]:
    """Read the text of /proc/net/dev."""
    found = {}
    for line in table.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        columns = [int(word) for word in numbers.split()]
        found[name.strip()] = Counters(columns[8], columns[0], columns[9], columns[1])
    return found
