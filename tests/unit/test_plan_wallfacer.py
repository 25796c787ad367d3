"""`megatron-ext plan wallfacer`: what it prints, its JSON, table and picture, and messages on bad input."""

import json
import xml.etree.ElementTree as ET

import pytest

from megatron_ext import cli
from megatron_ext.paro.network import Link, Network
from megatron_ext.tools import plan
from megatron_ext.tools.plan_wallfacer import main
from megatron_ext.wallfacer.geometry import shapes

LAYER = ["--seq-length", "131072", "--num-attention-heads", "32", "--hidden-size", "4096", "--bf16"]
NODES = ["--context-parallel-size", "16", "--ranks-per-node", "8", "--ranks-per-nic", "1"]
RATES = ["--rate-inside", "2400gbit", "--rate-between", "400gbit"]
TWO_NODES = [*LAYER, *NODES, *RATES, "--tflops", "400"]
MIB = 2**20


def run(capsys, *argv):
    assert main([*argv]) == 0
    return capsys.readouterr().out


def refused(capsys, *argv):
    assert main([*argv]) == 2
    out, err = capsys.readouterr()
    assert not out
    return [line.removeprefix("megatron-ext plan wallfacer: ") for line in err.splitlines()]


def test_report(capsys):
    text = run(capsys, *TWO_NODES)
    assert text.startswith(
        "131072 tokens x 1, 32 query and 32 key heads of 128 on each tensor-parallel rank, 2 bytes a value, "
        "causal\n16 context-parallel ranks on 2 nodes, 8 on each, 400 TFLOP/s each\n"
        "links (as given): inside a node 2.4 Tbit/s a rank, between nodes 400 Gbit/s a rank\n"
    )
    rows = [line.split() for line in text.splitlines() if line[:2].strip().isdigit() and "  " in line[2:]]
    found = {(int(row[0]), int(row[1])): row for row in rows}
    assert set(found) == set(shapes(16))
    assert rows[0][-2:] == ["take", "this"]
    assert found[4, 4][2] == "1"
    assert "Take C=2 and K=1: 1.49 times as fast as plain ring attention" in text
    assert text.rstrip().endswith(
        "--context-parallel-size 16 --cp-comm-type wallfacer \\\n  --wallfacer-team-size 2 "
        "--wallfacer-kv-bundle 1 --wallfacer-order gap --wallfacer-backward keys"
    )


def test_movements(capsys):
    """Both are compared, and the one to take is named; with K=1 there is none."""
    text = run(capsys, *TWO_NODES, "--wallfacer-kv-bundle", "2")
    assert "--wallfacer-movement direct" in text
    data = json.loads(run(capsys, *TWO_NODES, "--json"))
    moves = {(c["kv_bundle"] > 1, c["movement"]) for c in data["candidates"]}
    assert moves == {(False, None), (True, "direct"), (True, "relocate")}
    only = json.loads(run(capsys, *TWO_NODES, "--json", "--wallfacer-movement", "relocate"))
    assert {c["movement"] for c in only["candidates"]} == {None, "relocate"}


def test_recomputation(capsys):
    layers = ["--num-layers", "32", "--pipeline-model-parallel-size", "2", "--wallfacer-team-size", "2"]
    plain = json.loads(run(capsys, *TWO_NODES, *layers, "--json"))
    full = [*layers, "--recompute-granularity", "full", "--recompute-method", "uniform"]
    data = json.loads(run(capsys, *TWO_NODES, *full, "--json"))
    assert plain["layers"]["whole"] == data["layers"]["recomputed"] == 32
    assert data["candidates"][0]["memory"]["needed"] < plain["candidates"][0]["memory"]["needed"]
    assert "with what\n32 recomputed layers in flight keep" in run(capsys, *TWO_NODES, *full)
    assert "with what\n32 layers in flight keep" in run(capsys, *TWO_NODES, *layers)


def test_all_candidates(capsys):
    rows = [line for line in run(capsys, *TWO_NODES, "--all").splitlines() if line[:2].strip().isdigit()]
    assert len(rows) > 60


def test_it_can_answer_plain_ring(capsys):
    few = ["--num-query-groups", "4", "--context-parallel-size", "4", "--rate-inside", "400gbit"]
    text = run(capsys, *LAYER, *few, "--tflops", "400")
    assert "Take C=1 and K=1: plain ring attention: " in text
    assert "--wallfacer-team-size 1 --wallfacer-kv-bundle 1" in text


def test_json_has_exact_bytes(capsys):
    """The forward table of the specification: MiB per rank with 16-bit sums, 8 ranks."""
    argv = [
        *LAYER,
        "--context-parallel-size",
        "8",
        "--rate-inside",
        "1gbit",
        "--wallfacer-sum-dtype",
        "model",
    ]
    data = json.loads(run(capsys, *argv, "--json"))
    found = {(c["team_size"], c["kv_bundle"]): c for c in data["candidates"]}
    log_sum_exps = 2 * 4 * 131072 // 8 * 32
    for shape, mib in (((1, 1), 1792), ((2, 1), 768 + 260)):
        expected = mib * MIB if shape == (1, 1) else (768 + 256) * MIB + log_sum_exps
        assert set(found[shape]["bytes_by_rank"]["forward"]["inside"]) == {expected}
    both = found[2, 2]["bytes_by_rank"]["forward"]["inside"]
    assert max(both) == (1024 + 512) * MIB + log_sum_exps
    assert min(both) == (512 + 512) * MIB + log_sum_exps  # a rank that keeps its bundle
    assert data["recommended"]["reason"]
    assert {c["steps"] for c in data["candidates"]} == {8, 4, 2, 1}
    assert all(c["memory"]["needed"] > 0 and c["fits"] for c in data["candidates"])


def test_table_and_picture(capsys, tmp_path):
    picture = tmp_path / "plan.svg"
    given = ["--wallfacer-team-size", "2", "--wallfacer-order", "gpa"]
    text = run(capsys, *TWO_NODES, *given, "--table", "--svg", str(picture))
    assert "rank  team,member  group,position" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("10    5,0")]
    assert row[3:6] == ["2,0,6,4", "5", "5"]
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_given_choices_are_not_compared(capsys):
    data = json.loads(
        run(capsys, *TWO_NODES, "--json", "--wallfacer-team-size", "2", "--wallfacer-backward", "keys")
    )
    assert {(c["team_size"], c["kv_bundle"], c["backward"]) for c in data["candidates"]} == {(2, 2, "keys")}
    data = json.loads(run(capsys, *TWO_NODES, "--json", "--wallfacer-kv-bundle", "4"))
    assert {c["kv_bundle"] for c in data["candidates"]} == {4}
    data = json.loads(run(capsys, *TWO_NODES, "--json", "--wallfacer-team-size", "auto"))
    assert {c["team_size"] for c in data["candidates"]} == {1, 2, 4, 8, 16}


def test_memory(capsys):
    text = run(capsys, *TWO_NODES, "--num-layers", "32", "--memory", "10GiB")
    assert "too much" in text
    assert "nothing fits in memory" in run(capsys, *TWO_NODES, "--memory", "1MB")


def test_without_time_for_attention(capsys):
    text = run(capsys, *LAYER, *NODES, *RATES)
    assert "attention's own time left out" in text


def test_window_and_both_directions(capsys):
    assert "causal, 4096 keys back" in run(capsys, *TWO_NODES, "--window-size", "4096,0")
    assert "bidirectional" in run(capsys, *TWO_NODES, "--bidirectional")


def test_tensor_parallel_ranks_share_nics(capsys):
    """With 2 tensor-parallel ranks, 4 context-parallel ranks of a node send twice over its 4 NICs."""
    text = run(
        capsys, *LAYER, *RATES, "--tensor-model-parallel-size", "2", *NODES[:4], "--ranks-per-nic", "2"
    )
    assert "16 query and 16 key heads" in text
    assert "16 context-parallel ranks on 4 nodes, 4 on each" in text
    assert "between nodes 200 Gbit/s a rank" in text


def test_measured_network(capsys, tmp_path):
    file = tmp_path / "links.json"
    link = Link(1e-5, 1e9)
    network = Network(
        {(s, a): link for s in ("members", "groups", "flat") for a in ("gather", "reduce")}, 2, 8
    )
    file.write_text(network.to_json())
    text = run(capsys, *LAYER, *NODES[:4], "--bandwidths", str(file))
    assert f"links ({file}): inside a node 8 Gbit/s a rank, between nodes 8 Gbit/s a rank" in text


def test_config_file(capsys, tmp_path):
    file = tmp_path / "model.yaml"
    file.write_text(
        "model:\n  seq-length: 4096\n  num-attention-heads: 8\n  hidden-size: 512\n  bf16: true\n"
        "  context-parallel-size: 4\n  cp-comm-type: wallfacer\n  swiglu: true\n"
    )
    text = run(capsys, "--ext-config", str(file), "--rate-inside", "100gbit")
    assert text.startswith("4096 tokens x 1, 8 query and 8 key heads of 64")


def test_all_problems_at_once(capsys):
    found = refused(capsys, "--context-parallel-size", "zero", "--tflops", "0", "--memory", "many", "--foo")
    assert [text.split()[0] for text in found] == [
        *("--foo:", "--context-parallel-size", "--num-attention-heads", "--seq-length", "--tflops"),
        "--memory",
    ]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--seq-length", "131080"], "pad it to 131104"),
        (["--wallfacer-team-size", "3"], "their product must divide 16. C and K can be 1 and 1"),
        (["--num-query-groups", "5"], "--num-query-groups 5 does not divide --num-attention-heads 32"),
        (
            ["--tensor-model-parallel-size", "3", "--ranks-per-node", "9"],
            "heads are split over tensor-parallel ranks",
        ),
        (["--tensor-model-parallel-size", "16"], "tensor-parallel ranks would be on two nodes"),
        (["--ranks-per-nic", "3"], "Give a divisor of 8"),
        (["--rate-between", "fast"], "that is no rate above zero"),
        (["--window-size", "many"], "give two numbers of tokens, such as 4096,0"),
        (["--wallfacer-head-chunks", "3"], "cannot be split into 3 chunks"),
        (["--bandwidths", "nowhere.json"], "--bandwidths with --rate-inside"),
    ],
)
def test_bad_input(capsys, argv, text):
    (found,) = refused(capsys, *TWO_NODES, *argv)
    assert text in found


def test_missing_rates(capsys):
    found = refused(capsys, *LAYER, *NODES)
    assert [text.split()[0] for text in found] == ["--rate-inside", "--rate-between"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read"),
        ("{}", "this is not a bandwidth file"),
        (
            json.dumps({"schema": 1, "groups": 1, "members": 8, "backend": "gloo", "links": {}}),
            "no links inside",
        ),
    ],
)
def test_bad_bandwidth_files(capsys, tmp_path, content, text):
    file = tmp_path / "links.json"
    if content is not None:
        file.write_text(content)
    (found,) = refused(capsys, *LAYER, *NODES[:4], "--bandwidths", str(file))
    assert text in found


def test_picture_that_cannot_be_written(capsys, tmp_path):
    assert "--svg" in refused(capsys, *TWO_NODES, "--svg", str(tmp_path / "no" / "plan.svg"))[0]


def test_it_is_a_subject_of_plan(capsys):
    assert "wallfacer" in plan.usage()
    assert cli.main(["plan", "wallfacer", *TWO_NODES]) == 0
    assert "Take C=" in capsys.readouterr().out
