"""Rules: what cannot work is said before any process group exists, all of it at once.

A rule is a pure function of the arguments as stock's parser leaves them, before `validate_args` changes them
(plus `world_size`, and the file system): it returns a problem text, or None when all is well or when it
cannot judge. A text says what is set, why it cannot work and what to set instead. A rule for stock options
refuses only what stock refuses too, there or later.

    found = run(args, base_rules(), defaults)       # in a wrapper of validate_args
    if found:
        refuse(found)
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_ext.linear3d.rules import flags_need_the_grid
from megatron_ext.paro.rules import flags_need_the_strategy
from megatron_ext.pipeline.rules import flags_need_auto
from megatron_ext.rules_cpu import CPU_RULES
from megatron_ext.rules_files import FILE_RULES
from megatron_ext.rules_pipeline import PIPELINE_RULES
from megatron_ext.rules_sizes import SIZE_RULES
from megatron_ext.rules_training import TRAINING_RULES
from megatron_ext.vocab.rules import flags_need_the_mode
from megatron_ext.wallfacer.rules import flags_need_the_comm_type

Rule = Callable[[Namespace], str | None]


def base_rules() -> tuple[Rule, ...]:
    """Rules for every job, with or without our features."""
    features = (
        flags_need_the_mode,
        flags_need_the_strategy,
        flags_need_the_grid,
        flags_need_the_comm_type,
        flags_need_auto,
    )
    return (*SIZE_RULES, *PIPELINE_RULES, *TRAINING_RULES, *FILE_RULES, *features)


def run(args: Namespace, rules: Iterable[Rule], defaults: Mapping[str, Any] | None = None) -> list[str]:
    """All problems that the rules find, in order, each once.

    `defaults` are the script's own (second argument of `validate_args`): they stand where nothing was given.
    Under `--yaml-cfg` the namespace has another shape that nothing here can judge, so no rule runs.
    """
    if getattr(args, "yaml_cfg", None) is not None:
        return []
    args = with_defaults(args, defaults or {})
    return list(dict.fromkeys(problem for rule in rules if (problem := rule(args)) is not None))


def cpu_problems(args: Namespace, explicit: set[str]) -> list[str]:
    """All problems that `--cpu` brings; `explicit` are the destinations given on the command line."""
    return run(args, [lambda a, rule=rule: rule(a, explicit) for rule in CPU_RULES])


def with_defaults(args: Namespace, defaults: Mapping[str, Any]) -> Namespace:
    """A copy of the arguments in which None is replaced by the script's default, as `validate_args` does."""
    missing = {name: value for name, value in defaults.items() if getattr(args, name, None) is None}
    return Namespace(**(vars(args) | missing))


def explicit_flags(argv: Iterable[str], parser: ArgumentParser) -> set[str]:
    """Destinations of the options that stand on the command line, whatever their values."""
    actions = parser._option_string_actions
    given = (word.partition("=")[0] for word in argv)
    return {actions[name].dest for name in given if name in actions}
