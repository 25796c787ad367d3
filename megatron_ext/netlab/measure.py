"""Does this machine keep the rates of a lab? Plain TCP transfers between ranks, without torch."""

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier

from megatron_ext.netlab.forked import run_in_lab
from megatron_ext.netlab.lab import Lab
from megatron_ext.netlab.links import address

PORT = 6000
RANKS_PER_NODE = 2
Pairs = Sequence[tuple[int, int]]  # sending and receiving rank


@dataclass(frozen=True)
class Case:
    """Transfers at one time, and the bit/s that they should have together."""

    name: str
    pairs: Pairs
    rate: int


def cases(lab: Lab) -> list[Case]:
    """What can be measured with two ranks on each node of the lab."""
    rate, nodes = lab.links.rate, range(lab.nodes)
    first, second = [RANKS_PER_NODE * node for node in nodes], [RANKS_PER_NODE * node + 1 for node in nodes]
    found = []
    if lab.nodes > 1:
        ring = [(first[node], second[(node + 1) % lab.nodes]) for node in nodes]
        found += [
            Case("one node to another", [(first[0], first[1])], rate),
            Case("by two of its ranks", [(first[0], first[1]), (second[0], second[1])], rate),
            Case("both directions", [(first[0], first[1]), (second[1], second[0])], 2 * rate),
            Case("all nodes in a ring", ring, lab.nodes * rate),
        ]
    if lab.nodes > 2:
        found.append(Case("two nodes to one", [(first[1], first[0]), (first[2], second[0])], rate))
    if lab.links.intra_rate is not None:
        inside = list(zip(first, second, strict=True))
        found += [
            Case("inside one node", inside[:1], lab.links.intra_rate),
            Case("inside all nodes", inside, lab.nodes * lab.links.intra_rate),
        ]
    return found


def measure(lab: Lab, case: Case, repeats: int = 5, seconds: float = 0.5) -> list[float]:
    """Bit/s of the case's transfers together, each repeat for about `seconds` at the rates of the lab."""
    count = round(case.rate / 8 * seconds / len(case.pairs))
    return [8 * count * len(case.pairs) / transfer(lab, count, case.pairs) for _ in range(repeats)]


def table(lab: Lab, repeats: int = 5) -> str:
    """Set and measured rate of every case."""
    rows = [f"{'':<20} {'set':>11} {'measured':>11}   {'share':>5}   range  (Mbit/s, median of {repeats})"]
    for case in cases(lab):
        found = [rate / 1e6 for rate in measure(lab, case, repeats)]
        middle, wanted = statistics.median(found), case.rate / 1e6
        rows.append(
            f"{case.name:<20} {wanted:>11,.1f} {middle:>11,.1f}   {middle / wanted:>5.0%}   "
            f"{min(found):,.1f} to {max(found):,.1f}"
        )
    return "\n".join(rows)


def transfer(lab: Lab, count: int, pairs: Pairs) -> float:
    """Send `count` bytes over each pair of ranks, all at once; the seconds until the last byte came."""
    ready = multiprocessing.get_context("fork").Barrier(2 * len(pairs))
    results = run_in_lab(lab, RANKS_PER_NODE * lab.nodes, lambda: _rank(count, pairs, ready))
    # The clock is one for all processes.
    times = [result.value for result in results if result.value is not None]
    return max(end for _, end in times) - min(start for start, _ in times)


def _rank(count: int, pairs: Pairs, ready: Barrier) -> tuple[float, float] | None:
    """Body of a rank; a receiver returns when all were ready, and when its last byte came."""
    rank = int(os.environ["RANK"])
    for number, (source, target) in enumerate(pairs):
        where = (address(target // RANKS_PER_NODE), PORT + number)
        if rank == source:
            with _connect(where) as connection:
                ready.wait()
                connection.sendall(bytes(count))
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)  # the other side closes when it has everything
        elif rank == target:
            with socket.create_server(where) as server:
                connection = server.accept()[0]
            with connection:
                ready.wait()
                started, left = time.monotonic(), count
                while left:
                    left -= len(connection.recv(min(left, 1 << 20)))
                return started, time.monotonic()
    return None


def _connect(where: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(where)
        except ConnectionRefusedError:  # the other rank does not listen yet
            time.sleep(0.01)
