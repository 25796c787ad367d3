"""Ranks forked from one process that has imported everything: many fit in memory, and start in no time."""

import argparse
import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import os
import pickle
import runpy
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from megatron_ext.netlab import ranks
from megatron_ext.netlab.lab import Lab
from megatron_ext.netlab.supervise import supervise

DEFAULT_TIMEOUT = 120.0  # seconds
PRELOAD = ("torch", "megatron.training")


@dataclass
class RankResult:
    """How a rank ended: exit code (negative: killed by that signal), value or error, and its output."""

    rank: int
    node: int
    exit_code: int
    value: Any
    error: str | None
    output: str


class RanksFailed(RuntimeError):
    """A rank raised, died or hung; the text names it and shows why."""


def run_in_lab(
    lab: Lab,
    world: int,
    body: Callable[[], Any],
    *,
    timeout: float = DEFAULT_TIMEOUT,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> list[RankResult]:
    """Run `body` in `world` ranks, shared out evenly to the lab's nodes; returns their results by rank.

    Ranks are forked from the calling process, so it must have no threads: it imports torch, but neither
    computes gradients nor communicates. What `body` returns is pickled.

    Raises:
        RanksFailed: with `check`, when a rank raised or died; always when the time ran out.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(world)]
        lines: list[list[str]] = [[] for _ in range(world)]
        started = ranks.start(lab, world, lambda: _body(body, files), env or {})
        outcome = supervise(
            started, lambda rank, _, line: lines[rank.rank].append(line), timeout=timeout, stacks=True
        )
        results = [_collect(rank, files[rank.rank], lines[rank.rank]) for rank in started]
    if outcome.timed_out is not None or (check and outcome.exit_code):
        raise RanksFailed("\n".join([outcome.explain(), *map(_tail, results)]))
    return results


def _body(body: Callable[[], Any], files: Sequence[IO[bytes]]) -> NoReturn:
    dump_stacks_on_signal()
    code, value, error = 0, None, None
    try:
        value = body()
    except SystemExit as stop:
        code = exit_code(stop)
    except BaseException:
        code, error = 1, traceback.format_exc()
        print(error, file=sys.stderr)
    out = files[int(os.environ["RANK"])]
    pickle.dump((value, error), out)
    for stream in (out, sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _collect(rank: ranks.Rank, file: IO[bytes], lines: list[str]) -> RankResult:
    assert rank.exit_code is not None
    value, error = None, None
    file.seek(0)
    with contextlib.suppress(EOFError, pickle.UnpicklingError):  # it died before it had written all
        value, error = pickle.load(file)
    return RankResult(rank.rank, rank.node, rank.exit_code, value, error, "\n".join(lines))


def _tail(result: RankResult) -> str:
    return f"--- rank {result.rank} on node {result.node} ({result.exit_code})\n{result.output[-6000:]}"


def dump_stacks_on_signal() -> None:
    """On SIGUSR1 write the stacks of all threads to stderr."""
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def exit_code(stop: SystemExit) -> int:
    """The exit code that Python gives a process for this exception, whose text it prints."""
    if isinstance(stop.code, int):
        return stop.code
    if stop.code is not None:
        print(stop.code, file=sys.stderr)
    return int(stop.code is not None)


def preload(modules: Sequence[str], cpu: bool) -> None:
    """Import what all ranks need, once; with `cpu` as the launcher does under `--cpu`.

    Raises:
        ImportError: when one of the modules is not there.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if cpu:
        from megatron_ext import cpu as cpu_mode

        cpu_mode.set_environment()
        cpu_mode.hide_gpu_packages()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about every missing GPU package
        for module in modules:
            importlib.import_module(module)
    if "megatron.training" in sys.modules:
        _read_argument_sources()
    # Objects that the collector never visits again stay in memory that the ranks share.
    gc.collect()
    gc.freeze()


def _read_argument_sources() -> None:
    """Megatron reads the source of its config classes for its parser; ranks inherit what is read here."""
    inspect.getsource = functools.cache(inspect.getsource)
    from megatron.training.arguments import add_megatron_arguments

    add_megatron_arguments(argparse.ArgumentParser())


def script_body(command: Sequence[str]) -> Callable[[], NoReturn]:
    """A body that runs `SCRIPT.py ARGS` or `-m MODULE ARGS` as `python` would."""

    def body() -> NoReturn:
        dump_stacks_on_signal()
        code = 0
        try:
            if command[0] == "-m":
                sys.argv = list(command[1:])
                sys.path.insert(0, os.getcwd())
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = list(command)
                sys.path.insert(0, str(Path(command[0]).resolve().parent))
                runpy.run_path(command[0], run_name="__main__")
        except SystemExit as stop:
            code = exit_code(stop)
        except BaseException:
            code = 1
            traceback.print_exc()
        # What the script and the modules have registered, and their files; but not the frames of the parent.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    return body
