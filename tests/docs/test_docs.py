"""README and docs say what is there: every flag, path, command and generated table in them is checked."""

import argparse
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext import cli, tables
from tests.functional.runs import REPO

PAGES = [
    REPO / "README.md",
    REPO / "CONTRIBUTING.md",
    REPO / "CHANGELOG.md",
    REPO / "patches" / "README.md",
    *sorted((REPO / "docs").glob("*.md")),
]
# Options of programs that are not ours.
OTHERS = {
    "torchrun": {"--nproc-per-node"},
    "pip": {"--no-build-isolation", "--no-deps", "--target"},
    "git": {"--branch"},
    "sbatch": {"--gpus-per-node", "--nodes", "--dependency"},
    "scripts/test.sh": {"--full"},
    "unshare": {"--user", "--map-root-user"},
}
# What runs write, and paths of upstream's checkout.
OUTPUTS = re.compile(
    r"^(runs/|data/|notes|corpus|src/|PREFIX|DIR|compare\.|\.venv|run_|gpt_builders|model_provider)"
)

page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPO)))


PLANS = ("layers", "linear3d", "paro", "wallfacer")


@functools.cache
def known_flags() -> set[str]:
    """Every option of Megatron, of ours, of the tools, and of the programs around them."""
    from tests.ranks import preload

    preload()
    from megatron.training.arguments import add_megatron_arguments

    from megatron_ext import config, features
    from megatron_ext.dit.config import DiTConfig

    parser = add_megatron_arguments(argparse.ArgumentParser())
    config.add_arguments(parser, [*features.configs(), DiTConfig])
    flags = set(parser._option_string_actions) | {"--cpu", "--help", "--version"}
    helps = [["-m", "megatron_ext", tool] for tool in cli.TOOLS]
    helps += [["scripts/bench/vocab.py", command] for command in ("train", "paced")]
    helps += [["scripts/bench/paro.py", command] for command in ("train", "scaling")]
    helps += [
        ["scripts/bench/linear3d.py"],
        ["scripts/bench/linear3d_train.py"],
        ["scripts/bench/collectives.py"],
        ["scripts/bench/paro_overlap.py"],
    ]
    helps += [*(["-m", "megatron_ext", "plan", what] for what in PLANS)]
    helps += [["scripts/bench/attention.py", command] for command in ("calls", "train")]
    helps += [["-m", "megatron_ext.netlab", command] for command in ("run", "measure")]
    for program in helps:
        text = subprocess.run(
            [sys.executable, *program, "--help"],
            cwd=REPO,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        flags |= set(re.findall(r"--[a-z][a-z-]+", text))
    return flags.union(*OTHERS.values())


def code_of(path: Path) -> str:
    """Text in code spans and blocks."""
    text = path.read_text()
    blocks = re.findall(r"^```.*?^```|(?:^    .*\n?)+", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", text)])


@page
def test_flags_exist(page):
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code_of(page)))
    assert used - known_flags() == set()


@page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@page
def test_paths_exist(page):
    pattern = r"(?<![\w/.<-])((?:[\w.-]+/)*[\w.-]+\.(?:py|sh|sbatch|yaml|toml|md|txt|html))(?![\w/])"
    paths = {path for path in re.findall(pattern, code_of(page)) if not OUTPUTS.match(path)}
    paths |= set(
        re.findall(
            r"(?<![\w/.])((?:tests|configs|scripts|docs|megatron_ext|patches)/[\w./-]*\w)", code_of(page)
        )
    )
    placeholders = {"FILE.yaml", "other.yaml", "notes.txt"}
    for path in paths - placeholders:
        assert (REPO / path).exists() or (page.parent / path).exists(), path


@page
def test_tools_exist(page):
    for tool in re.findall(r"megatron-ext ([a-z]+)", code_of(page)):
        assert tool in cli.TOOLS, tool


def test_generated_tables_are_current():
    text = (REPO / "README.md").read_text()
    for table in (tables.composes_table(), tables.feature_table()):
        assert table.strip() in text, f"README.md lacks this table:\n{table}"


def test_modules_named_in_code_exist():
    """Dotted names of our own package in the docs can be imported."""
    import importlib

    for path in PAGES:
        for name in set(re.findall(r"\bmegatron_ext(?:\.[a-z_]+)+\b", path.read_text())):
            importlib.import_module(name)


def test_no_placeholder_is_left():
    for path in PAGES:
        assert not re.findall(r"\b[A-Z]+_TABLE\b|TODO|FIXME", path.read_text()), path


@pytest.mark.parametrize(
    "command", [["--help"], ["--version"], ["doctor", "--cpu"], ["compare", "--help"]], ids=" ".join
)
def test_fast_commands_run(command):
    result = subprocess.run(
        [sys.executable, "-m", "megatron_ext", *command], cwd=REPO, capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr


PLAN = re.compile(r"megatron-ext plan paro (--ext-config(?:.*\\\n)*.*)")


def plan_of_paro(path: Path) -> list[str]:
    """The words of the page's command, behind `plan paro`."""
    (command,) = PLAN.findall(path.read_text())
    return re.sub(r"\\\n#?", " ", command).split()


@pytest.mark.parametrize("path", ["README.md", "docs/paro.md", "configs/llama-7b-paro.yaml"])
def test_the_plan_of_the_shipped_configuration_runs(path, capsys, monkeypatch):
    from megatron_ext.tools.plan_paro import main

    monkeypatch.chdir(REPO)
    command = plan_of_paro(REPO / path)
    assert command == plan_of_paro(REPO / "README.md")
    assert main(command) == 0
    assert "Take NNG" in capsys.readouterr().out
    # What the page and the file say of the strategy that the file sets.
    assert main([*command, "--other-memory", "69GB"]) == 0
    assert "Take IIG over ho-ring" in capsys.readouterr().out
