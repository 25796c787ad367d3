"""What the subcommands of `megatron-ext plan` share: a model in Megatron's own flags, and reading numbers.

Flags are read as text and checked one by one, so that all problems are found at once.
"""

import argparse

from megatron_ext import configfile

DEFAULT_DIVISOR = 128  # stock's --make-vocab-size-divisible-by


def add_model_flags(group: argparse._ArgumentGroup) -> None:
    """Options of a GPT's shape."""
    for flag, what in (
        ("--num-layers", "transformer layers"),
        ("--hidden-size", "h"),
        ("--ffn-hidden-size", "f (default: stock's)"),
        ("--num-attention-heads", "only needed with --num-query-groups or --kv-channels"),
        ("--num-query-groups", "groups of keys and values"),
        ("--kv-channels", "head size"),
        ("--seq-length", "s"),
        ("--padded-vocab-size", "V; or"),
        ("--vocab-size", "rows before padding, which follows the next two"),
        ("--make-vocab-size-divisible-by", f"(default {DEFAULT_DIVISOR})"),
        ("--tensor-model-parallel-size", "(default 1)"),
    ):
        group.add_argument(flag, metavar="N", help=what)
    group.add_argument("-p", "--pipeline-model-parallel-size", metavar="N", help="pipeline stages")
    group.add_argument("--swiglu", action="store_true", help="gated MLP")
    group.add_argument("--ext-config", metavar="FILE", help="take these from a configuration file of a run")


def parse_known(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments, those of the file of --ext-config included, and problems with unknown ones."""
    args, unknown = parser.parse_known_args(argv)
    if args.ext_config is not None and not unknown:
        args = parser.parse_args(configfile.merge(_words_of(args.ext_config, parser), argv))
    return args, [
        f"{word}: there is no such argument. `{parser.prog} --help` lists those that there are."
        for word in unknown
    ]


def _words_of(path: str, parser: argparse.ArgumentParser) -> list[str]:
    """The words of a configuration file as far as this tool knows their options."""
    entries = configfile.load(path).entries.values()
    known = parser._option_string_actions
    return [word for entry in entries if entry.flag in known for word in entry.argv()]


class Numbers:
    """Reads numbers from the arguments; what is wrong goes to a list."""

    def __init__(self, args: argparse.Namespace, problems: list[str]):
        self.args, self.problems = args, problems

    def given(self, name: str) -> str | None:
        """The argument's text."""
        return getattr(self.args, name[2:].replace("-", "_"))

    def count(self, name: str, what: str, default: int | None = None, flag: str | None = None) -> int | None:
        """A whole number above zero."""
        text = self.given(name)
        if text is None:
            if default is None:
                self.problems.append(
                    f"{flag or name} is missing: it is {what}. Give it, or --ext-config FILE."
                )
            return default
        if text.isascii() and text.isdigit() and int(text) > 0:
            return int(text)
        self.problems.append(
            f"{name} {text}: {what} must be a whole number of 1 or more. Give such a number."
        )
        return None

    def number(self, name: str, what: str, most: float = float("inf")) -> float | None:
        """A number from 0 to `most`; None where it is not given, and where it is wrong."""
        text = self.given(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if 0 <= value <= most and value < float("inf"):
            return value
        limit = "0 or more" if most == float("inf") else f"from 0 to {most:g}"
        self.problems.append(f"{name} {text}: {what}, {limit}. Give such a number.")
        return None

    def time(self, name: str) -> float | None:
        """Milliseconds."""
        return self.number(name, "a time is a number of milliseconds")


def default_ffn(hidden: int, *, gated: bool) -> int:
    """The width of the MLP that stock takes."""
    return max(1, int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)


def attention_widths(read: Numbers, h: int | None) -> tuple[int | None, int | None]:
    """Widths of queries and of keys."""
    if h is None:
        return None, None
    if all(read.given(name) is None for name in ("--num-query-groups", "--kv-channels")):
        return h, h
    heads = read.count("--num-attention-heads", "the number of attention heads")
    if heads is None:
        return None, None
    size = read.count("--kv-channels", "the size of a head", default=max(1, h // heads))
    groups = read.count("--num-query-groups", "the number of groups of keys and values", default=heads)
    if size is None or groups is None:
        return None, None
    if heads % groups:
        read.problems.append(
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}: each group of keys "
            "serves as many heads as the others. Choose a divisor."
        )
        return None, None
    return heads * size, groups * size


def padded_vocabulary(read: Numbers, instead: str) -> int | None:
    """Rows of the vocabulary; `instead` is what else may be given, for the message that it is missing."""
    padded, rows = read.given("--padded-vocab-size"), read.given("--vocab-size")
    if padded is not None:
        return read.count("--padded-vocab-size", "the padded vocabulary")
    if rows is None:
        read.problems.append(f"the size of the vocabulary is missing: {instead}.")
        return None
    size = read.count("--vocab-size", "the vocabulary")
    divisor = read.count("--make-vocab-size-divisible-by", "the divisor", default=DEFAULT_DIVISOR)
    tensor = read.count("--tensor-model-parallel-size", "the tensor-parallel size", default=1)
    if size is None or divisor is None or tensor is None:
        return None
    return -(-size // (divisor * tensor)) * divisor * tensor
