import argparse
import enum
import re

import pytest

from megatron_ext.parse_errors import guard_enum_choices, nearest_names, refused_by_stock, unknown_flag_error


class Backend(enum.Enum):
    flash = 1
    fused = 2


class Raising(argparse.ArgumentParser):
    """A parser whose errors are the problem texts."""

    def error(self, message):
        raise SystemExit(unknown_flag_error(self, message))


@pytest.fixture
def parser():
    parser = Raising(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--num-attention-heads", type=int)
    parser.add_argument("--tensor-model-parallel-size", type=int)
    parser.add_argument("--normalization", choices=["LayerNorm", "RMSNorm"])
    parser.add_argument("--data-path", nargs="+")
    parser.add_argument("--bf16", action="store_true")
    # As upstream's ArgumentGroupFactory adds enums.
    parser.add_argument("--attention-backend", type=lambda name: Backend[name], choices=list(Backend))
    return parser


def error_of(parser, *argv):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(argv)
    return stop.value.code


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--num-layer", "3"], "--num-layer is not an option of this script: did you mean --num-layers?"),
        (["--num_layers=3"], "--num_layers is not an option of this script: did you mean --num-layers?"),
        (["-num-layers", "3"], "-num-layers is not an option of this script: did you mean --num-layers?"),
        (
            ["--tensor-model-paralel-size", "2"],
            "--tensor-model-paralel-size is not an option of this script: did you mean "
            "--tensor-model-parallel-size?",
        ),
        (
            ["--num-attention", "2"],
            "--num-attention is not an option of this script: did you mean --num-attention-heads?",
        ),
        (["--zebra", "x"], "--zebra is not an option of this script: see --help for the list."),
        (
            ["--bf16", "yes", "no"],
            "'yes no' belongs to no option: the option before it takes fewer values, or its name is missing.",
        ),
    ],
)  # fmt: skip
def test_unknown_flags(parser, argv, text):
    assert error_of(parser, *argv) == text


def test_every_unknown_flag_is_named(parser):
    text = error_of(parser, "--num-layer", "3", "--bf16", "--zebra", "--num-layers", "2")
    assert [line.split()[0] for line in text.splitlines()] == ["--num-layer", "--zebra"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--normalization", "rms"],
            "argument --normalization: invalid choice: 'rms' (choose from 'LayerNorm', 'RMSNorm'). See",
        ),
        (["--num-layers", "two"], "argument --num-layers: invalid int value: 'two'. See --help"),
        (
            ["--num-layers"],
            "argument --num-layers: expected one argument: give the value right after the option",
        ),
        (["--data-path", "--bf16"], "argument --data-path: expected at least one argument: give the value"),
    ],
)
def test_other_errors(parser, argv, text):
    # Python 3.12 quotes the choices, later versions do not.
    assert error_of(parser, *argv).replace("'", "").startswith(text.replace("'", ""))


def test_enum_options_become_errors_too(parser):
    with pytest.raises(KeyError):
        parser.parse_args(["--attention-backend", "flsh"])
    guard_enum_choices(parser)
    text = error_of(parser, "--attention-backend", "flsh")
    assert text.startswith("argument --attention-backend: invalid choice: 'flsh' (choose from flash, fused)")
    assert parser.parse_args(["--attention-backend", "flash"]).attention_backend is Backend.flash
    assert parser.parse_args(["--num-layers", "2"]).num_layers == 2


def test_nearest_names():
    known = ["--lr", "--lr-decay-iters", "--lr-decay-samples", "--lr-decay-style", "--seed"]
    assert nearest_names(known, "--lr_decay_style") == ["--lr-decay-style"]
    # Close in spelling first, then what continues the name.
    assert nearest_names(known, "--lr-decay") == [
        "--lr-decay-style",
        "--lr-decay-iters",
        "--lr-decay-samples",
    ]
    assert nearest_names(known, "--lr-decay", count=1) == ["--lr-decay-style"]
    assert nearest_names(known, "--tokens") == []


def refusal(function):
    with pytest.raises((AssertionError, ValueError)) as info:
        function()
    return refused_by_stock(info.value)


def test_stock_refusal_with_a_text():
    def stock():
        raise ValueError("num_attention_heads (8) must be a multiple of 3")

    lines = refusal(stock).splitlines()
    assert lines[0] == "Megatron-LM refuses these arguments: num_attention_heads (8) must be a multiple of 3"
    assert re.fullmatch(r"  \(checked in test_parse_errors\.py:\d+, ValueError\)", lines[1])


def test_stock_refusal_without_a_text_shows_the_condition():
    def stock():
        save_interval = None
        # No text, as most of stock's assertions; pytest would fill one in for a plain assert.
        if save_interval is None: raise AssertionError  # noqa: E701  # fmt: skip

    assert "refuses these arguments: `if save_interval is None: raise AssertionError" in refusal(stock)
