"""What `megatron-ext probe` says before it measures anything."""

import pytest

from megatron_ext import cli
from megatron_ext.tools import probe

WORLD = {
    "RANK": "0",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "LOCAL_WORLD_SIZE": "2",
}


def refused(monkeypatch, capsys, *argv, env=WORLD):
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        probe.main([*argv])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return " ".join(err.split())


def test_it_needs_a_world(monkeypatch, capsys):
    text = refused(monkeypatch, capsys, "--cpu", env={})
    assert "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: a probe runs on all ranks of a job." in text
    assert "torchrun --nproc-per-node N ... -m megatron_ext probe." in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--group-size", "3"],
            "--group-size 3: 4 ranks cannot be cut into groups of 3. Use --group-size with one of 1, 2, 4.",
        ),
        (["--group-size", "0"], "4 ranks cannot be cut into groups of 0."),
        (["--group-size", "x"], "4 ranks cannot be cut into groups of x."),
        (["--sizes", "big", "1MiB"], "--sizes big: that is no size. Write it as 80GB or 74.5GiB."),
        (["--sizes", "0MiB", "1MiB"], "--sizes 0MiB: that is no size."),
        (["--sizes", "1MiB"], "--sizes 1MiB: one size cannot tell latency from bandwidth. Give two."),
        (["--repeats", "0"], "--repeats 0: it must be a whole number of 1 or more."),
    ],
)
def test_bad_arguments(monkeypatch, capsys, argv, message):
    text = refused(monkeypatch, capsys, "--cpu", *argv)
    assert message in text
    assert "1 problem" in text


def test_bad_worlds(monkeypatch, capsys):
    env = WORLD | {"LOCAL_WORLD_SIZE": "3"}
    assert "ranks per node: 4 ranks cannot be cut into groups of 3." in refused(
        monkeypatch, capsys, "--cpu", env=env
    )
    env = WORLD | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert "there is no link to measure. Start two ranks or more." in refused(
        monkeypatch, capsys, "--cpu", env=env
    )


def test_the_ranks_of_a_node_are_not_guessed(monkeypatch, capsys):
    env = {name: value for name, value in WORLD.items() if name != "LOCAL_WORLD_SIZE"}
    text = refused(monkeypatch, capsys, "--cpu", env=env)
    assert "groups are the ranks of a node: LOCAL_WORLD_SIZE is not set" in text
    assert "Or set --group-size." in text


def test_without_gpus_the_backend_is_not_guessed(monkeypatch, capsys):
    monkeypatch.setattr(probe, "_has_gpu", lambda: False)
    assert "no GPU is visible: add --cpu to measure gloo between CPUs" in refused(monkeypatch, capsys)


def test_it_is_a_tool(capsys):
    assert "probe" in cli.TOOLS
    with pytest.raises(SystemExit) as stop:
        cli.main(["probe", "--help"])
    assert stop.value.code == 0
    assert "torchrun" in capsys.readouterr().out
