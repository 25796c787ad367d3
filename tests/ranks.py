"""Forked ranks for tests: `@ranks(4)` runs a test body in four gloo ranks, `run_ranks` any function.

The parent imports torch and megatron once and forks, so a case starts in about half a second. Every case has
a free port and a timeout; on timeout the stacks of all ranks are part of the failure. A rank that fails ends
the case, and its own traceback is what the test shows. Ranks die with the parent: no process is left behind.
The parent never computes gradients or communicates: threads do not survive a fork.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import functools
import inspect
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_TIMEOUT = 120.0  # seconds
GRACE = 10.0  # seconds that the other ranks get once one has failed
_PR_SET_PDEATHSIG = 1


@dataclass
class RankResult:
    """How one rank ended: exit code (negative: killed by that signal), value or error, and its output."""

    rank: int
    exit_code: int
    value: Any
    error: str | None
    output: str
    stacks: str


class RanksFailed(AssertionError):
    """A rank raised, died or hung; the text names the ranks and shows why."""


@functools.cache
def preload() -> None:
    """Import torch and megatron in the parent; tests/conftest.py has set the environment for it."""
    assert os.environ.get("TORCHDYNAMO_DISABLE") == "1", (
        "set before torch was imported, see tests/conftest.py"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about every missing GPU package
        import megatron.training  # noqa: F401
    import torch

    torch.set_num_threads(1)
    # Megatron reads the source of its config classes for every parser; children inherit what is read here.
    inspect.getsource = functools.cache(inspect.getsource)
    from megatron.training.arguments import add_megatron_arguments

    add_megatron_arguments(argparse.ArgumentParser())


PORTS = range(20000, 29000)
"""Below those that the kernel gives to outgoing connections, which would take one between probe and use."""


def free_port() -> int:
    """A port that nothing listens on now, drawn by chance since several test runs share a machine."""
    draw = random.SystemRandom()
    for _ in range(100):
        port = draw.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError(f"no free port found from {PORTS.start} to {PORTS.stop - 1}")


def ranks(world_size: int, timeout: float = DEFAULT_TIMEOUT) -> Callable:
    """Decorator: run the test body in `world_size` forked ranks with torch.distributed on gloo."""

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def wrapper(*args, **kwargs):
            run_ranks(world_size, functools.partial(_with_gloo, test, args, kwargs), timeout=timeout)

        return wrapper

    return decorate


def run_ranks(
    world_size: int,
    body: Callable[[], Any],
    *,
    timeout: float = DEFAULT_TIMEOUT,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> list[RankResult]:
    """Run `body` in forked ranks and return their results by rank.

    Raises:
        RanksFailed: with `check`, when a rank raised or died; always when the time ran out.
    """
    preload()
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    pids = [_fork(rank, body, folder, variables) for rank in range(world_size)]
    try:
        codes, hung = _wait(dict(enumerate(pids)), timeout, folder)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    results = [_collect(rank, codes[rank], folder) for rank in range(world_size)]
    shutil.rmtree(folder, ignore_errors=True)
    failed = [r for r in results if r.error is not None or r.exit_code != 0]
    if hung or (check and failed):
        raise RanksFailed(_explain(results, hung, timeout))
    return results


def _with_gloo(test: Callable, args: tuple, kwargs: dict) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        test(*args, **kwargs)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _fork(rank: int, body: Callable[[], Any], folder: Path, variables: dict[str, str]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
        _child(rank, body, folder)
    finally:
        os._exit(1)


def _child(rank: int, body: Callable[[], Any], folder: Path) -> None:
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    # pytest's capture objects must not be used in the child.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    stacks = open(folder / f"{rank}.stacks", "w")  # noqa: SIM115  (must outlive this function)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    code, value, error = 0, None, None
    try:
        value = body()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        code, error = 1, traceback.format_exc()
    with open(folder / f"{rank}.pickle", "wb") as out:
        pickle.dump((value, error), out)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(alive: dict[int, int], timeout: float, folder: Path) -> tuple[dict[int, int], list[int]]:
    """Exit code by rank, and the ranks that still ran at the end of the time."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    failing = False
    while alive:
        for rank, pid in list(alive.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del alive[rank]
                if codes[rank] != 0 and not failing:
                    failing = True
                    deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    hung = [] if failing else sorted(alive)
    for pid in alive.values():
        os.kill(pid, signal.SIGUSR1)
    if alive:
        time.sleep(1.0)
    for rank, pid in alive.items():
        os.killpg(pid, signal.SIGKILL)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return codes, hung


def _collect(rank: int, code: int, folder: Path) -> RankResult:
    value, error = None, None
    path = folder / f"{rank}.pickle"
    if path.exists() and path.stat().st_size:
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            value, error = pickle.loads(path.read_bytes())

    def text(suffix: str) -> str:
        file = folder / f"{rank}.{suffix}"
        return file.read_text(errors="replace") if file.exists() else ""

    return RankResult(rank, code, value, error, text("log"), text("stacks"))


def _explain(results: list[RankResult], hung: list[int], timeout: float) -> str:
    parts = [f"ranks {hung} still ran after {timeout:g} s"] if hung else []
    first = [r for r in results if r.error or (r.exit_code not in (0, -signal.SIGKILL))]
    for r in first:
        parts.append(f"--- rank {r.rank} exited with {r.exit_code}\n{r.error or ''}{r.output[-3000:]}")
    for r in results:
        if r.stacks.strip():
            parts.append(f"--- stacks of rank {r.rank}\n{r.stacks[-4000:]}")
    if hung or not first:
        parts += [f"--- end of rank {r.rank}'s output ({r.exit_code})\n{r.output[-1500:]}" for r in results]
    return "\n".join(parts)
