"""Doctor: every check has a line, a fix, and a level; the exit code follows."""

import json
import os
import subprocess
import sys
import types

import pytest

from megatron_ext import patching
from megatron_ext.patching import Patch
from megatron_ext.tools import doctor, doctor_gpu, doctor_machine, doctor_report, doctor_software
from megatron_ext.tools.doctor_report import Finding
from tests.unit.doctor_helpers import clear_environment, only
from tests.unit.fake_upstream import first_on_path, version_file, write


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    clear_environment(monkeypatch)


# --- report ------------------------------------------------------------------------------------------------


@pytest.fixture
def findings(monkeypatch):
    """What the checks of all three files find, in one list that the test fills."""
    found = []
    monkeypatch.setattr(doctor_software, "check", lambda cpu: found)
    monkeypatch.setattr(doctor_gpu, "check", lambda cpu, require_gpu: [])
    monkeypatch.setattr(doctor_machine, "check", lambda cpu: [])
    return found


def test_exit_code_and_text(findings, capsys):
    findings += [
        Finding("ok", "python", "3.12.1"),
        Finding("warn", "GPU", "none", "use --cpu " + "and read on " * 12),
    ]
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok    python                3.12.1"
    assert lines[1] == "warn  GPU                   none"
    assert lines[2].startswith(" " * 28 + "-> use --cpu and")
    assert lines[3].startswith(" " * 31 + "on and read")
    assert lines[-1] == "healthy for what this machine has, 1 to look at (warn)"
    assert max(map(len, lines)) <= doctor_report.WIDTH
    findings.append(Finding("FAIL", "torch", "gone"))
    assert doctor.main(["--cpu"]) == 1
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "not healthy for CPU runs: 1 to fix (FAIL), 1 to look at (warn)"
    )


def test_json(findings, capsys):
    findings.append(Finding("FAIL", "GPU", "none", "ask for one"))
    assert doctor.main(["--json", "--require-gpu"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "healthy": False,
        "asked": "GPU runs",
        "checks": [{"level": "FAIL", "name": "GPU", "value": "none", "fix": "ask for one"}],
    }


def test_cpu_and_require_gpu_exclude_each_other(capsys):
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--cpu", "--require-gpu"])
    assert stop.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


# --- software ----------------------------------------------------------------------------------------------

FILES = {
    "megatron/core/package_info.py": version_file(0, 19, 2),
    "megatron/core/ops.py": "def scale(x): return x\n\ndef shift(x, by): return x\n",
    "megatron/core/datasets/utils.py": "def compile_helpers(): pass\n",
    "megatron/training/__init__.py": "",
    "megatron/training/arguments.py": "def add_megatron_arguments(parser): return parser\n",
    "megatron/training/training.py": "def get_train_valid_test_num_samples(): pass\n",
}


def contract_text(*names):
    from megatron_ext import contract

    entries = {f"megatron.core.ops:{name}": contract.describe(f"megatron.core.ops:{name}") for name in names}
    return contract.dump(entries, "0.19.2", dict.fromkeys(entries, "vocab"))


@pytest.fixture
def software(tmp_path, monkeypatch):
    """Run the software checks on a fake megatron with one wrap and one replace in the catalogue."""
    monkeypatch.setattr(patching, "_ACTIVE", [])
    monkeypatch.setattr(doctor_software, "hide_gpu_packages", list)
    patches = [
        Patch("megatron.core.ops:scale", len, "replace", "sharding", "vocab"),
        Patch("megatron.core.ops:shift", len, "wrap", "offsets", "paro", ("by",)),
    ]
    features = types.SimpleNamespace(patch_catalogue=lambda: patches)
    monkeypatch.setitem(sys.modules, "megatron_ext.features", features)
    root, contracts = tmp_path / "root", tmp_path / "contracts"
    contracts.mkdir()
    monkeypatch.setattr("megatron_ext.contract.folder", lambda: contracts)
    write(root, FILES)
    (root / "megatron/core/datasets/Makefile").touch()
    with first_on_path(root):
        (contracts / "0.19.2.toml").write_text(contract_text("scale", "shift"), encoding="utf-8")

    def run(changed=None, cpu=True):
        write(root, changed or {})
        with first_on_path(root):
            return list(doctor_software.check(cpu))

    run.root, run.contracts = root, contracts
    return run


def test_healthy(software):
    found = software()
    assert {finding.level for finding in found} == {"ok"}
    assert only(found, "megatron-core").value == f"0.19.2 in {software.root}/megatron/core"
    assert (
        only(found, "upstream contract").value == "all 2 patches that flags can ask for fit what is installed"
    )
    assert "helpers-python" in only(found, "workaround").value
    assert "first run builds them" in only(found, "dataset helpers").value


def test_version_outside_the_window(software):
    found = software({"megatron/core/package_info.py": version_file(0, 20, 0)})
    assert "megatron-core is 0.20.0" in only(found, "megatron-core").value
    assert [finding.name for finding in found if finding.level == "FAIL"] == ["megatron-core"]
    assert only(found, "upstream contract").value == "not checked: the failures above come first"


def test_version_without_a_contract_of_its_own(software):
    found = software({"megatron/core/package_info.py": version_file(0, 19, 7)})
    values = [finding.value for finding in found if finding.name == "upstream contract"]
    assert "0.19.7 has no contract of its own" in values[0]
    assert {finding.level for finding in found} == {"ok"}


def test_mixed_copies(software, tmp_path):
    write(tmp_path / "checkout", {"megatron/core/package_info.py": version_file(0, 19, 2)})
    with first_on_path(tmp_path / "checkout", software.root):
        found = list(doctor_software.check(cpu=True))
    assert "Two copies of Megatron are mixed" in only(found, "import paths").value
    assert only(found, "import paths").level == "FAIL"


@pytest.mark.parametrize(
    ("ops", "level", "text"),
    [
        ("def scale(x): return -x\n\ndef shift(x, by): return x\n", "FAIL", "scale .* body changed.*'vocab'"),
        (
            "def scale(x): return x\n\ndef shift(x, by): return by\n",
            "warn",
            "shift, wrapped by 'paro'.*body changed",
        ),
        (
            "def scale(x): return x\n\ndef shift(x, to): return x\n",
            "FAIL",
            "no parameter by, only \\(x, to\\)",
        ),
        ("def shift(x, by): return x\n", "FAIL", "megatron.core.ops has no 'scale'.*Needed by 'vocab'"),
    ],
)
def test_drift(software, ops, level, text):
    import re

    found = software({"megatron/core/ops.py": ops})
    drift = [finding for finding in found if finding.name == "upstream drift"]
    assert [finding.level for finding in drift if re.search(text, finding.value)] == [level]
    assert not [finding for finding in found if finding.name == "upstream contract"]


def test_no_contract_at_all(software):
    (software.contracts / "0.19.2.toml").unlink()
    finding = only(software(), "upstream contract")
    assert finding.level == "FAIL"
    assert "reinstall" in finding.value


def test_megatron_that_cannot_be_imported(software):
    finding = only(software({"megatron/training/__init__.py": "import no_such_package\n"}), "import megatron")
    assert finding.level == "FAIL"
    assert finding.value == "ModuleNotFoundError: No module named 'no_such_package'"
    assert finding.fix


def test_helpers_that_cannot_be_built(software, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    finding = only(software(), "dataset helpers")
    assert (finding.level, finding.value) == ("FAIL", "not compiled, and make and g++ is missing")
    (software.root / "megatron/core/datasets/Makefile").unlink()
    finding = only(software(), "dataset helpers")
    assert (finding.level, finding.value) == ("FAIL", "not compiled, and there is no Makefile to do it")


def test_missing_package(software, monkeypatch):
    monkeypatch.setitem(doctor_software.REQUIRED, "no_such_module", "no-such-package")
    finding = only(software(), "required packages")
    assert (finding.level, finding.value) == ("FAIL", "missing: no-such-package")
    assert finding.fix == f"{sys.executable} -m pip install no-such-package"


@pytest.fixture
def gpu_packages(monkeypatch):
    """Optional packages can be found: conftest.py hides them from all tests."""
    for package in doctor_software.OPTIONAL:
        monkeypatch.setitem(sys.modules, package, None)  # put back what was there, whatever a test imports
        del sys.modules[package]


def test_optional_packages(software, gpu_packages):
    write(
        software.root,
        {
            "apex/apex.py": "",
            "flash_attn/flash_attn.py": "",
            "x/x.py": "",
        },
    )
    (software.root / "apex" / "__init__.py").touch()
    (software.root / "flash_attn" / "__init__.py").write_text("raise OSError('undefined symbol')\n")
    found = software(cpu=False)
    assert "not NVIDIA's Apex" in only(found, "apex").value
    assert "uninstall apex" in only(found, "apex").fix
    assert only(found, "flash_attn").value == "is installed but cannot be imported: OSError: undefined symbol"
    assert only(found, "flash_attn").level == "FAIL"
    found = software(cpu=True)
    assert only(found, "flash_attn") == Finding(
        "ok", "flash_attn", "installed; hidden from Megatron under --cpu"
    )


@pytest.mark.parametrize("package", ["transformer_engine", "flash_attn", "apex"])
@pytest.mark.parametrize("error", ["AssertionError('no GPU')", "KeyError('sm_100')", "Exception()"])
def test_whatever_an_optional_package_raises_is_a_finding(software, gpu_packages, package, error):
    """Megatron imports these packages, too: then its own import is a second finding."""
    apex = {"apex/__init__.py": "", "apex/multi_tensor_apply/__init__.py": ""}  # as NVIDIA's has it
    write(software.root, apex | {f"{package}/__init__.py": f"raise {error}\n"})
    found = software({"megatron/training/__init__.py": f"import {package}\n"}, cpu=False)
    name = error.partition("(")[0]
    assert only(found, package).level == "FAIL"
    assert only(found, package).value.startswith(f"is installed but cannot be imported: {name}: ")
    assert only(found, "import megatron").level == "FAIL"


def test_pythonpath(software, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{software.root}{os.pathsep}")
    assert f"a Megatron lies in {software.root}" in only(software(), "PYTHONPATH").value
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/gone")
    assert only(software(), "PYTHONPATH") == Finding(
        "warn", "PYTHONPATH", f"names what does not exist: {tmp_path}/gone", "take it off"
    )


def test_command_line_without_torch_is_fast():
    """`--help` must not import torch."""
    code = "import sys; from megatron_ext.tools import doctor as d; d._parser(); exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.path.dirname(doctor.__file__) + "/../..")
