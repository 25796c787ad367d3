"""`megatron-ext probe` in forked gloo ranks: what it measures, prints, and writes for a plan."""

import functools
import itertools
from pathlib import Path

import pytest
import torch

from megatron_ext import traffic
from megatron_ext.paro.measure import measure
from megatron_ext.paro.network import ACTIONS, Network
from megatron_ext.tools import plan_paro, probe
from tests.dist.test_paro_volume import make_groups
from tests.ranks import ranks, run_ranks

SIZES = ["--sizes", "0.0625MiB", "0.25MiB", "--repeats", "2"]


def probed(path: Path, *argv: str) -> int:
    return probe.main(["--cpu", "--output", str(path), *SIZES, *argv])


@pytest.mark.parametrize(
    ("k", "m", "scopes"),
    [(2, 2, {"members", "groups", "flat"}), (2, 1, {"groups", "flat"}), (1, 2, {"members", "flat"})],
)
def test_probe_writes_what_a_plan_reads(k, m, scopes, tmp_path, capsys):
    path = tmp_path / "made" / "bandwidths.json"
    results = run_ranks(k * m, functools.partial(probed, path, "--group-size", str(m)))
    assert [result.value for result in results] == [0] * (k * m)
    network = Network.read(path)
    assert set(network.links) == set(itertools.product(scopes, ACTIONS))
    assert (network.groups, network.members, network.backend) == (k, m, "gloo")
    for link in network.links.values():
        assert link.latency_s >= 0
        assert 1e5 < link.bytes_per_s < 1e12
    first, *others = (result.output for result in results)
    assert f"{k} groups of {m} ranks, all at once" in first
    assert ("inside groups" in first) == (m > 1)
    assert ("between groups" in first) == (k > 1)
    assert f"written: {path}" in first
    assert not any("groups" in output for output in others)
    ranks_ = ["--data-parallel-size", str(k * m), "--paro-group-size", str(m), "--microbatches", "2"]
    assert plan_paro.main(["--parameters", "1e6", *ranks_, "--bandwidths", str(path)]) == 0
    assert "Take " in capsys.readouterr().out


def test_groups_are_those_of_a_node_by_default(tmp_path):
    path = tmp_path / "bandwidths.json"
    run_ranks(2, functools.partial(probed, path), env={"LOCAL_WORLD_SIZE": "1"})
    assert Network.read(path).members == 1
    run_ranks(2, functools.partial(probed, path), env={"LOCAL_WORLD_SIZE": "2"})
    assert Network.read(path).members == 2


@ranks(4)
def test_all_ranks_get_one_result_from_calls_of_known_sizes():
    groups = make_groups(2, 2, "-measured")
    traffic.ledger().drain()
    network = measure(groups, torch.device("cpu"), [4000, 16000], 2)
    links = [None] * 4
    torch.distributed.all_gather_object(links, network.links)
    assert links == [links[0]] * 4
    assert {key: [(s.part, s.peers) for s in found] for key, found in network.samples.items()} == {
        (scope, action): [(4000 // parts, peers), (16000 // parts, peers)]
        for (scope, parts, peers), action in itertools.product(
            (("members", 2, 1), ("groups", 4, 1), ("flat", 4, 3)), ACTIONS
        )
    }
    # Every pass was made three times at both sizes.
    sent = {
        (row["kind"], row["group"]): row["bytes"]
        for row in traffic.ledger().drain()
        if row["feature"] == "probe"
    }
    assert {key: amount for key, amount in sent.items() if amount} == {
        ("all_gather", "paro-members-measured"): 3 * 10000,
        ("all_to_all", "paro-members-measured"): 3 * 10000,
        ("all_gather", "paro-groups-measured"): 3 * 5000,
        ("all_to_all", "paro-groups-measured"): 3 * 5000,
        ("all_gather", "paro-flat-measured"): 3 * 15000,
        ("send", "paro-flat-measured"): 3 * 15000,
    }
