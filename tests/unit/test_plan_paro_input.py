"""`megatron-ext plan paro`: what it reads, and what it says about bad input."""

import pytest

from megatron_ext.paro.network import ACTIONS, SCOPES, Link, Network
from megatron_ext.tools.plan_paro import main
from megatron_ext.tools.plan_paro_args import parse
from megatron_ext.tools.plan_units import parse_rate, parse_size, rate_text
from tests.unit.test_plan_paro import PAPER, RANKS, RATES, SIZE, run

SHAPE = [
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--padded-vocab-size", "128", "--micro-batch-size", "2"),
]  # fmt: skip
FOUR = ["--data-parallel-size", "4", "--paro-group-size", "2", "--microbatches", "3"]


def refused(capsys, *argv):
    assert main([*argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert all(line.startswith("megatron-ext plan paro: ") for line in lines)
    return [line.removeprefix("megatron-ext plan paro: ") for line in lines]


# --- what is read -------------------------------------------------------------------------------------------


def situation(*argv):
    return parse([*argv]).situation


def test_shape_of_a_gpt():
    of = situation(*SHAPE, *FOUR, *RATES)
    layer = 4 * 64 * 64 + 4 * 64 + 2 * 64 * 256 + 256 + 64 + 4 * 64
    assert [unit.padded for unit in of.units] == [128 * 64 + 2 * 64, *[layer] * 4]
    assert (of.wire.k, of.wire.m, of.microbatches) == (2, 2, 3)
    assert {(unit.itemsize, unit.grad_itemsize) for unit in of.units} == {(4, 4)}
    split = situation(*SHAPE, *FOUR, *RATES, "--tensor-model-parallel-size", "2", "-p", "2", "--swiglu",
                      "--ffn-hidden-size", "96", "--num-query-groups", "2", "--disable-bias-linear",
                      "--normalization", "RMSNorm", "--untie-embeddings-and-output-weights")  # fmt: skip
    layer = (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) // 2 + 2 * 64
    assert [unit.padded for unit in split.units] == [64 * 64 + 64, layer, layer]


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ([], (4, 4)),
        (["--bf16"], (2, 4)),
        (["--bf16", "--grad-reduce-in-bf16"], (2, 2)),
        (["--fp16"], (2, 2)),
        (["--fp16", "--accumulate-allreduce-grads-in-fp32"], (2, 4)),
    ],
)
def test_types(flags, sizes):
    of = situation("--parameters", "1e6", *FOUR, *RATES, *flags)
    assert {(unit.itemsize, unit.grad_itemsize) for unit in of.units} == {sizes}
    assert len(of.units) == 32


def test_sizes_are_split_over_tensor_and_pipeline_ranks():
    of = situation("--parameters", "64e6", "--num-layers", "8", *FOUR, *RATES, "-p", "4",
                   "--tensor-model-parallel-size", "2", "--trainable-fraction", "0.25")  # fmt: skip
    assert [unit.padded for unit in of.units] == [10**6, 3 * 10**6] * 2
    assert [unit.trainable for unit in of.units] == [True, False] * 2


def test_context_parallel_ranks_share_gradients():
    of = situation("--parameters", "1e6", *FOUR, *RATES, "--context-parallel-size", "2")
    assert (of.wire.k, of.wire.m) == (4, 2)


def test_microbatches_of_a_batch():
    of = situation(
        "--parameters", "1e6", *FOUR[:4], *RATES, "--global-batch-size", "64", "--micro-batch-size", "2"
    )
    assert of.microbatches == 8


def test_rates_and_latencies():
    of = situation(
        *SIZE, *RANKS, *RATES, "--latency-inside", "2", "--latency-between", "10", "--ranks-per-nic", "4"
    )
    assert of.network.link("members", "gather") == Link(pytest.approx(2e-6), 250e9)
    assert of.network.link("groups", "reduce") == Link(pytest.approx(1e-5), 2.5e9)
    assert of.network.link("flat", "reduce").bytes_per_s == 20e9  # NCCL has a ring for each of two NICs
    assert of.wire.backend == "nccl"
    of = situation(*SIZE, *RANKS, *RATES, "--ranks-per-nic", "4", "--backend", "gloo")
    assert of.network.link("flat", "reduce").bytes_per_s == 10e9


def test_only_the_links_in_use_are_needed():
    of = situation("--parameters", "1e6", "--data-parallel-size", "4", "--paro-group-size", "4",
                   "--microbatches", "1", "--rate-inside", "10gbit")  # fmt: skip
    assert of.network.link("members", "gather").bytes_per_s == 1.25e9
    of = situation("--parameters", "1e6", "--data-parallel-size", "4", "--paro-group-size", "1",
                   "--microbatches", "1", "--rate-between", "10gbit")  # fmt: skip
    assert of.network.link("groups", "gather").bytes_per_s == 1.25e9


def test_compute_by_time_and_by_flops():
    of = situation("--parameters", "1e6", *FOUR, *RATES, "--compute-ms", "30", "--optimizer-ms", "5")
    assert (of.compute.forward, of.compute.backward, of.compute.optimizer) == pytest.approx(
        (0.01, 0.02, 0.005)
    )
    of = situation("--parameters", "1e6", *FOUR, *RATES, "--tflops", "1", "--seq-length", "1000",
                   "--micro-batch-size", "2")  # fmt: skip
    assert (of.compute.forward, of.compute.backward) == pytest.approx((4e-3, 8e-3), rel=1e-3)
    of = situation(*SHAPE, *FOUR, *RATES, "--tflops", "0.001")
    total = sum(unit.padded for unit in of.units)
    assert of.compute.forward == pytest.approx(64 * (2 * total + 4 * 4 * 32 * 64) / 1e9)


def test_flags_of_the_run():
    of = situation(*PAPER, "--no-overlap", "--paro-reshard-after-forward", "off",
                   "--paro-inter-dtype", "int8", "--paro-comm", "ho-ring",
                   "--memory", "80GB", "--other-memory", "10GiB")  # fmt: skip
    assert not of.overlap_params
    assert not of.overlap_grads
    assert not of.reshard_after_forward
    assert (of.wire.comm, of.wire.inter_dtype) == ("ho-ring", "int8")
    assert (of.memory_limit, of.other_bytes) == (80 * 10**9, 10 << 30)


def bandwidths(tmp_path, scopes=SCOPES, groups=2, members=2):
    links = {(scope, action): Link(1e-5, 1e9) for scope in scopes for action in ACTIONS}
    path = tmp_path / "bandwidths.json"
    path.write_text(Network(links, groups, members, "gloo").to_json())
    return str(path)


def test_measured_bandwidths(tmp_path, capsys):
    path = bandwidths(tmp_path)
    argv = ["--parameters", "1e6", *FOUR, "--bandwidths", path]
    of = situation(*argv)
    assert of.network.link("flat", "gather") == Link(1e-5, 1e9)
    assert of.wire.backend == "gloo"
    text = run(capsys, *argv)
    assert f"({path}): inside groups 8 Gbit/s" in text
    assert "measured with" not in text
    text = run(capsys, *argv, "--context-parallel-size", "2")
    assert "measured with 2 groups of 2, whose ranks may share NICs otherwise" in text


def test_a_configuration_file_of_a_run(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(
        "num-layers: 4\nhidden-size: 64\nnum-attention-heads: 4\nseq-length: 32\nvocab-size: 100\n"
        "bf16: true\n"
        "paro-group-size: 2\npadded-vocab-size: 128\nglobal-batch-size: 24\nlr: 1e-3\n"
    )
    of = situation("--ext-config", str(config), "--data-parallel-size", "4", *RATES)
    assert (of.wire.m, of.microbatches, len(of.units)) == (2, 6, 5)
    assert refused(capsys, "--ext-config", str(tmp_path / "none.yaml")) == [
        f"{tmp_path}/none.yaml: cannot be read (No such file or directory). Correct the path of --ext-config "
        "or include."
    ]


# --- bad input ----------------------------------------------------------------------------------------------


def test_everything_that_is_missing_is_said_at_once(capsys):
    found = "\n".join(refused(capsys))
    for flag in ("--data-parallel-size", "--paro-group-size", "--microbatches", "--num-layers",
                 "--hidden-size", "--seq-length", "--rate-inside", "--rate-between"):  # fmt: skip
        assert f"{flag} is missing" in found, flag
    assert (
        "the size of the vocabulary is missing: Give --padded-vocab-size or --vocab-size, or --parameters"
        in found
    )
    assert "the model's transformer layers (or give --parameters)" in found


def test_a_shape_without_ranks_is_refused_too(capsys):
    for size in ([], ["--data-parallel-size", "x"]):
        found = refused(capsys, *SHAPE, "--paro-group-size", "2", "--microbatches", "3", *RATES, *size)
        assert len(found) == 1
        assert "--data-parallel-size" in found[0]


BAD = [
    (["--what"], "--what: there is no such argument. `megatron-ext plan paro --help` lists those"),
    (["--paro-group-size", "5"], "ranks cannot be cut into groups of 5. Use one of 1, 2, 4, 8, 16, 32."),
    (["--data-parallel-size", "0"], "the number of data-parallel ranks must be a whole number of 1 or more"),
    (["--parameters", "many"], "--parameters many: the number of parameters, such as 7e9, 0 or more."),
    (["--parameters", "0"], "--parameters 0: that is no model. Give 1 or more."),
    (["--trainable-fraction", "1.5"], "--trainable-fraction 1.5: a part of the parameters, from 0 to 1."),
    (["--fp16"], "--bf16 with --fp16: parameters have one type. Keep one of them."),
    (["--rate-between", "fast"], "fast: that is no rate above zero. Write it as 400mbit or 80gbit."),
    (["--rate-inside", "0gbit"], "--rate-inside 0gbit: that is no rate above zero."),
    (["--latency-inside", "-1"], "--latency-inside -1: a latency in microseconds, 0 or more."),
    (["--ranks-per-nic", "3"], "groups of 8 do not share NICs evenly so. Give a divisor of 8."),
    (["--ranks-per-nic", "16"], "groups of 8 do not share NICs evenly so. Give a divisor of 8."),
    (["--ranks-per-nic", "x"], "the number of ranks that share a NIC must be a whole number"),
    (["--memory", "80"], "--memory 80: that is no size. Write it as 80GB or 74.5GiB."),
    (["--other-memory", "x"], "--other-memory x: that is no size."),
    (["--compute-ms", "10", "--tflops", "100"], "--compute-ms with --tflops: both say how long"),
    (["--tflops", "0", "--seq-length", "8"], "--tflops 0: nothing would ever be computed."),
    (["--tflops", "100"], "--tflops needs the tokens of a microbatch. Give --seq-length, or --compute-ms."),
    (["--compute-ms", "x"], "--compute-ms x: a time is a number of milliseconds, 0 or more."),
    (["--num-experts", "8"], "--num-experts 8: experts have data-parallel groups of their own"),
    (["--mtp-num-layers", "1"], "--mtp-num-layers 1: its layers are units of another size"),
    (
        ["--paro-inter-dtype", "int8", "--paro-comm", "flat"],
        "--paro-inter-dtype int8 with --paro-comm flat: there is no hop between groups to quantise.",
    ),
    (["--bandwidths", "f"], "--bandwidths with --rate-inside and --rate-between: both say"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "message"), BAD)
def test_bad_arguments(capsys, argv, message):
    found = refused(capsys, *PAPER, *argv)
    assert len(found) == 1
    assert message in found[0]


def test_bad_files_of_bandwidths(tmp_path, capsys):
    argv = ["--parameters", "1e6", *FOUR, "--bandwidths"]
    missing = str(tmp_path / "none.json")
    again = "Give the file that `megatron-ext probe` wrote."
    assert refused(capsys, *argv, missing) == [
        f"--bandwidths {missing}: cannot be read (No such file or directory). {again}"
    ]
    path = tmp_path / "list.json"
    path.write_text("[]")
    assert refused(capsys, *argv, str(path)) == [
        f"--bandwidths {path}: this is not a bandwidth file of schema 1. {again}"
    ]
    partial = bandwidths(tmp_path, scopes=("groups", "flat"), groups=4, members=1)
    (problem,) = refused(capsys, *argv, partial)
    assert "has no links inside groups: it was measured with 4 groups of 1." in problem


def test_bad_batches_and_splits(capsys):
    base = ["--parameters", "1e6", *FOUR[:4], *RATES]
    (problem,) = refused(capsys, *base)
    assert problem.startswith("--microbatches is missing: split parameters are gathered for each of them.")
    (problem,) = refused(capsys, *base, "--global-batch-size", "10", "--micro-batch-size", "2")
    assert problem == (
        "--global-batch-size 10 is no multiple of --micro-batch-size 2 times --data-parallel-size 4. Change "
        "one of them."
    )
    (problem,) = refused(capsys, *SHAPE, *FOUR, *RATES, "-p", "3")
    assert problem.startswith("--num-layers 4 with -p 3: 4 layers do not split evenly over 3 stages.")


# --- units --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate"),
    [("400mbit", 5e7), ("80Gbit", 1e10), ("1.5 tbit", 1.875e11), ("8kbit", 1e3), ("0mbit", None), ("5", None),
     ("fast", None), ("-1mbit", None), ("1gb", None)],
)  # fmt: skip
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("74.5GiB", 74.5 * 2**30), ("1mib", 1 << 20), ("2 TB", 2 * 10**12), ("0GB", 0),
     ("80", None), ("x", None)],
)  # fmt: skip
def test_sizes(text, size):
    assert parse_size(text) == size


def test_rates_are_written_in_bits():
    assert [rate_text(rate) for rate in (5e7, 1.25e10, 1e3, 2.5e11)] == [
        "400 Mbit/s", "100 Gbit/s", "8 kbit/s", "2 Tbit/s"
    ]  # fmt: skip
