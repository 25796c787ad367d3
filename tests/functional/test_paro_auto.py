"""`--paro-strategy auto`: the planner's choice is logged and trains, by measured bandwidths too."""

from megatron_ext.paro.network import ACTIONS, Link, Network
from tests.functional.paro_runs import script
from tests.functional.runs import train

AUTO = ["--paro-strategy", "auto", "--paro-group-size", "2"]


def network(tmp_path, between: float) -> str:
    """A file as `megatron-ext probe` writes it: 2 GB/s inside, `between` bytes/s for the NIC of a group."""
    links = Network.given(Link(1e-5, 2e9), Link(1e-5, between), members=2, ranks_per_nic=2)
    path = tmp_path / "bandwidths.json"
    path.write_text(links.to_json())
    return str(path)


def test_the_choice_is_logged_and_trains(tmp_path):
    run = train(tmp_path, 4, *AUTO, "--paro-bandwidths", network(tmp_path, 5e7), steps=2)
    assert {line["paro"]["strategy"] for rank in range(4) for line in run.steps(rank)} == {"NNG"}
    said = [line for line in run.output.splitlines() if "--paro-strategy auto: NNG" in line]
    assert len(said) == 1, "rank 0 says it, once"
    assert "bandwidths.json" in said[0]


SMALL_GPU = """
import os
from megatron_ext.paro import resolve

resolve._memory_limit = lambda gpu: 1 << (10 if os.environ["RANK"] == "2" else 40)
"""


def test_ranks_that_choose_differently_stop(tmp_path):
    """One rank sees less memory, and would split everything."""
    run = train(tmp_path, 4, *AUTO, steps=2, check=False, script=script(SMALL_GPU), timeout=60)
    for rank in run.ranks:
        assert rank.exit_code != 0
        assert "PaRO is not the same on all ranks, so nothing was trained:" in rank.error
        assert "--paro-strategy: NNG on ranks [0, 1, 3], GNG on ranks [2]" in rank.error
    assert not any(run.steps(rank) for rank in range(4))


def test_a_file_that_lacks_links_is_refused(tmp_path):
    links = {("members", action): Link(0.0, 1e9) for action in ACTIONS}
    path = tmp_path / "one-node.json"
    path.write_text(Network(links, 1, 4, "gloo").to_json())
    run = train(tmp_path, 4, *AUTO, "--paro-bandwidths", str(path), steps=2, check=False)
    assert all(rank.exit_code == 2 for rank in run.ranks)
    said = " ".join(run.output.split())
    assert f"{path} has no links between groups and over all ranks" in said
    assert (
        "it was measured with 1 groups of 4, and this run has 2 groups of 2. Probe with its groups." in said
    )
    assert "Traceback" not in run.output


def test_what_cannot_be_planned_is_refused(tmp_path):
    run = train(
        tmp_path / "file", 2, *AUTO, "--paro-bandwidths", str(tmp_path / "none"), steps=2, check=False
    )
    assert all(rank.exit_code == 2 for rank in run.ranks)
    assert f"--paro-bandwidths {tmp_path / 'none'}: No such file" in run.output
