"""Doctor's checks of what is installed: versions, import paths, packages, upstream drift."""

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from megatron_ext import compat
from megatron_ext.cpu import hide_gpu_packages
from megatron_ext.tools.doctor_report import Finding

# What Megatron or we import without which some run fails: module -> name for pip.
REQUIRED = {
    "numpy": "numpy",
    "yaml": "PyYAML",
    "sentencepiece": "sentencepiece",
    "psutil": "psutil",
    "einops": "einops",
    "tensorboard": "tensorboard",
}
# Package -> what its absence means, and what it brings.
OPTIONAL = {
    "transformer_engine": (
        "use --transformer-impl local; no FP8, no context parallelism",
        "fused GPU layers",
    ),
    "apex": ("gradient accumulation fusion and fused optimizers come from elsewhere", "fused GPU kernels"),
    "flash_attn": ("attention comes from Transformer Engine or torch", "flash attention kernels"),
}


def check(cpu: bool) -> Iterator[Finding]:
    """All checks of this file; importing Megatron takes seconds."""
    problems = compat.version_problems()
    versions = {
        "python": (compat.python_version(), sys.executable),
        "torch": (compat.torch_version(), _folder("torch")),
        "megatron-core": (compat.megatron_version(), compat.megatron_paths()["megatron.core"]),
    }
    for name, (version, where) in versions.items():
        problem = problems.get(name)
        yield Finding("FAIL", name, problem) if problem else Finding("ok", name, f"{version} in {where}")
    mixed = compat.check_import_paths()
    for problem in mixed:
        yield Finding("FAIL", "import paths", problem)
    if not mixed and "megatron-core" not in problems:
        yield Finding("ok", "import paths", "megatron.core and megatron.training come from one place")
    yield from _pythonpath()
    missing = [pip_name for module, pip_name in REQUIRED.items() if not _is_installed(module)]
    if missing:
        fix = f"{sys.executable} -m pip install {' '.join(missing)}"
        yield Finding("FAIL", "required packages", f"missing: {', '.join(missing)}", fix)
    else:
        yield Finding("ok", "required packages", ", ".join(REQUIRED.values()))
    yield from _optional(cpu)
    if problems or mixed or missing:
        yield Finding("warn", "upstream contract", "not checked: the failures above come first")
        return
    if cpu:
        hide_gpu_packages()
    yield from _upstream()


def _folder(module: str) -> str | None:
    spec = importlib.util.find_spec(module)
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else None


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _pythonpath() -> Iterator[Finding]:
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    gone = [entry for entry in entries if not Path(entry).exists()]
    if gone:
        yield Finding("warn", "PYTHONPATH", f"names what does not exist: {', '.join(gone)}", "take it off")
    held = [entry for entry in entries if (Path(entry) / "megatron").is_dir()]
    note = f"; a Megatron lies in {', '.join(held)}" if held else ""
    if not gone:
        yield Finding("ok", "PYTHONPATH", f"{os.pathsep.join(entries) or 'not set'}{note}")


def _optional(cpu: bool) -> Iterator[Finding]:
    for package, (without, brings) in OPTIONAL.items():
        if not _is_installed(package):
            yield Finding("ok", package, "absent" if cpu else f"absent: {without}")
        elif cpu:
            yield Finding("ok", package, "installed; hidden from Megatron under --cpu")
        elif package == "apex" and not (Path(_folder(package)) / "multi_tensor_apply").is_dir():
            yield Finding(
                "FAIL",
                package,
                f"the package in {_folder('apex')} is not NVIDIA's Apex but an unrelated one of that name",
                f"{sys.executable} -m pip uninstall apex; NVIDIA's is installed from its sources",
            )
        else:
            yield _imported(package, brings)


def _imported(package: str, brings: str) -> Finding:
    """Whether an installed package works: those with CUDA code often do not match torch."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(package)
    except Exception as error:
        # Whatever a package's own code raises (an assertion, a KeyError, ...) is what doctor has to report.
        fix = f"build {package} again for this torch, or remove it"
        what = f"is installed but cannot be imported: {type(error).__name__}: {error}"
        return Finding("FAIL", package, what, fix)
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown version"
    return Finding("ok", package, f"{version}: {brings}")


def _upstream() -> Iterator[Finding]:
    """Import Megatron; then its defects, and drift of everything that any switch can patch."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("megatron.training")
    except Exception as error:
        # Megatron imports the optional packages, so that here, too, any error can come up.
        yield Finding(
            "FAIL",
            "import megatron",
            f"{type(error).__name__}: {error}",
            "install what is missing or does not match; `python -c 'import megatron.training'` shows where",
        )
        return
    names = dict.fromkeys(patch.why for patch in compat.workarounds_present())
    for why in names:
        yield Finding("ok", "workaround", why)
    yield from _helpers()
    yield from _drift()


def _helpers() -> Iterator[Finding]:
    """Whether the datasets' C++ part is there or can be built."""
    from megatron_ext import workarounds

    if workarounds.has_built_helpers():
        yield Finding("ok", "dataset helpers", "compiled for this Python")
        return
    tools = [tool for tool in ("make", "g++") if shutil.which(tool) is None]
    if not workarounds.has_makefile():
        fix = "install a megatron-core wheel for this Python, or use a Megatron-LM checkout"
        yield Finding("FAIL", "dataset helpers", "not compiled, and there is no Makefile to do it", fix)
    elif tools:
        fix = "install a C++ compiler and make"
        yield Finding("FAIL", "dataset helpers", f"not compiled, and {' and '.join(tools)} is missing", fix)
    else:
        yield Finding("ok", "dataset helpers", "not compiled yet; the first run builds them with make")


def _drift() -> Iterator[Finding]:
    from megatron_ext.contract import load_contract
    from megatron_ext.features import patch_catalogue
    from megatron_ext.patching import PatchError, missing_parameters, pristine
    from megatron_ext.targets import resolve

    try:
        contract = load_contract(compat.megatron_version())
    except PatchError as error:
        for problem in error.problems:
            yield Finding("FAIL", "upstream contract", problem)
        return
    patches = patch_catalogue()
    drifted: set[str] = set()
    for patch in patches:
        try:
            found = pristine(resolve(patch.target))
        except PatchError as error:
            problems, notes = [f"{problem} {patch.reason}" for problem in error.problems], []
        else:
            problems = missing_parameters(patch, found) + contract.errors(patch, found)
            notes = [] if patch.target in drifted else contract.warnings(patch, found)
        for problem in problems:
            yield Finding("FAIL", "upstream drift", problem)
        for note in notes:
            yield Finding("warn", "upstream drift", note, "review it, then run `megatron-ext lock`")
        if problems or notes:
            drifted.add(patch.target)
    if not contract.is_exact:
        yield Finding("ok", "upstream contract", contract.note)
    if not drifted:
        text = f"all {len(patches)} patches that flags can ask for fit what is installed"
        yield Finding("ok", "upstream contract", text)
