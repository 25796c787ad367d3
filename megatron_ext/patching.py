"""Declarative patches: collect, check everything, then apply all of them or none.

`apply` resolves every target, checks the parameters that the patches read and the reviewed upstream
contract, and looks for conflicts. Only when nothing is wrong does it change anything; if a maker fails
half-way, what was changed is restored.

Order: replaces come first, then wraps in the order of the list, so that of two wraps of one target the first
listed is the inner one.

When a module attribute that is callable (function, class) changes, every attribute of a loaded `megatron.*`
module that *is* the old object is rebound too. References in containers, closures, default arguments and
existing subclasses cannot be rebound: patch the place that looks them up instead.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron_ext.targets import UPSTREAM, DriftError, Found, Patch, PatchError, look_up, resolve

if TYPE_CHECKING:
    from megatron_ext.contract import Contract

__all__ = ["Applied", "DriftError", "Patch", "PatchError", "apply", "missing_parameters", "pristine"]

_ABSENT = object()
Holders = dict[int, list[tuple[ModuleType, str]]]


@dataclass(frozen=True, eq=False)
class _Site:
    """One place that holds the object; `before` is what the owner's own namespace had there, or _ABSENT."""

    owner: Any
    name: str
    before: Any

    def __str__(self) -> str:
        if isinstance(self.owner, ModuleType):
            return f"{self.owner.__name__}:{self.name}"
        return f"{self.owner.__module__}:{self.owner.__qualname__}.{self.name}"

    def restore(self) -> None:
        if self.before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


@dataclass(frozen=True, eq=False)
class _Layer:
    """An applied patch: the object it found, the one it left, and where."""

    patch: Patch
    old: Any
    new: Any
    sites: tuple[_Site, ...]

    def covers(self, owner: Any, name: str) -> bool:
        return any(site.owner is owner and site.name == name for site in self.sites)

    def restore(self) -> None:
        for site in reversed(self.sites):
            site.restore()


# Every applied patch of this process, oldest first.
_ACTIVE: list[_Layer] = []


class Applied:
    """What one `apply` did; leaving a `with` block undoes it."""

    def __init__(self, layers: Sequence[_Layer]):
        self._layers = list(layers)

    @property
    def records(self) -> list[dict[str, Any]]:
        """One dict per patch for the run record: target, kind, feature, why, sites."""
        return [
            {
                "target": layer.patch.target,
                "kind": layer.patch.kind,
                "feature": layer.patch.feature,
                "why": layer.patch.why,
                "sites": [str(site) for site in layer.sites],
            }
            for layer in self._layers
        ]

    def undo(self) -> None:
        """Restore every site exactly; a second call does nothing. PatchError if something lies on top."""
        problems = [problem for layer in self._layers for problem in self._obstacles(layer)]
        if problems:
            raise PatchError(problems)
        for layer in reversed(self._layers):
            layer.restore()
            _ACTIVE.remove(layer)
        self._layers = []

    def _obstacles(self, layer: _Layer) -> Iterator[str]:
        later = _ACTIVE[_ACTIVE.index(layer) + 1 :]
        for site in layer.sites:
            above = [x for x in later if x.covers(site.owner, site.name)]
            foreign = [x.patch.feature for x in above if x not in self._layers]
            if foreign:
                yield f"{site} cannot be restored: {foreign[-1]!r} patched it later; undo that first."
            elif not above and vars(site.owner).get(site.name, _ABSENT) is not layer.new:
                yield f"{site} cannot be restored: other code replaced what {layer.patch.feature!r} put in."

    def __enter__(self) -> "Applied":
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def apply(patches: Sequence[Patch], *, contract: "Contract | None", log: Callable[[str], None]) -> Applied:
    """Apply all patches or none, and log one line for each; those that are active already are left out.

    Raises PatchError with every problem found (DriftError if the only trouble is that upstream differs from
    the contract). What a maker raises passes through, with the patch in a note, after all is restored.
    """
    active = {layer.patch.key for layer in _ACTIVE}
    fresh = list({patch.key: patch for patch in patches if patch.key not in active}.values())
    _refuse_namesakes(patches)
    found = _check(fresh, contract)
    if contract is not None and not contract.is_exact and any(f.is_upstream for f in found.values()):
        log(contract.note)
    layers: list[_Layer] = []
    holders = _holders()
    for patch in sorted(fresh, key=lambda patch: patch.kind != "replace"):
        try:
            layers.append(_install(patch, found[patch.target], holders))
        except BaseException as error:
            for layer in reversed(layers):
                layer.restore()
            error.add_note(f"while patching {patch.target} for {patch.feature!r}; all was taken back")
            raise
    _ACTIVE.extend(layers)
    applied = Applied(layers)
    for record in applied.records:
        log(_log_line(record))
    return applied


def _log_line(record: dict[str, Any]) -> str:
    sites = record["sites"]
    where = f"{len(sites)} site{'s' if len(sites) > 1 else ''}: {', '.join(sites)}"
    return f"patched {record['target']} ({record['kind']}, {record['feature']}) at {where}: {record['why']}"


# --- checks ------------------------------------------------------------------------------------------------


def _check(patches: Sequence[Patch], contract: "Contract | None") -> dict[str, Found]:
    """Resolve and check all patches; raise with every problem, else return the resolved targets."""
    found: dict[str, Found] = {}
    problems: list[str] = []
    drift: list[str] = []
    for patch in patches:
        try:
            here = resolve(patch.target)
        except PatchError as error:
            problems += [f"{problem} {patch.reason}" for problem in error.problems]
            continue
        found[patch.target] = here
        original = pristine(here)
        problems += missing_parameters(patch, original)
        if contract is not None:
            drift += contract.errors(patch, original)
    problems += _conflicts([(patch, found[patch.target]) for patch in patches if patch.target in found])
    if problems or drift:
        raise (PatchError if problems else DriftError)(problems + drift)
    return found


def _refuse_namesakes(patches: Sequence[Patch]) -> None:
    """Two makers of one name (closures of one factory) look like one patch; one would be dropped silently."""
    first: dict[tuple[str, ...], Patch] = {}
    twins = [p for p in patches if first.setdefault(p.key, p).make is not p.make]
    if twins:
        raise PatchError(
            [
                f"{p.target}: {p.feature!r} has two patches with the same reason and maker name ({p.why}); "
                "give each a `why` of its own."
                for p in twins
            ]
        )


def pristine(found: Found) -> Found:
    """The target as it was before any active patch."""
    raw = found.raw
    for layer in reversed(_ACTIVE):
        if layer.new is raw and layer.covers(found.owner, found.name):
            raw = layer.old
    return Found(found.target, found.owner, found.name, raw)


def missing_parameters(patch: Patch, found: Found) -> list[str]:
    """Problems with the parameters that the patch reads by name."""
    if not patch.needs:
        return []
    wanted = ", ".join(patch.needs)
    if found.signature is None:
        return [f"{patch.target} shows no signature in which to find {wanted}. {patch.reason}"]
    names = found.signature.parameters
    gone = [name for name in patch.needs if name not in names]
    if not gone:
        return []
    return [f"{patch.target} has no parameter {', '.join(gone)}, only ({', '.join(names)}). {patch.reason}"]


def _conflicts(pairs: Sequence[tuple[Patch, Found]]) -> Iterator[str]:
    """Two replaces of one object, a replace over active wraps, a patch inside a replaced class."""
    replaced: dict[tuple[int, str], Patch] = {}
    classes = {id(layer.old): layer.patch for layer in _ACTIVE if layer.patch.kind == "replace"}
    for patch, found in pairs:
        if patch.kind != "replace":
            continue
        classes[id(found.raw)] = patch
        below = [layer.patch for layer in _ACTIVE if layer.covers(found.owner, found.name)]
        other = next((x for x in below if x.kind == "replace"), replaced.setdefault(_spot(found), patch))
        if other is not patch:
            yield (
                f"{patch.target} is replaced by both {other.feature!r} ({other.why}) and {patch.feature!r} "
                f"({patch.why}); switch one of them off."
            )
        elif below:
            yield (
                f"{patch.target}: {patch.feature!r} would replace it and lose what {below[-1].feature!r} "
                "wrapped around it; apply the replacement first or in the same call."
            )
    for patch, found in pairs:
        if outer := classes.get(id(found.owner)):
            yield (
                f"{patch.target} ({patch.feature!r}) lies in {outer.target}, which {outer.feature!r} "
                "replaces; switch one of them off."
            )


def _spot(found: Found) -> tuple[int, str]:
    """Identity of a target: Megatron's functions and classes are one wherever bound, others are a place."""
    return (id(found.raw), "") if found.is_upstream and found.is_shared else (id(found.owner), found.name)


# --- changes -----------------------------------------------------------------------------------------------


def _install(patch: Patch, found: Found, holders: Holders) -> _Layer:
    """Make the new object and put it in every place of the old one."""
    current = Found(found.target, found.owner, found.name, look_up(found.owner, found.name))
    new = patch.make(current.plain)
    _check_made(patch, current, new)
    method = type(current.raw)
    if method in (staticmethod, classmethod) and not isinstance(new, (staticmethod, classmethod)):
        new = method(new)
    sites = [_Site(found.owner, found.name, vars(found.owner).get(found.name, _ABSENT))]
    if current.is_shared:
        aliases = holders.get(id(current.raw), [])
        sites += [_Site(*place, current.raw) for place in aliases if place != (found.owner, found.name)]
    done: list[_Site] = []
    try:
        for site in sites:
            setattr(site.owner, site.name, new)
            done.append(site)
    except BaseException:
        for site in reversed(done):
            site.restore()
        raise
    if current.is_shared:  # a later patch of the same object finds the new one where this one left it
        holders[id(new)] = [(site.owner, site.name) for site in sites]
    return _Layer(patch, current.raw, new, tuple(sites))


def _check_made(patch: Patch, found: Found, new: Any) -> None:
    """A maker that returns something unusable is a bug in the feature."""
    old = found.plain
    if new is old or new is found.raw:
        raise TypeError(f"make of {patch.target} returned the original: nothing would be patched")
    if callable(old) and not callable(new) and not hasattr(new, "__get__"):
        raise TypeError(f"make of {patch.target} returned {new!r}, but the original is callable")
    if isinstance(found.owner, type) and hasattr(old, "__get__") and not hasattr(new, "__get__"):
        raise TypeError(f"make of {patch.target} returned {new!r}, which does not bind to instances")


def _holders() -> Holders:
    """Places (module, attribute) of loaded megatron modules by the id of the callable that they hold."""
    loaded = [m for name, m in sys.modules.items() if name == UPSTREAM or name.startswith(f"{UPSTREAM}.")]
    holders: Holders = {}
    for module in {id(m): m for m in loaded if isinstance(m, ModuleType)}.values():
        for name, value in list(vars(module).items()):
            if callable(value):
                holders.setdefault(id(value), []).append((module, name))
    return holders
