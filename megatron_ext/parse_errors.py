"""What argparse's errors say to a user: the option that was meant, or the values that are allowed."""

import argparse
import difflib
import enum
import os
import traceback
from argparse import ArgumentParser
from collections.abc import Iterable


def unknown_flag_error(parser: ArgumentParser, message: str) -> str:
    """Turn the message of `ArgumentParser.error` into a problem text.

    Unknown flags get the nearest names that the parser knows; other errors (a bad value, a missing one) name
    the argument already and get the way to its description.
    """
    kind, _, rest = message.partition(": ")
    if kind == "unrecognized arguments":
        return "\n".join(_unknown(parser, rest.split()))
    if message.endswith("expected one argument") or message.endswith("expected at least one argument"):
        return f"{message}: give the value right after the option, or leave the option out."
    return f"{message}. See --help for what it takes."


def refused_by_stock(error: Exception) -> str:
    """Problem text for what stock's own validation raised; a bare assertion is shown by its source line."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = str(error).strip() or f"`{where.line}` does not hold"
    place = f"{os.path.basename(where.filename)}:{where.lineno}"
    return f"Megatron-LM refuses these arguments: {said}\n  (checked in {place}, {type(error).__name__})"


def nearest_names(known: Iterable[str], flag: str, count: int = 3) -> list[str]:
    """Up to `count` of the known option strings that `flag` may stand for, best first."""
    known = list(known)
    spelled = "--" + flag.lstrip("-").replace("_", "-")
    if spelled in known:
        return [spelled]
    longer = sorted(name for name in known if name.startswith(spelled + "-"))
    close = difflib.get_close_matches(spelled, known, n=count, cutoff=0.75)
    return list(dict.fromkeys([*close, *longer]))[:count]


def guard_enum_choices(parser: ArgumentParser) -> None:
    """Make an unknown name for an enum option an argparse error; upstream's reader raises a bare KeyError."""
    for action in parser._actions:
        members = list(action.choices or ())
        if members and all(isinstance(member, enum.Enum) for member in members):
            action.type = _enum_reader(type(members[0]))


def _enum_reader(kind: type[enum.Enum]):
    def read(text: str) -> enum.Enum:
        if text not in kind.__members__:
            raise argparse.ArgumentTypeError(
                f"invalid choice: {text!r} (choose from {', '.join(kind.__members__)})"
            )
        return kind[text]

    return read


def _unknown(parser: ArgumentParser, words: list[str]) -> list[str]:
    known = [name for name in parser._option_string_actions if name.startswith("--")]
    texts = []
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("-") and flag.strip("-"):
            names = nearest_names(known, flag)
            hint = f"did you mean {' or '.join(names)}?" if names else "see --help for the list."
            texts.append(f"{flag} is not an option of this script: {hint}")
    if not texts:
        texts.append(
            f"{' '.join(words)!r} belongs to no option: the option before it takes fewer values, or its name "
            "is missing."
        )
    return texts
