"""`megatron-ext lock`: write the upstream contract of the installed megatron-core and show what changed.

The comparison is with the nearest contract that exists. Contracts hold hashes; a diff of the sources is shown
where a copy of the older version is found (on sys.path beside the one in use, or in `--against`).
"""

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_ext import compat, contract, fingerprint
from megatron_ext.contract import Contract, Entry
from megatron_ext.targets import Patch, PatchError


def main(argv: list[str]) -> int:
    """Write the contract; 0 if it was written, 1 if a target is gone, 2 if the input makes no sense."""
    options = _parser().parse_args(argv)
    version = compat.megatron_version()
    problem = _problem(options, version)
    if problem:
        print(f"megatron-ext lock: {problem}", file=sys.stderr)
        return 2
    for text in [*compat.check_versions(), *compat.check_import_paths()]:
        print(f"warning: {text}", file=sys.stderr)
    with warnings.catch_warnings():
        # Megatron warns of every optional package that is absent.
        warnings.simplefilter("ignore")
        patches = _upstream_patches()
        entries, gone = _entries(patches)
    if gone:
        print("Nothing was written; these targets are gone:\n  - " + "\n  - ".join(gone), file=sys.stderr)
        return 1
    print(f"megatron-core {version}: {len(entries)} targets of {len(patches)} patches")
    old = contract.nearest(version, contract.available())
    if old is not None:
        before = contract.load_contract(version)
        print("\n".join(_report(before, entries, patches, options.against)))
    else:
        print("There is no earlier contract: every body below has to be reviewed.")
    file = options.output / f"{version}.toml"
    file.write_text(contract.dump(entries, version, _needed_by(patches)), encoding="utf-8")
    print(f"wrote {file}; patches/README.md says how to review what changed before it is committed")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ext lock",
        description="Write down what every patched object of the installed megatron-core looks like "
        "(patches/VERSION.toml) and show what changed against the nearest contract. Review it before you "
        "commit the file: it says that the patches fit.",
    )
    parser.add_argument(
        "--output", type=Path, default=Path(str(contract.folder())), help="folder (default: %(default)s)"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="DIR",
        help="folder with a `megatron` of the older version, for a diff of the sources: a checkout, or what "
        "`pip install --no-deps --target DIR megatron-core==VERSION` wrote",
    )
    return parser


def _problem(options: argparse.Namespace, version: str | None) -> str | None:
    if version is None:
        return compat.version_problems()["megatron-core"]
    if not options.output.is_dir() or not os.access(options.output, os.W_OK):
        return f"--output {options.output} is not a folder that can be written; name one that is."
    if options.against is not None and compat.version_in(options.against / "megatron" / "core") is None:
        return f"--against {options.against} holds no megatron/core; give the folder above `megatron`."
    return None


def _upstream_patches() -> list[Patch]:
    """Every patch of Megatron that any switch can install; imports Megatron."""
    from megatron_ext.features import patch_catalogue

    return [patch for patch in patch_catalogue() if patch.target.startswith("megatron.")]


def _entries(patches: Sequence[Patch]) -> tuple[dict[str, Entry], list[str]]:
    """The entry of each target, and what cannot be found."""
    entries: dict[str, Entry] = {}
    gone: list[str] = []
    for patch in patches:
        try:
            entries[patch.target] = contract.describe(patch.target)
        except PatchError as error:
            gone += [f"{problem} {patch.reason}" for problem in error.problems]
    return entries, gone


def _needed_by(patches: Sequence[Patch]) -> dict[str, str]:
    needed: dict[str, list[str]] = {}
    for patch in patches:
        needed.setdefault(patch.target, []).append(f"{patch.feature} ({patch.kind})")
    return {target: ", ".join(dict.fromkeys(users)) for target, users in needed.items()}


def _report(
    before: Contract, entries: Mapping[str, Entry], patches: Sequence[Patch], against: Path | None
) -> Iterator[str]:
    """What changed since the nearest contract, in words and where possible as a diff."""
    users = _needed_by(patches)
    new = [target for target in entries if target not in before.entries]
    dropped = [target for target in before.entries if target not in entries]
    changed = {
        target: changes
        for target, entry in entries.items()
        if target in before.entries and (changes := contract.differences(before.entries[target], entry))
    }
    yield f"compared with the contract of {before.version}:"
    yield from (f"  new, to be reviewed: {target}, for {users[target]}" for target in new)
    yield from (f"  not patched any more: {target}" for target in dropped)
    older = _older_copy(before.version, against)
    for target, changes in changed.items():
        yield f"  changed: {target}, for {users[target]}: {'; '.join(changes)}"
        if older is not None:
            yield from _diff(target, older)
    if changed and older is None:
        yield (
            f"  no copy of {before.version} is at hand. For a diff of the bodies: pip install --no-deps "
            f"--target DIR megatron-core=={before.version}, then megatron-ext lock --against DIR"
        )
    if new or changed:
        yield "  read every body named above, a replaced one line by line, before the file is committed"
    elif not dropped:
        yield "  no difference"


def _older_copy(version: str, against: Path | None) -> Path | None:
    """Folder above another copy of `megatron`: `--against`, else one of that version on sys.path."""
    if against is not None:
        return against
    used = Path(compat.megatron_paths()["megatron.core"]).resolve()
    for root in map(Path, sys.path):
        core = (root / "megatron" / "core").resolve()
        if core != used and compat.version_in(core) == version:
            return root
    return None


def _diff(target: str, older: Path) -> Iterator[str]:
    """Unified diff of the definitions of a target in the two copies, older first."""
    module, _, qualname = target.partition(":")
    installed = Path(compat.megatron_paths()["megatron.core"]).parent.parent
    sides = []
    for root in (older, installed):
        base = root.joinpath(*module.split("."))
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        sides.append(fingerprint.source(file, qualname) if file.is_file() else [])
    names = [f"{compat.version_in(older / 'megatron' / 'core')}/{target}", f"installed/{target}"]
    for line in difflib.unified_diff(*sides, *names, lineterm=""):
        yield f"    {line}"
