"""How a job is refused: every problem at once, printed once, exit code 2.

A problem is a text that says what is set, why it cannot work and what to set instead.
"""

import os
import signal
import sys
import textwrap
import time
from typing import NoReturn

WIDTH = 100

TORCHRUN_GRACE_S = 20.0
"""How long ranks other than 0 stay alive under torchrun, in seconds.

torchrun stops all ranks as soon as one exits, so a fast rank must not leave before rank 0 has printed. A rank
that outlives the wait has a problem that rank 0 does not have (a file that is missing on one node only) and
prints it itself.
"""


class UserError(ValueError):
    """A mistake of the user's; `problems` lists all that were found, each ready to be printed."""

    def __init__(self, *problems: str):
        assert problems, "a UserError needs at least one problem"
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def render(problems: list[str], rank: int = 0) -> str:
    """The numbered list in its frame, as `refuse` prints it; indented lines of a problem stay as they are."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    where = f" on rank {rank}" if rank else ""
    lines = [f"megatron_ext: {count}{where}, nothing was started", "-" * WIDTH]
    for number, problem in enumerate(problems, start=1):
        first, indent = f"{number:3d}. ", " " * 5
        for line in problem.splitlines():
            if line.startswith(" "):
                lines.append(indent + line)
            else:
                lines += textwrap.wrap(
                    line,
                    WIDTH,
                    initial_indent=first,
                    subsequent_indent=indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            first = indent
    return "\n".join([*lines, "-" * WIDTH])


def _one_line(problems: list[str], rank: int) -> str:
    """A rank's problems in one line, for ranks whose list is most likely the one that rank 0 prints."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems, the first"
    return f"megatron_ext: rank {rank} refuses as well, {count}: {problems[0].splitlines()[0]}"


def _exit_refused(signum: int, frame: object) -> NoReturn:
    raise SystemExit(2)


def refuse(problems: list[str], rank: int | None = None) -> NoReturn:
    """Print the problems once, on rank 0, to stderr; every rank exits with code 2.

    Without torchrun (srun, mpirun) no rank can tell whether rank 0 has the same problems: the other ranks
    print one line each, so that a problem of one node (a file that is missing there) is never silent.
    `rank` defaults to the environment's RANK. Raises SystemExit(2), always.
    """
    assert problems, "refuse() needs at least one problem"
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    if rank == 0:
        print(render(problems), file=sys.stderr, flush=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, _exit_refused)
        # One rank of each node is first to print, so that a node's ranks do not repeat each other.
        time.sleep(TORCHRUN_GRACE_S + 0.5 * int(os.environ.get("LOCAL_RANK", "0")))
        print(render(problems, rank), file=sys.stderr, flush=True)
    else:
        print(_one_line(problems, rank), file=sys.stderr, flush=True)
    raise SystemExit(2)
