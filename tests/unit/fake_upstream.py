"""A small `megatron` in a temporary folder that hides the installed one for the length of a test."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE_INFO = 'MAJOR = {}\nMINOR = {}\nPATCH = {}\nPRE_RELEASE = "{}"\n'


def version_file(major: int, minor: int, patch: int, pre_release: str = "") -> str:
    """Text of a package_info.py."""
    return PACKAGE_INFO.format(major, minor, patch, pre_release)


def write(root: Path, files: dict[str, str]) -> None:
    """Write source files below `root`; every folder becomes a package except the first, as upstream's."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        for folder in file.relative_to(root).parents:
            if len(folder.parts) > 1 and not (root / folder / "__init__.py").exists():
                (root / folder / "__init__.py").write_text("", encoding="utf-8")


@contextlib.contextmanager
def first_on_path(*roots: Path) -> Iterator[None]:
    """Put folders first on sys.path, with every loaded megatron module set aside until the end.

    No bytecode is kept: a file that is written twice in a second would be taken for the first one.
    """

    def loaded() -> list[str]:
        return [name for name in sys.modules if name == "megatron" or name.startswith("megatron.")]

    aside = {name: sys.modules.pop(name) for name in loaded()}
    path, no_bytecode = list(sys.path), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(root) for root in roots]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        sys.dont_write_bytecode = no_bytecode
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(aside)
        importlib.invalidate_caches()
