"""`--paro-strategy auto`: the planner's choice is logged and trains, by measured bandwidths too."""

from megatron_ext.paro.network import Link, Network
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


def test_what_cannot_be_planned_is_refused(tmp_path):
    run = train(
        tmp_path / "file", 2, *AUTO, "--paro-bandwidths", str(tmp_path / "none"), steps=2, check=False
    )
    assert all(rank.exit_code == 2 for rank in run.ranks)
    assert f"--paro-bandwidths {tmp_path / 'none'}: No such file" in run.output
