"""What the links of a lab are like: rates, sizes and times as users write them, and the names of its parts."""

import re
from dataclasses import dataclass

MAX_NODES = 250
MTU = 9000  # bytes; jumbo frames, so that headers take 0.8 % of the rate and not 4 %
LOOPBACK_MTU = 65536  # bytes, what Linux gives lo
# A frame larger than the bucket never gets through, and the kernel sends up to 64 KiB as one.
MIN_BURST = 72 * 1024  # bytes
PREFIX = "nlab"

_RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SIZES = {"b": 1, "kb": 2**10, "mb": 2**20}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Links:
    """Links of a lab. Rates in bit/s and full duplex, burst in bytes, latency (one way) in seconds."""

    rate: int
    intra_rate: int | None = None
    latency: float = 0.0
    burst: int | None = None

    def bucket(self) -> int:
        """Bytes that a node may send at once after a pause."""
        return default_burst(self.rate) if self.burst is None else self.burst

    def intra_bucket(self) -> int:
        """The same for a node's loopback."""
        assert self.intra_rate is not None
        return default_burst(self.intra_rate)


def default_burst(rate: int) -> int:
    """One millisecond at `rate` bit/s, and at least one frame: bytes."""
    return max(rate // 8000, MIN_BURST)


def parse_rate(text: str) -> int:
    """`400mbit` -> 400000000 bit/s.

    Raises:
        ValueError: for anything that is not a positive number with bit, kbit, mbit or gbit.
    """
    hint = "Write bits per second, as 400mbit or 2gbit (units: bit, kbit, mbit, gbit)."
    if re.fullmatch(r"[\d.]+[kmg]?bps", text.lower()):
        raise ValueError(f"{text!r} is not a rate here: tc reads bps as bytes per second. {hint}")
    rate = round(_number(text, _RATES, f"{text!r} is not a rate. {hint}"))
    if rate < 10**6:
        raise ValueError(f"{text} is less than 1mbit: connections of ranks would time out. {hint}")
    return rate


def parse_size(text: str) -> int:
    """`256kb` -> 262144 bytes, at least `MIN_BURST`.

    Raises:
        ValueError: for anything else.
    """
    size = round(_number(text, _SIZES, f"{text!r} is not a size. Write bytes, as 256kb or 1mb."))
    if size < MIN_BURST:
        raise ValueError(
            f"a burst of {text} is smaller than the {MIN_BURST // 1024}kb that the kernel may send as one "
            f"packet, which would never get through. Set {MIN_BURST // 1024}kb or more."
        )
    return size


def parse_time(text: str) -> float:
    """`1ms` -> 0.001 seconds.

    Raises:
        ValueError: for anything that is not a positive number with us, ms or s.
    """
    return _number(text, _TIMES, f"{text!r} is not a time. Write it with its unit, as 500us, 1ms or 2s.")


def _number(text: str, units: dict[str, float], problem: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.strip().lower())
    if match is None or match[2] not in units or float(match[1]) <= 0:
        raise ValueError(problem)
    return float(match[1]) * units[match[2]]


def address(node: int) -> str:
    """IPv4 address of a node; the lab's network is its own, so it cannot clash with the machine's."""
    assert 0 <= node < MAX_NODES
    return f"10.77.0.{node + 1}"


def interface(owner: int, node: int) -> str:
    """Name of a node's interface: the process id of the lab's owner is in it, to find what is left over."""
    name = f"{PREFIX}{owner}x{node}"
    assert len(name) <= 15, name  # the kernel's limit
    return name


def owner_of(interface_name: str) -> int | None:
    """Process id of the lab that an interface belongs to; None for interfaces of others."""
    match = re.fullmatch(rf"{PREFIX}(\d+)x\d+", interface_name)
    return int(match[1]) if match else None
