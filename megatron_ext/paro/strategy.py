"""The sharding strategies: three levels, for parameters, gradients and optimizer states. Pure data.

Source: "Rethinking Memory and Communication Costs for Efficient Data Parallel Training of LLMs" (PaRO-DP);
fourteen of the 27 combinations are valid.
"""

import itertools
from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How finely something is split over the data-parallel ranks; a larger value is finer."""

    N = 0
    """Not split: every rank holds all."""
    I = 1  # noqa: E741 - the paper's letter
    """Split over the members of a group; the groups are replicas."""
    G = 2
    """Split over all data-parallel ranks."""


@dataclass(frozen=True)
class Strategy:
    """Levels of parameters, gradients and optimizer states; prints as its three letters."""

    params: Level
    grads: Level
    optimizer: Level

    def __str__(self) -> str:
        return self.params.name + self.grads.name + self.optimizer.name

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """The strategy of three letters such as NIG.

        Raises:
            ValueError: not one of the fourteen, with the rule that it breaks.
        """
        problem = why_not(text)
        if problem:
            raise ValueError(problem)
        return cls(*(Level[letter] for letter in text))


def why_not(text: str) -> str | None:
    """Why `text` is no strategy, None if it is one."""
    known = f"choose one of {', '.join(NAMES)}"
    if len(text) != 3 or any(letter not in Level.__members__ for letter in text):
        return (
            f"{text!r} is not a strategy: write three letters, for parameters, gradients and optimizer "
            f"states, each N (not split), I (split inside the group) or G (split globally); {known}"
        )
    params, grads, optimizer = (Level[letter] for letter in text)
    if optimizer < max(params, grads):
        finer = [
            f"{what} ({level.name})"
            for what, level in (("parameters", params), ("gradients", grads))
            if level > optimizer
        ]
        return (
            f"{text} splits {' and '.join(finer)} more finely than optimizer states ({optimizer.name}), so a "
            "rank would update values that it does not hold: optimizer states must be split at least as "
            f"finely as both; {known}"
        )
    return None


def _valid(levels: tuple[Level, Level, Level]) -> bool:
    return levels[2] >= max(levels[0], levels[1])


STRATEGIES: tuple[Strategy, ...] = tuple(
    Strategy(*levels)
    for levels in sorted(
        itertools.product(Level, repeat=3),
        key=lambda levels: (levels[2], levels[0] + levels[1], levels[0]),
    )
    if _valid(levels)
)
"""The valid ones, roughly from most to least memory."""

NAMES: tuple[str, ...] = tuple(str(strategy) for strategy in STRATEGIES)
