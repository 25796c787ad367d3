"""`--ext-check replicas` and `--ext-dump-grads`: they find what is wrong, and say where."""

import pytest
import torch

from megatron_ext.grads import assemble, step_folder
from megatron_ext.tools.grads import main as compare_grads
from tests.functional.runs import LLAMA, SCRIPT, train

CORRUPT = """
import os, runpy
import megatron.training.training as training

stock = training.train_step

def train_step(forward_step_func, data_iterator, model, *args, **kwargs):
    if kwargs["iteration"] == 1 and os.environ["RANK"] == "1":
        for name, param in model[0].named_parameters():
            if name.endswith({name!r}):
                param.data.view(-1)[3] += 1e-6
    return stock(forward_step_func, data_iterator, model, *args, **kwargs)

training.train_step = train_step
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("flags", "name", "axis"),
    [
        ([], "layers.2.mlp.linear_fc1.weight", "data-parallel"),
        (["--tensor-model-parallel-size", "2"], "layers.0.input_layernorm.weight", "tensor-parallel"),
        (["--pipeline-model-parallel-size", "2"], "output_layer.weight", "embedding"),
    ],
    ids=["data-parallel", "tensor-parallel", "tied-embeddings"],
)
def test_replicas_names_the_parameter_that_drifted(tmp_path, flags, name, axis):
    """One element of one parameter on rank 1 changes by a millionth between steps 1 and 2."""
    script = tmp_path / "corrupt.py"
    script.write_text(CORRUPT.format(name=name, script=str(SCRIPT)))
    run = train(tmp_path, 2, *flags, "--ext-check", "replicas", steps=3, script=script, check=False)
    for rank in run.ranks:
        assert rank.exit_code == 1
        assert f"--ext-check replicas, step 2: parameters differ within the {axis} group [0, 1]" in rank.error
        assert ": ranks [1] differ" in rank.error
    # Each rank names its own parameter; tied embeddings have two names.
    assert f"{name}: ranks [1] differ" in run.ranks[1].error
    assert sorted(run.losses()) == [1]


CORRUPT_LAST = """
import os, runpy
import megatron.training.training as training

stock = training.train_step

def train_step(forward_step_func, data_iterator, model, *args, **kwargs):
    result = stock(forward_step_func, data_iterator, model, *args, **kwargs)
    if kwargs["iteration"] == 1 and os.environ["RANK"] == "1":
        next(model[0].parameters()).data.view(-1)[3] += 1e-6
    return result

training.train_step = train_step
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("flags", [[], ["--exit-interval", "2", "--train-iters", "4"]], ids=["end", "exit"])
def test_replicas_are_compared_after_the_last_update_too(tmp_path, flags):
    script = tmp_path / "corrupt.py"
    script.write_text(CORRUPT_LAST.format(script=str(SCRIPT)))
    run = train(tmp_path, 2, "--ext-check", "replicas", *flags, steps=2, script=script, check=False)
    for rank in run.ranks:
        assert rank.exit_code == 1
        assert "--ext-check replicas, step 2, after its update: parameters differ within the" in rank.error
    assert sorted(run.losses()) == [1, 2]


def test_gradient_dump_has_stock_names_and_global_shapes(tmp_path):
    """One rank and four ranks (TP x PP) give the same names and shapes, those of a model on one rank."""
    grads = ["--ext-dump-grads", str(tmp_path / "one"), "--ext-dump-grads-step", "2"]
    train(tmp_path / "run1", 1, *LLAMA, *grads, steps=2)
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    grads = ["--ext-dump-grads", str(tmp_path / "four"), "--ext-dump-grads-step", "2"]
    train(tmp_path / "run4", 4, *LLAMA, *layout, *grads, steps=2)
    one, four = assemble(tmp_path / "one", 2), assemble(tmp_path / "four", 2)
    assert {name: g.shape for name, g in one.items()} == {name: g.shape for name, g in four.items()}
    assert one["embedding.word_embeddings.weight"].shape == (256, 64)
    assert one["decoder.layers.3.self_attention.linear_proj.weight"].shape == (64, 64)
    assert one["output_layer.weight"].abs().max() > 0
    # Gate and up halves of SwiGLU's first matrix, each split over ranks, are one tensor again.
    assert one["decoder.layers.0.mlp.linear_fc1.weight"].shape == (256, 64)


def test_gradient_dump_that_is_not_complete(tmp_path, capsys):
    train(
        tmp_path / "run", 2, "--pipeline-model-parallel-size", "2", "--ext-dump-grads", str(tmp_path), steps=1
    )
    assert compare_grads([str(tmp_path), str(tmp_path)]) == 0
    last = step_folder(tmp_path, 1) / "rank-0001.pt"
    whole = torch.load(last, weights_only=True)
    torch.save(whole | {"shards": whole["shards"][:-1] + whole["shards"][:1]}, last)
    with pytest.raises(ValueError, match="overlap"):
        assemble(tmp_path)
    last.unlink()
    assert compare_grads([str(tmp_path), str(tmp_path)]) == 2
    assert "the files of 1 of 2 ranks" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no gradient dump"):
        assemble(tmp_path, step=7)


def test_gradient_dump_that_never_happens_is_an_error(tmp_path):
    """A run that ends before the step, or starts after it, does not end well in silence."""
    grads = ["--ext-dump-grads", str(tmp_path / "grads"), "--ext-dump-grads-step", "4"]
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "2"]
    early = train(tmp_path / "early", 1, *grads, *save, "--exit-interval", "2", steps=5, check=False)
    assert early.ranks[0].exit_code == 1
    assert "step 4 was never trained" in early.lines[0][-1]["error"]
    grads[-1] = "1"
    late = train(tmp_path / "late", 1, *grads, "--load", str(tmp_path / "ckpt"), steps=5, check=False)
    assert late.ranks[0].exit_code == 1
    assert "this run starts at step 3, after it" in late.ranks[0].error
