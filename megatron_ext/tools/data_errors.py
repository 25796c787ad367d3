"""The one error class of `megatron-ext data`, and what can be wrong with an input."""

from dataclasses import dataclass


class DataError(ValueError):
    """A user's mistake. Its message goes to the terminal as it is, and the tool exits 2."""


@dataclass(frozen=True)
class Problem:
    """Something in an input that cannot be used.

    Args:
        kind: a word or two, used to count problems of one kind ("binary file", "empty", ...).
        where: file, with line or byte offset where that helps.
        what: what is wrong there and what to do about it.
        fatal: the run must stop on it; otherwise the text is left out and counted.
    """

    kind: str
    where: str
    what: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"
