"""The package as a user installs it: a wheel, in a fresh virtual environment, outside the checkout."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.functional.runs import REPO


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, so that the build leaves nothing in the checkout.
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, check=True).stdout
    for name in tracked.decode().split("\0"):
        if name and (REPO / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPO / name).read_bytes())
    built = run(sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist", source, cwd=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (folder / "dist").glob("*.whl")
    return path


def check_installation(python: Path, cwd: Path) -> None:
    tool = python.parent / "megatron-ext"
    doctor = run(tool, "doctor", "--cpu", cwd=cwd)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert "FAIL" not in doctor.stdout
    where = run(python, "-c", "import megatron_ext; print(megatron_ext.__file__)", cwd=cwd)
    assert str(REPO) not in where.stdout
    help_text = run(tool, "compare", "--help", cwd=cwd)
    assert help_text.returncode == 0
    assert "RUN" in help_text.stdout


def test_wheel_in_a_fresh_environment(wheel, tmp_path):
    """Dependencies are borrowed from this environment, which saves their 3 GB of downloads."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    installed = run(python, "-m", "pip", "install", "--no-deps", wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "venv" / "lib" / version / "site-packages"
    # Editable installs of this project are .pth files, which a plain path does not follow.
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    check_installation(python, tmp_path)


@pytest.mark.full
def test_wheel_with_its_own_dependencies(wheel, tmp_path):
    """As a user does it, with the tested versions; pip takes its cache where it has one."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = REPO / "constraints.txt"
    installed = run(python, "-m", "pip", "install", "-c", constraints, wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stdout[-3000:] + installed.stderr[-3000:]
    check_installation(python, tmp_path)
