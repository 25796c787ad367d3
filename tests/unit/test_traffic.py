"""Byte formulas, the ledger, and that every method of torch's ProcessGroup is known to the counter."""

import re
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import ProcessGroup

from megatron_ext import ledger as ledger_module
from megatron_ext import traffic
from megatron_ext.group_names import short_name
from megatron_ext.ledger import KINDS, Ledger, ideal_bytes
from megatron_ext.stock_traffic import METHODS, kept_of, size_of

SIZES = [0, 1, 2, 5, 7, 12, 4096, 1000003]
GROUPS = [1, 2, 3, 4, 7, 8]


def over_ranks(kind, p, **sizes):
    """Sum of `ideal_bytes` over the ranks; a size may be a function of the rank."""
    return sum(
        ideal_bytes(
            kind,
            group_size=p,
            group_rank=r,
            **{name: size(r) if callable(size) else size for name, size in sizes.items()},
        )
        for r in range(p)
    )


def uneven(n, p):
    """n bytes cut in p parts, the first ones longer."""
    return lambda r: n // p + (1 if r < n % p else 0)


@pytest.mark.parametrize("p", GROUPS)
@pytest.mark.parametrize("n", SIZES)
def test_sums_over_ranks_are_the_exact_totals(n, p):
    part = uneven(n, p)
    assert over_ranks("all_reduce", p, input_bytes=n) == 2 * (p - 1) * n
    assert over_ranks("all_gather", p, input_bytes=part) == (p - 1) * n
    assert over_ranks("reduce_scatter", p, input_bytes=n, output_bytes=part) == (p - 1) * n
    assert over_ranks("all_to_all", p, input_bytes=n, kept_bytes=part) == (p - 1) * n
    for root in range(p):
        assert over_ranks("broadcast", p, input_bytes=n, root=root) == (p - 1) * n
        assert over_ranks("reduce", p, input_bytes=n, root=root) == (p - 1) * n
        assert over_ranks("gather", p, input_bytes=part, root=root) == n - part(root)
        assert over_ranks("scatter", p, input_bytes=n, output_bytes=part, root=root) == n - part(root)
    assert over_ranks("send", p, input_bytes=n) == p * n
    assert over_ranks("recv", p) == over_ranks("barrier", p) == 0


@pytest.mark.parametrize("n", SIZES)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(n):
    for p in GROUPS:
        for r in range(p):
            at = {"group_size": p, "group_rank": r}
            own = uneven(n, p)(r)
            scatter = ideal_bytes("reduce_scatter", **at, input_bytes=n, output_bytes=own)
            assert ideal_bytes("all_reduce", **at, input_bytes=n) == 2 * scatter


def test_one_rank_sends_nothing():
    sizes = {"input_bytes": 64, "output_bytes": 64, "kept_bytes": 64, "root": 0}
    for kind in set(KINDS) - {"send"}:
        assert ideal_bytes(kind, group_size=1, group_rank=0, **sizes) == 0


def test_per_rank_values():
    assert [ideal_bytes("all_reduce", group_size=3, group_rank=r, input_bytes=10) for r in range(3)] == [
        12,
        14,
        14,
    ]
    assert [
        ideal_bytes("broadcast", group_size=3, group_rank=r, input_bytes=10, root=1) for r in range(3)
    ] == [0, 20, 0]
    assert [ideal_bytes("reduce", group_size=3, group_rank=r, input_bytes=10, root=1) for r in range(3)] == [
        10,
        0,
        10,
    ]


@pytest.mark.parametrize(
    "call",
    [
        {"kind": "allreduce", "group_size": 2, "group_rank": 0},
        {"kind": "all_reduce", "group_size": 2, "group_rank": 2},
        {"kind": "broadcast", "group_size": 2, "group_rank": 0, "input_bytes": 4},
    ],
)
def test_impossible_calls_are_internal_errors(call):
    with pytest.raises(AssertionError):
        ideal_bytes(**call)


def test_ledger_adds_by_feature_kind_and_group():
    ledger = Ledger()
    ledger.add("vocab", "send", "pp", 10)
    ledger.add("stock", "send", "pp", 1)
    ledger.add("vocab", "send", "pp", 5, calls=2)
    ledger.add("vocab", "recv", "pp", 0)
    assert ledger.totals() == {
        ("stock", "send", "pp"): (1, 1),
        ("vocab", "recv", "pp"): (0, 1),
        ("vocab", "send", "pp"): (15, 3),
    }
    rows = ledger.drain()
    assert rows[0] == {"feature": "stock", "kind": "send", "group": "pp", "bytes": 1, "calls": 1}
    assert [row["bytes"] for row in rows] == [1, 0, 15]
    assert ledger.drain() == []
    assert ledger.totals() == {}


def test_ledger_loses_nothing_between_threads():
    ledger, rows = Ledger(), []

    def work():
        for _ in range(2000):
            ledger.add("stock", "send", "pp", 3)
            if _ % 500 == 0:
                rows.extend(ledger.drain())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows.extend(ledger.drain())
    assert sum(row["bytes"] for row in rows) == 3 * sum(row["calls"] for row in rows) == 24000


def test_labels_nest_and_stay_in_their_thread():
    seen = []
    with traffic.label("vocab"):
        with traffic.label(None):
            assert ledger_module.current_feature() is None
        with pytest.raises(KeyError), traffic.label("paro"):
            raise KeyError
        assert ledger_module.current_feature() == "vocab"
        thread = threading.Thread(target=lambda: seen.append(ledger_module.current_feature()))
        thread.start()
        thread.join()
    assert seen == ["stock"]
    assert ledger_module.current_feature() == "stock"


def test_size_of_tensors_in_lists():
    a, b = torch.zeros(3, 2), torch.zeros(5, dtype=torch.bfloat16)
    assert size_of(a) == 24
    assert size_of([a, b]) == 34
    assert size_of([[a, a], [b]]) == 58
    assert size_of([]) == 0
    assert size_of(a[:, :1]) == 12
    assert size_of(a.to("meta")) == 24


def test_what_has_no_known_size_is_none():
    assert size_of(torch.eye(2).to_sparse()) is None
    assert size_of([torch.zeros(2), torch.eye(2).to_sparse()]) is None
    assert size_of("text") is None


def test_kept_part_of_an_all_to_all():
    rows = torch.zeros(6, 2)
    assert kept_of(rows, None, 1, 3) == kept_of(rows, [], 1, 3) == 16
    assert kept_of(rows, [1, 3, 2], 1, 3) == 24
    assert kept_of(torch.zeros(0, 2), [0, 0, 0], 1, 3) == 0
    assert kept_of([rows, rows[:1]], None, 1, 2) == 8


SILENT = re.compile(
    "abort|boxed|get_group_store|merge_remote_group|name|rank|set_timeout|shutdown|size|split_group|unbox"
    "|_(backend_id|enable_collectives_timing|(start|end)_coalescing|get_backend(_name)?|has_hooks|id"
    "|get_sequence_number_for_group|register_(backend|on_completion_hook)|wait_for_pending_works"
    "|set_(default_backend|group_desc|group_name|sequence_number_for_group)|pybind11_conduit_v1_)"
)


def test_every_method_that_communicates_is_counted():
    methods = {
        name for name in dir(ProcessGroup) if callable(getattr(ProcessGroup, name)) and name[:2] != "__"
    }
    methods -= {name for name in methods if isinstance(getattr(ProcessGroup, name), type)}
    assert {name for name in methods if not SILENT.fullmatch(name)} == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_arguments_are_where_torch_has_them(name):
    """Positions and keywords in the table against every overload that torch documents."""
    overloads = re.findall(rf"{name}\(self: [^,)]*(?:, )?(.*)\) -> ", getattr(ProcessGroup, name).__doc__)
    assert overloads
    method = METHODS[name]
    for overload in overloads:
        parameters = re.findall(r"(\w+): ", re.sub(r"<.*?>", "", overload))
        for where in (method.input, method.output, method.splits):
            assert not where or parameters[where[0]] in where[1:], (overload, where)
        if method.root and {"opts", "root"} & set(parameters):
            assert parameters[method.root[0]] in method.root[1:], overload


def test_megatron_trains_without_collectives_that_bypass_the_counter():
    """Functional collectives go from C++ to C++; Megatron uses none in its own code."""
    import megatron.core

    core = Path(megatron.core.__file__).parent
    files = [*core.rglob("*.py"), *(core.parent / "training").rglob("*.py")]
    assert len(files) > 300
    text = {file.relative_to(core.parent).as_posix(): file.read_text() for file in files}
    functional = r"_c10d_functional|ops\.c10d|funcol|_functional_collectives(?!\.is_torchdynamo_compiling)"
    assert [name for name, code in text.items() if re.search(functional, code)] == []
    # Of DTensors that FSDP has made, as the module says.
    whole = {name for name, code in text.items() if ".full_tensor()" in code}
    assert whole == {"core/utils.py", "core/distributed/finalize_model_grads.py"}


@pytest.mark.parametrize(
    ("description", "name"),
    [
        ("default_pg", "world"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("DATA_PARALLEL_GROUP_WITH_CP_GLOO", "dp-cp-gloo"),
        ("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1", "inter-dist-opt"),
        ("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L0", "intra-expt-dp-gloo"),
        ("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0", "cp-l0"),
        ("HYBRID_DP_CP_GROUP_4", "hybrid-dp-cp-4"),
        ("SOME_NEW_PARALLEL_GROUP", "some-new"),
        ("vocab-stats", "vocab-stats"),
        ("mesh_dp", "mesh_dp"),
    ],
)
def test_group_descriptions_become_short_names(description, name):
    assert short_name(description) == name
