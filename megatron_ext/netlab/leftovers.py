"""Processes in the namespaces of labs: those of a lab that ends, and those of labs that were killed.

A namespace goes with its last process, so these processes are all that a killed lab can leave behind.
"""

import contextlib
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.netlab.links import owner_of
from megatron_ext.netlab.namespaces import parse_counters

_VANISHED = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True)
class Leftover:
    """A process in the namespace of a lab whose own process is gone."""

    pid: int
    owner: int  # process id of that lab
    command: str


def find(proc: Path = Path("/proc")) -> list[Leftover]:
    """All leftovers among the processes that the caller may look into."""
    own = proc / "self" / "ns"
    mine, my_pids = os.readlink(own / "net"), os.readlink(own / "pid")
    found = []
    for process in _processes(proc):
        with contextlib.suppress(*_VANISHED):
            namespace = os.readlink(process / "ns" / "net")
            # In a container's process namespace the owner has another number than here.
            if namespace == mine or os.readlink(process / "ns" / "pid") != my_pids:
                continue
            names = parse_counters((process / "net" / "dev").read_text())
            owner = next((pid for pid in map(owner_of, names) if pid is not None), None)
            if owner is not None and not _holds(proc / str(owner), namespace):
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                found.append(Leftover(int(process.name), owner, words.decode(errors="replace").strip()))
    return found


def remove() -> list[Leftover]:
    """Kill all leftovers and return them; what they start meanwhile is killed, too."""
    removed: dict[int, Leftover] = {}
    deadline = time.monotonic() + 5.0
    while (found := find()) and time.monotonic() < deadline:
        for process in found:
            removed[process.pid] = process
            _kill(process.pid)
        time.sleep(0.01)
    return list(removed.values())


def kill_inside(namespaces: Collection[int]) -> None:
    """Kill every process in the namespaces behind these descriptors, except the caller."""
    ids = {os.fstat(namespace).st_ino for namespace in namespaces}
    deadline = time.monotonic() + 5.0
    while (inside := _inside(ids)) and time.monotonic() < deadline:
        for pid in inside:
            _kill(pid)
        time.sleep(0.01)


def _inside(ids: set[int]) -> list[int]:
    found = []
    for process in _processes(Path("/proc")):
        with contextlib.suppress(*_VANISHED):
            if int(process.name) != os.getpid() and os.stat(process / "ns" / "net").st_ino in ids:
                found.append(int(process.name))
    return found


def _processes(proc: Path) -> list[Path]:
    return sorted((entry for entry in proc.iterdir() if entry.name.isdigit()), key=lambda e: int(e.name))


def _holds(process: Path, namespace: str) -> bool:
    """Whether a process is alive and has the namespace open, as every lab does until its end."""
    with contextlib.suppress(*_VANISHED):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(descriptor) == namespace:
                    return True
    return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
