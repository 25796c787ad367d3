"""One launch on one rank: what is checked and patched before the script runs, and while it parses flags."""

import copy
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ext import (
    __version__,
    compat,
    config,
    configfile,
    cpu,
    features,
    hooks,
    parse_errors,
    problems,
    rules,
)
from megatron_ext.patching import Applied, Patch, PatchError


@dataclass
class Options:
    """What stands in front of the script's name, the script, and its arguments."""

    cpu: bool = False
    ext_config: str | None = None
    script: str | None = None
    args: list[str] = field(default_factory=list)


class Launcher:
    """One launch on one rank; `undo()` restores everything that `prepare()` patched."""

    def __init__(
        self,
        options: Options,
        file: configfile.ConfigFile | None = None,
        table: Sequence[features.Feature] = features.FEATURES,
    ):
        self.options = options
        self.table = table
        self.file = file
        self.args = options.args if file is None else configfile.merge(file.argv, options.args)
        self.script_defaults: dict[str, Any] = {}
        self.rank = int(os.environ.get("RANK", "0"))
        self.flags: Any = None
        self.on: list[features.Feature] = []
        self.groups: Any = None
        self.record: Any = None
        self.dump: Any = None
        self.memory: Any = None
        self._applied: list[Applied] = []
        self._parser: Any = None

    def log(self, text: str) -> None:
        """One line on rank 0."""
        if self.rank == 0:
            print(f"[megatron_ext] {text}", flush=True)

    # --- before the script ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that can be refused before megatron is imported."""
        found = [] if os.path.isfile(self.options.script) else [self._missing_script()]
        if "--cpu" in self.args:
            found.append(
                "--cpu stands behind the script. It is an option of the launcher: "
                f"-m megatron_ext --cpu {self.options.script} ..."
            )
        found += compat.check_versions() + compat.check_import_paths()
        if found:
            problems.refuse(found)
        self.flags = config.preparse(
            self.args, features.configs(self.table), features.stock_flags(self.table)
        )
        self.on = features.enabled_features(self.flags, self.table)

    def _missing_script(self) -> str:
        name = self.options.script
        hint = ""
        if os.path.basename(name) == "pretrain_gpt.py":
            hint = " megatron_ext's own pretrain_gpt.py lies at the top of its checkout."
        return f"There is no script {name} (from {os.getcwd()}). Give the path of your training script.{hint}"

    def prepare(self) -> None:
        """Install all patches: torch's CPU answers first, then megatron's; all or none."""
        if self.options.cpu:
            self._prepare_cpu()
        import megatron.training  # noqa: F401  (aliases exist only once the modules are loaded)

        contract = self._contract()
        self.log(
            f"megatron_ext {__version__} on megatron-core {compat.megatron_version()} "
            f"({os.path.dirname(sys.modules['megatron.core'].__file__)})"
        )
        self._apply(self._patches(), contract)
        self.log("features on: " + (", ".join(f.name for f in self.on) or "none (stock Megatron)"))
        if self.record is not None:
            self.record.info = {
                "argv": [self.options.script, *self.args],
                "cpu_mode": self.options.cpu,
                "features": [feature.name for feature in self.on],
                "patches": [r for applied in self._applied for r in applied.records if r["feature"] != "cpu"],
            }

    def _prepare_cpu(self) -> None:
        cpu.set_environment()
        cpu.quiet_known_noise()
        hidden = cpu.hide_gpu_packages()
        self.log("--cpu: stock Megatron on CPU with gloo; CUDA queries get CPU answers, no numerics change")
        if hidden:
            self.log(f"--cpu: hidden GPU packages: {', '.join(hidden)}")
        self._apply(cpu.torch_patches(), None, quiet=True)

    def _contract(self):
        from megatron_ext.contract import load_contract

        return load_contract(compat.megatron_version())

    def _patches(self) -> list[Patch]:
        from megatron_ext import checks, grads, groups, memory_step, record

        out = list(compat.workarounds_present(self.args))
        if self.options.cpu:
            out += cpu.megatron_patches()
        out += argument_patches(self)
        if self.on:
            self.groups = groups.GroupRegistry()
            out += groups.catalogue() + group_patches(self)
        context = features.Context(self.flags, self.groups)
        for feature in self.on:
            out += feature.patches(context)
        # The record comes last: wraps compose in order, so it sees what everything else did.
        out += checks.patches(self.flags.ext_check)
        if self.flags.ext_memory:
            self.memory = memory_step.StepMemory(self.flags.ext_memory_step)
            out += self.memory.patches()
        if self.flags.ext_dump_grads:
            self.dump = grads.GradientDump(self.flags.ext_dump_grads, self.flags.ext_dump_grads_step)
            out += self.dump.patches()
        if self.flags.ext_report:
            self.record = record.RunRecord(self.flags.ext_report, self.rank, {})
            self.record.memory = self.memory
            self.record.step_fields = context.step_fields
            out += record.patches(self.record)
        return out

    def _apply(self, patches: list[Patch], contract, quiet: bool = False) -> None:
        from megatron_ext import patching

        try:
            log = (lambda text: None) if quiet else self.log
            self._applied.append(patching.apply(patches, contract=contract, log=log))
        except PatchError as error:
            self.undo()
            problems.refuse([f"A patch cannot be applied, so nothing was patched and nothing runs.\n{error}"])

    def undo(self) -> None:
        """Restore every patched attribute, last first."""
        while self._applied:
            self._applied.pop().undo()

    # --- while the script parses its arguments -------------------------------------------------------------

    def extend_parser(self, parser: Any) -> None:
        """Add our flags to Megatron's parser and make its errors ours."""
        config.add_arguments(parser, features.configs(self.table))
        if self.options.cpu:
            shown = cpu.set_defaults(parser)
        if self.options.cpu and self._parser is None:  # stock builds its parser more than once
            self.log("--cpu: set by the launcher unless given: " + " ".join(dict.fromkeys(shown)))
            self.log(
                "--cpu: and unless set: TORCHDYNAMO_DISABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=1 (environment)"
            )
        self._parser = parser
        parse_errors.guard_enum_choices(parser)
        parser.error = lambda message: problems.refuse([parse_errors.unknown_flag_error(parser, message)])
        parse_known = parser.parse_known_args

        def parse_args(args=None, namespace=None):
            parsed, unknown = parse_known(args, namespace)
            if unknown:
                text = parse_errors.unknown_flag_error(parser, f"unrecognized arguments: {' '.join(unknown)}")
                problems.refuse([text, *self.problems_of(parsed, self.script_defaults)])
            return parsed

        parser.parse_args = parse_args

    def problems_of(self, args: Any, defaults: dict[str, Any]) -> list[str]:
        """All problems of freshly parsed arguments; `defaults` are the script's own."""
        args = copy.copy(args)
        args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        on_file = self.file.unknown_left_out(self._parser._option_string_actions) if self.file else []
        of_features = [rule for feature in self.on for rule in feature.rules]
        found = on_file + rules.run(args, [*rules.base_rules(), *of_features], defaults)
        found += features.conflicts(args, self.on, self.options.cpu, self.table)
        if self.options.cpu:
            found += rules.cpu_problems(args, rules.explicit_flags(self.args, self._parser))
        return found

    def validate(self, stock_validate, args: Any, defaults: dict[str, Any], **kwargs):
        """Our rules, then stock's `validate_args`; what is wrong is printed once and every rank exits 2."""
        found = self.problems_of(args, defaults)
        if found:
            problems.refuse(found)
        if self.options.cpu:
            cpu.prepare_args(args)
        try:
            validated = stock_validate(args, defaults, **kwargs)
        except (AssertionError, ValueError, RuntimeError) as error:
            problems.refuse([parse_errors.refused_by_stock(error)])
        try:
            for feature in self.on:
                feature.adjust(validated, self.flags)
        except ValueError as error:
            problems.refuse([str(error)])
        if self.record is not None:
            for feature in self.on:
                if described := feature.describe(validated, self.flags):
                    self.record.info[feature.name] = described
        return validated


def argument_patches(launcher: Launcher | None) -> list[Patch]:
    """How our flags reach Megatron's parser and our rules its validation."""

    def add(original):
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            parser = original(*args, **kwargs)
            launcher.extend_parser(parser)
            return parser

        return wrapper

    def remember_defaults(original):
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            launcher.script_defaults = hooks.bound(original, args, kwargs)["args_defaults"]
            return original(*args, **kwargs)

        return wrapper

    def validate(original):
        @functools.wraps(original)
        def wrapper(args, defaults={}, **kwargs):  # noqa: B006  (upstream's own default, never written to)
            return launcher.validate(original, args, defaults, **kwargs)

        return wrapper

    where = "megatron.training.arguments"
    return [
        Patch(f"{where}:add_megatron_arguments", add, "wrap", "our flags in Megatron's parser", "launcher"),
        Patch(
            f"{where}:parse_and_validate_args",
            remember_defaults,
            "wrap",
            "the script's own defaults, for our rules",
            "launcher",
            ("args_defaults",),
        ),
        Patch(
            f"{where}:validate_args",
            validate,
            "wrap",
            "our rules before stock's",
            "launcher",
            ("args", "defaults"),
        ),
    ]


def group_patches(launcher: Launcher | None) -> list[Patch]:
    """The features' process groups, made as soon as Megatron's exist, on every rank in one order."""

    def make(original):
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            result = original(*args, **kwargs)
            from megatron.training import get_args

            from megatron_ext import groups

            for feature in launcher.on:
                if agreement := feature.agreement(get_args()):
                    groups.require_equal(feature.title, agreement)
                for name, group in feature.groups(get_args()).items():
                    launcher.groups.get(name, group.rank_lists, communicator=group.communicator)
            return result

        return wrapper

    where = "megatron.training.initialize:initialize_megatron"
    return [Patch(where, make, "wrap", "process groups of features, after Megatron's", "groups")]


def catalogue() -> list[Patch]:
    """Patches of the launcher, its gradient dump, memory report and checks, for the contract."""
    from megatron_ext import checks, grads, memory_step

    own = argument_patches(None) + group_patches(None)
    return own + grads.catalogue() + memory_step.catalogue() + checks.catalogue()
