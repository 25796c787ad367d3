"""What can be patched: the patch record, the errors, and finding the object that a target names."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

UPSTREAM = "megatron"


class PatchError(RuntimeError):
    """Patches that cannot be applied; `problems` lists every reason found."""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        super().__init__("\n  - ".join(["these patches cannot be applied:", *self.problems]))


class DriftError(PatchError):
    """The installed upstream differs from what was reviewed, and nothing else is wrong."""


@dataclass(frozen=True)
class Patch:
    """One change of one upstream object.

    `make` gets the original (for static and class methods the plain function, for a property the property)
    and returns a new object; it must not change the original. Wrappers pass `*args, **kwargs` through.
    """

    target: str
    """"package.module:Qual.name"; name the module that defines the object."""
    make: Callable[[Any], Any]
    kind: Literal["wrap", "replace"]
    """A wrap calls the original; a replace does not, so the original's body has to be reviewed."""
    why: str
    feature: str
    needs: tuple[str, ...] = ()
    """Parameters of the target that the new object reads."""

    @property
    def key(self) -> tuple[str, ...]:
        """What makes two patches the same one. Makers count by name, since catalogues build them anew."""
        maker = f"{getattr(self.make, '__module__', '')}.{getattr(self.make, '__qualname__', id(self.make))}"
        return (self.target, self.kind, self.feature, self.why, maker)

    @property
    def reason(self) -> str:
        """Who asks for this patch and what helps, for messages."""
        return (
            f"Needed by {self.feature!r} ({self.why}): leave that off, or install a megatron-core that "
            "`megatron-ext doctor` calls supported."
        )


@dataclass(frozen=True, eq=False)
class Found:
    """A resolved target: `raw` is what `owner` (a module or class) holds or inherits under `name`."""

    target: str
    owner: Any
    name: str
    raw: Any

    @property
    def is_upstream(self) -> bool:
        """Whether the target belongs to Megatron, and so falls under the contract."""
        return self.target.split(":")[0].split(".")[0] == UPSTREAM

    @property
    def is_shared(self) -> bool:
        """Whether other modules can hold the same object by value (constants are not meant by identity)."""
        return isinstance(self.owner, ModuleType) and callable(self.raw)

    @property
    def plain(self) -> Any:
        """The object without a static or class method around it."""
        return self.raw.__func__ if isinstance(self.raw, (staticmethod, classmethod)) else self.raw

    @property
    def signature(self) -> inspect.Signature | None:
        """Parameters, `self` and `cls` included; None for what has none (constants, some builtins)."""
        subject = self.raw.fget if isinstance(self.raw, property) else self.plain
        try:
            return inspect.signature(subject)
        except (TypeError, ValueError):
            return None


def resolve(target: str) -> Found:
    """Import the module of `target` and find the object; a PatchError says what is missing."""
    module_name, _, qualname = target.partition(":")
    if not module_name or not qualname:
        raise PatchError([f"{target!r} is no target; write 'package.module:Qual.name'."])
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise PatchError([f"{target}: module {module_name} cannot be imported ({error})."]) from error
    *path, name = qualname.split(".")
    seen = module_name
    for part in path:
        if not hasattr(owner, part):
            raise PatchError([_missing(target, seen, owner, part)])
        owner, seen = getattr(owner, part), f"{seen}.{part}"
        if not isinstance(owner, (type, ModuleType)):
            kind = type(owner).__name__
            raise PatchError([f"{target}: {seen} is a {kind}; only modules and classes can be patched."])
    if not hasattr(owner, name):
        raise PatchError([_missing(target, seen, owner, name)])
    return Found(target, owner, name, look_up(owner, name))


def look_up(owner: Any, name: str) -> Any:
    """What a module or class holds under `name`, descriptors untouched, inherited ones included."""
    if name in vars(owner):
        return vars(owner)[name]
    # Inherited by a class, or made on demand by a module's __getattr__.
    return inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)


def _missing(target: str, where: str, owner: Any, name: str) -> str:
    close = difflib.get_close_matches(name, dir(owner), n=3)
    hint = f"; similar names there: {', '.join(close)}" if close else ""
    return f"{target}: {where} has no {name!r}{hint}."
