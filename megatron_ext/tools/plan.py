"""megatron-ext plan: what a run should be set to, worked out before it starts."""

import importlib
import sys

SUBJECTS = {
    "layers": "the best split of layers over pipeline stages that stock can do",
    "linear3d": "grids of --linear-3d for a tensor-parallel group, compared",
    "paro": "sharding strategies for parameters, gradients and optimizer states, compared",
    "wallfacer": "team sizes, bundles and placements of context-parallel attention, compared",
}
EXIT_BAD_INPUT = 2


def usage() -> str:
    """The text of `megatron-ext plan --help`."""
    lines = "\n".join(f"  {name:<9} {what}" for name, what in SUBJECTS.items())
    return f"usage: megatron-ext plan SUBJECT ...\n\n{lines}\n\nmegatron-ext plan SUBJECT --help says more."


def main(argv: list[str]) -> int:
    """Run `plan SUBJECT`; returns the exit code."""
    if argv and argv[0] in SUBJECTS:
        return importlib.import_module(f"megatron_ext.tools.plan_{argv[0]}").main(argv[1:])
    if argv and argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    what = f"there is no plan for {argv[0]!r}" if argv else "it is not said what to plan"
    print(f"megatron-ext plan: {what}. Say one of {', '.join(SUBJECTS)}.\n\n{usage()}", file=sys.stderr)
    return EXIT_BAD_INPUT
