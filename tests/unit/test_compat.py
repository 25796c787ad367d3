"""Versions and import paths are those of the code that will really be imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext import compat
from tests.unit.fake_upstream import first_on_path, version_file, write

CORE = "megatron/core/package_info.py"
TRAINING = "megatron/training/__init__.py"


def megatron(root: Path, *version, training: bool = True) -> Path:
    """A copy of megatron with this version; without it, package_info.py says nothing."""
    write(
        root, {CORE: version_file(*version) if version else "x = 1\n"} | ({TRAINING: ""} if training else {})
    )
    return root


@pytest.mark.parametrize("version", [(0, 19, 0), (0, 19, 2), (0, 19, 17)])
def test_inside_the_window(tmp_path, version):
    with first_on_path(megatron(tmp_path, *version)):
        assert compat.megatron_version() == ".".join(map(str, version))
        assert compat.check_versions() == []
        assert compat.check_import_paths() == []


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        ((0, 18, 3), "0.18.3"),
        ((0, 20, 0), "0.20.0"),
        ((0, 20, 0, "rc0"), "0.20.0rc0"),  # the main branch calls itself so
        ((0, 19, 0, "rc1"), "0.19.0rc1"),
        ((), "of an unknown version"),
    ],
)
def test_outside_the_window(tmp_path, version, shown):
    with first_on_path(megatron(tmp_path, *version)):
        (problem,) = compat.check_versions()
    folder = tmp_path / "megatron" / "core"
    assert (
        f"megatron-core is {shown} in {folder}, but megatron_ext works with {compat.MEGATRON_WINDOW}"
        in problem
    )
    assert f'{sys.executable} -m pip install "{compat.MEGATRON_INSTALL}"' in problem
    assert "take it off PYTHONPATH" in problem


def test_checkout_in_front_of_the_wheel_is_what_counts(tmp_path):
    wheel, checkout = megatron(tmp_path / "wheel", 0, 18, 0), megatron(tmp_path / "checkout", 0, 19, 1)
    with first_on_path(checkout, wheel):
        assert compat.megatron_version() == "0.19.1"
        assert compat.check_versions() + compat.check_import_paths() == []


def test_mixed_copies(tmp_path):
    wheel = megatron(tmp_path / "wheel", 0, 19, 2)
    checkout = megatron(tmp_path / "checkout", 0, 19, 2, training=False)
    with first_on_path(checkout, wheel):
        (problem,) = compat.check_import_paths()
    assert f"megatron.core comes from {checkout}/megatron/core" in problem
    assert f"megatron.training from {wheel}/megatron/training" in problem
    assert "first on PYTHONPATH" in problem
    assert "take it off PYTHONPATH" in problem


def run_alone(tmp_path: Path, code: str) -> str:
    """Output of a Python without site-packages: neither torch nor megatron, but the project and packaging."""
    import packaging

    folder = tmp_path / "only"
    folder.mkdir()
    (folder / "packaging").symlink_to(Path(packaging.__file__).parent)
    (folder / "megatron_ext").symlink_to(Path(compat.__file__).parent)
    path = [str(folder), str(tmp_path)]
    script = f"import sys; sys.path[:0] = {path}\nfrom megatron_ext import compat\n{code}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_installed(tmp_path):
    out = run_alone(
        tmp_path, "print(*compat.check_versions(), sep='\\n'); print(compat.check_import_paths())"
    )
    torch, megatron_core, paths = out.splitlines()
    assert (
        torch == f'torch is not installed. Run: {sys.executable} -m pip install "torch{compat.TORCH_WINDOW}"'
    )
    install = f'{sys.executable} -m pip install "{compat.MEGATRON_INSTALL}"'
    assert megatron_core == f"megatron-core is not installed. Run: {install}"
    assert paths == "[]"  # said once, by check_versions


def test_megatron_without_training(tmp_path):
    megatron(tmp_path, 0, 19, 2, training=False)
    out = run_alone(tmp_path, "print(*compat.check_import_paths())")
    assert "there is no megatron.training. Run:" in out


@pytest.mark.parametrize(
    ("version", "supported"),
    [("2.10.0+cu128", False), ("2.11.0+cu130", True), ("2.11.0a0+nv26", True), ("3.0.1", True)],
)
def test_torch_window(tmp_path, version, supported):
    write(tmp_path, {"torch/__init__.py": "", "torch/version.py": f"__version__ = '{version}'\n"})
    megatron(tmp_path, 0, 19, 2)
    out = run_alone(tmp_path, "print(compat.torch_version(), *compat.check_versions())")
    found, _, problem = out.strip().partition(" ")
    assert found == version
    assert (problem == "") is supported
    assert supported or f"torch is {version} in {tmp_path}/torch, but megatron_ext needs" in problem


@pytest.mark.parametrize("version", ["3.11.9", "3.14.0", "3.14.2"])
def test_python_outside_the_window(monkeypatch, version):
    monkeypatch.setattr(compat, "python_version", lambda: version)
    problem = compat.version_problems()["python"]
    assert f"Python is {version} ({sys.executable}), but megatron_ext needs {compat.PYTHON_WINDOW}" in problem
    assert "virtual environment with Python 3.12 or 3.13" in problem


@pytest.mark.parametrize("version", ["3.12.0", "3.13.9"])
def test_python_inside_the_window(monkeypatch, version):
    monkeypatch.setattr(compat, "python_version", lambda: version)
    assert "python" not in compat.version_problems()


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from megatron_ext import compat; compat.check_versions(); compat.check_import_paths();"
        "assert not {'torch', 'megatron.core', 'megatron.training'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(compat.__file__).parent.parent)
