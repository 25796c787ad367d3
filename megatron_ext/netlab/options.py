"""Options of `netlab`, and what cannot be meant by them."""

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_ext.netlab.forked import PRELOAD
from megatron_ext.netlab.lab import Lab
from megatron_ext.netlab.links import MAX_NODES, Links, parse_rate, parse_size, parse_time


def split(argv: list[str]) -> tuple[list[str], list[str] | None]:
    """Options, and the command behind the first `--` (None where there is no `--`)."""
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def parser() -> argparse.ArgumentParser:
    """The parser of everything in front of `--`; the subcommand is in `what`."""
    top = argparse.ArgumentParser(
        prog="netlab",
        description="Nodes on one machine: network namespaces joined by links whose rates are limited.",
        epilog="netlab run --help shows the options of a run.",
    )
    commands = top.add_subparsers(dest="what", required=True, metavar="{run,measure,doctor,clean}")
    _add_run(commands.add_parser("run", help="build the nodes, start the ranks, count bytes, remove it all"))
    _add_measure(commands.add_parser("measure", help="does this machine keep the rates of a lab?"))
    commands.add_parser("doctor", help="say what this machine lacks; exit code 0 if a lab can be built")
    commands.add_parser("clean", help="end processes of labs that were killed (every run does this, too)")
    return top


def _add_run(run: argparse.ArgumentParser) -> None:
    run.usage = "netlab run --nodes K --ranks-per-node M --rate RATE [options] -- COMMAND ..."
    run.description = "Start COMMAND once per rank, with the environment that torchrun would set."
    _add_links(run)
    add = run.add_argument
    add("--ranks-per-node", type=int, required=True, metavar="M", help="ranks on each node")
    add("--timeout", type=float, metavar="SECONDS", help="end everything after this time (default: no limit)")
    add("--json", type=Path, metavar="FILE", help="write bytes, exit codes and times there")
    fork = (
        "fork the ranks from one process that has imported torch and megatron; COMMAND is then SCRIPT.py ARGS"
    )
    add("--fork", action="store_true", help=f"{fork} or -m MODULE ARGS")
    modules = "what --fork imports first (default: %(default)s)"
    add("--preload", default=",".join(PRELOAD), metavar="MODULES", help=modules)
    add("--dry-run", action="store_true", help="print the commands that build the network, and do nothing")


def _add_measure(measure: argparse.ArgumentParser) -> None:
    measure.description = (
        "Time plain TCP transfers between two ranks on each node, and compare with what is set."
    )
    _add_links(measure)
    measure.add_argument("--repeats", type=int, default=5, metavar="N", help="of each (default: %(default)s)")


def _add_links(command: argparse.ArgumentParser) -> None:
    rate, size, duration = _typed(parse_rate), _typed(parse_size), _typed(parse_time)
    add = command.add_argument
    add("--nodes", type=int, required=True, metavar="K", help="number of nodes")
    add("--rate", type=rate, required=True, help="of every node's NIC, each way: 400mbit, 2gbit")
    inside = "inside each node, for all its ranks together (default: no limit)"
    add("--intra-rate", type=rate, metavar="RATE", help=inside)
    burst = "bytes that pass at once after a pause (default: 2 ms at the rate, at least 20kb)"
    add("--burst", type=size, metavar="SIZE", help=burst)
    latency = "one way between nodes, as 1ms; needs netem in the kernel"
    add("--latency", type=duration, default=0.0, metavar="TIME", help=latency)


def _typed[T](parse: Callable[[str], T]) -> Callable[[str], T]:
    """Let argparse show the text of a ValueError."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def lab(options: argparse.Namespace) -> Lab:
    """The lab that is asked for, not yet built."""
    if not 1 <= options.nodes <= MAX_NODES:
        raise ValueError(f"--nodes {options.nodes} is not possible; set 1 to {MAX_NODES}.")
    return Lab(options.nodes, Links(options.rate, options.intra_rate, options.latency, options.burst))


def check_run(options: argparse.Namespace, command: list[str] | None) -> list[str]:
    """The command, when the options of `run` make sense with it; ValueError if not."""
    if not command:
        raise ValueError("no command was given. Put it behind --: netlab run ... -- python train.py")
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
