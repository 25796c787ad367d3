"""Everything that a switch can patch exists in the installed megatron-core and is what was reviewed."""

import ast
import functools
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron_ext import compat, contract, patching, workarounds
from megatron_ext.contract import Entry, load_contract
from megatron_ext.features import patch_catalogue
from megatron_ext.patching import DriftError, Patch, PatchError
from megatron_ext.targets import resolve

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def catalogue():
    importlib.import_module("megatron.training")
    return patch_catalogue()


@pytest.fixture(scope="module")
def installed():
    return load_contract(compat.megatron_version())


def upstream(patches):
    return [patch for patch in patches if patch.target.startswith("megatron.")]


def test_versions_and_paths_are_supported():
    assert compat.check_versions() + compat.check_import_paths() == []


def test_every_target_exists_with_what_the_patch_reads(catalogue):
    assert upstream(catalogue)
    problems = [p for patch in catalogue for p in patching.missing_parameters(patch, resolve(patch.target))]
    assert problems == []


def test_every_target_is_as_reviewed(catalogue, installed):
    """A version without a contract of its own must at least be safe to patch."""
    for patch in upstream(catalogue):
        found = resolve(patch.target)
        assert installed.errors(patch, found) == []
        if installed.is_exact:
            assert installed.warnings(patch, found) == []


def test_contract_has_no_leftovers(catalogue, installed):
    assert set(installed.entries) == {patch.target for patch in upstream(catalogue)}


def test_every_wrap_and_replace_says_why(catalogue):
    for patch in catalogue:
        assert patch.why
        assert patch.feature
        assert patch.kind in ("wrap", "replace")


def test_only_compat_names_versions():
    """The supported window stands in one file (and in the package's metadata, which pip reads)."""
    for file in sorted((ROOT / "megatron_ext").rglob("*.py")):
        constants = [n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)]
        named = [text for text in constants if isinstance(text, str) and re.search(r"\b0\.\d\d\.\d", text)]
        assert file.name == "compat.py" or not named, file


def test_metadata_agrees_with_the_window():
    metadata = (ROOT / "pyproject.toml").read_text()
    assert f'"{compat.MEGATRON_INSTALL}"' in metadata
    assert f'"torch{compat.TORCH_WINDOW}"' in metadata
    assert tomllib.loads(metadata)["project"]["requires-python"] == compat.PYTHON_WINDOW


# --- the installed copy, patched ---------------------------------------------------------------------------


def test_workarounds_apply_and_undo(installed):
    """What the launcher does first; the aliases of real modules are rebound and restored."""
    training = importlib.import_module("megatron.training")
    stock = training.get_train_valid_test_num_samples
    patches, lines = compat.workarounds_present(), []
    with patching.apply(patches, contract=installed, log=lines.append) as applied:
        assert training.get_train_valid_test_num_samples is not stock
        sites = {site for record in applied.records for site in record["sites"]}
    assert training.get_train_valid_test_num_samples is stock
    assert "megatron.training:get_train_valid_test_num_samples" in sites
    patched = [line.split()[1] for line in lines if line.startswith("patched ")]
    assert patched == [patch.target for patch in patches]


def test_class_is_rebound_wherever_it_was_imported(installed):
    """Stock binds its layer classes by value in many modules."""
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    name = "megatron.core.tensor_parallel.layers:ColumnParallelLinear"
    stock = resolve(name).raw
    patch = Patch(name, lambda original: type("Ours", (original,), {}), "wrap", "test", "test")
    with patching.apply([patch], contract=installed, log=lambda line: None) as applied:
        sites = applied.records[0]["sites"]
        assert len(sites) > 2
        for site in sites:
            assert resolve(site).raw.__name__ == "Ours"
    assert all(resolve(site).raw is stock for site in sites)


def test_replace_that_nobody_reviewed_is_refused(installed):
    target = "megatron.core.pipeline_parallel.schedules:forward_step"
    stock = resolve(target).raw
    with pytest.raises(DriftError, match=r"schedules:forward_step is not what .* never reviewed"):
        patching.apply([Patch(target, lambda f: len, "replace", "why", "x")], contract=installed, log=print)
    assert resolve(target).raw is stock


def test_stock_help_is_printed():
    """Megatron's own --help, with the workaround that the installed copy needs."""
    arguments = importlib.import_module("megatron.training.arguments")
    patches = [p for p in compat.workarounds_present() if p.target.endswith(":add_megatron_arguments")]
    with patching.apply(patches, contract=None, log=lambda line: None):
        parser = workarounds.argparse.ArgumentParser()
        assert "--tensor-model-parallel-size" in arguments.add_megatron_arguments(parser).format_help()


def test_pybind11_headers_exist():
    """A checkout's helpers can be built without pybind11, since torch ships its headers."""
    folders = workarounds._pybind11_includes()
    assert any((Path(folder) / "pybind11" / "pybind11.h").is_file() for folder in folders)


# --- doctored copies ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doctored(tmp_path_factory):
    """A copy of the installed megatron in which a function and a parameter have other names."""
    root = tmp_path_factory.mktemp("doctored")
    source = Path(compat.megatron_paths()["megatron.core"]).parent
    for package in ("core", "training"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source / package, root / "megatron" / package, ignore=ignored)
    edit = functools.partial(replace_in, root / "megatron")
    edit("core/tensor_parallel/random.py", "def _get_cuda_rng_state(", "def _renamed_by_the_test(")
    edit(
        "training/arguments.py",
        "def validate_args(args, defaults={}):",
        "def validate_args(options, defaults={}):",
    )
    return root


def replace_in(root, file, old, new):
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))


def alone(root, code):
    """Output of a fresh Python that imports megatron from `root`."""
    command = [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_doctor_on_a_doctored_copy(doctored):
    """Doctor names the target that is gone and the parameter that is gone, with who needs them."""
    out = alone(
        doctored,
        "from megatron_ext.tools import doctor\nprint('exit code', doctor.main(['--cpu', '--json']))\n",
    )
    assert out.splitlines()[-1] == "exit code 1"
    assert "random has no '_get_cuda_rng_state'" in out
    assert "validate_args has no parameter args, only (options, defaults)" in out
    assert "Needed by 'cpu'" in out
    assert "Needed by 'launcher'" in out


def test_replaced_body_that_changed(tmp_path, installed, catalogue):
    """The hash of a real replaced body moves with the body, and only with it."""
    replaces = [patch for patch in upstream(catalogue) if patch.kind == "replace"]
    assert replaces
    for patch in replaces:
        found = resolve(patch.target)
        reviewed = Entry.of(found)
        changed = contract.Contract(
            installed.version,
            "0.0.0",
            {patch.target: Entry(reviewed.kind, reviewed.parameters, "0" * 64)},
        )
        (problem,) = changed.errors(patch, found)
        assert "body changed" in problem
        assert f"Needed by {patch.feature!r}" in problem


def test_patches_that_cannot_all_be_applied_leave_stock_alone(installed):
    stock = resolve("megatron.training.arguments:validate_args").raw
    good = Patch("megatron.training.arguments:validate_args", lambda f: lambda *a: f(*a), "wrap", "why", "a")
    bad = Patch("megatron.training.arguments:no_such_function", len, "wrap", "why", "b")
    with pytest.raises(PatchError, match="no_such_function"):
        patching.apply([good, bad], contract=installed, log=print)
    assert resolve("megatron.training.arguments:validate_args").raw is stock
