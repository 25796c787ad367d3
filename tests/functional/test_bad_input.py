"""Bad input: a clear message before any process group exists, all problems at once, every rank exits 2."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.runs import MODEL, REPO, SCRIPT, launch, merged
from tests.ranks import run_ranks


def refused(
    *extra: str,
    world: int = 1,
    launcher: tuple = ("--cpu",),
    script=SCRIPT,
    before=lambda: None,
    unpatched=False,
):
    """Launch, check that every rank exits 2 before any process group exists; the text of rank 0."""
    args = merged(MODEL, ["--mock-data", "--train-iters", "2"], list(extra))

    def body():
        import torch.distributed

        before()
        stock_zeros = torch.zeros
        try:
            launch([*launcher, str(script), *args])
        finally:
            assert not torch.distributed.is_initialized()
            assert torch.zeros is stock_zeros or not unpatched

    results = run_ranks(world, body, check=False)
    assert [r.exit_code for r in results] == [2] * world, [r.error or r.output[-2000:] for r in results]
    for other in results[1:]:
        assert "nothing was started" not in other.output  # the list is printed once
    # Messages are wrapped to the terminal's width.
    return " ".join(results[0].output.split())


def test_unknown_flag_names_the_nearest():
    text = refused("--pipeline-model-paralel-size", "2")
    assert "--pipeline-model-paralel-size is not an option" in text
    assert "did you mean --pipeline-model-parallel-size" in text


def test_several_problems_are_listed_once_by_rank_0(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    text = refused(
        "--ext-reprot",
        "x",
        "--num-layers",
        "3",
        "--pipeline-model-parallel-size",
        "2",
        "--save",
        str(blocked / "ckpt"),
        world=2,
    )
    assert "did you mean --ext-report?" in text
    assert "--num-layers 3" in text
    assert "--save" in text
    assert "problems, nothing was started" in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tensor-model-parallel-size", "3"], ["--tensor-model-parallel-size 3", "2 processes"]),
        (["--pipeline-model-parallel-size", "4"], ["--pipeline-model-parallel-size 4"]),
        (["--num-layers", "5", "--pipeline-model-parallel-size", "2"], ["--num-layers 5", "4 or 6"]),
        (["--global-batch-size", "7"], ["--global-batch-size 7"]),
        (["--num-attention-heads", "5"], ["--num-attention-heads 5"]),
        (["--ext-report", "/proc/version/x"], ["--ext-report", "/proc/version"]),
        (["--ext-check", "bytes"], ["--ext-check bytes"]),
        (["--ext-check", "bites"], ["no check is called 'bites'", "bytes,replicas,layouts"]),
        (["--transformer-impl", "transformer_engine"], ["Transformer Engine", "without --cpu"]),
        (["--context-parallel-size", "2"], ["--context-parallel-size 2"]),
        (["--use-megatron-fsdp", "--ext-check", "replicas"], ["--ext-check replicas cannot read"]),
        (["--use-megatron-fsdp", "--ext-dump-grads", "x"], ["--ext-dump-grads cannot read"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_refused_with_the_way_out(flags, says):
    text = refused(*flags, world=2)
    for words in says:
        assert words in text


def test_missing_data_names_the_command_that_makes_it(tmp_path):
    body = functools.partial(
        launch, ["--cpu", str(SCRIPT), *MODEL, "--train-iters", "2", "--data-path", str(tmp_path / "corpus")]
    )
    (result,) = run_ranks(1, body, check=False)
    assert result.exit_code == 2
    assert str(tmp_path / "corpus") in result.output
    assert "megatron-ext data" in result.output


def test_stock_refusal_is_shown_as_one_of_ours():
    """What only stock's validation knows still ends with exit 2 and a message, not a traceback."""
    text = refused(
        "--moe-router-topk", "2", "--num-experts", "3", "--expert-model-parallel-size", "2", world=2
    )
    assert "Megatron-LM refuses these arguments" in text
    assert "Traceback" not in text


def test_missing_script():
    text = refused(script="no/such/pretrain_gpt.py")
    assert "There is no script no/such/pretrain_gpt.py" in text


def test_launcher_option_behind_the_script():
    text = refused("--cpu", launcher=())
    assert "--cpu stands behind the script" in text


def test_patch_target_gone(tmp_path):
    """A doctored upstream without one of our targets: nothing is patched and nothing runs."""

    def remove():
        import megatron.training.training

        del megatron.training.training.train_step

    # Even torch, which --cpu patches before Megatron is looked at, is as it was.
    text = refused("--ext-report", str(tmp_path), before=remove, unpatched=True)
    assert "megatron.training.training:train_step" in text
    assert "nothing was patched and nothing runs" in text


def test_replaced_body_changed(tmp_path):
    """A doctored upstream whose body differs from the reviewed one, under a patch that replaces it."""

    def change():
        import megatron.core.tensor_parallel.random as rng

        doctored = Path(rng.__file__).read_text().replace("if not graph_safe:", "if graph_safe:")
        (tmp_path / "random.py").write_text(doctored)
        rng.__file__ = str(tmp_path / "random.py")

    text = refused(before=change)
    assert "_get_cuda_rng_state" in text
    assert "body changed" in text
    assert "megatron-ext lock" in text


def run_cli(*argv: str, path: list[str] = (), timeout: float = 120) -> subprocess.CompletedProcess:
    """`python -m megatron_ext ARGV` in a process of its own, with folders in front of the import path."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), str(REPO)])}
    command = [sys.executable, "-m", "megatron_ext", *argv]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def doctored_megatron(folder, major: int, minor: int) -> None:
    """A megatron package of another version."""
    for name in ("core", "training"):
        (folder / "megatron" / name).mkdir(parents=True)
        (folder / "megatron" / name / "__init__.py").write_text("")
    info = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 0\nPRE_RELEASE = ''\n"
    info += f"__version__ = '{major}.{minor}.0'\n"
    (folder / "megatron" / "core" / "package_info.py").write_text(info)


def test_megatron_outside_the_window(tmp_path):
    doctored_megatron(tmp_path, 0, 18)
    result = run_cli("--cpu", str(SCRIPT), path=[tmp_path])
    assert result.returncode == 2, result.stdout + result.stderr
    assert "0.18.0" in result.stderr
    assert "0.19" in result.stderr


def test_no_script_and_unknown_launcher_option():
    result = run_cli("--cpu")
    assert result.returncode == 2
    assert "No script was given" in result.stderr
    result = run_cli("--gpu", str(SCRIPT))
    assert result.returncode == 2
    assert "The launcher has no option --gpu" in result.stderr


def test_help_lists_our_flags_among_megatrons():
    """`--help` works (the wheel's own crashes) and shows our options."""
    result = run_cli("--cpu", str(SCRIPT), "--help")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "--ext-report" in result.stdout
    assert "--pipeline-model-parallel-size" in result.stdout
