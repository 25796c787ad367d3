"""Doctor: every check has a line, a fix, and a level; the exit code follows."""

import json
import os
import socket
import subprocess
import sys
import types
from collections import namedtuple

import pytest

from megatron_ext import patching
from megatron_ext.patching import Patch
from megatron_ext.tools import doctor, doctor_gpu, doctor_machine, doctor_report, doctor_software
from megatron_ext.tools.doctor_report import Finding
from tests.unit.fake_upstream import first_on_path, version_file, write


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No variable of the caller's decides a test."""
    for name in list(os.environ):
        prefixes = ("NCCL_", "TORCH_NCCL_", "GLOO_", "SLURM_", "MASTER_", "LOCAL_", "CUDA_")
        if name.startswith(prefixes) or name in (
            "RANK",
            "WORLD_SIZE",
            "GROUP_WORLD_SIZE",
            "OMP_NUM_THREADS",
            "PYTHONPATH",
        ):
            monkeypatch.delenv(name)


def levels(findings):
    return [(finding.level, finding.name) for finding in findings]


def only(findings, name):
    (finding,) = [finding for finding in findings if finding.name == name]
    return finding


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
    assert lines[3].startswith(" " * 31 + "and read")
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


def test_optional_packages(software, monkeypatch):
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
    assert only(found, "flash_attn").value == "is installed but cannot be imported: undefined symbol"
    assert only(found, "flash_attn").level == "FAIL"
    found = software(cpu=True)
    assert only(found, "flash_attn") == Finding(
        "ok", "flash_attn", "installed; hidden from Megatron under --cpu"
    )


def test_pythonpath(software, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{software.root}{os.pathsep}")
    assert f"a Megatron lies in {software.root}" in only(software(), "PYTHONPATH").value
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/gone")
    assert only(software(), "PYTHONPATH") == Finding(
        "warn", "PYTHONPATH", f"names what does not exist: {tmp_path}/gone", "take it off"
    )


# --- GPUs --------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """A torch.cuda with the given devices, and an nvidia-smi that shows `seen`."""
    import torch

    def have(*devices, seen=(), archs=("sm_80", "sm_90a")):
        Properties = namedtuple("Properties", "name major minor total_memory")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(archs))
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda i: Properties("GPU", *devices[i], 80 << 30)
        )
        monkeypatch.setattr(doctor_gpu, "nvidia_smi", lambda: list(seen))

    return have


def test_gpus(cuda):
    cuda((9, 0), (8, 0), seen=[("H100", "580.1"), ("A100", "580.1")])
    capability, found = doctor_gpu.gpus(required=True)
    assert capability == (8, 0)
    assert [finding.level for finding in found] == ["ok"] * 3
    assert found[0].value == "GPU, 80 GiB, compute capability 9.0"
    assert "driver 580.1" in found[2].value


def test_gpu_that_is_too_old(cuda):
    cuda((7, 0))
    _, found = doctor_gpu.gpus(required=False)
    assert found[0].level == "FAIL"
    assert "older than this torch supports" in found[0].value
    assert "no nvidia-smi" in found[1].value


@pytest.mark.parametrize(
    ("required", "seen", "visible", "level", "text"),
    [
        (False, [], None, "warn", "none"),
        (True, [], None, "FAIL", "none"),
        (False, [("H100", "470.1")], None, "FAIL", "nvidia-smi shows 1 (H100, driver 470.1), but torch"),
        (False, [("H100", "470.1")], "", "warn", "none: CUDA_VISIBLE_DEVICES='' hides them"),
    ],
)
def test_no_gpu(cuda, monkeypatch, required, seen, visible, level, text):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cuda(seen=seen)
    capability, (finding,) = doctor_gpu.gpus(required)
    assert capability is None
    assert finding.level == level
    assert finding.value.startswith(text)
    assert finding.fix


def test_cpu_runs_do_not_ask_for_gpus():
    assert levels(doctor_gpu.check(cpu=True, require_gpu=False)) == [
        ("ok", "GPU"),
        ("ok", "CUDA connections"),
    ]


def test_nvidia_smi_output(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_gpu.nvidia_smi() == []
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 80GB, 580.1'\n")
    tool.chmod(0o755)
    assert doctor_gpu.nvidia_smi() == [("NVIDIA H100, 80GB", "580.1")]
    tool.write_text("#!/bin/sh\necho 'no driver, really'; exit 9\n")
    assert doctor_gpu.nvidia_smi() == []


@pytest.mark.parametrize(
    ("capability", "value", "level"),
    [
        (None, None, "ok"),
        ((9, 0), None, "warn"),
        ((9, 0), "8", "warn"),
        ((9, 0), "1", "ok"),
        ((10, 0), None, "ok"),
    ],
)
def test_cuda_connections(monkeypatch, capability, value, level):
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    finding = doctor_gpu.cuda_connections(capability)
    assert finding.level == level
    assert (value or "not set") in finding.value
    assert ("--use-megatron-fsdp" in finding.fix) is (level == "warn")


# --- machine -----------------------------------------------------------------------------------------------


def test_this_machine_is_reported():
    names = [finding.name for finding in doctor_machine.check(cpu=True)]
    expected = {"CPU cores", "OMP_NUM_THREADS", "launch variables", "NCCL variables", "network interfaces"}
    assert expected | {"host name", "shared memory", "temporary folder"} <= set(names)


def test_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    finding = doctor_machine.cores()
    assert (finding.level, finding.value) == ("warn", "bound to 1 of 64; every rank started here shares it")
    assert "--cpu-bind=none" in finding.fix
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    assert doctor_machine.cores() == Finding("ok", "CPU cores", "32 of 64 usable")


@pytest.mark.parametrize(
    ("threads", "ranks", "level", "fix"),
    [
        (None, "8", "ok", ""),
        ("4", "2", "ok", ""),
        ("4", "4", "warn", "export OMP_NUM_THREADS=2"),
        ("16", None, "warn", "export OMP_NUM_THREADS=8"),
        ("many", "2", "FAIL", "unset it or give one"),
        ("0", "2", "FAIL", "unset it or give one"),
    ],
)
def test_omp_threads(monkeypatch, threads, ranks, level, fix):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, value in (("OMP_NUM_THREADS", threads), ("LOCAL_WORLD_SIZE", ranks)):
        if value is not None:
            monkeypatch.setenv(name, value)
    finding = doctor_machine.omp_threads()
    assert (finding.level, finding.fix) == (level, fix)


WHOLE = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        ({}, []),
        (WHOLE, []),
        ({"MASTER_ADDR": "127.0.0.1"}, []),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4 is set without RANK"]),
        (
            {"RANK": "1"},
            ["RANK=1 is set without WORLD_SIZE", "RANK is set without MASTER_ADDR and MASTER_PORT"],
        ),
        (WHOLE | {"RANK": "4"}, ["RANK=4 does not exist with WORLD_SIZE=4"]),
        (WHOLE | {"RANK": "one"}, ["RANK='one': no numbers"]),
        (WHOLE | {"MASTER_PORT": "70000"}, ["MASTER_PORT='70000' is no port"]),
        (
            WHOLE | {"MASTER_ADDR": "no-such-host.invalid"},
            ["MASTER_ADDR=no-such-host.invalid cannot be resolved"],
        ),
    ],
)
def test_launch_variables(monkeypatch, given, problems):
    def getaddrinfo(host, port):
        if host.endswith(".invalid"):
            raise socket.gaierror("unknown name")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = list(doctor_machine.launch_variables())
    if problems:
        assert [finding.level for finding in found] == ["FAIL"] * len(problems)
        assert all(f.value.startswith(p) for f, p in zip(found, problems, strict=True))
        assert all("torchrun" in finding.fix for finding in found)
    else:
        assert levels(found) == [("ok", "launch variables")]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("NCCL_IB_DISABLE", "1", "InfiniBand is switched off"),
        ("NCCL_IB_DISABLE", "0", None),
        ("NCCL_DEBUG", "INFO", None),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "a dead rank leaves the others hanging"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "torch does not read NCCL_ASYNC_ERROR_HANDLING"),
    ],
)
def test_nccl_variables(monkeypatch, name, value, text):
    monkeypatch.setenv(name, value)
    *suspicious, listed = doctor_machine.nccl_variables()
    assert listed == Finding("ok", "NCCL variables", f"{name}={value}")
    assert [text in finding.value and finding.level == "warn" for finding in suspicious] == (
        [True] if text else []
    )


ADDRESSES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"], "ib0": [], "ib1": []}


@pytest.mark.parametrize(
    ("variable", "value", "missing"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", []),
        ("GLOO_SOCKET_IFNAME", "eth", ["eth"]),
        ("GLOO_SOCKET_IFNAME", "eth0,ib7", ["ib7"]),
        ("NCCL_SOCKET_IFNAME", "eth", []),
        ("NCCL_SOCKET_IFNAME", "ib,enp", []),
        ("NCCL_SOCKET_IFNAME", "enp,bond", ["enp", "bond"]),
        ("NCCL_SOCKET_IFNAME", "=eth", ["eth"]),
        ("NCCL_SOCKET_IFNAME", "=ib0", []),
        ("NCCL_SOCKET_IFNAME", "^docker", []),
        ("NCCL_SOCKET_IFNAME", "", []),
    ],
)
def test_interfaces_by_name(monkeypatch, variable, value, missing):
    monkeypatch.setenv(variable, value)
    assert doctor_machine._missing_interfaces(variable, ADDRESSES) == missing


@pytest.mark.parametrize(
    ("variable", "cpu", "level"),
    [
        ("GLOO_SOCKET_IFNAME", True, "FAIL"),
        ("NCCL_SOCKET_IFNAME", True, "warn"),
        ("NCCL_SOCKET_IFNAME", False, "FAIL"),
    ],
)
def test_missing_interface_is_reported(monkeypatch, variable, cpu, level):
    monkeypatch.setenv(variable, "no-such-interface")
    finding = only(doctor_machine.network(cpu), variable)
    assert finding.level == level
    assert "names no-such-interface, which this machine does not have" in finding.value
    assert "unset it" in finding.fix


@pytest.mark.parametrize(
    ("given", "address", "level"),
    [
        ({}, "127.0.1.1", "ok"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "127.0.1.1", "warn"),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "127.0.1.1", "warn"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, "127.0.1.1", "ok"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "10.0.0.5", "ok"),
        ({"SLURM_JOB_NUM_NODES": "2"}, None, "warn"),
        ({"SLURM_JOB_NUM_NODES": "2", "GLOO_SOCKET_IFNAME": "eth0"}, "127.0.1.1", "ok"),
    ],
)
def test_host_name_of_a_node(monkeypatch, given, address, level):
    def gethostbyname(name):
        if address is None:
            raise socket.gaierror("unknown name")
        return address

    monkeypatch.setattr(socket, "gethostbyname", gethostbyname)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    finding = doctor_machine._host_name(["eth0"])
    assert finding.level == level
    assert (finding.fix == "export GLOO_SOCKET_IFNAME=eth0 on every node") is (level == "warn")


def test_shared_memory(monkeypatch, tmp_path):
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda folder: Usage(64 << 20, 0, 64 << 20))
    finding = doctor_machine.shared_memory(str(tmp_path))
    assert finding.level == "warn"
    assert "0.1 of 0.1 GiB free" in finding.value
    assert "--shm-size" in finding.fix
    assert doctor_machine.shared_memory(f"{tmp_path}/gone").level == "ok"


def test_scratch(monkeypatch):
    assert doctor_machine.scratch().name == "temporary folder"

    def full(dir):
        raise OSError("No space left on device")

    monkeypatch.setattr(doctor_machine.tempfile, "TemporaryFile", full)
    finding = doctor_machine.scratch()
    assert (finding.level, finding.value) == ("FAIL", "No space left on device")
    assert "TMPDIR" in finding.fix


def test_command_line_without_torch_is_fast():
    """`--help` must not import torch."""
    code = "import sys; from megatron_ext.tools import doctor; doctor._parser(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.path.dirname(doctor.__file__) + "/../..")
