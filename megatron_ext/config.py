"""Our flags: one dataclass per feature, whose field docstrings are the --help text.

`add_arguments` puts them into Megatron's own parser through upstream's `ArgumentGroupFactory`, so that they
are parsed, listed in --help and printed like stock flags. `preparse` reads only them from a full command
line, without importing torch or megatron: the launcher must know what is on before Megatron is imported.

Annotations must be real types (no `from __future__ import annotations`): both readers look at them.
"""

import argparse
import dataclasses
import enum
import types
import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from megatron_ext.parse_errors import unknown_flag_error
from megatron_ext.problems import refuse

CHECKS = ("bytes", "replicas", "layouts")


def parse_checks(text: str) -> list[str]:
    """The value of --ext-check as a list of names; raises ArgumentTypeError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in CHECKS:
            raise argparse.ArgumentTypeError(
                f"no check is called {name!r}; give one or more of {','.join(CHECKS)}"
            )
    return list(dict.fromkeys(names))


@dataclasses.dataclass(kw_only=True)
class RunConfig:
    """Options of the launcher itself, for stock jobs and for every feature."""

    ext_config: str | None = None
    """YAML file with arguments in Megatron's spelling; the command line wins. Read by the launcher before
    Megatron starts."""

    ext_report: str | None = None
    """Folder for the run record: one JSON-lines file per rank with losses, times, peak memory and bytes sent.
    `megatron-ext compare` reads it."""

    ext_check: list[str] = dataclasses.field(
        default_factory=list,
        metadata={"argparse_meta": {"type": parse_checks, "nargs": None, "metavar": "NAME[,NAME...]"}},
    )
    """Self-checks at run time, separated by commas: bytes (sent bytes equal the formulas), replicas
    (replicated parameters stay equal on all ranks), layouts (shards have the shapes they should)."""

    ext_trace: str | None = None
    """Folder for the measured times of every pass and transfer of one step, for features with a pipeline
    schedule of ours. `megatron-ext trace --measured` draws them beside the plan."""

    ext_trace_step: int = 3
    """Step that is traced, counted from where this process starts or resumes."""

    ext_memory: bool = False
    """Measure the memory of one step by category (weights, gradients, optimizer, activations, vocabulary
    passes, communication), for --ext-report. That step takes several times as long. `megatron-ext memory`
    shows it."""

    ext_memory_step: int = 2
    """Step whose memory is measured, counted from where this process starts or resumes; at least 2, since the
    optimizer has no state before."""

    ext_dump_grads: str | None = None
    """Folder for a dump of all gradients of one step, before the optimizer step, under stock names and global
    shapes. `megatron-ext grads` compares two of them."""

    ext_dump_grads_step: int = 1
    """Step whose gradients are dumped, counted from 1."""


def add_arguments(parser: ArgumentParser, configs: Iterable[type]) -> ArgumentParser:
    """Add every field of the config dataclasses to Megatron's parser; imports megatron."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    for config in configs:
        ArgumentGroupFactory(config).build_group(parser, title=f"megatron_ext {config.__name__}")
    return parser


def light_parser(configs: Iterable[type], stock: Sequence[str] = ()) -> ArgumentParser:
    """The same flags as `add_arguments` gives, without help texts and without importing megatron.

    `stock` names stock flags to read too; their values are lists of strings, or None when not given.
    """
    parser = _Preparser(allow_abbrev=False, add_help=False)
    for config in configs:
        for field in dataclasses.fields(config):
            if field.init:
                names, options = _option(field)
                parser.add_argument(*names, **options)
    for flag in stock:
        parser.add_argument(flag, nargs="*", default=None)
    return parser


def preparse(
    argv: Sequence[str], configs: Iterable[type] = (RunConfig,), stock: Sequence[str] = ()
) -> Namespace:
    """Read our flags out of a full command line that may hold anything else.

    Exits with 2 and a message when one of our flags has a bad value.
    """
    return light_parser(configs, stock).parse_known_args(list(argv))[0]


class _Preparser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse([unknown_flag_error(self, message)])


def _option(field: dataclasses.Field) -> tuple[list[str], dict[str, Any]]:
    """Names and keyword arguments of `add_argument` for one field, as upstream's factory chooses them."""
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    name = field.name.replace("_", "-")
    options: dict[str, Any] = {"arg_names": [f"--{name}"], "dest": field.name, "default": default}
    if field.type is bool:
        if default:
            options |= {"action": "store_false", "arg_names": [f"--no-{name}", f"--disable-{name}"]}
        else:
            options["action"] = "store_true"
    else:
        options |= _value_options(field.type)
    options |= field.metadata.get("argparse_meta", {})
    return options.pop("arg_names"), options


def _value_options(annotation: Any) -> dict[str, Any]:
    """`type`, `nargs` and `choices` for an annotation that upstream's factory accepts."""
    arguments = typing.get_args(annotation)
    match typing.get_origin(annotation):
        case None if issubclass(annotation, enum.Enum):
            return {"type": lambda text: annotation[text], "choices": list(annotation)}
        case None:
            return {"type": annotation}
        case typing.Literal:
            return {"type": type(arguments[0]), "choices": arguments}
        case origin if origin is list:
            return _value_options(arguments[0]) | {"nargs": "+"}
        case origin if origin in (types.UnionType, typing.Union) and arguments[1:] == (types.NoneType,):
            return _value_options(arguments[0])
    raise TypeError(f"a flag cannot have the type {annotation}: use X, X | None, list[X], Literal or an Enum")
