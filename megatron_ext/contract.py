"""The reviewed upstream contract: what every patched object looked like when its patch was written.

`patches/<version>.toml` holds, for one exact megatron-core version, the parameters and the body hash of every
target. A version without a file of its own is compared with the nearest file: same hash, same code.
"""

import importlib.resources
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path

from packaging.version import Version

from megatron_ext import fingerprint
from megatron_ext.targets import DriftError, Found, Patch, PatchError, resolve

__all__ = ["Contract", "DriftError", "Entry", "available", "describe", "folder", "load_contract"]

SCHEMA = 1


@dataclass(frozen=True)
class Entry:
    """One target as reviewed."""

    kind: str
    parameters: tuple[str, ...] | None
    body: str | None
    """sha256 of the normalised source; None where there is none."""

    @classmethod
    def of(cls, found: Found) -> "Entry":
        words = fingerprint.parameters(found)
        kind = fingerprint.kind_of(found)
        body = None if kind == "value" else fingerprint.body_hash(found)
        return cls(kind, None if words is None else tuple(words), body)


def folder() -> Traversable:
    """Where the contracts are: in the installed package, or in `patches/` of a checkout."""
    try:
        return importlib.resources.files("megatron_ext.patches")
    except ModuleNotFoundError:
        return Path(__file__).resolve().parent.parent / "patches"


def available(where: Traversable | None = None) -> list[str]:
    """Versions with a contract, oldest first."""
    where = folder() if where is None else where
    names = [entry.name for entry in where.iterdir()] if where.is_dir() else []
    return sorted((name.removesuffix(".toml") for name in names if name.endswith(".toml")), key=Version)


def nearest(installed: str, versions: Iterable[str]) -> str | None:
    """The version itself, else the closest one in numbers (the older one of two); None if there is none."""

    def distance(version: str) -> tuple[int, ...]:
        have, want = Version(version).release, Version(installed).release
        return tuple(abs(a - b) for a, b in zip(have, want, strict=False))

    return min(sorted(versions, key=Version), key=distance, default=None)


def describe(target: str) -> Entry:
    """The entry of an importable target as it is installed; PatchError if it is gone."""
    from megatron_ext.patching import pristine

    return Entry.of(pristine(resolve(target)))


@dataclass(frozen=True)
class Contract:
    """What was reviewed (`version`, `entries`), for use with what is installed (`installed`)."""

    version: str
    installed: str
    entries: Mapping[str, Entry]

    @property
    def is_exact(self) -> bool:
        return Version(self.version) == Version(self.installed)

    @property
    def note(self) -> str:
        """Log line for a version without a contract of its own."""
        return (
            f"megatron-core {self.installed} has no contract of its own: "
            f"every patched object was compared with {self.version}"
        )

    def errors(self, patch: Patch, found: Found) -> list[str]:
        """Drift that makes the patch unsafe.

        A replace stands for the whole original, so that any difference counts. A wrap passes on what it does
        not know; only what it reads counts: the kind of object, and where its `needs` parameters stand.
        """
        if not found.is_upstream:
            return []
        reviewed = self.entries.get(patch.target)
        if patch.kind == "replace":
            changes = (
                ["it was never reviewed"] if reviewed is None else differences(reviewed, Entry.of(found))
            )
        else:
            changes = [] if reviewed is None else _changes_for_wrap(reviewed, found, patch.needs)
        if not changes:
            return []
        return [
            f"{patch.target} is not what the contract of megatron-core {self.version} says "
            f"(installed: {self.installed}): {'; '.join(changes)}. Needed by {patch.feature!r} "
            f"({patch.why}). {self._cure(patch)}"
        ]

    def _cure(self, patch: Patch) -> str:
        if self.is_exact:
            install = "reinstall megatron-core if this copy was edited"
        else:
            install = f"install a megatron-core with a contract ({', '.join(available())})"
        return f"Leave {patch.feature!r} off, {install}, or review the change and run `megatron-ext lock`."

    def warnings(self, patch: Patch, found: Found) -> list[str]:
        """Drift that is worth a look but stops nothing (for `doctor`)."""
        if not found.is_upstream or self.errors(patch, found):
            return []
        reviewed = self.entries.get(patch.target)
        changes = ["not in the contract"] if reviewed is None else differences(reviewed, Entry.of(found))
        if not changes:
            return []
        text = "; ".join(changes)
        return [f"{patch.target}, wrapped by {patch.feature!r}, against {self.version}: {text}"]


def load_contract(installed: str, where: Traversable | None = None) -> Contract:
    """The contract of this exact megatron-core version, else the nearest; PatchError if there is none."""
    where = folder() if where is None else where
    version = nearest(installed, available(where))
    if version is None:
        raise PatchError([f"no upstream contract in {where}: megatron_ext is not complete; reinstall it."])
    data = tomllib.loads((where / f"{version}.toml").read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA:
        problem = f"patches/{version}.toml has schema {data.get('schema')}, not {SCHEMA}"
        raise PatchError([f"{problem}; write it anew with `megatron-ext lock`."])
    entries = {
        target: Entry(
            kind=entry["kind"],
            parameters=tuple(entry["parameters"]) if "parameters" in entry else None,
            body=entry.get("body"),
        )
        for target, entry in data.get("target", {}).items()
    }
    return Contract(version, installed, entries)


def _changes_for_wrap(reviewed: Entry, found: Found, needs: Iterable[str]) -> list[str]:
    kind, words = fingerprint.kind_of(found), fingerprint.parameters(found)
    if kind != reviewed.kind:
        return [f"was a {reviewed.kind}, is a {kind}"]
    moved = [name for name in needs if _place(reviewed.parameters, name) != _place(words, name)]
    if not moved:
        return []
    return [f"parameter {', '.join(moved)} moved: {_shown(reviewed.parameters)} became {_shown(words)}"]


def differences(old: Entry, new: Entry) -> list[str]:
    """What changed between two entries, in words."""
    if old.kind != new.kind:
        return [f"was a {old.kind}, is a {new.kind}"]
    changes = []
    if old.parameters != new.parameters:
        before, after = _names(old.parameters), _names(new.parameters)
        added = [name for name in after if name not in before]
        removed = [name for name in before if name not in after]
        changes += [f"parameters added: {', '.join(added)}"] if added else []
        changes += [f"parameters removed: {', '.join(removed)}"] if removed else []
        if not added and not removed:
            changes.append(f"parameters changed from {_shown(old.parameters)} to {_shown(new.parameters)}")
    if old.body != new.body:
        changes.append("body changed")
    return changes


def _names(words: Iterable[str] | None) -> list[str]:
    return [name for word in words or () if (name := word.strip("*/="))]


def _place(words: Iterable[str] | None, name: str) -> tuple[int, bool] | None:
    """The number of parameters before it, and whether it is keyword-only; None if there is no such one."""
    position = 0
    only_keyword = False
    for word in words or ():
        if word.strip("*/=") == name:
            return (-1, True) if only_keyword else (position, False)
        only_keyword = only_keyword or word.startswith("*")
        position += word != "/"
    return None


def _shown(words: Iterable[str] | None) -> str:
    return f"({', '.join(words or ())})"


def dump(entries: Mapping[str, Entry], version: str, needed_by: Mapping[str, str]) -> str:
    """A contract as TOML text; `needed_by` says for each target which features patch it and how."""
    lines = [
        "# What the patched parts of megatron-core look like in this exact version, as reviewed.",
        "# Written by `megatron-ext lock`; README.md beside it says how to review.",
        f"schema = {SCHEMA}",
        f"megatron_core = {_quoted(version)}",
    ]
    for target, entry in sorted(entries.items()):
        lines += ["", f"[target.{_quoted(target)}]", f"kind = {_quoted(entry.kind)}"]
        if entry.parameters is not None:
            lines.append(f"parameters = [{', '.join(map(_quoted, entry.parameters))}]")
        if entry.body is not None:
            lines.append(f"body = {_quoted(entry.body)}")
        lines.append(f"needed_by = {_quoted(needed_by[target])}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of TOML's."""
    return json.dumps(text, ensure_ascii=False)
