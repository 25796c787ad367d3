"""Patching: everything is checked first, then all patches are applied or none, and undo restores exactly."""

import functools
import importlib
import operator
import re
import sys

import pytest

from megatron_ext import patching
from megatron_ext.contract import Contract, Entry
from megatron_ext.patching import Patch, PatchError
from megatron_ext.targets import resolve
from tests.unit.fake_upstream import first_on_path, write

FILES = {
    "megatron/core/ops.py": """
def scale(x, factor=2):
    return x * factor

def shift(x, *, by=1):
    return x + by

HAVE_TE = True

class Base:
    def inherited(self):
        return "base"

class Layer(Base):
    kind = "dense"

    def __init__(self, size=1):
        self.size = size

    def forward(self, x):
        return x * self.size

    @staticmethod
    def make(size):
        return Layer(size)

    @classmethod
    def default(cls):
        return cls(7)

    @property
    def name(self):
        return f"layer{self.size}"
""",
    "megatron/core/user.py": """
from megatron.core.ops import HAVE_TE, Layer, scale
from megatron.core.ops import scale as renamed
OTHER_FLAG = True

def run(x):
    return scale(x)
""",
    "megatron/core/late.py": "from megatron.core.ops import scale\n",
}


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """`megatron.core.ops` of the fake package, with `user` loaded and `late` not."""
    monkeypatch.setattr(patching, "_ACTIVE", [])
    write(tmp_path, FILES)
    with first_on_path(tmp_path):
        importlib.import_module("megatron.core.user")
        yield importlib.import_module("megatron.core.ops")


def plus(amount):
    def make(original):
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            return original(*args, **kwargs) + amount

        return wrapper

    return make


def wrap(target, make=None, feature="a", needs=(), why="because"):
    return Patch(f"megatron.core.ops:{target}", make or plus(100), "wrap", why, feature, needs)


def replace(target, new, feature="a", why="because"):
    return Patch(f"megatron.core.ops:{target}", lambda original: new, "replace", why, feature)


def apply(*patches, contract=None, log=None):
    return patching.apply(patches, contract=contract, log=log or (lambda line: None))


def snapshot():
    """Every attribute of every fake module and of the classes in it, by identity."""
    out = {}
    for name in ("megatron.core.ops", "megatron.core.user"):
        for attribute, value in vars(sys.modules[name]).items():
            out[name, attribute] = id(value)
            if isinstance(value, type):
                out.update({(name, attribute, key): id(item) for key, item in vars(value).items()})
    return out


# --- functions and their aliases ---------------------------------------------------------------------------


def test_wrap_reaches_aliases_and_later_imports_and_is_undone(upstream):
    before, lines = snapshot(), []
    applied = apply(wrap("scale"), log=lines.append)
    user = sys.modules["megatron.core.user"]
    assert user.scale(1) == user.renamed(1) == user.run(1) == upstream.scale(1) == 102
    assert importlib.import_module("megatron.core.late").scale(1) == 102
    sites = ["megatron.core.ops:scale", "megatron.core.user:scale", "megatron.core.user:renamed"]
    assert applied.records == [
        {
            "target": "megatron.core.ops:scale",
            "kind": "wrap",
            "feature": "a",
            "why": "because",
            "sites": sites,
        }
    ]
    assert lines == [f"patched megatron.core.ops:scale (wrap, a) at 3 sites: {', '.join(sites)}: because"]
    applied.undo()
    assert snapshot() == before
    assert applied.records == []
    applied.undo()  # a second time does nothing
    assert snapshot() == before


def test_class_is_rebound_where_it_was_imported(upstream):
    stock = upstream.Layer
    with apply(wrap("Layer", lambda original: type("Layer", (original,), {"kind": "ours"}))) as applied:
        assert sys.modules["megatron.core.user"].Layer is upstream.Layer
        assert upstream.Layer.kind == "ours"
        assert issubclass(upstream.Layer, stock)
        assert applied.records[0]["sites"] == ["megatron.core.ops:Layer", "megatron.core.user:Layer"]
    assert sys.modules["megatron.core.user"].Layer is upstream.Layer is stock


def test_constant_changes_only_where_it_is_named(upstream):
    with apply(replace("HAVE_TE", False)) as applied:
        user = sys.modules["megatron.core.user"]
        assert upstream.HAVE_TE is False
        assert user.HAVE_TE is True  # every True is the same object: constants are patched by name
        assert user.OTHER_FLAG is True
        assert len(applied.records[0]["sites"]) == 1
    assert upstream.HAVE_TE is True


def test_targets_outside_megatron_need_no_contract():
    import math

    contract = Contract("1.0", "1.0", {})
    with apply(Patch("math:floor", lambda original: lambda x: 42, "replace", "test", "a"), contract=contract):
        assert math.floor(1.5) == 42
    assert math.floor(1.5) == 1


# --- methods -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "make", "call", "stock", "patched"),
    [
        ("Layer.forward", plus(1), lambda cls: cls(3).forward(2), 6, 7),
        ("Layer.make", lambda f: lambda size: f(size + 1), lambda cls: cls.make(1).size, 1, 2),
        ("Layer.make", lambda f: lambda size: f(size + 1), lambda cls: cls().make(1).size, 1, 2),
        (
            "Layer.default",
            lambda f: lambda cls: f(cls).size,
            lambda cls: getattr(cls.default(), "size", 0),
            7,
            0,
        ),
        (
            "Layer.name",
            lambda p: property(lambda s: p.fget(s) + "!"),
            lambda cls: cls(2).name,
            "layer2",
            "layer2!",
        ),
        (
            "Layer.inherited",
            lambda f: lambda self: f(self) + "+",
            lambda cls: cls().inherited(),
            "base",
            "base+",
        ),
        ("Layer.__init__", lambda f: lambda self: f(self, 9), lambda cls: cls().size, 1, 9),
        ("Layer.kind", lambda value: "sparse", lambda cls: cls.kind, "dense", "sparse"),
    ],
)
def test_members_of_a_class(upstream, target, make, call, stock, patched):
    before = snapshot()
    assert call(upstream.Layer) == stock
    with apply(wrap(target, make)) as applied:
        assert call(upstream.Layer) == patched
        assert applied.records[0]["sites"] == [f"megatron.core.ops:{target}"]
    assert call(upstream.Layer) == stock
    assert snapshot() == before


def test_inherited_method_is_patched_on_the_class_that_was_named(upstream):
    with apply(wrap("Layer.inherited", lambda f: lambda self: "ours")):
        assert upstream.Base().inherited() == "base"
        assert upstream.Layer().inherited() == "ours"
    assert "inherited" not in vars(upstream.Layer)


# --- composition -------------------------------------------------------------------------------------------


def test_wraps_compose_in_order_and_the_first_is_the_inner_one(upstream):
    double = wrap("scale", lambda f: lambda *a, **k: 2 * f(*a, **k), feature="b")
    with apply(wrap("scale", plus(1)), double):
        assert upstream.scale(5) == 2 * (10 + 1)
    with apply(double, wrap("scale", plus(1))):
        assert upstream.scale(5) == 2 * 10 + 1


def test_replace_goes_below_wraps_wherever_it_is_listed(upstream):
    with apply(wrap("scale", plus(1)), replace("scale", lambda x: -x, feature="b")):
        assert upstream.scale(5) == -5 + 1
    assert upstream.scale(5) == 10


def test_same_patch_twice_is_once(upstream):
    same = wrap("scale")
    with apply(same, same) as first:
        assert len(first.records) == 1
        assert upstream.scale(1) == 102
        with apply(wrap("scale")) as second:  # a catalogue that is built anew
            assert second.records == []
            assert upstream.scale(1) == 102
        assert upstream.scale(1) == 102


def test_two_makers_of_one_name_are_not_one_patch(upstream):
    """Closures of one factory with the same reason: one would be dropped in silence."""
    with pytest.raises(PatchError, match="two patches with the same reason and maker name"):
        apply(wrap("scale"), wrap("scale"))
    assert upstream.scale(1) == 2


def test_two_replaces_of_one_object_conflict(upstream):
    first = replace("scale", len, feature="vocab", why="shards")
    second = replace("scale", max, feature="paro", why="strategy")
    with pytest.raises(PatchError, match="replaced by both 'vocab' \\(shards\\) and 'paro' \\(strategy\\)"):
        apply(first, second)
    assert upstream.scale(1) == 2
    with apply(first), pytest.raises(PatchError, match="both 'vocab'"):
        apply(second)
    # The same function under the name by which another module knows it.
    alias = Patch("megatron.core.user:renamed", lambda f: max, "replace", "strategy", "paro")
    with pytest.raises(PatchError, match="both 'vocab'"):
        apply(first, alias)
    with apply(first), pytest.raises(PatchError, match="both 'vocab'"):
        apply(alias)


def test_replace_above_an_active_wrap_is_refused(upstream):
    with apply(wrap("scale", feature="record")):
        with pytest.raises(PatchError, match="'b' would replace it and lose what 'record' wrapped"):
            apply(replace("scale", len, feature="b"))
        assert upstream.scale(1) == 102


def test_patch_inside_a_replaced_class_is_refused(upstream):
    outer = replace("Layer", type("Other", (), {}), feature="x")
    inner = wrap("Layer.forward", feature="y")
    with pytest.raises(PatchError, match=r"'y'\) lies in megatron\.core\.ops:Layer, which 'x' replaces"):
        apply(inner, outer)
    assert upstream.Layer.__name__ == "Layer"


def test_undo_in_the_wrong_order_is_refused(upstream):
    first = apply(wrap("scale", plus(1), feature="inner"))
    second = apply(wrap("scale", plus(2), feature="outer"))
    with pytest.raises(PatchError, match="'outer' patched it later; undo that first"):
        first.undo()
    assert upstream.scale(0) == 3
    second.undo()
    first.undo()
    assert upstream.scale(0) == 0


def test_undo_does_not_drop_what_other_code_put_there(upstream):
    applied = apply(wrap("shift"))
    ours, upstream.shift = upstream.shift, len
    with pytest.raises(PatchError, match="other code replaced what 'a' put in"):
        applied.undo()
    assert upstream.shift is len
    upstream.shift = ours
    applied.undo()
    assert upstream.shift(1) == 2


# --- what cannot be applied --------------------------------------------------------------------------------


def test_every_problem_is_reported_and_nothing_changes(upstream):
    before = snapshot()
    bad = [
        wrap("scael"),
        Patch("megatron.core.gone:f", len, "wrap", "why", "b"),
        Patch("megatron.core.ops", len, "wrap", "why", "c"),
        wrap("HAVE_TE.x", feature="d"),
        wrap("shift", needs=("by", "speed"), feature="e"),
        wrap("Layer.fwd.x", feature="f"),
    ]
    with pytest.raises(PatchError) as caught:
        apply(wrap("scale"), *bad)
    text = str(caught.value)
    assert len(caught.value.problems) == len(bad)
    assert "megatron.core.ops has no 'scael'; similar names there: scale" in text
    assert "module megatron.core.gone cannot be imported (No module named 'megatron.core.gone')" in text
    assert "'megatron.core.ops' is no target; write 'package.module:Qual.name'" in text
    assert "HAVE_TE is a bool; only modules and classes can be patched" in text
    assert "megatron.core.ops:shift has no parameter speed, only (x, by)" in text
    assert "megatron.core.ops.Layer has no 'fwd'" in text
    assert re.search(r"Needed by 'e' \(because\): leave that off, or install a megatron-core", text)
    assert snapshot() == before
    assert not hasattr(upstream, "scael")


def test_needs_of_an_object_without_signature(upstream):
    with pytest.raises(PatchError, match="HAVE_TE shows no signature in which to find x"):
        apply(wrap("HAVE_TE", needs=("x",)))


def test_needs_are_checked_against_the_original_below_other_wraps(upstream):
    hides_parameters = wrap("scale", lambda f: lambda *a, **k: f(*a, **k))
    with apply(hides_parameters), apply(wrap("scale", plus(1), feature="b", needs=("factor",))):
        assert upstream.scale(1, factor=5) == 6


def test_maker_that_raises_rolls_everything_back(upstream):
    before = snapshot()

    def broken(original):
        raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError, match="no such luck") as caught:
        apply(wrap("scale"), wrap("Layer.make"), wrap("shift", broken, feature="vocab"))
    assert "while patching megatron.core.ops:shift for 'vocab'; all was taken back" in caught.value.__notes__
    assert snapshot() == before
    assert patching._ACTIVE == []


@pytest.mark.parametrize(
    ("target", "made", "message"),
    [
        ("scale", lambda f: f, "returned the original"),
        ("Layer.make", lambda f: f, "returned the original"),
        ("scale", lambda f: None, "returned None, but the original is callable"),
        ("Layer.forward", lambda f: operator.itemgetter(0), "does not bind to instances"),
    ],
)
def test_maker_that_returns_something_useless_is_a_bug(upstream, target, made, message):
    before = snapshot()
    with pytest.raises(TypeError, match=message):
        apply(wrap("scale", plus(1), feature="other"), wrap(target, made))
    assert snapshot() == before


def test_site_that_cannot_be_set_rolls_everything_back(upstream):
    before = snapshot()
    immutable = Patch("builtins:int.bit_length", lambda f: lambda self: 0, "wrap", "why", "a")
    with pytest.raises(TypeError, match="immutable type"):
        apply(wrap("scale"), immutable)
    assert snapshot() == before


# --- contract ----------------------------------------------------------------------------------------------


def entry(target):
    return Entry.of(resolve(f"megatron.core.ops:{target}"))


def test_contract_of_another_version_is_logged_once(upstream):
    lines = []
    contract = Contract("0.19.2", "0.19.1", {"megatron.core.ops:scale": entry("scale")})
    with apply(replace("scale", len), wrap("shift"), contract=contract, log=lines.append):
        pass
    assert lines[0] == (
        "megatron-core 0.19.1 has no contract of its own: every patched object was compared with 0.19.2"
    )
    assert len(lines) == 3


def test_drift_and_other_problems_are_reported_together(upstream):
    contract = Contract("0.19.2", "0.19.2", {})
    with pytest.raises(patching.DriftError, match="never reviewed") as caught:
        apply(replace("scale", len), contract=contract)
    assert len(caught.value.problems) == 1
    with pytest.raises(PatchError) as caught:
        apply(replace("scale", len), wrap("gone"), contract=contract)
    assert not isinstance(caught.value, patching.DriftError)
    assert len(caught.value.problems) == 2
