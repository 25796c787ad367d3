"""Doctor's checks of the machine: environment variables, network, shared memory, scratch space."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator

from megatron_ext.tools.doctor_report import Finding

GIB = 1 << 30

# Variables with a value that is usually a leftover: (name, value) -> what it does, what to do.
SUSPECT = {
    ("NCCL_IB_DISABLE", "1"): ("InfiniBand is switched off", "unset it unless the network has none"),
    ("NCCL_P2P_DISABLE", "1"): ("GPUs of a node talk through host memory", "unset it"),
    ("NCCL_SHM_DISABLE", "1"): ("ranks of a node talk through sockets", "unset it"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): ("every collective blocks its rank", "unset it"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"): ("a dead rank leaves the others hanging", "unset it"),
}
# Old names that torch no longer reads -> the ones it does.
RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}


def check(cpu: bool) -> Iterator[Finding]:
    """All checks of this file."""
    yield cores()
    yield omp_threads()
    yield from launch_variables()
    yield from nccl_variables()
    yield from network(cpu)
    yield shared_memory()
    yield scratch()


# --- processor and environment -----------------------------------------------------------------------------


def cores() -> Finding:
    """Cores that this process may use; a scheduler may have bound it to one."""
    have, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    if usable == 1 < have:
        fix = "under Slurm: srun --cpu-bind=none, or more --cpus-per-task"
        return Finding("warn", "CPU cores", f"bound to 1 of {have}; every rank started here shares it", fix)
    return Finding("ok", "CPU cores", f"{usable} of {have} usable")


def omp_threads() -> Finding:
    """OMP_NUM_THREADS against the cores."""
    value, local = os.environ.get("OMP_NUM_THREADS"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    if value is None:
        return Finding("ok", "OMP_NUM_THREADS", "not set; torchrun sets 1 for each rank if there are several")
    if not value.isdigit() or int(value) < 1:
        return Finding(
            "FAIL", "OMP_NUM_THREADS", f"{value!r} is no number of threads", "unset it or give one"
        )
    usable = len(os.sched_getaffinity(0))
    wanted = int(value) * (int(local) if local.isdigit() else 1)
    if wanted > usable:
        text = f"{value} threads x {local} ranks on this node = {wanted}, but {usable} cores"
        return Finding(
            "warn", "OMP_NUM_THREADS", text, f"export OMP_NUM_THREADS={max(1, usable // int(local))}"
        )
    return Finding("ok", "OMP_NUM_THREADS", value)


def launch_variables() -> Iterator[Finding]:
    """What torchrun sets for its ranks; half of it, left over in a shell, is a trap."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ[name] for name in names if name in os.environ}
    problems = [*_rank_problems(given), *_master_problems(given)]
    for problem in problems:
        yield Finding(
            "FAIL", "launch variables", problem, "start with torchrun, which sets them, or unset them"
        )
    if not problems:
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        yield Finding("ok", "launch variables", shown or "none set; torchrun sets them")


def _rank_problems(given: dict[str, str]) -> Iterator[str]:
    numbers = {n: v for n, v in given.items() if n not in ("MASTER_ADDR", "MASTER_PORT")}
    bad = [f"{name}={value!r}" for name, value in numbers.items() if not value.isdigit()]
    if bad:
        yield f"{', '.join(bad)}: no numbers"
        return
    if ("RANK" in given) != ("WORLD_SIZE" in given):
        present, absent = ("RANK", "WORLD_SIZE") if "RANK" in given else ("WORLD_SIZE", "RANK")
        yield f"{present}={given[present]} is set without {absent}"
    elif "RANK" in given and int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        yield f"RANK={given['RANK']} does not exist with WORLD_SIZE={given['WORLD_SIZE']}"
    if "RANK" in given and not {"MASTER_ADDR", "MASTER_PORT"} <= given.keys():
        yield "RANK is set without MASTER_ADDR and MASTER_PORT, so that ranks cannot meet"


def _master_problems(given: dict[str, str]) -> Iterator[str]:
    port, address = given.get("MASTER_PORT"), given.get("MASTER_ADDR")
    if port is not None and not (port.isdigit() and 0 < int(port) < 65536):
        yield f"MASTER_PORT={port!r} is no port (1 to 65535)"
    if address is not None:
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            yield f"MASTER_ADDR={address} cannot be resolved ({error})"


def nccl_variables() -> Iterator[Finding]:
    """NCCL_*, TORCH_NCCL_*: what is set, and what is known to hurt."""
    given = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "TORCH_NCCL_"))
    }
    for name, value in given.items():
        if name in RENAMED:
            yield Finding("warn", "NCCL", f"torch does not read {name}", f"it is now {RENAMED[name]}")
        elif (name, value) in SUSPECT:
            effect, fix = SUSPECT[name, value]
            yield Finding("warn", "NCCL", f"{name}={value}: {effect}", fix)
    shown = ", ".join(f"{name}={value}" for name, value in given.items())
    yield Finding("ok", "NCCL variables", shown or "none set")


# --- network -----------------------------------------------------------------------------------------------


def network(cpu: bool) -> Iterator[Finding]:
    """Interfaces, the ones that gloo and NCCL are told to use, and where this host's name leads."""
    import psutil

    addresses = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    shown = ", ".join(f"{name} {' '.join(found) or '-'}" for name, found in sorted(addresses.items()))
    yield Finding("ok", "network interfaces", shown)
    outside = [n for n, found in addresses.items() if any(not a.startswith("127.") for a in found)]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        missing = _missing_interfaces(variable, addresses)
        if missing:
            level = "warn" if cpu and variable.startswith("NCCL") else "FAIL"
            fix = f"set it to one that exists ({', '.join(outside) or 'lo'}), or unset it"
            yield Finding(
                level, variable, f"names {', '.join(missing)}, which this machine does not have", fix
            )
    yield _host_name(outside)


def _missing_interfaces(variable: str, addresses: dict[str, list[str]]) -> list[str]:
    """NCCL takes prefixes, or exact names after `=`, and `^` excludes; gloo takes exact names."""
    value = os.environ.get(variable, "")
    if value.startswith("^"):
        return []
    exact = variable.startswith("GLOO") or value.startswith("=")
    wanted = [name.strip() for name in value.lstrip("=").split(",") if name.strip()]

    def exists(name: str) -> bool:
        return name in addresses if exact else any(have.startswith(name) for have in addresses)

    # NCCL is content with any match; gloo opens every one.
    missing = [name for name in wanted if not exists(name)]
    return missing if variable.startswith("GLOO") or len(missing) == len(wanted) else []


def _host_name(outside: list[str]) -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = None
    local = address is None or address.startswith("127.")
    leads = f"{name} does not resolve" if address is None else f"{name} is {address}"
    if local and _is_multi_node() and "GLOO_SOCKET_IFNAME" not in os.environ:
        text = f"{leads}: gloo would listen where other nodes cannot reach it"
        fix = f"export GLOO_SOCKET_IFNAME={outside[0] if outside else 'INTERFACE'} on every node"
        return Finding("warn", "host name", text, fix)
    return Finding("ok", "host name", leads)


def _is_multi_node() -> bool:
    def number(name: str) -> int:
        value = os.environ.get(name, "")
        return int(value) if value.isdigit() else 1

    nodes = max(number("SLURM_JOB_NUM_NODES"), number("GROUP_WORLD_SIZE"))
    return nodes > 1 or (
        "LOCAL_WORLD_SIZE" in os.environ and number("WORLD_SIZE") > number("LOCAL_WORLD_SIZE")
    )


# --- memory and disk ---------------------------------------------------------------------------------------


def shared_memory(folder: str = "/dev/shm") -> Finding:
    """DataLoader workers and NCCL pass data through it; containers often have 64 MB."""
    if not os.path.isdir(folder):
        return Finding("ok", "shared memory", f"no {folder} on this system")
    size = shutil.disk_usage(folder)
    value = f"{size.free / GIB:.1f} of {size.total / GIB:.1f} GiB free in {folder}"
    if size.free < GIB:
        fix = "in a container: --shm-size=8g or --ipc=host; or --num-workers 0"
        return Finding("warn", "shared memory", f"{value}; DataLoader workers and NCCL may fail", fix)
    return Finding("ok", "shared memory", value)


def scratch() -> Finding:
    """The temporary folder must take a file."""
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return Finding("FAIL", "temporary folder", str(error), "set TMPDIR to a folder that can be written")
    free = shutil.disk_usage(folder).free
    value = f"{free / GIB:.1f} GiB free in {folder}"
    if free < GIB:
        return Finding("warn", "temporary folder", value, "free some space or set TMPDIR to another disk")
    return Finding("ok", "temporary folder", value)
