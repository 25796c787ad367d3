"""Which files are read: named files as they are, folders by suffix, in an order that never changes."""

import fnmatch
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.tools.data_errors import DataError

# fmt: off
DEFAULT_SUFFIXES = (
    ".txt", ".md", ".rst", ".tex", ".jsonl", ".py", ".pyi", ".pyx", ".c", ".h",
    ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".cuh", ".m", ".mm", ".go",
    ".rs", ".zig", ".java", ".kt", ".scala", ".groovy", ".cs", ".fs", ".vb", ".swift",
    ".dart", ".js", ".jsx", ".mjs", ".ts", ".tsx", ".vue", ".php", ".rb", ".pl",
    ".pm", ".lua", ".r", ".jl", ".hs", ".ml", ".mli", ".clj", ".ex", ".exs",
    ".erl", ".el", ".lisp", ".scm", ".f90", ".asm", ".sh", ".bash", ".zsh", ".ps1",
    ".bat", ".sql", ".proto", ".cmake", ".toml", ".yaml", ".yml",
)
# fmt: on
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})


@dataclass(frozen=True)
class Source:
    """One input file.

    Args:
        path: as the user wrote it, or below the folder the user wrote.
        size: bytes on disk.
        mtime_ns: time of its last change, nanoseconds.
        named: given by name, as opposed to found in a folder (problems in it then stop the run).
    """

    path: str
    size: int
    mtime_ns: int
    named: bool

    @property
    def is_gzip(self) -> bool:
        return self.path.lower().endswith(".gz")

    @property
    def is_jsonl(self) -> bool:
        return self.path.lower().removesuffix(".gz").endswith(".jsonl")


def find_sources(
    inputs: Sequence[str],
    suffixes: Sequence[str] = DEFAULT_SUFFIXES,
    exclude: Sequence[str] = (),
    never: Collection[str] = (),
) -> list[Source]:
    """List the input files: arguments in the given order, folders walked in sorted order.

    Args:
        inputs: files and folders.
        suffixes: what to take from folders (`.py` also takes `.py.gz`); files given by name are always taken.
        exclude: names or patterns (`test*`) of files and folders to leave out of the walk, at any depth.
        never: absolute paths that are not inputs (the tool's own outputs).

    Returns:
        Every file once, at its first mention.

    Raises:
        DataError: an argument that does not exist or is no file or folder, or nothing found at all.
    """
    found: dict[str, Source] = {}
    taken = tuple(end for suffix in suffixes for end in (suffix.lower(), suffix.lower() + ".gz"))
    for argument in inputs:
        if not os.path.lexists(argument):
            raise DataError(f"--input {argument} does not exist; check the path.")
        is_folder = os.path.isdir(argument)
        for path in _walk(argument, taken, exclude) if is_folder else [argument]:
            absolute = os.path.abspath(path)
            if absolute not in found and absolute not in never:
                found[absolute] = _source(path, named=not is_folder)
    if not found:
        excluded = f" (after --exclude {' '.join(exclude)})" if exclude else ""
        raise DataError(
            f"no input file found in --input {' '.join(inputs)}{excluded}: folders are searched for files "
            f"that end in {_shorten(suffixes)}; name the files, or give the endings with --suffixes."
        )
    return list(found.values())


def _walk(folder: str, taken: tuple[str, ...], exclude: Sequence[str]) -> Iterator[str]:
    def excluded(name: str) -> bool:
        return name.startswith(".") or any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)

    def unreadable(error: OSError):
        raise DataError(
            f"folder {error.filename} cannot be read: {error.strerror}; exclude it or make it readable."
        )

    for root, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not excluded(name))
        for name in sorted(files):
            path = os.path.join(root, name)
            if name.lower().endswith(taken) and not excluded(name) and os.path.isfile(path):
                yield path


def _source(path: str, named: bool) -> Source:
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise DataError(
            f"--input {path} is a link to a file that does not exist; fix or leave it out."
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"--input {path} is neither a regular file nor a folder; the input is read twice.")
    return Source(path, status.st_size, status.st_mtime_ns, named)


def _shorten(names: Iterable[str], limit: int = 12) -> str:
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return " ".join(names[:limit]) + rest
