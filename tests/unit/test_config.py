import argparse
import dataclasses
import enum
import shlex
import typing

import pytest

from megatron_ext import config
from megatron_ext.config import RunConfig, preparse


class Color(enum.Enum):
    red = 1
    blue = 2


@dataclasses.dataclass(kw_only=True)
class EveryKind:
    """One field of each kind that a feature may use; a contract test reads it through upstream's factory."""

    kind_switch: bool = False
    """A switch."""
    kind_on: bool = True
    """A switch that is on."""
    kind_int: int = 3
    """A number."""
    kind_float: float | None = None
    """A number or nothing."""
    kind_old: typing.Optional[int] = None  # noqa: UP045
    """As upstream writes it."""
    kind_mode: typing.Literal["off", "naive"] = "off"
    """One of some words."""
    kind_color: Color = Color.red
    """One of an enumeration."""
    kind_sizes: list[int] = dataclasses.field(default_factory=list)
    """Several numbers."""
    kind_named: list[str] = dataclasses.field(
        default_factory=lambda: ["auto"],
        metadata={"argparse_meta": {"arg_names": ["--kind-name"], "nargs": 3}},
    )
    """Spelled out by hand."""
    kind_derived: int = dataclasses.field(default=0, init=False)
    """Not a flag."""


def test_defaults():
    assert vars(preparse([])) == {
        "ext_config": None,
        "ext_report": None,
        "ext_check": [],
        "ext_trace": None,
        "ext_trace_step": 3,
        "ext_memory": False,
        "ext_memory_step": 2,
        "ext_dump_grads": None,
        "ext_dump_grads_step": 1,
    }


def test_our_flags_are_found_among_anything():
    argv = shlex.split(
        "--num-layers 2 --ext-report out --data-path 0.3 a 0.7 b --ext-check bytes,replicas --lr -1 "
        "--ext-dump-grads=g --ext --ext-rep x --help --ext-dump-grads-step 4 stray -- --ext-config no"
    )
    flags = preparse(argv)
    assert flags.ext_report == "out"
    assert flags.ext_check == ["bytes", "replicas"]
    assert flags.ext_dump_grads == "g"
    assert flags.ext_dump_grads_step == 4
    assert flags.ext_config is None, "words after -- are no flags"


def test_flags_are_not_abbreviated():
    assert preparse(["--ext-dump", "x", "--ext-conf", "y"]) == preparse([])


@pytest.mark.parametrize(
    ("value", "names"),
    [("bytes", ["bytes"]), ("layouts, bytes,layouts", ["layouts", "bytes"]), ("", [])],
)
def test_checks(value, names):
    assert preparse(["--ext-check", value]).ext_check == names


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--ext-check", "byte"],
            "argument --ext-check: no check is called 'byte'; give one or more of bytes,replicas,layouts.",
        ),
        (
            ["--ext-report"],
            "argument --ext-report: expected one argument: give the value right after the option",
        ),
        (["--ext-dump-grads-step", "two"], "argument --ext-dump-grads-step: invalid int value: 'two'."),
    ],
)
def test_bad_values(argv, text, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stop:
        preparse(argv)
    assert stop.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_every_kind_of_field():
    nothing = preparse([], [EveryKind])
    assert vars(nothing) == {
        "kind_switch": False,
        "kind_on": True,
        "kind_int": 3,
        "kind_float": None,
        "kind_old": None,
        "kind_mode": "off",
        "kind_color": Color.red,
        "kind_sizes": [],
        "kind_named": ["auto"],
    }
    argv = shlex.split(
        "--kind-switch --no-kind-on --kind-int 4 --kind-float 0.5 --kind-old 6 --kind-mode naive "
        "--kind-color blue --kind-sizes 1 2 --kind-name a b c"
    )
    assert vars(preparse(argv, [EveryKind])) == {
        "kind_switch": True,
        "kind_on": False,
        "kind_int": 4,
        "kind_float": 0.5,
        "kind_old": 6,
        "kind_mode": "naive",
        "kind_color": Color.blue,
        "kind_sizes": [1, 2],
        "kind_named": ["a", "b", "c"],
    }
    assert preparse(["--disable-kind-on"], [EveryKind]).kind_on is False


def test_stock_flags_are_read_as_words():
    flags = preparse(
        ["--cp-comm-type", "wallfacer", "p2p", "--lr", "1"], [RunConfig], ["--cp-comm-type", "--spec"]
    )
    assert flags.cp_comm_type == ["wallfacer", "p2p"]
    assert flags.spec is None


@pytest.mark.parametrize("annotation", [int | str, dict[str, int]])
def test_types_that_no_flag_can_have(annotation):
    bad = dataclasses.make_dataclass("Bad", [("field", annotation, dataclasses.field(default=None))])
    with pytest.raises(TypeError, match=r"a flag cannot have the type .* use X, X \| None"):
        preparse([], [bad])


def test_every_field_has_a_help_text():
    # Upstream's factory takes it from the source: a string right after the field.
    import ast
    import inspect

    (body,) = ast.parse(inspect.getsource(RunConfig)).body
    described = [a.target.id for a, b in zip(body.body, body.body[1:], strict=False)
                 if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)]  # fmt: skip
    assert described == [field.name for field in dataclasses.fields(RunConfig)]


def test_parser_leaves_the_script_its_help():
    assert "-h" not in config.light_parser([RunConfig])._option_string_actions
    with pytest.raises(argparse.ArgumentError, match="conflicting option"):
        config.light_parser([RunConfig, RunConfig])
