"""What counts as the same upstream code, and what a contract makes of a difference."""

import ast
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext import contract as contracts
from megatron_ext import fingerprint
from megatron_ext.contract import Contract, Entry, load_contract
from megatron_ext.patching import DriftError, Patch, PatchError, apply
from megatron_ext.targets import resolve
from tests.unit.fake_upstream import first_on_path, write

STOCK = '''
import functools

def jit(f):
    return lambda *args: f(*args)  # hides the function, as some jit wrappers do

@jit
def loss(logits, labels):
    """Cross entropy."""
    return logits - labels

def norm(x, /, eps=1e-5, *, dim, keep=True, **kwargs):
    return x

def gather(*inputs, group=None): return inputs

class Linear:
    """A layer."""
    bias: bool = True
    """Whether it has one."""

    def forward(self, x):
        return x + 1

    @property
    def size(self):
        return self._size

    @size.setter
    def size(self, value):
        self._size = value

try:
    import no_such_package
except ImportError:
    def fused(x):
        return x

LIMIT = 3
'''
COSMETIC = '''
# A comment.
import functools

def jit(f):
    return lambda *args: f(*args)

@jit
def loss(logits: "Tensor", labels: "Tensor") -> "Tensor":
    """Another text."""
    return (logits
            - labels)   # explained

def norm(x, /, eps=0.00001, *, dim, keep=True, **kwargs):
    return x

def gather(*inputs, group=None):
    return inputs

class Linear:
    bias: bool = True

    def forward(self, x: int) -> int:
        "Adds one."
        return x + 1

    @property
    def size(self): return self._size

    @size.setter
    def size(self, value): self._size = value

try:
    import no_such_package
except ImportError:
    def fused(x): return x

LIMIT = 3
'''
NAMES = ["loss", "norm", "gather", "Linear", "Linear.forward", "Linear.size", "fused", "LIMIT"]
MODULE = "megatron.core.parts"


def entries(root, text):
    write(root, {"megatron/core/parts.py": text})
    with first_on_path(root):
        return {name: Entry.of(resolve(f"{MODULE}:{name}")) for name in NAMES}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return entries(tmp_path_factory.mktemp("stock"), STOCK)


def test_cosmetics_do_not_count(stock, tmp_path):
    assert entries(tmp_path, COSMETIC) == stock
    assert all(entry.body for name, entry in stock.items() if name != "LIMIT")
    assert len({entry.body for entry in stock.values()}) == len(NAMES)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("logits - labels", "labels - logits", ["loss"]),
        ("@jit\ndef loss", "def loss", ["loss"]),
        ("eps=1e-5", "eps=1e-6", ["norm"]),
        ("return x + 1", "return x + 1.0", ["Linear", "Linear.forward"]),
        ("bias: bool = True", "bias: bool = False", ["Linear"]),
        ("self._size = value", "self._size = int(value)", ["Linear", "Linear.size"]),
        ("LIMIT = 3", "LIMIT = '3'", []),
    ],
)
def test_behaviour_counts(stock, tmp_path, old, new, changed):
    assert old in STOCK
    now = entries(tmp_path, STOCK.replace(old, new))
    assert [name for name in NAMES if now[name].body != stock[name].body] == changed


def test_kinds_and_parameters(stock):
    kinds = {name: entry.kind for name, entry in stock.items()}
    assert kinds == {
        "loss": "function",
        "norm": "function",
        "gather": "function",
        "Linear": "class",
        "Linear.forward": "method",
        "Linear.size": "property",
        "fused": "function",
        "LIMIT": "value",
    }
    assert stock["norm"].parameters == ("x", "/", "eps=", "*", "dim", "keep=", "**kwargs")
    assert stock["gather"].parameters == ("*inputs", "group=")
    assert stock["Linear.size"].parameters == ("self",)
    assert stock["LIMIT"].parameters is None


def test_object_that_is_defined_elsewhere(stock, tmp_path):
    """Inherited methods and re-exported functions have no definition under their own name."""
    write(
        tmp_path,
        {
            "megatron/core/parts.py": STOCK,
            "megatron/core/more.py": f"from {MODULE} import Linear, norm\nclass Wide(Linear): pass\n",
        },
    )
    with first_on_path(tmp_path):
        assert Entry.of(resolve("megatron.core.more:norm")) == stock["norm"]
        inherited = Entry.of(resolve("megatron.core.more:Wide.forward"))
    assert inherited.kind == "method"
    assert inherited.body == stock["Linear.forward"].body


def test_the_normalised_text_is_the_same_in_every_python():
    """A contract written with one Python version must hold with another, whatever `ast.dump` does there."""
    (function,) = ast.parse('def f(x: int, y=1.5):\n    "doc"\n    return x + y').body
    assert fingerprint.canonical(function) == (
        "FunctionDef(name='f',args=arguments(args=[arg(arg='x'),arg(arg='y')],defaults=[1.5]),"
        "body=[Return(value=BinOp(left=Name(id='x'),op=Add(),right=Name(id='y')))])"
    )
    nested = ast.parse("f'{x:<{width}}.'", mode="eval").body
    assert fingerprint.canonical(nested) == (
        "JoinedStr([FormattedValue(value=Name(id='x'),conversion=-1,"
        "format_spec=JoinedStr(['<',FormattedValue(value=Name(id='width'),conversion=-1)])),'.'])"
    )


def test_source_is_read_without_import(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(
        "import no_such_package\n\n@no_such_package.jit\ndef f(x):\n    return x\n", encoding="utf-8"
    )
    assert fingerprint.source(file, "f") == ["@no_such_package.jit", "def f(x):", "    return x"]
    assert fingerprint.source(file, "g") == []


# --- contract files ----------------------------------------------------------------------------------------


def test_file_round_trip(stock, tmp_path):
    targets = {f"{MODULE}:{name}": entry for name, entry in stock.items()}
    text = contracts.dump(targets, "0.19.2", dict.fromkeys(targets, 'vocab "wrap"'))
    (tmp_path / "0.19.2.toml").write_text(text, encoding="utf-8")
    loaded = load_contract("0.19.2", tmp_path)
    assert loaded.is_exact
    assert loaded.entries == targets


def test_nearest_contract():
    have = ["0.19.2", "0.19.10", "0.18.9", "0.19.4"]
    assert contracts.nearest("0.19.2", have) == "0.19.2"
    assert contracts.nearest("0.19.0", have) == "0.19.2"
    assert contracts.nearest("0.19.3", have) == "0.19.2"  # the older of two
    assert contracts.nearest("0.19.9", have) == "0.19.10"
    assert contracts.nearest("0.19.1", []) is None


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(PatchError, match=r"no upstream contract in .*reinstall"):
        load_contract("0.19.2", tmp_path)
    (tmp_path / "0.19.2.toml").write_text("schema = 99\n", encoding="utf-8")
    with pytest.raises(PatchError, match="has schema 99, not 1; write it anew with `megatron-ext lock`"):
        load_contract("0.19.2", tmp_path)


def test_contracts_lie_beside_the_package_in_a_checkout():
    assert "0.19.2" in contracts.available()


def test_contracts_lie_in_an_installed_package(tmp_path):
    package = Path(contracts.__file__).parent
    shutil.copytree(package, tmp_path / "megatron_ext", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(package.parent / "patches", tmp_path / "megatron_ext" / "patches")
    code = "from megatron_ext import contract; print(contract.folder(), contract.available())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"{tmp_path}/megatron_ext/patches {contracts.available()}"


# --- drift -------------------------------------------------------------------------------------------------


def drift(stock, root, old, new, kind, target="norm", needs=(), installed="0.19.3"):
    """Errors and warnings of one patch when STOCK was reviewed and `old` has become `new`."""
    write(root, {"megatron/core/parts.py": STOCK.replace(old, new)})
    contract = Contract("0.19.2", installed, {f"{MODULE}:{name}": entry for name, entry in stock.items()})
    patch = Patch(f"{MODULE}:{target}", lambda original: len, kind, "sharding", "vocab", needs)
    with first_on_path(root):
        found = resolve(patch.target)
        return contract.errors(patch, found), contract.warnings(patch, found)


def test_nothing_changed(stock, tmp_path):
    assert drift(stock, tmp_path, "", "", "replace", needs=("eps",)) == ([], [])


def test_body_of_a_replaced_target(stock, tmp_path):
    errors, _ = drift(stock, tmp_path, "return x\n\ndef gather", "return -x\n\ndef gather", "replace")
    assert errors == [
        "megatron.core.parts:norm is not what the contract of megatron-core 0.19.2 says (installed: 0.19.3): "
        "body changed. Needed by 'vocab' (sharding). Leave 'vocab' off, install a megatron-core with a "
        f"contract ({', '.join(contracts.available())}), or review the change and run `megatron-ext lock`."
    ]


def test_body_of_a_wrapped_target_is_a_warning(stock, tmp_path):
    errors, warnings = drift(stock, tmp_path, "return x\n\ndef gather", "return -x\n\ndef gather", "wrap")
    assert errors == []
    assert warnings == ["megatron.core.parts:norm, wrapped by 'vocab', against 0.19.2: body changed"]


def test_edited_copy_of_a_reviewed_version(stock, tmp_path):
    errors, _ = drift(
        stock, tmp_path, "return x\n\ndef gather", "return -x\n\ndef gather", "replace", installed="0.19.2"
    )
    assert "reinstall megatron-core if this copy was edited" in errors[0]


def test_parameters_of_a_replaced_target(stock, tmp_path):
    errors, _ = drift(stock, tmp_path, "eps=1e-5, *, dim,", "scale=1, *, dim,", "replace")
    assert "parameters added: scale; parameters removed: eps; body changed" in errors[0]


def test_default_of_a_replaced_target(stock, tmp_path):
    errors, _ = drift(stock, tmp_path, "*, dim,", "*, dim=0,", "replace")
    before, after = "(x, /, eps=, *, dim, keep=, **kwargs)", "(x, /, eps=, *, dim=, keep=, **kwargs)"
    assert f"parameters changed from {before} to {after}" in errors[0]


@pytest.mark.parametrize(
    ("old", "new", "needs", "moved"),
    [
        ("(x, /, eps=1e-5", "(x, /, scale=1, eps=1e-5", ("eps",), True),  # its position
        ("(x, /, eps=1e-5", "(x, /, scale=1, eps=1e-5", ("dim",), False),  # a keyword has none
        ("eps=1e-5, *, dim", "*, dim, eps=1e-5", ("eps",), True),  # became a keyword
        ("(x, /, eps=1e-5", "(x, /, scale=1, eps=1e-5", (), False),  # the wrap reads nothing
    ],
)
def test_parameters_of_a_wrapped_target(stock, tmp_path, old, new, needs, moved):
    errors, warnings = drift(stock, tmp_path, old, new, "wrap", needs=needs)
    assert bool(errors) is moved
    assert bool(warnings) is not moved
    if moved:
        assert "parameter eps moved: (x, /, eps=, *, dim, keep=, **kwargs) became (" in errors[0]


@pytest.mark.parametrize("kind", ["wrap", "replace"])
def test_function_that_became_a_class(stock, tmp_path, kind):
    old = "def gather(*inputs, group=None): return inputs"
    errors, _ = drift(stock, tmp_path, old, "class gather: pass", kind, target="gather")
    assert "was a function, is a class" in errors[0]


def test_target_without_an_entry(stock, tmp_path):
    del (known := dict(stock))["norm"]
    errors, warnings = drift(known, tmp_path, "", "", "replace")
    assert "it was never reviewed" in errors[0]
    errors, warnings = drift(known, tmp_path, "", "", "wrap")
    assert errors == []
    assert "not in the contract" in warnings[0]


def test_drift_stops_the_patch(stock, tmp_path):
    write(tmp_path, {"megatron/core/parts.py": STOCK.replace("logits - labels", "labels - logits")})
    contract = Contract("0.19.2", "0.19.3", {f"{MODULE}:{name}": entry for name, entry in stock.items()})
    patch = Patch(f"{MODULE}:loss", lambda original: len, "replace", "sharding", "vocab")
    with first_on_path(tmp_path):
        with pytest.raises(DriftError, match=r"loss is not what the contract .* body changed"):
            apply([patch], contract=contract, log=lambda line: None)
        assert importlib.import_module(MODULE).loss(3, 1) == -2
