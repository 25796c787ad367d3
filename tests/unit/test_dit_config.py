"""configs/dit-*.yaml: every key is an option, no rule objects, and the header says what the file holds."""

import argparse
import re
from pathlib import Path

import pytest

from megatron_ext import config, configfile, features, rules
from megatron_ext.dit import rules as dit_rules
from megatron_ext.dit.config import DiTConfig, geometry_of

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(ROOT.glob("configs/dit-*.yaml"))
each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def parser():
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return config.add_arguments(parser, [*features.configs(), DiTConfig])


@pytest.fixture
def parse(parser):
    """Arguments of a file as `pretrain_dit.py` would train with them."""

    def parse_file(path: Path, world_size: int) -> argparse.Namespace:
        argv = configfile.load(str(path)).argv
        defaults = dit_rules.stock_defaults(config.preparse(argv, [DiTConfig]))
        args = rules.with_defaults(parser.parse_args(argv), defaults)
        args.world_size = world_size
        return args

    return parse_file


def number_of_parameters(args: argparse.Namespace) -> int:
    """Weights of the model, from its shapes."""
    hidden, values = args.hidden_size, geometry_of(args).patch_dim
    assert args.disable_bias_linear if hasattr(args, "disable_bias_linear") else not args.add_bias_linear
    layer = 4 * hidden**2 + 8 * hidden**2 + 6 * hidden * (hidden + 1)
    condition = (256 + hidden + args.dit_num_classes + 1) * hidden
    head = 2 * hidden * (hidden + 1) + (hidden + 1) * values
    return args.num_layers * layer + condition + (values + 1) * hidden + head


def test_there_is_one():
    assert [path.stem for path in CONFIGS] == ["dit-digits-cpu"]


@each_config
def test_every_key_is_an_option_that_nothing_refuses(path, parser, parse):
    flags = [word for word in configfile.load(str(path)).argv if word.startswith("--")]
    assert [flag for flag in flags if flag not in parser._option_string_actions] == []
    args = parse(path, 2)
    assert rules.run(args, rules.base_rules()) == []
    assert dit_rules.problems_of(args) == []
    assert args.hidden_dropout == args.attention_dropout == 0


@each_config
def test_header_says_what_the_file_holds(path, parse):
    args, header = parse(path, 2), path.read_text().partition("model:")[0]
    millions = re.search(r"([\d.]+) M parameters", header).group(1)
    assert number_of_parameters(args) == pytest.approx(float(millions) * 1e6, rel=0.03)
    batch, tokens, steps = re.search(
        r"tokens +(\d+) sequences x (\d+) = \d+ a step, (\d+) steps", header
    ).groups()
    assert (int(batch), int(tokens)) == (args.global_batch_size, args.seq_length)
    assert int(steps) == args.train_iters
    assert f"configs/{path.name}" in header
