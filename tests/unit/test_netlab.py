"""netlab without root: what users write, the commands that build a network, and what is missing."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from megatron_ext.netlab import Lab, LabError, Links, cli, leftovers, needs, plan, report
from megatron_ext.netlab.links import address, mark, owner_of, parse_rate, parse_size, parse_time
from megatron_ext.netlab.measure import cases
from megatron_ext.netlab.namespaces import Counters, parse_counters

RUN = ["run", "--nodes", "2", "--ranks-per-node", "2", "--rate", "400mbit"]


@pytest.mark.parametrize(
    ("text", "rate"), [("400mbit", 400_000_000), ("1.5gbit", 1_500_000_000), ("2000KBIT", 2_000_000)]
)
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_rate, "400", r"'400' is not a rate. Write bits per second with their unit, as 400mbit"),
        (parse_rate, "-1mbit", "is not a rate"),
        (parse_rate, "0mbit", "is not a rate"),
        (parse_rate, "50mbps", "ambiguous: tc reads bps as bytes per second"),
        (parse_rate, "500kbit", "so slow that ranks could not even connect. Set 1mbit or more"),
        (parse_size, "256", "is not a size. Write bytes with their unit, as 256kb"),
        (parse_size, "4kb", "never gets through. Set 20kb or more"),
        (parse_time, "1", "is not a time. Write it with its unit"),
        (parse_time, "0ms", "is not a time"),
    ],
)
def test_what_cannot_be_read_is_explained(parse, text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_sizes_and_times():
    assert parse_size("256kb") == 256 * 1024
    assert parse_time("500us") == pytest.approx(0.0005)


def test_default_burst_is_two_milliseconds_and_never_less_than_a_portion():
    assert Links(400_000_000).bucket() == 100_000
    assert Links(10_000_000).bucket() == 20 * 1024
    assert Links(400_000_000, burst=300_000).bucket() == 300_000
    # One packet of the loopback is 64 KiB: a smaller bucket would block it for ever.
    assert Links(10**6, intra_rate=10**6).intra_bucket() > 65536 + 14


def test_marks_name_their_owner():
    assert owner_of(mark(4194304)) == 4194304
    assert len(mark(4194304)) <= 15  # the kernel's limit for names
    assert [owner_of(name) for name in ("lo", "eth0", "netlab", "netlab1x", "xnetlab1")] == [None] * 5
    assert (address(0), address(249)) == ("10.77.0.1", "10.77.0.250")


def test_plan_limits_both_directions_of_every_node():
    steps = [step.text() for step in plan.network(3, Links(400_000_000), owner=77)]
    limits = [text for text in steps if "tbf" in text]
    assert [re.sub(" limit .*", "", text) for text in limits] == [
        f"{place} root tbf rate 400000000bit burst 100000"
        for node in range(3)
        for place in (f"[hub] tc qdisc add dev port{node}", f"[node {node}] tc qdisc add dev eth0")
    ]
    assert "[hub] ip link add port2 mtu 9000 type veth peer name eth0 mtu 9000 netns NODE2" in steps
    assert "[node 2] ip address add 10.77.0.3/24 dev eth0" in steps
    assert "[node 1] ip link add netlab77 type bridge" in steps
    assert "[node 0] echo reno > /proc/sys/net/ipv4/tcp_congestion_control" in steps


def test_plan_limits_the_loopback_only_when_asked():
    without = plan.dry_run(plan.network(1, Links(10**8), owner=1))
    limited = plan.dry_run(plan.network(1, Links(10**8, intra_rate=2 * 10**9), owner=1))
    assert "dev lo root" not in without
    assert "[node 0] tc qdisc add dev lo root tbf rate 2000000000bit burst 500000 limit" in limited


def test_plan_delays_before_it_limits():
    steps = [step.text() for step in plan.network(1, Links(10**9, latency=0.001), owner=1)]
    at = next(i for i, text in enumerate(steps) if "netem" in text)
    assert steps[at].startswith("[hub] tc qdisc add dev port0 root handle 1: netem delay 1000us limit ")
    assert steps[at + 1].startswith(
        "[hub] tc qdisc add dev port0 parent 1:1 handle 10: tbf rate 1000000000bit"
    )


def test_dry_run_needs_nothing_and_shows_everything(capsys, monkeypatch):
    monkeypatch.setattr(needs, "missing", lambda: pytest.fail("a dry run asks for nothing"))
    assert cli.main([*RUN, "--intra-rate", "2gbit", "--dry-run", "--", "ls", "-l"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "[hub] ip link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0" in lines
    last = lines[-1]
    assert last.startswith("[node 1] RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 ")
    for word in (
        "MASTER_ADDR=10.77.0.1",
        "MASTER_PORT=29500",
        "GLOO_SOCKET_IFNAME=eth0",
        "NCCL_SOCKET_IFNAME=eth0",
        "OMP_NUM_THREADS=1",
    ):
        assert word in last.split()
    assert last.endswith(" ls -l")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([], "no command was given. Put it behind --"),
        (["--"], "no command was given"),
        (["--", "no-such-program"], "the command 'no-such-program' was not found"),
        (["--nodes", "0", "--", "ls"], "--nodes 0 is not possible; set 1 to 250"),
        (["--ranks-per-node", "0", "--", "ls"], "--ranks-per-node 0 is not possible"),
        (["--timeout", "0", "--", "ls"], "--timeout 0 is no time"),
        (["--json", "no/such/folder/x.json", "--", "ls"], "there is no folder no/such/folder"),
        (["--fork", "--", "python", "x.py"], "'python' is neither. Write `-- SCRIPT.py ARGS`"),
        (["--fork", "--", "no-such.py"], "'no-such.py' is neither"),
        (["--fork", "--preload", "no_such_module", "--", "-m", "json"], "No module named 'no_such_module'"),
    ],
)
def test_bad_use(extra, message, capsys, monkeypatch):
    monkeypatch.setattr(needs, "missing", list)
    assert cli.main([*RUN, *extra]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"), [("--rate", "fast"), ("--intra-rate", "1bps"), ("--burst", "1kb")]
)
def test_bad_values_exit_2(flag, value, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*RUN, flag, value, "--", "ls"])
    assert stop.value.code == 2
    assert f"argument {flag}: " in capsys.readouterr().err


def test_without_root_or_tools_it_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(needs, "tool", lambda name: None if name == "tc" else "/sbin/ip")
    monkeypatch.setattr(needs, "missing_capabilities", lambda status: ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main([*RUN, "--", "ls"]) == 2
    said = capsys.readouterr().err
    assert "the program `tc` is not installed. It comes with iproute2" in said
    assert "user 1000 lacks CAP_NET_ADMIN and CAP_SYS_ADMIN" in said
    assert "sudo" in said
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.count("missing  ") == 2


def test_capabilities_are_read_from_the_status():
    assert needs.missing_capabilities("Name:\tx\nCapEff:\t000001ffffffffff\n") == []
    assert needs.missing_capabilities("CapEff:\t0000000000000000\n") == ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"]
    # What docker grants by default with NET_ADMIN added.
    assert needs.missing_capabilities("CapEff:\t00000000a80435fb\n") == ["CAP_SYS_ADMIN"]


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(needs.sys, "platform", "darwin")
    assert needs.missing() == ["netlab builds Linux network namespaces; this is darwin. Run it on Linux."]


def test_latency_without_netem_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(needs, "missing", list)
    monkeypatch.setattr(needs, "has_netem", lambda: False)
    assert cli.main([*RUN, "--latency", "1ms", "--", "ls"]) == 2
    assert "--latency needs netem, and this kernel has none" in capsys.readouterr().err


def test_what_is_measured_depends_on_the_lab():
    names = [case.name for case in cases(Lab(2, Links(10**8)))]
    assert names == ["one node to another", "by two of its ranks", "both directions", "all nodes in a ring"]
    assert [case.name for case in cases(Lab(1, Links(10**8, 10**9)))] == [
        "inside one node",
        "inside all nodes",
    ]
    ring = next(case for case in cases(Lab(3, Links(10**8))) if case.name == "all nodes in a ring")
    assert (ring.pairs, ring.rate) == ([(0, 3), (2, 5), (4, 1)], 3 * 10**8)
    assert cases(Lab(3, Links(10**8)))[-1].pairs == [(2, 0), (4, 1)]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--repeats", "0"], "--repeats 0 is not possible"),
        (["--nodes", "300"], "--nodes 300 is not possible; set 1 to 250"),
        (["--", "ls"], "`netlab measure` takes no command"),
    ],
)
def test_bad_use_of_measure(extra, message, capsys):
    assert cli.main(["measure", "--nodes", "2", "--rate", "100mbit", *extra]) == 2
    assert message in capsys.readouterr().err


def test_a_lab_has_a_number_of_nodes():
    with pytest.raises(ValueError, match="1 to 250 nodes, not 251"):
        Lab(251, Links(10**8))


def test_a_lab_needs_what_is_missing(monkeypatch):
    monkeypatch.setattr(needs, "missing", lambda: ["one", "two"])
    with pytest.raises(LabError, match="one\ntwo"), Lab(1, Links(10**8)):
        pytest.fail("it was built")


DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes  packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo:     100       2    0    0    0     0          0         0      100       2    0    0    0     0      0
  eth0:    5000      50    0    0    0     0          0         0     7000      70    0    0    0     0      0
"""


def test_counters():
    found = parse_counters(DEV)
    assert found["eth0"] == Counters(tx_bytes=7000, rx_bytes=5000, tx_packets=70, rx_packets=50)
    assert found["eth0"].since(Counters(6000, 1000, 60, 10)) == Counters(1000, 4000, 10, 40)
    nodes = [{"nic": found["eth0"], "lo": found["lo"]}]
    assert report.table(nodes).splitlines()[1].split() == ["0", "7,000", "5,000", "100"]
    assert report.difference(nodes, nodes)[0]["nic"] == Counters(0, 0, 0, 0)


@pytest.fixture
def proc(tmp_path):
    """A /proc with the caller in net:[1] and a way to add processes."""

    def add(pid, net, names=(), holds=(), pids="pid:[1]"):
        folder = tmp_path / str(pid)
        (folder / "ns").mkdir(parents=True)
        (folder / "ns" / "net").symlink_to(net)
        (folder / "ns" / "pid").symlink_to(pids)
        (folder / "net").mkdir()
        (folder / "net" / "dev").write_text(DEV + "".join(f"{name}: {'0 ' * 16}\n" for name in names))
        (folder / "fd").mkdir()
        for number, target in enumerate(holds):
            (folder / "fd" / str(number)).symlink_to(target)
        (folder / "cmdline").write_bytes(b"sleep\x00100\x00")

    add("self", "net:[1]")
    add.root = tmp_path
    return add


def test_leftovers_are_processes_whose_lab_is_gone(proc):
    proc(10, "net:[1]")  # a neighbour of the caller
    proc(20, "net:[2]", ["docker0"])  # somebody's container
    proc(30, "net:[1]", holds=["net:[3]", "socket:[9]"])  # a lab
    proc(31, "net:[3]", ["netlab30"])  # its rank
    proc(41, "net:[4]", ["netlab40"])  # of a lab that was killed
    proc(51, "net:[5]", ["netlab30"])  # of a killed lab whose number another lab has now
    proc(61, "net:[6]", ["netlab60"], pids="pid:[2]")  # of a lab in a container: numbers mean something else
    assert leftovers.find(proc.root) == [
        leftovers.Leftover(41, 40, "sleep 100"),
        leftovers.Leftover(51, 30, "sleep 100"),
    ]


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "netlab"


def test_an_older_python_is_told_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    monkeypatch.setenv("MEGATRON_EXT_VENV", str(tmp_path))
    with pytest.raises(
        SystemExit, match=r"is older than Python 3.12, and .* does not exist. Run scripts/setup.sh"
    ):
        runpy.run_path(str(SCRIPT))


def test_an_older_python_hands_over_to_the_environment(monkeypatch, tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("")
    called = []

    def execv(path, argv):
        called.append((path, argv))
        raise SystemExit

    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    monkeypatch.setattr(sys, "argv", ["netlab", "clean"])
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv("MEGATRON_EXT_VENV", str(tmp_path))
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT))
    assert called == [(str(python), [str(python), str(SCRIPT), "clean"])]
