from pathlib import Path

import pytest

from megatron_ext import configfile
from megatron_ext.problems import UserError


def read(path, *environ):
    return configfile.load(path, *environ).argv


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def write(tmp_path):
    def write(text, name="job.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def problems(path, **environ):
    with pytest.raises(UserError) as error:
        read(path, environ)
    return error.value.problems


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("--num-layers: 2", ["--num-layers", "2"]),
        ("num-layers: 2", ["--num-layers", "2"]),
        ("num_layers: 2", ["--num-layers", "2"]),
        ("swiglu: true", ["--swiglu"]),
        ("swiglu: True", ["--swiglu"]),
        ("swiglu: false", []),
        ("swiglu: null", []),
        ("swiglu:", []),
        ("data-path: [0.3, a, 0.7, b]", ["--data-path", "0.3", "a", "0.7", "b"]),
        ("data-path:\n- a\n- b c", ["--data-path", "a", "b c"]),
        ("profile-ranks: []", ["--profile-ranks"]),
        ("lr: 0.0001", ["--lr", "0.0001"]),
        ("lr: 1.0e-5", ["--lr", "1.0e-5"]),
        ("lr: 1e-4", ["--lr", "1e-4"]),
        ("loss-scale: 4294967296", ["--loss-scale", "4294967296"]),
        ("split: 990,8,2", ["--split", "990,8,2"]),
        ("split: 100_0", ["--split", "100_0"]),
        ("step-batch-size-schedule: 0:16 1:30", ["--step-batch-size-schedule", "0:16 1:30"]),
        ("exit-time: 12:30:00", ["--exit-time", "12:30:00"]),  # a number in base 60 for YAML
        ("wandb-exp-name: 2024-01-01", ["--wandb-exp-name", "2024-01-01"]),  # a date for YAML
        ('wandb-exp-name: "true"', ["--wandb-exp-name", "true"]),
        ('vocab-parallel: "off"', ["--vocab-parallel", "off"]),
        ("wandb-exp-name: first run", ["--wandb-exp-name", "first run"]),
        ('wandb-exp-name: ""', ["--wandb-exp-name", ""]),
        ("pad-id: -1", ["--pad-id=-1"]),
        ("note: --dry", ["--note=--dry"]),
        ("model:\n  num-layers: 2\nrun:\n  deeper:\n    lr: 1", ["--num-layers", "2", "--lr", "1"]),
        ("use-checkpoint-opt_param-scheduler: true", ["--use-checkpoint-opt_param-scheduler"]),
        ("use-checkpoint-opt-param-scheduler: true", ["--use-checkpoint-opt_param-scheduler"]),
        ("", []),
        ("# nothing\n", []),
    ],
)
def test_values(write, text, argv):
    assert read(write(text), {}) == argv


def test_order_is_kept(write):
    assert read(write("b-b: 1\nx:\n  a-a: 2\nc: 3"), {}) == [
        "--b-b",
        "1",
        "--a-a",
        "2",
        "--c",
        "3",
    ]


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("load: $DATA/a", ["--load", "/d/a"]),
        ("load: ${DATA}_b", ["--load", "/d_b"]),
        ("data-path: [1, $DATA]", ["--data-path", "1", "/d"]),
        ("note: 5$$", ["--note", "5$"]),
        ("load: ~/a/../b", ["--load", "~/a/../b"]),
    ],
)
def test_environment(write, text, argv):
    assert read(write(text), {"DATA": "/d"}) == argv


def test_own_environment_is_the_default(write, monkeypatch):
    monkeypatch.setenv("MY_DATA", "/here")
    assert read(write("load: $MY_DATA")) == ["--load", "/here"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("load: $NOPE", "{path}:1: load: the environment variable NOPE is not set. Set it, or write $$"),
        ("load: 5$", "{path}:1: load: a $ in '5$' names no variable. Write $$ for a plain $."),
        ("\nlr: [[1]]", "{path}:2: lr must be a flat list of values, without lists, mappings, true,"),
        ("lr: [1, true]", "{path}:1: lr must be a flat list of values, without lists, mappings, true,"),
        ("--lr:\n  max: 1", "{path}:1: --lr takes a value or a list, but it holds a mapping."),
        ("a:\n  lr: 1\nb:\n  --lr: 2", "{path}:4: --lr is given before, at {path}:2: lr: keep one."),
        ("lr: 1\nlr: 2", "{path}:2: lr is given before, at {path}:1: lr: keep one."),
        (
            "vocab-parallel: off",
            "{path}:1: vocab-parallel: YAML reads off as true or false. Write true for a bare flag, false to "
            'leave the option out, or "off" in quotes for the word itself.',
        ),
        ("swiglu: Yes", "{path}:1: swiglu: YAML reads Yes as true or false. Write true"),
        ("OMP_NUM_THREADS: 1", "{path}:1: OMP_NUM_THREADS is no option name: write it as on the command"),
        ("? [a, b]\n: 1", "{path}:1: list is no option name"),
        ("<<: {lr: 1}\n--<<: 2", "{path}:2: --<< is no option name"),
        ("- lr", "{path}: must hold `option: value` lines, but its top level is a list."),
        ("lr", "{path}: must hold `option: value` lines, but its top level is a single value."),
        ("a: b: c", "{path}: is not YAML: mapping values are not allowed here"),
        ("include: {a: b}", "{path}:1: include takes the name of a YAML file, or a list of names."),
        ("include: [true]", "{path}:1: include takes the name of a YAML file, or a list of names."),
    ],
)  # fmt: skip
def test_errors(write, text, problem):
    path = write(text)
    (found,) = problems(path)
    assert found.startswith(problem.format(path=path))


def test_all_errors_are_reported(write):
    found = problems(write("lr: off\nBad: 1\nload: $NOPE"))
    assert [text.split(":")[1] for text in found] == ["1", "2", "3"]


def test_missing_file(tmp_path):
    (text,) = problems(f"{tmp_path}/no.yaml")
    assert text == (
        f"{tmp_path}/no.yaml: cannot be read (No such file or directory). Correct the path of --ext-config "
        "or include."
    )


def test_binary_file(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00\x01")
    assert "x.yaml: is not a text file (" in problems(f"{tmp_path}/x.yaml")[0]


def test_include(write, tmp_path):
    (tmp_path / "sub").mkdir()
    write("num-layers: 2\nlr: 1\nswiglu: true", "sub/base.yaml")
    write("include: sub/base.yaml\nseed: 5", "middle.yaml")
    path = write("run:\n  lr: 3\ninclude: middle.yaml\nswiglu: false")
    assert read(path, {}) == ["--num-layers", "2", "--lr", "3", "--seed", "5"]


def test_include_several_later_wins(write):
    write("lr: 1\nseed: 1", "a.yaml")
    write("lr: 2", "b.yaml")
    assert read(write("include: [a.yaml, $NAME.yaml]"), {"NAME": "b"}) == [
        "--lr",
        "2",
        "--seed",
        "1",
    ]


def test_include_of_a_missing_file(write, tmp_path):
    (text,) = problems(write("include: gone.yaml"))
    assert text.startswith(f"{tmp_path}/gone.yaml: cannot be read")


def test_include_in_a_circle(write, tmp_path):
    write("include: job.yaml", "other.yaml")
    (text,) = problems(write("include: other.yaml"))
    assert "goes in a circle. Remove one of the includes." in text


def test_same_file_included_twice_is_no_circle(write):
    write("lr: 1", "base.yaml")
    write("include: base.yaml", "a.yaml")
    write("include: base.yaml\nseed: 2", "b.yaml")
    assert read(write("include: [a.yaml, b.yaml]"), {}) == ["--lr", "1", "--seed", "2"]


def test_options_left_out_must_exist(write):
    path = write("swiglu: false\nswigllu: false\ngradient-accumulation-fusion: false\nzebra: null\nwrong: 1")
    known = ["--swiglu", "--no-gradient-accumulation-fusion", "--lr"]
    assert configfile.load(path, {}).unknown_left_out(known) == [
        f"{path}:2: swigllu: --swigllu is not an option of this script: did you mean --swiglu?",
        f"{path}:3: gradient-accumulation-fusion: --gradient-accumulation-fusion is not an option of this "
        "script: to switch it off, set --no-gradient-accumulation-fusion: true.",
        f"{path}:4: zebra: --zebra is not an option of this script: see --help for the list.",
    ]


@pytest.mark.parametrize(
    ("file", "cli", "merged"),
    [
        ("--lr 1 --seed 2", "--lr 3", "--seed 2 --lr 3"),
        ("--lr 1 --seed 2", "--lr=3", "--seed 2 --lr=3"),
        ("--lr=1 --seed 2", "--lr 3", "--seed 2 --lr 3"),
        ("--data-path 1 a 2 b --seed 2", "--data-path c", "--seed 2 --data-path c"),
        ("--swiglu --lr 1", "--swiglu", "--lr 1 --swiglu"),
        ("--lr 1", "", "--lr 1"),
        ("", "word --lr 1", "word --lr 1"),
        ("--profile-ranks -1 2 --lr 1", "--lr 2", "--profile-ranks -1 2 --lr 2"),
        ("--lr-decay-style x", "--lr 1", "--lr-decay-style x --lr 1"),
        # Opposites are other options: the last one, the command line's, wins in argparse.
        ("--rl-profile", "--no-rl-profile", "--rl-profile --no-rl-profile"),
    ],
)
def test_command_line_wins(file, cli, merged):
    assert configfile.merge(file.split(), cli.split()) == merged.split()


def test_stray_value_is_not_taken_by_the_file():
    with pytest.raises(UserError, match="'word' stands before the first option on the command line"):
        configfile.merge(["--data-path", "a"], ["word", "--lr", "1"])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_can_be_read(path, monkeypatch):
    argv = read(str(path), {})
    assert "--num-layers" in argv
