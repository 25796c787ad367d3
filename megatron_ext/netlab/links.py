"""What the links of a lab are like: rates, sizes and times as users write them, and names of its parts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_NODES = 250
MTU = 9000  # bytes; jumbo frames, so that headers take 0.8 % of the rate and not 4 %
# The kernel hands up to 64 KiB at once to an interface. Smaller portions make shorter queues: at 100 Mbit/s a
# portion of 64 KiB holds up whatever comes behind it for 5 ms.
PORTION = 16 * 1024  # bytes
LOOPBACK_PORTION = 64 * 1024  # bytes, one packet at the MTU of lo
HEADERS = 4 * 1024  # bytes, more than those of all packets in one portion
NIC = "eth0"  # in every node
PREFIX = "netlab"

_RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SIZES = {"b": 1, "kb": 2**10, "mb": 2**20}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Links:
    """Links of a lab: rates in bit/s, burst in bytes, latency (one way, between nodes) in seconds."""

    rate: int
    intra_rate: int | None = None
    latency: float = 0.0
    burst: int | None = None

    def bucket(self) -> int:
        """Bytes that a node may send at once after a pause."""
        return _bucket(self.rate, PORTION) if self.burst is None else self.burst

    def intra_bucket(self) -> int:
        """The same for a node's loopback."""
        assert self.intra_rate is not None
        return _bucket(self.intra_rate, LOOPBACK_PORTION)


def _bucket(rate: int, portion: int) -> int:
    """Two milliseconds at `rate`, so that a late timer costs nothing, and at least one portion: bytes."""
    return max(rate // 8 * 2 // 1000, portion + HEADERS)


def parse_rate(text: str) -> int:
    """`400mbit` -> 400000000 bit/s.

    Raises:
        ValueError: for anything that is not a number with bit, kbit, mbit or gbit, or is below 1mbit.
    """
    hint = "Write bits per second with their unit, as 400mbit or 2gbit (bit, kbit, mbit, gbit)."
    if re.fullmatch(r"[\d.]+[kmgt]?bps", text.lower()):
        raise ValueError(f"{text!r} is ambiguous: tc reads bps as bytes per second. {hint}")
    rate = round(_number(text, _RATES, f"{text!r} is not a rate. {hint}"))
    if rate < 10**6:
        raise ValueError(f"{text} is so slow that ranks could not even connect. Set 1mbit or more.")
    return rate


def parse_size(text: str) -> int:
    """`256kb` -> 262144 bytes.

    Raises:
        ValueError: for anything that is not a number with b, kb or mb, or is too small for one portion.
    """
    size = round(
        _number(text, _SIZES, f"{text!r} is not a size. Write bytes with their unit, as 256kb or 1mb.")
    )
    least = PORTION + HEADERS
    if size < least:
        raise ValueError(
            f"a burst of {text} is smaller than what the kernel sends at once, and never gets through. "
            f"Set {least // 1024}kb or more."
        )
    return size


def parse_time(text: str) -> float:
    """`1ms` -> 0.001 seconds.

    Raises:
        ValueError: for anything that is not a positive number with us, ms or s.
    """
    return _number(text, _TIMES, f"{text!r} is not a time. Write it with its unit, as 500us, 1ms or 2s.")


def _number(text: str, units: Mapping[str, float], problem: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.strip().lower())
    if match is None or match[2] not in units or float(match[1]) <= 0:
        raise ValueError(problem)
    return float(match[1]) * units[match[2]]


def rate_text(rate: int) -> str:
    """400000000 -> `400 Mbit/s`."""
    for unit, factor in (("Gbit/s", 10**9), ("Mbit/s", 10**6)):
        if rate >= factor:
            return f"{rate / factor:g} {unit}"
    return f"{rate} bit/s"


def address(node: int) -> str:
    """IPv4 address of a node; the lab's network is its own, so it cannot clash with the machine's."""
    assert 0 <= node < MAX_NODES
    return f"10.77.0.{node + 1}"


def mark(owner: int) -> str:
    """Name of an unused interface in every node: it holds the process id of the lab that the node is of.

    A node's NIC vanishes with the lab's switch; this stays as long as a process is in the node.
    """
    return f"{PREFIX}{owner}"


def owner_of(name: str) -> int | None:
    """Process id of the lab whose mark this interface is; None for all others."""
    match = re.fullmatch(rf"{PREFIX}(\d+)", name)
    return int(match[1]) if match else None
