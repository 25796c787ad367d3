"""The command line of `netlab`: run, measure, doctor, clean."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from megatron_ext.netlab import forked, leftovers, needs, options, plan, ranks, report
from megatron_ext.netlab import measure as measuring
from megatron_ext.netlab.lab import Lab, LabError
from megatron_ext.netlab.links import Links, parse_rate
from megatron_ext.netlab.supervise import StopSignals, supervise

BAD_USE = 2


def main(argv: list[str]) -> int:
    """Run a subcommand; returns the exit code: of the first rank that failed, or 2 if nothing could start."""
    front, command = options.split(argv)
    chosen = options.parser().parse_args(front)
    try:
        if chosen.what == "run":
            return run(chosen, command)
        if command is not None:
            raise ValueError(f"`netlab {chosen.what}` takes no command.")
        if chosen.what == "measure":
            return measure(chosen)
        return doctor() if chosen.what == "doctor" else clean()
    except (ValueError, LabError) as error:
        for line in str(error).splitlines():
            print(f"netlab: {line}", file=sys.stderr)
        return BAD_USE
    except BrokenPipeError:  # what reads our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # outside of a run's StopSignals
        return 128 + signal.SIGINT


def run(chosen: argparse.Namespace, command: list[str] | None) -> int:
    """Build the lab, run the command in it, report; raises before anything is started if it cannot."""
    command = options.check_run(chosen, command)
    lab = options.lab(chosen)
    world = lab.nodes * chosen.ranks_per_node
    if chosen.dry_run:
        print(_dry_run(lab, world, command))
        return 0
    lab.check()
    body = _body(chosen, command)
    ranks.adopt_orphans()
    with StopSignals() as stop, lab:
        _say(*(f"ended {_describe(process)}" for process in lab.removed))
        _say(report.headline(lab, world), f"look into node 0 with nsenter --net={lab.door(0)} COMMAND")
        before, started = lab.counters(), time.monotonic()
        processes = ranks.start(lab, world, body, {})
        outcome = supervise(processes, _print_line, timeout=chosen.timeout, stop=stop, stacks=chosen.fork)
        seconds = time.monotonic() - started
        traffic = report.difference(lab.counters(), before)
        found = report.as_json(lab, processes, command, outcome, traffic, seconds)
    print(report.table(traffic))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    if outcome.exit_code:
        _say(outcome.explain())
    return outcome.exit_code


def _body(chosen: argparse.Namespace, command: list[str]) -> Callable[[], NoReturn]:
    if not chosen.fork:
        return ranks.exec_body(command)
    try:
        forked.preload([name for name in chosen.preload.split(",") if name], cpu="--cpu" in command)
    except ImportError as error:
        raise ValueError(
            f"--fork cannot import what --preload {chosen.preload} names: {error}. This is "
            f"{sys.executable}; start netlab with a Python that has them: .venv/bin/python scripts/netlab ..."
        ) from error
    return forked.script_body(command)


def _dry_run(lab: Lab, world: int, command: list[str]) -> str:
    environments = [
        f"[node {rank // (world // lab.nodes)}] "
        + " ".join(f"{name}={value}" for name, value in lab.environment(rank, world).items())
        + f" {' '.join(command)}"
        for rank in range(world)
    ]
    return "\n".join([plan.dry_run(plan.network(lab.nodes, lab.links, lab.owner)), *environments])


def _say(*lines: str) -> None:
    for line in lines:
        print(f"netlab: {line}", file=sys.stderr, flush=True)


def _print_line(rank: ranks.Rank, stream: int, line: str) -> None:
    print(f"[rank {rank.rank}] {line}", file=sys.stdout if stream == 1 else sys.stderr, flush=True)


def _describe(process: leftovers.Leftover) -> str:
    return f"process {process.pid} ({process.command}), left over from the killed lab {process.owner}"


def measure(chosen: argparse.Namespace) -> int:
    """Print set and measured rates."""
    if chosen.repeats < 1:
        raise ValueError(f"--repeats {chosen.repeats} is not possible; set 1 or more.")
    with options.lab(chosen) as lab:
        print(measuring.table(lab, chosen.repeats))
    return 0


def doctor() -> int:
    """Print what is missing, and try what is there; 0 if a lab can be built."""
    problems = needs.missing()
    if not problems:
        try:
            with Lab(2, Links(parse_rate("100mbit"), parse_rate("400mbit"))):
                print("ok       a lab of two nodes was built and removed")
        except LabError as error:
            problems = [str(error)]
    for problem in problems:
        print(f"missing  {problem}")
    if not problems:
        print("ok       --latency works" if needs.has_netem() else f"absent   {needs.NO_NETEM}")
    return int(bool(problems))


def clean() -> int:
    """End what killed labs have left behind."""
    removed = leftovers.remove()
    for process in removed:
        print(f"ended {_describe(process)}")
    if not removed:
        print("nothing was left over")
    return 0
