"""Which command-line arguments of the runs differ."""

import re
from dataclasses import dataclass

from megatron_ext.tools.compare_stats import Figures

_FLAG = re.compile(r"--?[A-Za-z]")  # "-0.5" is a value
# Every run has its own record folder; that it differs is no news.
_EXPECTED = {"--ext-report"}


@dataclass(frozen=True)
class Argument:
    """A flag and what each run gave it: "given" for a bare flag, "-" where it is not given."""

    name: str
    values: list[str]


def parse_arguments(argv: list[str]) -> dict[str, str]:
    """Flag -> value ("given" for a bare flag); words before the first flag are under "script"."""
    found: dict[str, list[str]] = {}
    name = "script"
    for word in argv:
        if _FLAG.match(word):
            name, equals, value = word.partition("=")
            found[name] = [value] if equals else []  # the last of several wins, as in argparse
        else:
            found.setdefault(name, []).append(word)
    return {name: " ".join(values) or "given" for name, values in found.items()}


def differing_arguments(figures: list[Figures]) -> list[Argument]:
    """The arguments that are not the same in all runs, in the order in which they were given."""
    parsed = [parse_arguments([str(word) for word in of.run.start.get("argv") or []]) for of in figures]
    names = {name: None for arguments in parsed for name in arguments if name not in _EXPECTED}
    table = [Argument(name, [arguments.get(name, "-") for arguments in parsed]) for name in names]
    return [argument for argument in table if len(set(argument.values)) > 1]
