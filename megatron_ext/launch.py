"""The launcher: `torchrun ... -m megatron_ext [--cpu] [--ext-config FILE.yaml] SCRIPT ARGS...`.

It checks versions and import paths, patches what the given flags ask for (all or nothing) and runs the user's
script, unmodified, as `__main__`.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ext import config, configfile, features, problems
from megatron_ext.launcher import Launcher, Options


def parse_front(argv: list[str]) -> Options:
    """Read the launcher's own options; exits 2 with a message when they make no sense."""
    options = Options()
    rest = list(argv)
    while rest and rest[0].startswith("-"):
        flag, _, value = rest.pop(0).partition("=")
        if flag == "--cpu":
            options.cpu = True
        elif flag == "--ext-config":
            if not value and not rest:
                problems.refuse(["--ext-config needs a file: --ext-config FILE.yaml."])
            options.ext_config = value or rest.pop(0)
        else:
            problems.refuse(
                [
                    f"The launcher has no option {flag}. In front of the script stand only --cpu and "
                    f"--ext-config FILE.yaml; Megatron's flags and ours go behind it: "
                    f"-m megatron_ext [--cpu] pretrain_gpt.py {flag} ..."
                ]
            )
    if not rest:
        problems.refuse(
            ["No script was given. Write: torchrun ... -m megatron_ext [--cpu] pretrain_gpt.py FLAGS..."]
        )
    options.script, options.args = rest[0], rest[1:]
    return options


def read_config(options: Options) -> configfile.ConfigFile | None:
    """The file of `--ext-config`, given in front of the script or among its flags."""
    behind = config.preparse(options.args).ext_config
    if options.ext_config and behind:
        problems.refuse(
            [
                f"--ext-config is given twice: {options.ext_config} in front of the script, {behind} behind "
                "it. Give one; a file can `include:` another."
            ]
        )
    if not (options.ext_config or behind):
        return None
    try:
        file = configfile.load(options.ext_config or behind)
    except problems.UserError as error:
        problems.refuse(error.problems)
    if config.preparse(file.argv).ext_config:
        problems.refuse(
            [f"{options.ext_config or behind} sets ext-config. Write `include: OTHER.yaml` instead."]
        )
    return file


def run(launcher: Launcher) -> None:
    """Run the user's script as `__main__` with its own arguments; the record notes how it ended."""
    sys.argv = [launcher.options.script, *launcher.args]
    stop: SystemExit | None = None
    try:
        runpy.run_path(launcher.options.script, run_name="__main__")
    except SystemExit as exit_:  # stock leaves this way at --exit-interval and the like
        stop = exit_
    except BaseException as error:
        _end(launcher, f"{type(error).__name__}: {error}")
        raise
    if stop is not None and stop.code not in (None, 0):
        _end(launcher, f"exit code {stop.code}")
        raise stop
    asked = (launcher.dump, launcher.memory)
    texts = [part.missed() for part in asked if part is not None] + [_trace_missed(launcher)]
    missed = "\n".join(text for text in texts if text) or None
    _end(launcher, missed)
    if missed:
        raise RuntimeError(missed)


def _trace_missed(launcher: Launcher) -> str | None:
    """What to say at the end of a run that never came to the step to be traced."""
    flags = launcher.flags
    if not flags.ext_trace or os.path.exists(
        os.path.join(flags.ext_trace, f"trace-rank-{launcher.rank:04d}.jsonl")
    ):
        return None
    return (
        f"--ext-trace-step {flags.ext_trace_step} was not reached, so nothing was traced. Train more steps, "
        "or trace an earlier one; steps count from where the process starts or resumes."
    )


def _end(launcher: Launcher, error: str | None) -> None:
    if launcher.record is not None:
        launcher.record.end(error)


def main(argv: list[str], table: Sequence[features.Feature] = features.FEATURES) -> int:
    """Launch with the features of `table`; returns 0 when the script ends, exits 2 on bad input."""
    options = parse_front(argv)
    # As `python SCRIPT` would: a Megatron-LM checkout beside the script is the megatron that is used.
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    launcher = Launcher(options, read_config(options), table)
    launcher.check()
    launcher.prepare()
    from torch.distributed.elastic.multiprocessing.errors import record as report_to_torchrun

    report_to_torchrun(run)(launcher)
    return 0
