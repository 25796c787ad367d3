"""megatron-ext memory RUN [RUN...]: what each rank holds, by category, in a run with --ext-memory.

Prints tables and writes memory.html, memory.svg and memory.csv. Needs neither torch nor megatron.
"""

import argparse
import os
import sys
from pathlib import Path

from megatron_ext.tools import page
from megatron_ext.tools.compare import default_names
from megatron_ext.tools.compare_read import RecordError, read_run
from megatron_ext.tools.memory_page import as_html
from megatron_ext.tools.memory_read import RunMemory, in_one_order, read_memory
from megatron_ext.tools.memory_svg import picture
from megatron_ext.tools.memory_text import as_csv, report

EXIT_OK, EXIT_BAD_INPUT = 0, 2

_EPILOG = """\
Categories: weights (and module buffers), gradients, optimizer (states and master weights), activations (all
that forward and backward passes make), vocabulary (what vocabulary passes make), communication, other.
They count live tensors; what an allocator rounds up or keeps is not in them.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ext memory",
        description="Show the measured memory of runs, per rank and category.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's --ext-report folder")
    parser.add_argument("--planned", action="store_true", help="print the planned memory, too")
    parser.add_argument("--step", type=int, metavar="N", help="default: the last measured step")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: `memory` beside the first RUN")
    return parser


def write(memories: list[RunMemory], folder: Path) -> Path:
    """Write memory.html, memory.svg and memory.csv into `folder`; returns the page's path."""
    contents = {
        "memory.html": as_html(memories),
        "memory.svg": picture(memories, page.style()),
        "memory.csv": as_csv(memories),
    }
    page.write_all(folder, contents, RecordError)
    return folder / "memory.html"


def main(argv: list[str]) -> int:
    """Run the tool; returns 0, or 2 on bad input."""
    args = _parser().parse_args(argv)
    try:
        folders = [Path(run) for run in args.runs]
        names = default_names(folders)
        if len(folders) == 1:  # the last part alone is "record" as a rule
            names = ["/".join(Path(os.path.abspath(folders[0])).parts[-2:]).lstrip("/")]
        runs = [read_run(*pair) for pair in zip(folders, names, strict=True)]
        memories = in_one_order([read_memory(run, args.step) for run in runs])
        if args.planned and (unplanned := [of.run.folder for of in memories if not of.planned]):
            raise RecordError(
                f"{', '.join(map(str, unplanned))} recorded no planned memory. Leave --planned off."
            )
        page = write(memories, args.output or Path(os.path.abspath(folders[0])).parent / "memory")
    except RecordError as error:
        print(f"megatron-ext memory: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        print(f"megatron-ext memory: cannot read {error.filename}: {error.strerror}.", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(report(memories, args.planned))
    print(f"page: {page}")
    return EXIT_OK
