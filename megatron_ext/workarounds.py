"""Defects of stock Megatron that stop a run, each worked around only in the copies that have it.

None touches numerics. `present` looks at the installed copy; the launcher lists what it found at start.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import re
import shlex
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from megatron_ext import workarounds_optimizer
from megatron_ext.patching import Patch, pristine
from megatron_ext.targets import resolve

FEATURE = "workaround"
_COMPILE_HELPERS = "megatron.core.datasets.utils:compile_helpers"
_ADD_ARGUMENTS = "megatron.training.arguments:add_megatron_arguments"
_NUM_SAMPLES = "megatron.training.training:get_train_valid_test_num_samples"
_DISTOPT = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_DATA_LOADERS = "megatron.training.training:build_train_valid_test_data_loaders"


@dataclass(frozen=True)
class Workaround:
    """One defect: where it is patched, and how to see that the installed copy has it."""

    name: str
    defect: str
    makes: dict[str, Callable[[Any], Any]]
    """target -> maker of the wrap"""
    present: Callable[[], bool]
    only_with: tuple[str, ...] = ()
    """Script arguments without which the defect cannot show; empty: it always can."""

    @property
    def patches(self) -> list[Patch]:
        why = f"{self.name}: {self.defect}"
        return [Patch(target, make, "wrap", why, FEATURE) for target, make in self.makes.items()]


# --- C++ helpers of the datasets ---------------------------------------------------------------------------


def _datasets_folder() -> Path:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None, "versions are checked before workarounds are looked for"
    assert spec.origin is not None, "megatron.core is a regular package"
    return Path(spec.origin).parent / "datasets"


def has_makefile() -> bool:
    return (_datasets_folder() / "Makefile").is_file()


def has_built_helpers() -> bool:
    return any((_datasets_folder() / f"helpers_cpp{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)


def _skip_build(original: Callable) -> Callable:
    @functools.wraps(original)
    def compile_helpers(*args, **kwargs):
        print("> the dataset index builder comes compiled; nothing to build", flush=True)

    return compile_helpers


def _build_for_this_python(original: Callable) -> Callable:
    """The Makefile's variables, as make reads them from MAKEFLAGS, say what to build for."""

    @functools.wraps(original)
    def compile_helpers(*args, **kwargs):
        flags = [os.environ.get("MAKEFLAGS", ""), *_make_variables()]
        with _environment("MAKEFLAGS", " ".join(flags)):
            return original(*args, **kwargs)

    return compile_helpers


def _make_variables() -> list[str]:
    """Suffix of this interpreter's extension modules; its headers, and pybind11's (torch ships them too)."""
    includes = [sysconfig.get_path("include"), *_pybind11_includes()]
    flags = " ".join(f"-I{shlex.quote(folder)}" for folder in includes)
    values = {"LIBEXT": sysconfig.get_config_var("EXT_SUFFIX"), "CPPFLAGS": flags}
    return [f"{name}={value.replace('\\', r'\\').replace(' ', r'\ ')}" for name, value in values.items()]


def _pybind11_includes() -> list[str]:
    if importlib.util.find_spec("pybind11") is not None:
        import pybind11

        return [pybind11.get_include()]
    import torch.utils.cpp_extension

    return torch.utils.cpp_extension.include_paths()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# --- a bare % in a help text -------------------------------------------------------------------------------


def _bad_help_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Options whose help text argparse cannot print."""
    formatter = parser._get_formatter()
    bad = []
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                formatter._expand_help(action)
            except (ValueError, TypeError):
                bad.append(action)
    return bad


def _escape_help(original: Callable) -> Callable:
    @functools.wraps(original)
    def add_megatron_arguments(*args, **kwargs):
        parser = original(*args, **kwargs)
        for action in _bad_help_actions(parser):
            # Double every % that starts neither %% nor %(name)s.
            action.help = re.sub(r"%%|%(?!\(\w+\))", "%%", action.help)
        return parser

    return add_megatron_arguments


def _has_bad_help() -> bool:
    stock_add = pristine(resolve(_ADD_ARGUMENTS)).plain
    return bool(_bad_help_actions(stock_add(argparse.ArgumentParser(allow_abbrev=False))))


# --- no --eval-interval ------------------------------------------------------------------------------------


def _without_eval_interval(original: Callable) -> Callable:
    """Count validation samples as for an interval that never comes; the argument itself stays unset."""

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        from megatron.training import get_args

        options = get_args()
        if options.eval_interval is not None:
            return original(*args, **kwargs)
        options.eval_interval = sys.maxsize
        try:
            return original(*args, **kwargs)
        finally:
            options.eval_interval = None

    return wrapper


class _Unset(types.SimpleNamespace):
    """Arguments of which only a few are set; all others are None."""

    def __getattr__(self, name: str) -> None:
        return None


def _needs_eval_interval() -> bool:
    """Whether stock's own count of samples fails when the interval is unset: run it on stand-in arguments."""
    stock = pristine(resolve(_NUM_SAMPLES)).plain
    options = _Unset(train_iters=1, global_batch_size=1, eval_global_batch_size=1, eval_iters=0)
    names = {**stock.__globals__, "get_args": lambda: options}
    try:
        types.FunctionType(stock.__code__, names, argdefs=stock.__defaults__)()
    except (TypeError, AssertionError):
        return True
    return False


WORKAROUNDS = (
    Workaround(
        "helpers-prebuilt",
        "the wheel has the compiled dataset helpers but no Makefile, so that building them fails",
        {_COMPILE_HELPERS: _skip_build},
        lambda: has_built_helpers() and not has_makefile(),
    ),
    Workaround(
        "helpers-python",
        "a checkout's Makefile builds the dataset helpers for the python3 on PATH, not the one that runs",
        {_COMPILE_HELPERS: _build_for_this_python},
        has_makefile,
    ),
    Workaround(
        "help-percent",
        "--help fails on a bare % in a help text",
        {_ADD_ARGUMENTS: _escape_help},
        _has_bad_help,
        only_with=("-h", "--help"),
    ),
    Workaround(
        "eval-interval",
        "training without --eval-interval fails when validation samples are counted",
        {_NUM_SAMPLES: _without_eval_interval, _DATA_LOADERS: _without_eval_interval},
        _needs_eval_interval,
    ),
    Workaround(
        "distopt-load",
        "the distributed optimizer on torch's Adam cannot load its checkpoints",
        {
            f"{_DISTOPT}.sharded_state_dict": workarounds_optimizer.state_before_load,
            f"{_DISTOPT}._set_main_param_and_optimizer_states": workarounds_optimizer.set_all_but_step,
            f"{_DISTOPT}.load_state_dict": workarounds_optimizer.own_step_per_parameter,
        },
        workarounds_optimizer.uses_torch_adam,
    ),
)


def workarounds_catalogue() -> list[Patch]:
    """Patches of every known defect, whether or not the installed copy has it."""
    return [patch for workaround in WORKAROUNDS for patch in workaround.patches]


def workarounds_present(argv: Sequence[str] | None = None) -> list[Patch]:
    """Patches of the defects that the installed copy has; imports megatron.training.

    With the arguments of the script, only of those that can show in this run (looking for some costs time).
    """
    possible = [w for w in WORKAROUNDS if argv is None or not w.only_with or set(w.only_with) & set(argv)]
    return [patch for workaround in possible if workaround.present() for patch in workaround.patches]
