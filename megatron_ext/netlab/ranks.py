"""Ranks as processes: each is forked into its node, in its own process group, with its output in pipes."""

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from megatron_ext.netlab.lab import Lab

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Rank:
    """A started rank. `outputs` maps the read ends of its pipes to 1 (stdout) or 2 (stderr)."""

    rank: int
    node: int
    pid: int
    pidfd: int
    outputs: dict[int, int]
    exit_code: int | None = None  # negative: killed by that signal
    last_line: str = ""  # on stderr
    partial: dict[int, bytes] = field(default_factory=dict)

    def signal(self, number: int) -> None:
        """Signal the rank and what it started in its process group, unless it has ended."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def cause(self) -> str:
        """How the rank ended, in words."""
        assert self.exit_code is not None
        if self.exit_code < 0:
            how = f"was killed by {signal.Signals(-self.exit_code).name}"
        else:
            how = f"ended with exit code {self.exit_code}"
        said = f"; its last line on stderr: {self.last_line}" if self.last_line else ""
        return f"rank {self.rank} on node {self.node} {how}{said}"


def adopt_orphans() -> None:
    """Make this process the parent of what its ranks leave behind, so that it can end it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(lab: Lab, world: int, body: Callable[[], NoReturn], extra: dict[str, str]) -> list[Rank]:
    """Fork `world` ranks into the lab; each runs `body`, with the variables of `extra` on top."""
    if world < 1 or world % lab.nodes:
        raise ValueError(f"{world} ranks cannot be shared out evenly to {lab.nodes} nodes.")
    port = lab.new_port()
    sys.stdout.flush()
    sys.stderr.flush()
    ranks: list[Rank] = []
    try:
        for rank in range(world):
            environment = {**lab.environment(rank, world, port), **extra}
            ranks.append(_start(lab, rank, rank // (world // lab.nodes), body, environment))
    except BaseException:
        for started in ranks:
            started.signal(signal.SIGKILL)
        raise
    return ranks


def _start(lab: Lab, rank: int, node: int, body: Callable[[], NoReturn], environment: dict[str, str]) -> Rank:
    parent = os.getpid()
    pipes = {stream: os.pipe() for stream in (1, 2)}
    pid = os.fork()
    if pid == 0:
        try:
            _become_rank(parent, {stream: write for stream, (_, write) in pipes.items()})
            lab.enter(node)
            os.environ.update(environment)
            body()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    for _, write in pipes.values():
        os.close(write)
    outputs = {read: stream for stream, (read, _) in pipes.items()}
    for read in outputs:
        os.set_blocking(read, False)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    return Rank(rank, node, pid, os.pidfd_open(pid), outputs)


def _become_rank(parent: int, outputs: dict[int, int]) -> None:
    """What a forked process does before anything else."""
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for netlab alone
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for stream, write in outputs.items():
        os.dup2(write, stream)
        os.close(write)
    nothing = os.open(os.devnull, os.O_RDONLY)
    if nothing:  # 0 where netlab itself was started without stdin
        os.dup2(nothing, 0)
        os.close(nothing)
    # Objects that the parent put in their place, such as pytest's, must not be used here.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def exec_body(command: list[str]) -> Callable[[], NoReturn]:
    """A body that becomes the command."""

    def body() -> NoReturn:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"netlab: cannot start {command[0]!r}: {error.strerror}.", file=sys.stderr, flush=True)
            os._exit(127)

    return body
