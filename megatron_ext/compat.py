"""The only file that knows versions: which ones we work with, and what is broken in the installed one.

Versions and paths are those of the code that will really be imported (a checkout on the path hides the
wheel), found without importing torch or megatron.
"""

import ast
import importlib.util
import re
import sys
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_ext.workarounds import workarounds_catalogue, workarounds_present

__all__ = [
    "check_import_paths",
    "check_versions",
    "megatron_paths",
    "megatron_version",
    "python_version",
    "torch_version",
    "version_in",
    "version_problems",
    "workarounds_catalogue",
    "workarounds_present",
]

MEGATRON_WINDOW = SpecifierSet(">=0.19.0,<0.20")
MEGATRON_INSTALL = "megatron-core>=0.19.2,<0.20"
TORCH_WINDOW = SpecifierSet(">=2.11")
PYTHON_WINDOW = SpecifierSet(">=3.12,<3.14")  # those that megatron-core has a wheel for


def _origin(module: str) -> Path | None:
    """The file that `import module` would run or has run; None if there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def megatron_paths() -> dict[str, str | None]:
    """Folders of the two packages that a run needs, keyed "megatron.core" and "megatron.training"."""
    origins = {name: _origin(name) for name in ("megatron.core", "megatron.training")}
    return {name: str(origin.parent) if origin else None for name, origin in origins.items()}


def megatron_version() -> str | None:
    """Version of the megatron.core that will be imported, as "0.19.2"; None if absent or not readable."""
    core = megatron_paths()["megatron.core"]
    return None if core is None else version_in(Path(core))


def version_in(core: Path) -> str | None:
    """Version of the copy of megatron.core in a folder, read from its package_info.py without running it."""
    try:
        tree = ast.parse((core / "package_info.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    values = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    if not all(isinstance(values.get(part), int) for part in ("MAJOR", "MINOR", "PATCH")):
        return None
    return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values.get('PRE_RELEASE') or ''}"


def torch_version() -> str | None:
    """Version of the torch that will be imported, as "2.11.0+cu130"; None if there is none."""
    origin = _origin("torch")
    if origin is None:
        return None
    match = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", (origin.parent / "version.py").read_text())
    return match.group(1) if match else None


def python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def version_problems() -> dict[str, str]:
    """What is wrong, keyed "python", "torch" and "megatron-core", each with the command that helps."""
    problems = {}
    if not PYTHON_WINDOW.contains(python_version()):
        problems["python"] = (
            f"Python is {python_version()} ({sys.executable}), but megatron_ext needs {PYTHON_WINDOW}. "
            "Make a virtual environment with Python 3.12 or 3.13."
        )
    torch, pip = torch_version(), f"{sys.executable} -m pip install"
    if torch is None:
        problems["torch"] = f'torch is not installed. Run: {pip} "torch{TORCH_WINDOW}"'
    # The builds in NVIDIA's containers call themselves 2.11.0a0+...: the base version counts.
    elif not TORCH_WINDOW.contains(Version(torch).base_version):
        problems["torch"] = (
            f"torch is {torch} in {_origin('torch').parent}, but megatron_ext needs {TORCH_WINDOW}. "
            f'Run: {pip} "torch{TORCH_WINDOW}"'
        )
    core, megatron = megatron_paths()["megatron.core"], megatron_version()
    if core is None:
        problems["megatron-core"] = f'megatron-core is not installed. Run: {pip} "{MEGATRON_INSTALL}"'
    elif megatron is None or not MEGATRON_WINDOW.contains(megatron, prereleases=True):
        problems["megatron-core"] = (
            f"megatron-core is {megatron or 'of an unknown version'} in {core}, but megatron_ext works with "
            f'{MEGATRON_WINDOW}. Run: {pip} "{MEGATRON_INSTALL}"; if that folder is a Megatron-LM checkout, '
            "check out a release of the supported line or take it off PYTHONPATH."
        )
    return problems


def check_versions() -> list[str]:
    """What is wrong with the versions of Python, torch and megatron-core."""
    return list(version_problems().values())


def check_import_paths() -> list[str]:
    """Whether megatron.core and megatron.training come from one place.

    `megatron` is a namespace package: a checkout on the path and an installed wheel are merged silently.
    """
    paths = megatron_paths()
    core, training = paths["megatron.core"], paths["megatron.training"]
    if core is None:
        return []
    if training is None:
        return [
            f"megatron.core is in {core}, but there is no megatron.training. Run: {sys.executable} -m pip "
            f'install "{MEGATRON_INSTALL}", or put the whole Megatron-LM checkout on PYTHONPATH.'
        ]
    if Path(core).resolve().parent == Path(training).resolve().parent:
        return []
    return [
        f"Two copies of Megatron are mixed: megatron.core comes from {core}, megatron.training from "
        f"{training}. Use one: put the root of the Megatron-LM checkout first on PYTHONPATH (its `megatron` "
        "folder must hold both core and training), or take it off PYTHONPATH to use the installed wheel."
    ]
