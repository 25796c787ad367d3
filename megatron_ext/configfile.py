"""`--ext-config FILE.yaml`: arguments in Megatron's own spelling, kept in a file. The command line wins.

    include: base.yaml                     # read first, relative to this file; keys here replace its keys
    parallelism:                           # groups only order the file; any name, any depth
      tensor-model-parallel-size: 2        # leading dashes are optional, _ stands for -
      sequence-parallel: true              # a bare flag; false or null leaves the option out
    data:
      data-path: [0.3, $DATA/a, 0.7, $DATA/b]    # several values; $VAR, ${VAR} from the environment; $$ is $

Values reach Megatron as they are written (1.0e-5 stays 1.0e-5). `no`, `yes`, `on` and `off` are refused
unless quoted, because YAML reads them as true and false. The same option twice in one file is an error.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import environ as ENVIRON
from pathlib import Path
from string import Template

import yaml

from megatron_ext.parse_errors import nearest_names
from megatron_ext.problems import UserError

# The only stock options with an underscore in their names.
UNDERSCORED = {
    "--override-opt-param-scheduler": "--override-opt_param-scheduler",
    "--use-checkpoint-opt-param-scheduler": "--use-checkpoint-opt_param-scheduler",
}
_KEY = re.compile(r"(--)?[a-z][a-z0-9_-]*")
_OPTION = re.compile(r"--[a-z]")


@dataclass(frozen=True)
class Entry:
    """One option of a file: its values (None: left out, because it is false or null), and where it stands."""

    flag: str
    values: tuple[str, ...] | None
    where: str

    def argv(self) -> list[str]:
        """The option as command-line words; a value that starts with a dash is tied to its option by =."""
        if self.values is None:
            return []
        if len(self.values) == 1 and self.values[0].startswith("-"):
            return [f"{self.flag}={self.values[0]}"]
        return [self.flag, *self.values]


@dataclass
class ConfigFile:
    """What a file and the files that it includes say, by option, in order."""

    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def argv(self) -> list[str]:
        """All options as command-line words."""
        return [word for entry in self.entries.values() for word in entry.argv()]

    def unknown_left_out(self, known: Sequence[str]) -> list[str]:
        """Problems with options that are false or null and that no parser knows.

        They are not on the command line, so the parser cannot object to a wrong name.
        """
        problems = []
        for entry in self.entries.values():
            if entry.values is None and entry.flag not in known:
                opposite = "--no-" + entry.flag[2:]
                if opposite in known:
                    hint = f"to switch it off, set {opposite}: true."
                else:
                    names = nearest_names(known, entry.flag)
                    hint = f"did you mean {' or '.join(names)}?" if names else "see --help for the list."
                problems.append(f"{entry.where}: {entry.flag} is not an option of this script: {hint}")
        return problems


def load(path: str, environ: Mapping[str, str] = ENVIRON) -> ConfigFile:
    """Read a file and what it includes. Raises UserError with every problem found."""
    reader = _Reader(environ)
    entries = reader.file(Path(path), ())
    if reader.problems:
        raise UserError(*reader.problems)
    return ConfigFile(entries)


def merge(config_argv: Sequence[str], cli_argv: Sequence[str]) -> list[str]:
    """The words of the file and of the command line as one command line, in which the latter wins.

    An option that is on the command line too, spelled exactly the same, is dropped from the file's words with
    its values. Opposites (--no-x for --x) are other spellings: both stay, and argparse lets the last, the
    command line's, win. Raises UserError when the command line starts with a value.
    """
    if config_argv and cli_argv and not cli_argv[0].startswith("-"):
        raise UserError(
            f"{cli_argv[0]!r} stands before the first option on the command line, where an option of "
            "--ext-config would take it as a value. Put it after the option it belongs to."
        )
    given = {word.partition("=")[0] for word in cli_argv if _OPTION.match(word)}
    kept: list[str] = []
    keep = True
    for word in config_argv:
        if _OPTION.match(word):
            keep = word.partition("=")[0] not in given
        if keep:
            kept.append(word)
    return [*kept, *cli_argv]


class _Reader:
    """Collects entries and problems; every problem names its file, line and key."""

    def __init__(self, environ: Mapping[str, str]):
        self.environ = environ
        self.problems: list[str] = []

    def file(self, path: Path, including: tuple[Path, ...]) -> dict[str, Entry]:
        if path.resolve() in including:
            self.problems.append(
                f"{including[-1]}: include {path} goes in a circle. Remove one of the includes."
            )
            return {}
        root = self.compose(path)
        if root is None:
            return {}
        entries: dict[str, Entry] = {}
        own: dict[str, Entry] = {}
        for key, value in root.value:
            if key.value == "include":
                for name in self.included(path, value):
                    entries |= self.file(path.parent / name, (*including, path.resolve()))
            else:
                self.item(path, key, value, own)
        return entries | own

    def compose(self, path: Path) -> yaml.MappingNode | None:
        try:
            root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
        except OSError as error:
            self.problems.append(
                f"{path}: cannot be read ({error.strerror}). Correct the path of --ext-config or include."
            )
        except UnicodeDecodeError as error:
            self.problems.append(f"{path}: is not a text file ({error}).")
        except yaml.YAMLError as error:
            self.problems.append(f"{path}: is not YAML: {' '.join(str(error).split())}")
        else:
            if root is None or isinstance(root, yaml.MappingNode):
                return root
            self.problems.append(
                f"{path}: must hold `option: value` lines, but its top level is a {_kind(root)}."
            )
        return None

    def included(self, path: Path, node: yaml.Node) -> list[str]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        where = _where(path, node, "include")
        if not all(_is_text(n) for n in nodes):
            self.problems.append(f"{where} takes the name of a YAML file, or a list of names.")
            return []
        return [self.expand(n.value, where) for n in nodes]

    def item(self, path: Path, key: yaml.Node, value: yaml.Node, entries: dict[str, Entry]) -> None:
        name = key.value if isinstance(key, yaml.ScalarNode) else ""
        where = _where(path, key, name)
        if isinstance(value, yaml.MappingNode) and not name.startswith("--"):
            for inner_key, inner_value in value.value:
                self.item(path, inner_key, inner_value, entries)
            return
        if not _KEY.fullmatch(name):
            self.problems.append(
                f"{where} is no option name: write it as on the command line, like "
                "tensor-model-parallel-size. (Environment variables are set outside, merge keys are "
                "`include`.)"
            )
            return
        flag = "--" + name.removeprefix("--").replace("_", "-")
        flag = UNDERSCORED.get(flag, flag)
        if flag in entries:
            self.problems.append(f"{where} is given before, at {entries[flag].where}: keep one.")
            return
        entries[flag] = Entry(flag, self.values(where, value), where)

    def values(self, where: str, node: yaml.Node) -> tuple[str, ...] | None:
        if isinstance(node, yaml.MappingNode):
            self.problems.append(f"{where} takes a value or a list, but it holds a mapping.")
            return None
        if isinstance(node, yaml.SequenceNode):
            if all(_is_text(item) for item in node.value):
                return tuple(self.expand(item.value, where) for item in node.value)
            self.problems.append(
                f"{where} must be a flat list of values, without lists, mappings, true, false or null in it."
            )
            return None
        if _is_text(node):
            return (self.expand(node.value, where),)
        if _tag(node) == "null" or node.value.lower() == "false":
            return None
        if node.value.lower() == "true":
            return ()
        self.problems.append(
            f"{where}: YAML reads {node.value} as true or false. Write true for a bare flag, false to leave "
            "the "
            f'option out, or "{node.value}" in quotes for the word itself.'
        )
        return None

    def expand(self, text: str, where: str) -> str:
        try:
            return Template(text).substitute(self.environ)
        except KeyError as error:
            self.problems.append(
                f"{where}: the environment variable {error.args[0]} is not set. Set it, or write $$ for a "
                "plain $."
            )
        except ValueError:
            self.problems.append(f"{where}: a $ in {text!r} names no variable. Write $$ for a plain $.")
        return text


def _where(path: Path, node: yaml.Node, key: str) -> str:
    return f"{path}:{node.start_mark.line + 1}: {key or _kind(node)}"


def _kind(node: yaml.Node) -> str:
    return {yaml.MappingNode: "mapping", yaml.SequenceNode: "list"}.get(type(node), "single value")


def _tag(node: yaml.Node) -> str:
    return node.tag.rpartition(":")[2]


def _is_text(node: yaml.Node) -> bool:
    """A scalar that is passed on as it is written: anything but true, false and null."""
    return isinstance(node, yaml.ScalarNode) and _tag(node) not in ("bool", "null")
