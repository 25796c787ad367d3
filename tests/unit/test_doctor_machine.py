"""Doctor's checks of the machine, on machines that the tests make up."""

import os
import socket
from collections import namedtuple

import pytest

from megatron_ext.tools import doctor_gpu, doctor_machine
from megatron_ext.tools.doctor_report import Finding
from tests.unit.doctor_helpers import clear_environment, only


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    clear_environment(monkeypatch)


def levels(findings):
    return [(finding.level, finding.name) for finding in findings]


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
        monkeypatch.setattr(doctor_gpu, "matmul", lambda index: None)

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


def test_gpu_that_cannot_compute(cuda, monkeypatch):
    """Whatever torch raises there: doctor names the GPU and goes on with the next."""

    def matmul(index):
        if index == 1:
            raise AssertionError("uncorrectable ECC error")

    cuda((9, 0), (9, 0), (9, 0), seen=[("H100", "580.1")] * 3)
    monkeypatch.setattr(doctor_gpu, "matmul", matmul)
    _, found = doctor_gpu.gpus(required=True)
    assert levels(found) == [("ok", "GPU 0"), ("FAIL", "GPU 1"), ("ok", "GPU 2"), ("ok", "CUDA")]
    assert found[1].value.endswith(": cannot do a small matmul: AssertionError: uncorrectable ECC error")
    assert found[1].fix


def test_matmul_is_on_the_gpu_it_is_asked_for(monkeypatch):
    """On torch's `meta` device, which any machine has, the calls are real."""
    import torch

    asked, waited = [], []

    def device(kind, index):
        asked.append((kind, index))
        return "meta"

    monkeypatch.setattr(torch, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    doctor_gpu.matmul(2)
    assert (asked, waited) == ([("cuda", 2)], [2])


@pytest.mark.parametrize("devices", [[], [(9, 0)]], ids=["no GPU", "one GPU"])
def test_nvidia_smi_that_hangs(cuda, tmp_path, monkeypatch, devices):
    ask = doctor_gpu.nvidia_smi
    cuda(*devices)
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nwhile :; do :; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor_gpu, "nvidia_smi", ask)
    monkeypatch.setattr(doctor_gpu, "SMI_TIMEOUT_S", 0.2)
    _, found = doctor_gpu.gpus(required=False)
    assert found[0].level == "FAIL"
    assert found[0].name == "nvidia-smi"
    assert found[0].value.startswith("gave no answer within 0.2 s")
    rest = levels(found[1:])
    assert rest == ([("ok", "GPU 0"), ("ok", "CUDA")] if devices else [("warn", "GPU")])
    if devices:
        assert "driver unknown (nvidia-smi hangs)" in found[2].value


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
