"""Each defect of stock Megatron is seen where it is, and worked around there only."""

import importlib
import sysconfig

import pytest

from megatron_ext import patching, workarounds
from megatron_ext.workarounds import workarounds_present
from tests.unit.fake_upstream import first_on_path, write

DEFECTIVE = {
    "megatron/core/datasets/utils.py": """
import os, subprocess, sys
folder = os.path.dirname(__file__)

def compile_helpers():
    if subprocess.run(["make", "-s", "-C", folder]).returncode != 0:
        sys.exit(1)
""",
    "megatron/training/__init__.py": "from megatron.training.global_vars import get_args\n",
    "megatron/training/global_vars.py": "def get_args(): return ARGS\n",
    "megatron/training/arguments.py": """
def add_megatron_arguments(parser):
    group = parser.add_argument_group("stock")
    group.add_argument("--headroom", default=1.1, help="1.10 = 10%). Default %(default)s, or 100%%.")
    group.add_argument("--fine", help="twice (%(type)s), %(prog)s")
    group.add_argument("--odd", help="% of %s, 5% done")
    group.add_argument("--silent")
    return parser
""",
    "megatron/training/training.py": """
from megatron.training.global_vars import get_args

def get_train_valid_test_num_samples():
    args = get_args()
    points = args.train_iters // args.eval_interval + 1
    return (args.train_iters * args.global_batch_size, points * args.eval_iters * args.global_batch_size)

def build_train_valid_test_data_loaders(provider):
    args = get_args()
    args.consumed_valid_samples = args.iteration // args.eval_interval * args.eval_iters
    return provider(get_train_valid_test_num_samples())
""",
}
SOUND = {
    "megatron/training/arguments.py": "def add_megatron_arguments(parser): return parser\n",
    "megatron/training/training.py": """
from megatron.training.global_vars import get_args

def get_train_valid_test_num_samples():
    args = get_args()
    return (args.train_iters, args.train_iters // args.eval_interval if args.eval_interval else 0)

def build_train_valid_test_data_loaders(provider):
    return provider(get_train_valid_test_num_samples())
""",
}
HELPERS = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
MAKEFILE = "OUT = helpers_cpp$(LIBEXT)\nLIBEXT = $(shell exit 1)\n$(OUT):\n\t@echo '$(CPPFLAGS)' > $@\n"


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Make a fake megatron from files and put it first on the path; returns its datasets folder."""
    monkeypatch.setattr(patching, "_ACTIVE", [])
    # Folders with spaces must survive make and the shell.
    root = tmp_path / "a copy"
    with first_on_path(root):

        def make(*layers):
            for files in layers:
                write(root, files)
            return root / "megatron" / "core" / "datasets"

        yield make


def present():
    return list(dict.fromkeys(patch.why.split(":")[0] for patch in workarounds_present()))


def applied():
    return patching.apply(workarounds_present(), contract=None, log=lambda line: None)


def test_a_wheel(copy):
    datasets = copy(DEFECTIVE)
    (datasets / HELPERS).touch()
    assert present() == ["helpers-prebuilt", "help-percent", "eval-interval"]


def test_a_checkout(copy):
    copy(DEFECTIVE, {"megatron/core/datasets/Makefile": MAKEFILE})
    assert present() == ["helpers-python", "help-percent", "eval-interval"]


def test_a_copy_without_defects(copy):
    copy(DEFECTIVE, SOUND)
    assert present() == []


def test_every_workaround_says_what_it_is_for():
    for patch in workarounds.workarounds_catalogue():
        assert patch.feature == "workaround"
        name, _, defect = patch.why.partition(": ")
        assert name.replace("-", "").isalpha()
        assert len(defect) > 20


def test_prebuilt_helpers_are_not_built(copy, capfd):
    datasets = copy(DEFECTIVE)
    (datasets / HELPERS).touch()
    utils = importlib.import_module("megatron.core.datasets.utils")
    with pytest.raises(SystemExit):  # make finds no Makefile
        utils.compile_helpers()
    with applied():
        assert utils.compile_helpers() is None
    assert "nothing to build" in capfd.readouterr().out


def test_makefile_builds_for_this_python(copy, monkeypatch):
    monkeypatch.setenv("MAKEFLAGS", "-s")
    datasets = copy(DEFECTIVE, {"megatron/core/datasets/Makefile": MAKEFILE})
    monkeypatch.setattr(workarounds, "_pybind11_includes", lambda: ["/with space/include"])
    utils = importlib.import_module("megatron.core.datasets.utils")
    with applied():
        utils.compile_helpers()
        assert workarounds.os.environ["MAKEFLAGS"] == "-s"
    built = (datasets / HELPERS).read_text()
    assert f"-I{sysconfig.get_path('include')}" in built
    assert "-I/with space/include" in built


def test_help_is_printed_whole(copy):
    copy(DEFECTIVE)
    arguments = importlib.import_module("megatron.training.arguments")
    parser = workarounds.argparse.ArgumentParser(prog="train")
    with pytest.raises(ValueError, match="unsupported format character"):
        arguments.add_megatron_arguments(parser).format_help()
    with applied():
        help_text = arguments.add_megatron_arguments(
            workarounds.argparse.ArgumentParser(prog="train")
        ).format_help()
    text = " ".join(help_text.split())
    assert "1.10 = 10%). Default 1.1, or 100%." in text
    assert "twice (None), train" in text
    assert "% of %s, 5% done" in text


@pytest.mark.parametrize(("interval", "valid"), [(None, 3), (4, 9)])
def test_eval_interval(copy, interval, valid):
    copy(DEFECTIVE)
    training = importlib.import_module("megatron.training.training")
    args = workarounds.types.SimpleNamespace(
        train_iters=10, global_batch_size=1, eval_iters=3, eval_interval=interval, iteration=5
    )
    importlib.import_module("megatron.training.global_vars").ARGS = args
    with applied():
        # Without an interval there is one evaluation, after training.
        assert training.get_train_valid_test_num_samples() == (10, valid)
        assert training.build_train_valid_test_data_loaders(lambda counts: counts) == (10, valid)
        assert args.consumed_valid_samples == (0 if interval is None else 3)
        assert args.eval_interval == interval
