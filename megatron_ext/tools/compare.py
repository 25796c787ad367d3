"""megatron-ext compare RUN_A RUN_B [...]: do runs agree, and what does each cost?

Reads the records that `--ext-report DIR` leaves, prints a table, and writes compare.json, compare.csv and
compare.html. Needs neither torch nor megatron.
"""

import argparse
import math
import os
import sys
from pathlib import Path

from megatron_ext.tools import page
from megatron_ext.tools.compare_files import as_csv, as_json
from megatron_ext.tools.compare_page import as_html
from megatron_ext.tools.compare_read import RecordError, read_run
from megatron_ext.tools.compare_stats import figures
from megatron_ext.tools.compare_text import report
from megatron_ext.tools.compare_verdict import Comparison, Tolerance, compare

EXIT_AGREE, EXIT_DISAGREE, EXIT_BAD_INPUT = 0, 1, 2

_EPILOG = """\
The first run is the reference. A relative difference is |run - reference| / |reference|.
A step's time is that of its slowest rank. Rates and bytes per step leave the warm-up steps out.
Runs of different length are compared over the steps that all of them have.
Values that are NaN or infinite in both runs never agree: such runs have diverged. Neither does a named loss
that one run alone recorded; with --bitwise, the same holds for gradient norms.
Exit code: 0 losses and gradient norms agree, 1 they do not, 2 the records cannot be compared.
"""


def _tolerance(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


# argparse shows these names in "invalid ... value".
_tolerance.__name__ = "tolerance (a number, 0 or more)"
_count.__name__ = "count (a whole number, 0 or more)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ext compare",
        description="Compare runs by their records: losses, gradient norms, time, memory, communication.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's --ext-report folder; two or more")
    parser.add_argument(
        "--names", nargs="+", metavar="NAME", help="names to show, one per RUN (default: folders)"
    )
    parser.add_argument("--loss-rtol", type=_tolerance, default=1e-5, metavar="X", help="default %(default)g")
    parser.add_argument(
        "--grad-norm-rtol", type=_tolerance, default=1e-4, metavar="X", help="default %(default)g"
    )
    parser.add_argument(
        "--bitwise", action="store_true", help="losses and gradient norms must be equal bit for bit"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: `compare` beside the first RUN")
    parser.add_argument(
        "--warmup", type=_count, default=2, metavar="N",
        help="steps after each start that rates and bytes per step leave out (default %(default)s)",
    )  # fmt: skip
    return parser


def default_names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart, without a part that all end in.

    runs/tp2/record and runs/pp2/record are "tp2" and "pp2".
    """
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    while len(set(parts)) > 1 and len({of[-1] for of in parts}) == 1:
        parts = [of[:-1] for of in parts]
    depth = 1
    while len({of[-depth:] for of in parts}) < len(set(parts)):
        depth += 1
    names = ["/".join(of[-depth:]).lstrip("/") or "/" for of in parts]
    # A folder that is given twice still needs two names.
    return [f"{n} ({names[:i].count(n) + 1})" if n in names[:i] else n for i, n in enumerate(names)]


def _names(given: list[str] | None, folders: list[Path]) -> list[str]:
    if given is None:
        return default_names(folders)
    if len(given) != len(folders):
        raise RecordError(
            f"--names has {len(given)} names for {len(folders)} runs. Give one per RUN, after the RUNs: "
            "RUN_A RUN_B --names a b"
        )
    if len(set(given)) < len(given):
        raise RecordError(f"--names has a name twice: {' '.join(given)}. Give each run its own name.")
    return given


def write(comparison: Comparison, folder: Path) -> Path:
    """Write compare.json, compare.csv and compare.html into `folder`; returns the page's path."""
    texts = {"compare.json": as_json, "compare.csv": as_csv, "compare.html": as_html}
    contents = {name: make(comparison) for name, make in texts.items()}
    page.write_all(folder, contents, RecordError)
    return folder / "compare.html"


def main(argv: list[str]) -> int:
    """Run the tool; returns 0 (agree), 1 (disagree) or 2 (bad input)."""
    args = _parser().parse_args(argv)
    try:
        if len(args.runs) < 2:
            raise RecordError(
                f"One run is given ({args.runs[0]}); a comparison needs two or more RUN folders."
            )
        folders = [Path(run) for run in args.runs]
        runs = [read_run(*pair) for pair in zip(folders, _names(args.names, folders), strict=True)]
        tolerance = Tolerance(args.loss_rtol, args.grad_norm_rtol, args.bitwise)
        comparison = compare([figures(run, args.warmup) for run in runs], tolerance, args.warmup)
        page = write(comparison, args.output or Path(os.path.abspath(folders[0])).parent / "compare")
    except RecordError as error:
        print(f"megatron-ext compare: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        print(f"megatron-ext compare: cannot read {error.filename}: {error.strerror}.", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(report(comparison))
    print(f"page: {page}")
    return EXIT_AGREE if comparison.agrees else EXIT_DISAGREE
