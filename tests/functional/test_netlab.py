"""A real lab: rates hold, bytes are counted, failures come back, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ext.netlab import Lab, LabError, Links, leftovers, needs, node_counters, run_in_lab
from megatron_ext.netlab.links import mark
from megatron_ext.netlab.measure import cases, measure, transfer
from megatron_ext.netlab.namespaces import interface_counters
from tests.functional.runs import REPO

pytestmark = pytest.mark.skipif(bool(needs.missing()), reason="; ".join(needs.missing()) or "-")

MBIT = 10**6
LINKS = Links(rate=100 * MBIT, intra_rate=300 * MBIT)
NETLAB = [sys.executable, str(REPO / "scripts" / "netlab")]
RUN = [*NETLAB, "run", "--nodes", "2", "--ranks-per-node", "2", "--rate", "100mbit"]


@pytest.fixture(scope="module")
def lab():
    with Lab(3, LINKS) as built:
        yield built


CASES = [case.name for case in cases(Lab(3, LINKS))]


@pytest.mark.parametrize("name", CASES)
def test_rates_hold(lab, name):
    """Never more than what is set, and that much once the machine has time for it."""
    case = next(case for case in cases(lab) if case.name == name)
    found: list[float] = []
    while not found or (max(found) < 0.87 * case.rate and len(found) < 8):
        found += measure(lab, case, repeats=1, seconds=0.3)
    assert 0.87 * case.rate < max(found) < 1.12 * case.rate, f"{found} bit/s instead of {case.rate}"


def test_bytes_are_counted_where_they_pass(lab):
    count = 1 << 20
    before = lab.counters()
    transfer(lab, count, [(0, 2)])
    between = lab.counters()
    transfer(lab, count, [(2, 3)])
    after = lab.counters()

    def passed(node, name, new, old):
        return new[node][name].since(old[node][name])

    assert count < passed(0, "nic", between, before).tx_bytes < 1.1 * count
    assert count < passed(1, "nic", between, before).rx_bytes < 1.1 * count
    assert passed(1, "nic", between, before).tx_bytes < 0.1 * count  # acknowledgements
    assert passed(0, "lo", between, before).tx_bytes == 0
    assert count < passed(1, "lo", after, between).tx_bytes < 1.1 * count
    assert passed(1, "nic", after, between).tx_bytes < 0.1 * count


def test_ranks_see_their_own_node_only(lab):
    def body():
        seen = node_counters()
        return sorted(interface_counters()), seen["nic"].tx_bytes, os.environ["GLOO_SOCKET_IFNAME"]

    for result in run_in_lab(lab, 6, body):
        names, sent, interface = result.value
        assert {"lo", "eth0", mark(os.getpid())} <= set(names)
        assert interface == "eth0"
        assert sent <= lab.counters()[result.node]["nic"].tx_bytes


def test_gloo_talks_over_the_lab(lab):
    import torch  # before the ranks are forked, so that they share it
    import torch.distributed as dist

    def body():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        value = torch.full((1000,), float(dist.get_rank() + 1))
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value.unique().tolist()

    assert [result.value for result in run_in_lab(lab, 6, body)] == [[21.0]] * 6


def test_command_line(tmp_path):
    file = tmp_path / "run.json"
    code = (
        "import os, sys; print('env', os.environ['RANK'], os.environ['GROUP_RANK'], os.environ['LOCAL_RANK'])"
    )
    result = subprocess.run(
        [*RUN, "--intra-rate", "300mbit", "--json", str(file), "--", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = result.stdout.splitlines()
    said = sorted(line for line in lines if "env" in line)
    assert said == [f"[rank {rank}] env {rank} {rank // 2} {rank % 2}" for rank in range(4)]
    assert lines[-3].split() == ["node", "sent", "received", "inside", "bytes"]
    assert "netlab: 2 nodes x 2 ranks, 100 Mbit/s between nodes" in result.stderr
    found = json.loads(file.read_text())
    assert (found["rate"], found["intra_rate"], found["exit_code"]) == (100 * MBIT, 300 * MBIT, 0)
    assert [rank["exit_code"] for rank in found["ranks"]] == [0] * 4
    assert [node["nic"].keys() for node in found["traffic"]] == [
        {"tx_bytes", "rx_bytes", "tx_packets", "rx_packets"}
    ] * 2


def test_exit_code_of_the_first_failing_rank(tmp_path):
    file = tmp_path / "run.json"
    code = "import os, sys; sys.exit(7 if os.environ['RANK'] == '2' else 0)"
    result = subprocess.run(
        [*RUN, "--json", str(file), "--", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 7
    assert "netlab: rank 2 on node 1 ended with exit code 7" in result.stderr
    assert json.loads(file.read_text())["first_failed_rank"] == 2


def test_forked_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys; print(sys.argv[1], 'json' in sys.modules, os.environ['LOCAL_WORLD_SIZE'])"
    )
    command = [*RUN, "--fork", "--preload", "json", "--", str(script), "--flag"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(result.stdout.splitlines()[:4]) == [f"[rank {rank}] --flag True 2" for rank in range(4)]


def strays(owner: int) -> list[int]:
    """Processes in the nodes of a lab."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if f"{mark(owner)}:" in (process / "net" / "dev").read_text():
                    found.append(int(process.name))
            except OSError:  # it has ended
                continue
    return found


def start_lab_with_daemons() -> subprocess.Popen:
    """A lab whose two ranks have each started a process that is out of reach for signals to their group."""
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "print('started', flush=True)\n"
        "time.sleep(300)"
    )
    command = [*NETLAB, "run", "--nodes", "2", "--ranks-per-node", "1", "--rate", "100mbit", "--"]
    lab = subprocess.Popen([*command, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert lab.stdout is not None
    for _ in range(2):
        assert "started" in lab.stdout.readline()
    assert len(strays(lab.pid)) == 4
    return lab


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_stopped_lab_leaves_nothing(number, code):
    lab = start_lab_with_daemons()
    lab.send_signal(number)
    lab.communicate(timeout=60)
    assert lab.returncode == code
    assert strays(lab.pid) == []


def test_what_a_killed_lab_leaves_goes_with_the_next_start():
    lab = start_lab_with_daemons()
    lab.kill()
    lab.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while len(left := strays(lab.pid)) > 2 and time.monotonic() < deadline:
        time.sleep(0.05)  # the kernel ends the ranks, as their parent is gone
    assert len(left) == 2
    assert {process.pid for process in leftovers.find()} >= set(left)
    with Lab(1, LINKS) as next_lab:
        assert {process.pid for process in next_lab.removed} >= set(left)
    assert strays(lab.pid) == []


def test_a_running_lab_is_no_leftover(lab):
    def body():
        return [process.owner for process in leftovers.find()]

    assert all(os.getpid() not in result.value for result in run_in_lab(lab, 3, body))
    result = subprocess.run([*NETLAB, "clean"], capture_output=True, text=True, check=True)
    assert str(os.getpid()) not in result.stdout


def test_a_failing_command_is_named(monkeypatch):
    links = Links(rate=100 * MBIT, latency=1.0)
    monkeypatch.setattr(needs, "has_netem", lambda: True)
    if needs.try_qdisc("netem delay 1ms") is None:
        pytest.skip("this kernel has netem, so the command does not fail")
    with (
        pytest.raises(LabError, match=r"building the network failed at: \[hub\] tc qdisc .* netem delay"),
        Lab(1, links),
    ):
        pytest.fail("it was built")


def test_doctor_builds_one():
    result = subprocess.run([*NETLAB, "doctor"], capture_output=True, text=True, check=True)
    assert "ok       a lab of two nodes was built and removed" in result.stdout


def test_measure_command():
    command = [*NETLAB, "measure", "--nodes", "2", "--rate", "100mbit", "--repeats", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split("  ")[0] for line in result.stdout.splitlines()[1:]] == [
        "one node to another",
        "by two of its ranks",
        "both directions",
        "all nodes in a ring",
    ]
