"""Lock: writes the contract of what is installed and shows what changed against the nearest one."""

import sys
import types

import pytest

from megatron_ext import contract, patching
from megatron_ext.patching import Patch
from megatron_ext.tools import lock
from tests.unit.fake_upstream import first_on_path, version_file, write

OLD = "def scale(x):\n    return x\n\n\ndef shift(x, by):\n    return x + by\n"
NEW = "def scale(x):\n    return 2 * x\n\n\ndef shift(x, by, scale=1):\n    return x + by\n"


def patch(name, kind="wrap", feature="vocab"):
    return Patch(f"megatron.core.ops:{name}", len, kind, "why", feature)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Folders with 0.19.72 and 0.19.73 of a fake megatron, an empty one for contracts, and a catalogue."""
    monkeypatch.setattr(patching, "_ACTIVE", [])
    contracts = tmp_path / "contracts"
    contracts.mkdir()
    monkeypatch.setattr(contract, "folder", lambda: contracts)
    for name, text in (("0.19.72", OLD), ("0.19.73", NEW)):
        files = {"megatron/core/ops.py": text, "megatron/training/__init__.py": ""}
        files["megatron/core/package_info.py"] = version_file(*map(int, name.split(".")))
        write(tmp_path / name, files)
    patches = [patch("scale", "replace"), patch("scale", feature="record"), patch("shift")]
    patches.append(Patch("math:floor", len, "replace", "not upstream", "cpu"))
    features = types.SimpleNamespace(patch_catalogue=lambda: patches)
    monkeypatch.setitem(sys.modules, "megatron_ext.features", features)

    def run(*versions, args=()):
        with first_on_path(*(tmp_path / version for version in versions)):
            return lock.main(list(args))

    run.root, run.contracts, run.patches = tmp_path, contracts, patches
    return run


def test_first_contract(project, capsys):
    assert project("0.19.72") == 0
    out = capsys.readouterr().out
    assert "megatron-core 0.19.72: 2 targets of 3 patches" in out
    assert "There is no earlier contract: every body below has to be reviewed." in out
    written = contract.load_contract("0.19.72")
    assert list(written.entries) == ["megatron.core.ops:scale", "megatron.core.ops:shift"]
    text = (project.contracts / "0.19.72.toml").read_text()
    assert 'needed_by = "vocab (replace), record (wrap)"' in text
    assert project("0.19.72") == 0
    assert "no difference" in capsys.readouterr().out
    assert (project.contracts / "0.19.72.toml").read_text() == text


def test_what_changed_in_words(project, capsys):
    project("0.19.72")
    assert project("0.19.73") == 0
    out = capsys.readouterr().out
    assert "compared with the contract of 0.19.72:" in out
    assert "  changed: megatron.core.ops:scale, for vocab (replace), record (wrap): body changed\n" in out
    assert (
        "  changed: megatron.core.ops:shift, for vocab (wrap): parameters added: scale; body changed\n" in out
    )
    assert "no copy of 0.19.72 is at hand" in out
    assert "pip install --no-deps --target DIR megatron-core==0.19.72" in out
    assert contract.available() == ["0.19.72", "0.19.73"]


@pytest.mark.parametrize("how", ["path", "against"])
def test_what_changed_as_a_diff(project, capsys, how):
    project("0.19.72")
    older = project.root / "0.19.72"
    code = (
        project("0.19.73", args=["--against", str(older)])
        if how == "against"
        else project("0.19.73", "0.19.72")
    )
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("    --- 0.19.72/megatron.core.ops:scale")
    assert lines[start : start + 6] == [
        "    --- 0.19.72/megatron.core.ops:scale",
        "    +++ installed/megatron.core.ops:scale",
        "    @@ -1,2 +1,2 @@",
        "     def scale(x):",
        "    -    return x",
        "    +    return 2 * x",
    ]


def test_new_and_dropped_targets(project, capsys):
    project("0.19.72")
    project.patches[2:] = [Patch("megatron.core.ops:shift.__name__", len, "wrap", "why", "paro")]
    assert project("0.19.72") == 1
    assert "shift is a function; only modules and classes can be patched" in capsys.readouterr().err
    project.patches[2:] = [Patch("megatron.core.package_info:MAJOR", len, "replace", "why", "paro")]
    assert project("0.19.72") == 0
    out = capsys.readouterr().out
    assert "  new, to be reviewed: megatron.core.package_info:MAJOR, for paro (replace)\n" in out
    assert "  not patched any more: megatron.core.ops:shift\n" in out


def test_target_that_is_gone(project, capsys):
    project.patches.append(patch("gone"))
    assert project("0.19.72") == 1
    err = capsys.readouterr().err
    assert "Nothing was written" in err
    assert "megatron.core.ops has no 'gone'" in err
    assert not list(project.contracts.iterdir())


def test_output_elsewhere(project, tmp_path):
    (tmp_path / "out").mkdir()
    assert project("0.19.72", args=["--output", str(tmp_path / "out")]) == 0
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["0.19.72.toml"]


def test_bad_input(project, capsys, tmp_path):
    assert project("0.19.72", args=["--output", str(tmp_path / "gone")]) == 2
    assert "is not a folder that can be written; name one that is." in capsys.readouterr().err
    assert project("0.19.72", args=["--against", str(tmp_path)]) == 2
    assert "holds no megatron/core; give the folder above `megatron`." in capsys.readouterr().err


def test_version_outside_the_window_is_written_with_a_warning(project, capsys):
    write(project.root / "0.19.72", {"megatron/core/package_info.py": version_file(0, 20, 1)})
    assert project("0.19.72") == 0
    assert "warning: megatron-core is 0.20.1" in capsys.readouterr().err
    assert contract.available() == ["0.20.1"]
