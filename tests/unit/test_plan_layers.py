"""`megatron-ext plan layers`: the optimum, stock's flags for it, and what it says about bad input."""

import itertools
import json
from argparse import Namespace

import pytest

from megatron_ext.schedules.costs import Costs
from megatron_ext.tools import plan, plan_layers
from megatron_ext.tools.plan_costs import LayerCosts, costs_of_layers, modelled_costs
from megatron_ext.tools.plan_layers import best_split, layout, main, other_flags, split_of
from megatron_ext.vocab.memory_description import stage_layers

MODEL = ["--num-layers", "32", "--hidden-size", "3072", "--ffn-hidden-size", "12288", "--seq-length", "2048"]


def costs(output: float, embedding: float = 0.0, layer: float = 1.0) -> LayerCosts:
    return LayerCosts(layer, embedding, output, "ms", "")


def every_split(layers: int, stages: int):
    for counts in itertools.product(range(layers + 1), repeat=stages):
        if sum(counts) == layers and all(counts[1:-1]):
            yield counts


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("layers", [2, 5, 7])
@pytest.mark.parametrize(
    ("output", "embedding"), [(0, 0), (0.78, 0), (1.5, 0.3), (2.5, 2.5), (6.25, 0.1), (0, 3)]
)
def test_no_split_is_faster(layers, stages, output, embedding):
    model = costs(output, embedding)
    best = best_split(layers, stages, model)
    assert sum(best.layers) == layers
    everyone = min(split_of(counts, model).slowest for counts in every_split(layers, stages))
    assert best.slowest == pytest.approx(everyone)


# Layers of the last stage in the artifact of arXiv 2411.05288, for p = 8, L = 32, h = 3072, s = 2048.
@pytest.mark.parametrize(("vocab", "last"), [(32000, 4), (64000, 3), (128000, 2), (256000, 0)])
def test_as_good_as_the_artifact(vocab, last):
    model = modelled_costs(3072, 2048, 12288, 3072, 3072, vocab, gated=False)
    each, more = divmod(32 - last, 7)
    theirs = split_of([each] * (7 - more) + [each + 1] * more + [last], model)
    ours = best_split(32, 8, model)
    assert ours.slowest <= theirs.slowest
    if vocab != 128000:  # one layer fewer on the last stage is better there: 5 instead of 5.12
        assert ours.layers == theirs.layers


def test_output_layer_costs_by_the_formula():
    # 6 V / (72 h + 12 s), and 6.25 layers for the A100 table's largest vocabulary.
    model = modelled_costs(3072, 2048, 4 * 3072, 3072, 3072, 256000, gated=False)
    assert model.output == pytest.approx(6 * 256000 / (72 * 3072 + 12 * 2048)) == pytest.approx(6.25)
    gated = modelled_costs(64, 32, 128, 64, 16, 1000, gated=True)
    layer = 12 * 64 * (64 + 16) + 12 * 32 * 64 + 18 * 64 * 128
    assert gated.output == pytest.approx(6 * 64 * 1000 / layer)


SPLITS = [
    (4, 4),
    (5, 3),
    (3, 5),
    (4, 4, 4, 3),
    (3, 4, 4, 3),
    (2, 4, 4, 3),
    (4, 4, 5, 3),
    (4, 4, 4, 0),
    (0, 5, 5, 1),
]


@pytest.mark.parametrize("layers", [*SPLITS, (1, 1), (12, 13, 1), (8,)])
def test_stock_accepts_the_layout(layers):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    text = layout(layers)
    parsed = PipelineParallelLayerLayout(text, len(layers))
    parsed.validate_layer_layout(num_layers=sum(layers), mtp_num_layers=0)
    assert parsed.virtual_pipeline_model_parallel_size == 1
    built = [parsed.get_num_layers_to_build(pp_rank=rank) for rank in range(len(layers))]
    assert tuple(built) == tuple(layers)


@pytest.mark.parametrize(
    ("layers", "flags"),
    [
        ((4, 4), [""]),
        ((8,), [""]),
        ((4, 3), ["--account-for-loss-in-pipeline-split"]),
        ((3, 4, 4, 3), ["--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"]),
        ((4, 4, 4, 2), ["--decoder-last-pipeline-num-layers 2"]),
        ((2, 4, 4, 3), ["--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 3"]),
        ((4, 4, 5, 3), []),
        ((4, 4, 4, 0), []),
    ],
)
def test_other_flags(layers, flags):
    assert other_flags(layers) == flags


@pytest.mark.parametrize("layers", SPLITS)
def test_other_flags_give_the_same_split_in_stock(layers):
    """By stock's own `get_num_layers_to_build`."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    for flags in filter(None, other_flags(layers)):
        words = flags.split()
        given = {}
        for word, value in zip(words, [*words[1:], ""], strict=True):
            if word.startswith("--account"):
                given[word[2:].replace("-", "_")] = True
            elif word.startswith("--decoder"):
                given["num_layers_in_" + word.split("-")[3] + "_pipeline_stage"] = int(value)
        config = TransformerConfig(
            num_layers=sum(layers), hidden_size=8, num_attention_heads=1, pipeline_dtype=object(),
            pipeline_model_parallel_size=len(layers), **given,
        )  # fmt: skip
        built = [get_num_layers_to_build(config, pp_rank=rank) for rank in range(len(layers))]
        assert tuple(built) == layers


def test_report(capsys):
    assert main([*MODEL, "--padded-vocab-size", "256000", "-p", "8"]) == 0
    text = capsys.readouterr().out
    assert '--pipeline-model-parallel-layout "Et*4|t*4|t*4|t*5|t*5|t*5|t*5|L"' in text
    assert "    7       0  output layer          6.250" in text
    assert "The slowest stage takes 6.250, the mean is 4.781: 1.31 times as long." in text
    assert "Stock's even split takes 10.250; this one is 1.64 times as fast." in text
    assert "With --vocab-parallel the slowest stage takes 4.781: 1.31 times as fast" in text


def test_own_split_of_stock_is_said(capsys):
    assert main([*MODEL, "--padded-vocab-size", "32000", "-p", "8"]) == 0
    assert "or nothing: it is stock's own split." in capsys.readouterr().out


def test_measured_times(capsys):
    assert (
        main(["--num-layers", "6", "-p", "2", "--layer-ms", "2", "--output-ms", "4", "--embedding-ms", "2"])
        == 0
    )
    text = capsys.readouterr().out
    # 2 + 2 n = 4 + 2 (6 - n): n = 3.5, so 10 at best.
    assert "The slowest stage takes 10.000" in text


def test_json(capsys):
    assert main([*MODEL, "--padded-vocab-size", "64000", "-p", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == [4, 4, 4, 4, 4, 4, 5, 3]
    assert found["slowest"] == max(found["costs"]) == 5.0
    assert found["flags"] == ["--pipeline-model-parallel-layout", "Et*4|t*4|t*4|t*4|t*4|t*4|t*5|t*3L"]
    assert found["other_flags"] == []
    args = Namespace(
        num_layers=32, pipeline_model_parallel_size=8, pipeline_model_parallel_layout=found["flags"][1]
    )
    assert list(stage_layers(args)) == found["layers"]


def test_configuration_file_and_command_line(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model:\n  num-layers: 32\n  hidden-size: 3072\n  ffn-hidden-size: 12288\n  seq-length: 2048\n"
        "  vocab-size: 255990\n  bf16: true\ncluster:\n  pipeline-model-parallel-size: 4\n"
    )
    assert main(["--ext-config", str(file), "-p", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == [4, 4, 4, 5, 5, 5, 5, 0]
    assert found["model"]["output"] == pytest.approx(6.25)  # 255990 rows are padded to 256000
    assert main(["--ext-config", str(file), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 4


def test_costs_of_a_run_with_vocabulary_passes():
    run = Costs(
        forward=(0.010, 0.011), backward=(0.020, 0.019), output_s=0.002, output_t=0.004, loss=0.001,
        input_forward=(0.001, 0.002), input_backward=0.003,
    )  # fmt: skip
    found = costs_of_layers(run, layers=4, stages=2)
    assert found.layer == pytest.approx(60 / 4)
    assert found.output == pytest.approx(2 * 6 + 1)
    assert found.embedding == pytest.approx(5)


def test_costs_of_a_stock_run(tmp_path, capsys):
    run = Costs(forward=(0.012, 0.010, 0.010, 0.030), backward=(0.022, 0.020, 0.020, 0.050))
    found = costs_of_layers(run, layers=8, stages=4)
    assert (found.layer, found.embedding, found.output) == pytest.approx((15, 4, 50))
    file = tmp_path / "costs.json"
    file.write_text(run.to_json())
    assert main(["--num-layers", "8", "-p", "4", "--costs", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][-1] == 0


BAD = [
    (["--frobnicate"], "--frobnicate: there is no such argument"),
    (["--num-layers", "2", "-p", "5"], "each of the 3 stages between the first and the last needs a layer"),
    (["-p", "0"], "the number of pipeline stages must be a whole number of 1 or more"),
    (["--hidden-size", "x"], "--hidden-size x: the width of the model must be a whole number"),
    (["--layer-ms", "3"], "--output-ms missing: measured times and FLOPs have no common unit"),
    (["--layer-ms", "0", "--output-ms", "1"], "--layer-ms 0: layers that cost nothing need no plan"),
    (["--layer-ms", "-3", "--output-ms", "1"], "--layer-ms -3: a time is a number of milliseconds"),
    (["--costs", "nowhere.json"], "--costs nowhere.json: cannot be read"),
    (["--costs", "nowhere.json", "--layer-ms", "3"], "both say what layers cost. Keep one."),
    (["--num-experts", "8"], "--num-experts 8: layers differ in cost between ranks"),
    (["--num-query-groups", "3", "--num-attention-heads", "4"], "--num-query-groups 3 does not divide"),
    (["--num-query-groups", "2"], "--num-attention-heads is missing"),
]


@pytest.mark.parametrize(("words", "text"), BAD)
def test_bad_input(words, text, capsys):
    given = [*MODEL, "--padded-vocab-size", "32000", "-p", "8", *words]
    assert main(given) == 2
    assert text in capsys.readouterr().err


def test_all_problems_at_once(capsys):
    assert main(["--hidden-size", "x"]) == 2
    text = capsys.readouterr().err
    for part in ("--num-layers is missing", "-p is missing", "--hidden-size x", "--seq-length is missing",
                 "the size of the vocabulary is missing"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (Costs(forward=(1, 1), backward=(2, 4)), "of 2 stages or fewer none is without a vocabulary layer"),
        (Costs(forward=(1, 1, 1), backward=(2, 2, 4)), "32 layers do not split evenly over its 3 stages"),
    ],
)
def test_costs_that_cannot_be_told_apart(run, text, tmp_path, capsys):
    file = tmp_path / "costs.json"
    file.write_text(run.to_json())
    assert main(["--num-layers", "32", "-p", "8", "--costs", str(file)]) == 2
    assert text in capsys.readouterr().err


def test_subjects(capsys):
    assert plan.main(["--help"]) == 0
    assert "layers" in capsys.readouterr().out
    assert plan.main([]) == 2
    assert "it is not said what to plan" in capsys.readouterr().err
    assert plan.main(["costs"]) == 2
    assert (
        "there is no plan for 'costs'. Say one of layers, linear3d, paro, wallfacer."
        in capsys.readouterr().err
    )
    assert plan.main(["layers", "--num-layers", "4", "-p", "2", "--layer-ms", "1", "--output-ms", "2"]) == 0


def test_too_few_layers_for_the_middle():
    with pytest.raises(ValueError, match="1 layers are too few for 2 stages in the middle"):
        plan_layers.best_split(1, 4, costs(1))
