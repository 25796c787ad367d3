"""Command line: `megatron-ext TOOL ...` or `... -m megatron_ext [--cpu] SCRIPT ...`."""

import importlib
import sys

TOOLS = {
    "doctor": "check versions, import paths, upstream drift, environment, GPUs and network",
    "lock": "write the upstream contract of the installed megatron-core and show what changed",
    "data": "turn text, jsonl or source trees into Megatron's indexed dataset and a tokenizer",
    "compare": "compare the run records of two or more runs: table, JSON, CSV and one HTML page",
    "grads": "compare two gradient dumps, parameter by parameter",
    "memory": "memory of runs with --ext-memory, by rank and category",
    "trace": "draw a pipeline schedule, or a traced run beside its plan",
    "plan": "what to set before a run: a split of layers over stages, a sharding strategy",
    "probe": "measure links inside and between groups of ranks, under torchrun",
}


def usage() -> str:
    """The text of `megatron-ext --help`."""
    tools = "\n".join(f"  {name:<9} {what}" for name, what in TOOLS.items())
    return (
        "megatron_ext: features for stock Megatron-LM by flags, no fork.\n\n"
        "Train:  torchrun --nproc-per-node N -m megatron_ext [--cpu] [--ext-config FILE.yaml] SCRIPT ARGS\n"
        "        (ARGS: Megatron's own and ours; -m megatron_ext --cpu pretrain_gpt.py --help lists them)\n\n"
        f"Tools:  megatron-ext TOOL --help\n{tools}\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Run a tool or launch a script; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        from megatron_ext import __version__

        print(f"megatron_ext {__version__}")
        return 0
    if argv[0] in TOOLS:
        return importlib.import_module(f"megatron_ext.tools.{argv[0]}").main(argv[1:])
    from megatron_ext.launch import main as launch

    return launch(argv)
