"""scripts/setup.sh, test.sh and quickstart.sh, run in a small copy of the checkout with stand-in Pythons.

The stand-ins answer the probe of scripts/lib.sh by running it in this Python with a doctored version or a
module taken away; `-m venv` copies the stand-in, and `-m pip` only writes down that it was called.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/*.sbatch"), ROOT / ".ci" / "run"])
TOOLS = (
    "awk bash cat cp cut dirname du env find flock grep head mkdir mv rm sed sha256sum sleep sort tail tee"
)
SHELLCHECK = shutil.which("shellcheck")

STAND_IN = """#!{bash}
if [ "$1" = -c ]; then exec {real} -c 'import sys; {doctored}
'"$2"; fi
case "$2" in
    venv) echo venv >>"$CALLS"; mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    pip) echo "pip $*" >>"$CALLS"; sleep "${{PIP_SECONDS:-0}}"; exit "${{PIP_EXIT:-0}}" ;;
    *) echo "$*" >>"$CALLS"; echo "output of $*"; [[ "$*" != *"${{FAIL_ON:-nothing}}"* ]] || exit 5 ;;
esac
"""


class Machine:
    """A fresh machine in a folder: its own PATH, home and checkout."""

    def __init__(self, folder: Path):
        self.bin = folder / "bin"
        self.home = folder / "home"
        self.checkout = folder / "checkout"
        self.calls_file = folder / "calls"
        for made in (self.bin, self.home, self.checkout / "scripts"):
            made.mkdir(parents=True)
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.tool("uname", "echo Linux")
        self.tool("df", "echo; echo disk 99999 1 99998 1% /")
        for name in ("setup.sh", "lib.sh", "test.sh", "quickstart.sh"):
            shutil.copy(ROOT / "scripts" / name, self.checkout / "scripts" / name)
        for name in ("pyproject.toml", "setup.py", "constraints.txt"):
            shutil.copy(ROOT / name, self.checkout / name)

    def tool(self, name: str, body: str) -> Path:
        path = name if isinstance(name, Path) else self.bin / name
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
        path.chmod(0o755)
        return path

    def python(self, name: str | Path, version: str = "3.12.7", missing: str | None = None) -> Path:
        path = self.tool(name, "")
        doctored = f'sys.version_info = ({version.replace(".", ", ")}); sys.version = "{version} stand-in"'
        if missing:
            doctored += f'; sys.modules["{missing}"] = None'
        path.write_text(STAND_IN.format(bash=shutil.which("bash"), real=sys.executable, doctored=doctored))
        return path

    def environment(self, **settings: str) -> dict[str, str]:
        return {"PATH": str(self.bin), "HOME": str(self.home), "CALLS": str(self.calls_file), **settings}

    def run(self, script: str = "setup.sh", *args: str, **settings: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [shutil.which("bash"), self.checkout / "scripts" / script, *args],
            env=self.environment(**settings),
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def setup(self, *args: str, **settings: str) -> subprocess.CompletedProcess:
        done = self.run("setup.sh", *args, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    @property
    def venv(self) -> Path:
        return self.checkout / ".venv"

    def calls(self) -> list[str]:
        """What the stand-ins were asked to do since the last call of this."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.write_text("")
        return [line.split()[0] for line in lines]


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


# ---- which Python


def test_tested_version_comes_first(machine):
    for minor in (12, 13, 14):
        machine.python(f"python3.{minor}", f"3.{minor}.1")
    machine.python("python3", "3.14.1")
    assert f"with {machine.bin}/python3.12\n" in machine.setup().stdout


def test_newer_default_python_is_passed_over(machine):
    machine.python("python3", "3.14.0")
    root = machine.home / ".pyenv"
    for version in ("3.13.2", "3.14.0"):
        machine.python(root / "versions" / version / "bin" / "python", version)
    assert f"with {root}/versions/3.13.2/bin/python\n" in machine.setup().stdout


@pytest.mark.parametrize("names", [("python3.14", "python3"), ("python3.14",)], ids=" ".join)
def test_newer_python_alone_is_refused(machine, names):
    for name in names:
        machine.python(name, "3.14.0")
    done = machine.run()
    assert done.returncode == 1
    assert "no usable Python 3.12 or 3.13 was found" in done.stderr
    if "python3" in names:
        assert f"{machine.bin}/python3: Python 3.14.0 is newer than 3.13" in done.stderr
        assert "megatron-core has no wheel for it" in done.stderr
    else:
        assert "there is no python3.12, python3.13, python3 or python" in done.stderr
    assert machine.calls() == []


def test_shim_that_does_not_run_is_passed_over(machine):
    machine.tool("python3.12", 'echo "pyenv: python3.12: command not found" >&2; exit 127')
    machine.python("python3.13", "3.13.1")
    assert f"with {machine.bin}/python3.13\n" in machine.setup().stdout


@pytest.mark.parametrize("how", ["PYENV_ROOT", "home"])
def test_pyenv_newest_patch_release(machine, tmp_path, how):
    machine.python("python3", "3.11.7")
    root = tmp_path / "pyenv" if how == "PYENV_ROOT" else machine.home / ".pyenv"
    for version in ("3.11.9", "3.12.9", "3.12.10", "3.13.2"):
        machine.python(root / "versions" / version / "bin" / "python", version)
    settings = {"PYENV_ROOT": str(root)} if how == "PYENV_ROOT" else {}
    assert f"with {root}/versions/3.12.10/bin/python\n" in machine.setup(**settings).stdout


def test_uv_is_asked_last(machine, tmp_path):
    found = machine.python(tmp_path / "uv-pythons" / "python", "3.12.4")
    machine.tool("uv", f'[ "$1 $2" = "python find" ] && echo {found}')
    assert f"with {found}\n" in machine.setup().stdout


def test_no_python_says_what_was_tried_and_what_to_install(machine):
    machine.tool("python3.12", "exit 127")
    machine.python("python3.13", "3.13.0", missing="ensurepip")
    machine.python("python3", "3.11.7")
    done = machine.run()
    assert done.returncode == 1
    assert f"{machine.bin}/python3.12: it does not run" in done.stderr
    assert f"{machine.bin}/python3.13: Python 3.13.0 lacks the module ensurepip" in done.stderr
    assert f"{machine.bin}/python3: Python 3.11.7 is older than 3.12" in done.stderr
    for advice in ("apt-get install", "pyenv install 3.12", "uv python install 3.12", "PYTHON="):
        assert advice in done.stderr
    assert machine.calls() == []


def test_python_variable_wins(machine, tmp_path):
    machine.python("python3.12")
    chosen = machine.python(tmp_path / "mine" / "python", "3.13.1")
    assert f"with {chosen}\n" in machine.setup(PYTHON=str(chosen)).stdout


@pytest.mark.parametrize(
    ("version", "reason"), [("3.10.2", "is older than 3.12"), ("3.14.1", "is newer than 3.13")]
)
def test_python_variable_of_another_version(machine, tmp_path, version, reason):
    machine.python("python3.12")
    other = machine.python(tmp_path / "other" / "python", version)
    done = machine.run(PYTHON=str(other))
    assert done.returncode == 1
    assert f"PYTHON={other} cannot be used: Python {version} {reason}" in done.stderr
    assert "Set PYTHON to a Python 3.12 or 3.13 that has venv, or unset it" in done.stderr


def test_other_systems_are_refused(machine):
    machine.tool("uname", "echo Darwin")
    done = machine.run()
    assert done.returncode == 1
    assert "Linux only; this is Darwin" in done.stderr


# ---- the environment


def test_installs_once_then_returns_at_once(machine):
    machine.python("python3.12")
    machine.setup()
    assert machine.calls() == ["venv", "pip"]
    start = time.monotonic()
    again = machine.setup()
    assert time.monotonic() - start < 1
    assert "is up to date" in again.stdout
    assert machine.calls() == []


def test_pip_gets_constraints_and_the_checkout(machine):
    machine.python("python3.12")
    machine.setup()
    line = machine.calls_file.read_text().splitlines()[1]
    root = machine.checkout
    assert line == f"pip -m pip install --constraint {root}/constraints.txt --editable {root}[dev,dit]"


@pytest.mark.parametrize("name", ["pyproject.toml", "setup.py", "constraints.txt"])
def test_changed_requirements_install_into_the_same_environment(machine, name):
    machine.python("python3.12")
    machine.setup()
    (machine.venv / "kept").touch()
    machine.calls()
    with (machine.checkout / name).open("a") as file:
        file.write("# changed\n")
    machine.setup()
    assert machine.calls() == ["pip"]
    assert (machine.venv / "kept").exists()


def test_failed_pip_says_so_and_is_started_afresh(machine):
    machine.python("python3.12")
    done = machine.run(PIP_EXIT="3")
    assert done.returncode == 1
    assert "pip could not install the packages" in done.stderr
    assert "PIP_INDEX_URL" in done.stderr
    (machine.venv / "half-installed").touch()
    machine.calls()
    machine.setup()
    assert machine.calls() == ["venv", "pip"]
    assert not (machine.venv / "half-installed").exists()


def test_environment_whose_python_is_gone_is_made_again(machine):
    machine.python("python3.12")
    machine.setup()
    machine.calls()
    (machine.venv / "bin" / "python").unlink()
    machine.setup()
    assert machine.calls() == ["venv", "pip"]


def test_moved_checkout_is_made_again(machine):
    machine.python("python3.12")
    machine.setup()
    machine.calls()
    machine.checkout = machine.checkout.rename(machine.checkout.with_name("moved"))
    machine.setup()
    assert machine.calls() == ["venv", "pip"]


def test_rebuild_and_unknown_argument(machine):
    machine.python("python3.12")
    machine.setup()
    machine.calls()
    machine.setup("--rebuild")
    assert machine.calls() == ["venv", "pip"]
    done = machine.run("setup.sh", "--rebiuld")
    assert done.returncode == 1
    assert "unknown argument '--rebiuld'" in done.stderr


def test_two_at_once_install_once(machine):
    machine.python("python3.12")
    command = [shutil.which("bash"), str(machine.checkout / "scripts" / "setup.sh")]
    slow = machine.environment(PIP_SECONDS="1.5")
    both = [
        subprocess.Popen(command, env=slow, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert machine.calls() == ["venv", "pip"]
    assert sum("waiting for it" in output for output in outputs) == 1


def test_little_space_is_said_before_downloading(machine):
    machine.python("python3.12")
    machine.tool("df", "echo; echo disk 9999 1 1234 1% /")
    done = machine.run()
    assert done.returncode == 1
    assert "only 1234 MB are free" in done.stderr
    assert "MEGATRON_EXT_VENV" in done.stderr
    assert machine.calls() == ["venv"]


# ---- a folder of the user's own


def test_folder_that_is_no_environment_is_left_alone(machine, tmp_path):
    machine.python("python3.12")
    precious = tmp_path / "precious" / "thesis.txt"
    precious.parent.mkdir()
    precious.touch()
    done = machine.run(MEGATRON_EXT_VENV=str(precious.parent))
    assert done.returncode == 1
    assert "will not be deleted" in done.stderr
    assert list(precious.parent.iterdir()) == [precious]


def test_environment_of_the_user_is_installed_into_and_never_cleared(machine, tmp_path):
    theirs = tmp_path / "theirs"
    machine.python(theirs / "bin" / "python")
    failed = machine.run(MEGATRON_EXT_VENV=str(theirs), PIP_EXIT="1")
    assert failed.returncode == 1
    machine.setup(MEGATRON_EXT_VENV=str(theirs))
    assert machine.calls() == ["pip", "pip"]
    rebuild = machine.run("setup.sh", "--rebuild", MEGATRON_EXT_VENV=str(theirs))
    assert rebuild.returncode == 1
    assert "or --rebuild asks for a new one" in rebuild.stderr
    assert (theirs / "bin" / "python").exists()


def test_active_environment_is_mentioned(machine):
    machine.python("python3.12")
    assert "the active environment /elsewhere is left alone" in machine.setup(VIRTUAL_ENV="/elsewhere").stdout


def test_folder_that_cannot_be_written(machine, tmp_path):
    machine.python("python3.12")
    (tmp_path / "file").touch()
    done = machine.run(MEGATRON_EXT_VENV=str(tmp_path / "file" / "venv"))
    assert done.returncode == 1
    assert "cannot write into" in done.stderr


# ---- scripts/test.sh on top of it


def test_test_script_runs_ruff_then_the_subset(machine):
    machine.python("python3.12")
    done = machine.run("test.sh", "tests/unit", "-k", "some thing")
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.calls_file.read_text().splitlines()[2:] == [
        "-m ruff check .",
        "-m ruff format --check .",
        "-m pytest -v --durations=15 -m not full and not gpu tests/unit -k some thing",
    ]


def test_test_script_full(machine):
    machine.python("python3.12")
    assert machine.run("test.sh", "--full").returncode == 0
    assert machine.calls_file.read_text().splitlines()[-1] == "-m pytest -v --durations=15 -m not gpu"


def test_test_script_fails_when_a_tool_does(machine):
    machine.python("python3.12")
    machine.setup()
    done = machine.run("test.sh", FAIL_ON="ruff format")
    assert done.returncode == 5
    assert "while: ruff format" in done.stderr
    assert machine.run("test.sh", FAIL_ON="pytest").returncode == 5, "as pytest exits when it ran no test"


# ---- scripts/quickstart.sh on top of it


def jobs(machine) -> list[str]:
    """What quickstart.sh started after the setup, each as one line."""
    return [line for line in machine.calls_file.read_text().splitlines() if line.startswith("-m")]


ALL_RUNS = ("pp1", "pp2", "pp2-vocab", "pp2-v-half", "tp4-linear3d", "cp2-wallfacer", "dp4-paro")


def test_quickstart_starts_all_runs_from_one_seed(machine):
    machine.python("python3.12")
    done = machine.run("quickstart.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    data, seed, one, two, vocab, v_half, linear3d, wallfacer, paro, compare = jobs(machine)
    assert data.startswith("-m megatron_ext data --input ")
    prefix = re.search(r"--output (\S+)", data)[1]
    for job in (seed, one, two, vocab, v_half, linear3d, wallfacer, paro):
        assert f"--data-path {prefix}_text_document " in job
        assert f"--tokenizer-model {prefix}.model " in job
    assert "--iterations-to-skip 1 --save runs/quickstart/seed " in seed
    load = "--load runs/quickstart/seed --finetune --no-load-optim --no-load-rng "
    assert "--nproc-per-node 1 " in one
    assert one.endswith(f"{load}--ext-report runs/quickstart/pp1")
    assert "--nproc-per-node 2 " in two
    assert two.endswith(f"{load}--pipeline-model-parallel-size 2 --ext-report runs/quickstart/pp2")
    assert f"{load}--pipeline-model-parallel-size 2 --vocab-parallel vocab-2 " in vocab
    assert vocab.endswith("--ext-report runs/quickstart/pp2-vocab")
    assert (
        f"{load}--pipeline-model-parallel-size 2 --vocab-parallel vocab-2 --pipeline-schedule v-half "
        in v_half
    )
    assert f"{load}--tensor-model-parallel-size 4 --linear-3d 2 1 2 " in linear3d
    assert f"{load}--context-parallel-size 2 --cp-comm-type wallfacer --wallfacer-team-size 2 " in wallfacer
    assert f"{load}--paro-strategy IIG --paro-group-size 2 " in paro
    assert "--nproc-per-node 4 " in paro
    folders = " ".join(f"runs/quickstart/{name}" for name in ALL_RUNS)
    assert compare.startswith(f"-m megatron_ext compare {folders} ")


def test_quickstart_shows_the_end_of_a_failed_job(machine):
    machine.python("python3.12")
    done = machine.run("quickstart.sh", FAIL_ON="--ext-report runs/quickstart/pp1")
    assert done.returncode == 1
    assert "output of -m torch.distributed.run" in done.stderr
    assert "the job failed while: training in one process" in done.stderr
    assert "runs/quickstart/pp1.log" in done.stderr
    assert len(jobs(machine)) == 3, "nothing is started after it"


def test_quickstart_names_the_step_that_failed(machine):
    machine.python("python3.12")
    done = machine.run("quickstart.sh", FAIL_ON="megatron_ext data")
    assert done.returncode == 5
    assert "while: preparing data from the Python standard library's sources" in done.stderr
    refused = machine.run("quickstart.sh", "--fast")
    assert refused.returncode == 1
    assert "takes no arguments" in refused.stderr


# ---- constraints.txt


def test_constraints_pin_every_direct_dependency_as_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for text in project["dependencies"] + extras["dev"] + extras["dit"]]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert {canonicalize_name(name) for name in pins} == {canonicalize_name(need.name) for need in wanted}
    for need in wanted:
        assert need.specifier.contains(pins[need.name]), need
        if need.name != "build":  # used by no code of ours; the rest is what these tests run on
            assert metadata.version(need.name).partition("+")[0] == pins[need.name]


# ---- all scripts


def test_scripts_are_there():
    names = {path.name for path in SCRIPTS}
    assert names >= {"setup.sh", "test.sh", "quickstart.sh", "pretrain.sbatch", "pretrain_node.sh", "run"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_syntax(path):
    checker = [SHELLCHECK, "-x", "--severity=warning"] if SHELLCHECK else ["bash", "-n"]
    done = subprocess.run([*checker, path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.access(path, os.X_OK) or path.suffix == ".sbatch", f"chmod +x {path}"


def test_ci_runs_the_test_command():
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if not line.startswith("#")]
    assert lines[-1] == "bash scripts/test.sh </dev/null"
