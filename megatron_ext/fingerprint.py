"""What identifies an upstream object: its parameters, and a hash of its source that ignores cosmetics.

The hash is taken of the definition as it stands in the module's file, decorators included, since objects are
often wrapped at import (jit, deprecation). Comments, formatting, docstrings and function annotations do not
count. `ast.dump` is not used because its output differs between Python versions.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_ext.targets import Found

# Fields that say nothing about behaviour, for any node that has them.
_COSMETIC = frozenset({"ctx", "kind", "type_comment", "returns", "lineno"})
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def kind_of(found: Found) -> str:
    """function, method, staticmethod, classmethod, property, class, or value (a constant or other object)."""
    raw = found.raw
    if isinstance(raw, (staticmethod, classmethod, property)):
        return type(raw).__name__
    if isinstance(raw, type):
        return "class"
    if not callable(raw):
        return "value"
    return "function" if isinstance(found.owner, ModuleType) else "method"


def parameters(found: Found) -> list[str] | None:
    """The signature as words, e.g. ["self", "x", "scale=", "*", "group="]; `=` marks a default."""
    if found.signature is None:
        return None
    words: list[str] = []
    previous: Any = None
    for parameter in found.signature.parameters.values():
        kind = parameter.kind
        if previous is parameter.POSITIONAL_ONLY and kind is not parameter.POSITIONAL_ONLY:
            words.append("/")
        if kind is parameter.KEYWORD_ONLY and previous not in (kind, parameter.VAR_POSITIONAL):
            words.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "")
        words.append(f"{stars}{parameter.name}{'' if parameter.default is parameter.empty else '='}")
        previous = kind
    if previous is inspect.Parameter.POSITIONAL_ONLY:
        words.append("/")
    return words


def body_hash(found: Found) -> str | None:
    """sha256 of the normalised source, or None where there is none (constants, C functions)."""
    nodes: list[Any] = definitions(_file_of(found), found.target.partition(":")[2])
    if not nodes:
        # Not defined under this name in this module: inherited or imported from elsewhere.
        subject = found.raw.fget if isinstance(found.raw, property) else found.plain
        try:
            nodes = ast.parse(textwrap.dedent(inspect.getsource(subject))).body
        except (TypeError, OSError, SyntaxError):
            return None
    text = "\n".join(canonical(node) for node in nodes)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_of(found: Found) -> Path | None:
    file = getattr(importlib.import_module(found.target.partition(":")[0]), "__file__", None)
    return Path(file) if file else None


def definitions(file: Path | None, qualname: str) -> list[Definition]:
    """Every definition of `qualname` in a source file: several if conditional, or a property's parts."""
    if file is None or file.suffix != ".py":
        return []
    scopes: list[ast.AST] = [_parse(file, file.stat().st_mtime_ns)]
    for part in qualname.split("."):
        scopes = [node for scope in scopes for node in _members(scope) if node.name == part]
    return scopes  # type: ignore[return-value]


def source(file: Path, qualname: str) -> list[str]:
    """Source lines of every definition of `qualname` in a file, decorators included, without an import."""
    lines = file.read_text(encoding="utf-8").splitlines()
    out: list[str] = []
    for node in definitions(file, qualname):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        out += lines[first - 1 : node.end_lineno]
    return out


@functools.lru_cache(maxsize=64)
def _parse(file: Path, modified_ns: int) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # upstream's own invalid escapes
        return ast.parse(file.read_text(encoding="utf-8"))


def _members(scope: ast.AST) -> Iterator[Definition]:
    """Functions and classes of a module or class body, also those under if, try and with."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, Definition):
            yield child
        elif isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _members(child)


def canonical(node: Any) -> str:
    """A text that two pieces of source share exactly if they differ in cosmetics only."""
    if isinstance(node, ast.Constant):
        return ascii(node.value)
    if isinstance(node, ast.JoinedStr):
        # Python 3.12 has empty pieces in nested format specifications, 3.13 does not.
        pieces = [canonical(value) for value in node.values if getattr(value, "value", None) != ""]
        return f"JoinedStr([{','.join(pieces)}])"
    if isinstance(node, list):
        return f"[{','.join(canonical(item) for item in node if not _is_text(item))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = [
        f"{name}={canonical(value)}"
        for name, value in ast.iter_fields(node)
        if value is not None
        and value != []
        and name not in _COSMETIC
        and not (isinstance(node, ast.arg) and name == "annotation")
    ]
    return f"{type(node).__name__}({','.join(fields)})"


def _is_text(node: Any) -> bool:
    """A docstring, or a string that documents a field."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
