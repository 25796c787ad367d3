"""What a lab needs of the machine, and what to do where it is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_ext.netlab import namespaces

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
# Users who are not root often have no sbin on their PATH.
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
NO_NETEM = (
    "--latency needs netem, and this kernel has none (CONFIG_NET_SCH_NETEM, module sch_netem). Leave "
    "--latency out, or use a kernel that has it: `modprobe sch_netem` on the host may be enough."
)


def tool(name: str) -> str | None:
    """Path of `ip` or `tc`; None where it is not installed."""
    return shutil.which(name, path=_PATH)


def missing() -> list[str]:
    """Everything that a lab lacks here, each with what to do; empty where it can be built."""
    if sys.platform != "linux":
        return [f"netlab builds Linux network namespaces; this is {sys.platform}. Run it on Linux."]
    problems = [
        f"the program `{name}` is not installed. It comes with iproute2: apt-get install iproute2, or "
        "dnf install iproute-tc."
        for name in ("ip", "tc")
        if tool(name) is None
    ]
    lacking = missing_capabilities(Path("/proc/self/status").read_text())
    if lacking:
        who = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
        problems.append(
            f"{who} lacks {' and '.join(lacking)}, which making network namespaces and limits needs. Run "
            "netlab with sudo; or as `unshare --user --map-root-user scripts/netlab ...` where the machine "
            "allows user namespaces; or start the container with --cap-add SYS_ADMIN --cap-add NET_ADMIN."
        )
    return problems


def missing_capabilities(status: str) -> list[str]:
    """Names of the needed capabilities that the text of /proc/PID/status does not grant."""
    line = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    granted = int(line.split()[1], 16)
    return [name for name, bit in _CAPABILITIES.items() if not granted >> bit & 1]


def has_netem() -> bool:
    """Whether the kernel can delay packets; needs what a lab needs."""
    return try_qdisc("netem delay 1ms") is None


def try_qdisc(qdisc: str) -> str | None:
    """Put a qdisc on the loopback of a namespace made for it: the error text, or None if it works."""
    program = tool("tc")
    assert program is not None
    namespace = namespaces.create()
    try:
        with namespaces.inside(namespace):
            command = [program, "qdisc", "add", "dev", "lo", "root", *qdisc.split()]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        os.close(namespace)
    return None if result.returncode == 0 else result.stderr.strip()
