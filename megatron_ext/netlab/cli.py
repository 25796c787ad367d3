"""The command line of `netlab`: run, measure, doctor, clean."""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron_ext.netlab import forked, leftovers, needs, plan, ranks, report
from megatron_ext.netlab.lab import Lab, LabError
from megatron_ext.netlab.links import MAX_NODES, Links, parse_rate, parse_size, parse_time
from megatron_ext.netlab.supervise import StopSignals, supervise

BAD_USE = 2


def main(argv: list[str]) -> int:
    """Run a subcommand; returns the exit code: of the first rank that failed, or 2 if nothing could start."""
    front, command = _split(argv)
    options = _parser().parse_args(front)
    try:
        if options.what == "run":
            return run(options, command)
        if command is not None:
            raise ValueError(f"`netlab {options.what}` takes no command.")
        if options.what == "measure":
            return measure(options)
        return doctor() if options.what == "doctor" else clean()
    except (ValueError, LabError) as error:
        for line in str(error).splitlines():
            print(f"netlab: {line}", file=sys.stderr)
        return BAD_USE
    except BrokenPipeError:  # what reads our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # before the ranks have started; afterwards StopSignals takes it
        return 130


def _split(argv: list[str]) -> tuple[list[str], list[str] | None]:
    """Options and the command behind the first `--`."""
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="netlab",
        description="Nodes on one machine: network namespaces joined by links whose rates are limited.",
        epilog="netlab run --help shows the options of a run.",
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="{run,measure,doctor,clean}")
    _add_run(commands.add_parser("run", help="build the nodes, start the ranks, count bytes, remove it all"))
    _add_measure(commands.add_parser("measure", help="does this machine keep the rates of a lab?"))
    commands.add_parser("doctor", help="say what this machine lacks; exit code 0 if a lab can be built")
    commands.add_parser("clean", help="end processes of labs that were killed (every run does this, too)")
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "netlab run --nodes K --ranks-per-node M --rate RATE [options] -- COMMAND ..."
    parser.description = "Start COMMAND once per rank, with the environment that torchrun would set."
    _add_links(parser)
    add = parser.add_argument
    add("--ranks-per-node", type=int, required=True, metavar="M", help="ranks on each node")
    add(
        "--rate", type=_typed(parse_rate), required=True, help="of every node's NIC, each way: 400mbit, 2gbit"
    )
    add(
        "--intra-rate",
        type=_typed(parse_rate),
        metavar="RATE",
        help="inside each node, for all its ranks together (default: no limit)",
    )
    add(
        "--burst",
        type=_typed(parse_size),
        metavar="SIZE",
        help="bytes that pass at once after a pause (default: 2 ms at the rate, at least 20kb)",
    )
    add(
        "--latency",
        type=_typed(parse_time),
        default=0.0,
        metavar="TIME",
        help="one way between nodes, as 1ms; needs netem in the kernel",
    )
    add("--timeout", type=float, metavar="SECONDS", help="end everything after this time (default: no limit)")
    add("--json", type=Path, metavar="FILE", help="write bytes, exit codes and times there")
    add(
        "--fork",
        action="store_true",
        help="fork the ranks from one process that has imported torch and megatron; COMMAND is then "
        "SCRIPT.py ARGS or -m MODULE ARGS",
    )
    add(
        "--preload",
        default=",".join(forked.PRELOAD),
        metavar="MODULES",
        help="what --fork imports first (default: %(default)s)",
    )
    add("--dry-run", action="store_true", help="print the commands that build the network, and do nothing")


def _typed[T](parse: Callable[[str], T]) -> Callable[[str], T]:
    """Let argparse show the text of a ValueError."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def run(options: argparse.Namespace, command: list[str] | None) -> int:
    """Build the lab, run the command in it, report; raises before anything is started if it cannot."""
    command = _checked(options, command)
    links = Links(options.rate, options.intra_rate, options.latency, options.burst)
    world = options.nodes * options.ranks_per_node
    lab = Lab(options.nodes, links)
    if options.dry_run:
        print(_dry_run(lab, world, command))
        return 0
    lab.check()
    body = _body(options, command)
    ranks.adopt_orphans()
    with StopSignals() as stop, lab:
        for process in lab.removed:
            print(f"netlab: ended {_describe(process)}", file=sys.stderr)
        print(f"netlab: {report.headline(lab, world)}", file=sys.stderr)
        print(
            f"netlab: look into node 0 with nsenter --net={lab.door(0)} COMMAND", file=sys.stderr, flush=True
        )
        before, started = lab.counters(), time.monotonic()
        processes = ranks.start(lab, world, body, {})
        outcome = supervise(processes, _print_line, timeout=options.timeout, stop=stop, stacks=options.fork)
        seconds = time.monotonic() - started
        traffic = report.difference(lab.counters(), before)
        found = report.as_json(lab, processes, command, outcome, traffic, seconds)
    print(report.table(traffic))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if outcome.exit_code:
        print(f"netlab: {outcome.explain()}", file=sys.stderr)
    return outcome.exit_code


def _checked(options: argparse.Namespace, command: list[str] | None) -> list[str]:
    """The command, when the options make sense together."""
    if not command:
        raise ValueError("no command was given. Put it behind --: netlab run ... -- python train.py")
    if not 1 <= options.nodes <= MAX_NODES:
        raise ValueError(f"--nodes {options.nodes} is not possible; set 1 to {MAX_NODES}.")
    if options.ranks_per_node < 1:
        raise ValueError(f"--ranks-per-node {options.ranks_per_node} is not possible; set 1 or more.")
    if options.timeout is not None and options.timeout <= 0:
        raise ValueError(f"--timeout {options.timeout:g} is no time; set seconds above 0, or leave it out.")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ValueError(f"--json {options.json}: there is no folder {options.json.parent}. Make it first.")
    if options.fork:
        _check_script(command)
    elif shutil.which(command[0]) is None:
        raise ValueError(f"the command {command[0]!r} was not found. Give a program on PATH, or its path.")
    return command


def _check_script(command: list[str]) -> None:
    if command[0] == "-m" and len(command) > 1:
        return
    if not command[0].endswith(".py") or not os.path.exists(command[0]):
        raise ValueError(
            f"--fork runs a Python file or module by itself, and {command[0]!r} is neither. Write "
            "`-- SCRIPT.py ARGS` or `-- -m MODULE ARGS`, without `python` in front."
        )


def _body(options: argparse.Namespace, command: list[str]) -> Callable[[], NoReturn]:
    if not options.fork:
        return ranks.exec_body(command)
    try:
        forked.preload([name for name in options.preload.split(",") if name], cpu="--cpu" in command)
    except ImportError as error:
        raise ValueError(
            f"--fork cannot import what --preload {options.preload} names: {error}. This is "
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


def _print_line(rank: ranks.Rank, stream: int, line: str) -> None:
    print(f"[rank {rank.rank}] {line}", file=sys.stdout if stream == 1 else sys.stderr, flush=True)


def _describe(process: leftovers.Leftover) -> str:
    return f"process {process.pid} ({process.command}), left over from the killed lab {process.owner}"


def doctor() -> int:
    """Print what is missing, and try what is there; 0 if a lab can be built."""
    problems = needs.missing()
    if not problems:
        try:
            links = Links(parse_rate("100mbit"), parse_rate("400mbit"))
            with Lab(2, links):
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
