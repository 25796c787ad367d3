"""The choice of a grid: bytes, memory, links, and what cannot be split."""

import json
from math import inf

import pytest

from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.memory import edge_parameters, layer_memory, layer_parameters, saved_by_linears
from megatron_ext.linear3d.planner import Situation, evaluate, one_axis, peers, ranking
from megatron_ext.linear3d.sizes import ModelSizes
from megatron_ext.paro.network import Link
from megatron_ext.tools import plan_linear3d

EQUAL = Link(0.0, 1e9)
AC3 = ModelSizes(128, 4, 256, 8, 8, 32, 1024, 1024, tied=False, learned=False)


def situation(ranks, h, tokens, *, batch=64, **more):
    model = ModelSizes(tokens // batch, batch, h, 64, 64, h // 64, 4 * h, 51200, itemsize=2)
    return Situation(model, ranks, 32, more.pop("node", ranks), EQUAL, more.pop("between", EQUAL), **more)


def test_acceptance_check_11():
    """Closed forms of section 6.2: bytes a layer, forward and backward, bf16, gathered."""
    s = situation(64, 8192, 16384, save="gathered")
    linear = {c.grid.sizes: c for c in ranking(s)[0]}
    norm = 2 * (2 - 1) * 2 * 4 * 2 * (16384 // (4 * 8))  # statistics of the two norms for (4, 8, 2)
    assert ranking(s)[0][0].grid.sizes == (4, 8, 2)
    assert linear[4, 8, 2].bytes - norm == 486539264
    assert linear[1, 64, 1].bytes == 2113929216
    cube = linear[4, 4, 4]
    assert cube.bytes - _statistics(Grid3D(4, 4, 4), 16384) == 553648128


def _statistics(grid, tokens):
    local = tokens // (grid.gi * grid.gj)
    gather = (grid.gl - 1) * 2 * local * 4
    reduce = 2 * (2 * local * 4 - 2 * local * 4 // grid.gl)
    return 2 * (gather + reduce)


def test_a_tie_goes_to_what_is_off_the_critical_path():
    s = situation(8, 4096, 4096, save="gathered")
    found, _ = ranking(s)
    linear = {c.grid.sizes: c.bytes - _statistics(c.grid, 4096) for c in found}
    assert linear[1, 4, 2] == linear[2, 4, 1] == 201326592
    assert linear[2, 2, 2] == linear[1, 8, 1] == 234881024
    assert found[0].grid.sizes == (2, 4, 1)


def test_one_axis_can_be_best():
    """Few ranks and few tokens: nothing beats stock's tensor parallelism, and the planner says so."""
    s = situation(4, 8192, 1024, batch=4, save="gathered")
    found, _ = ranking(s)
    assert found[0].grid.sizes == (1, 4, 1)
    assert one_axis(s, found) is found[0]
    many, _ = ranking(situation(4, 8192, 65536, batch=4, save="gathered"))
    assert many[0].grid.sizes != (1, 4, 1)


def test_latency_counts():
    """Every step of a ring over an axis costs one latency, for every call."""
    slow = Link(1e-3, inf)
    s = Situation(**{**vars(situation(8, 4096, 4096, save="gathered")), "inside": slow, "between": slow})
    found = {c.grid.sizes: c for c in ranking(s)[0]}
    assert found[1, 8, 1].seconds == pytest.approx(8 * 7 * 1e-3)
    assert found[2, 4, 1].seconds == pytest.approx((8 * 1 + 8 * 3) * 1e-3)


def test_nodes():
    grid = Grid3D(2, 2, 2)
    assert peers(grid, "l", 2) == (1, 0)
    assert peers(grid, "j", 2) == (0, 1)
    assert peers(grid, "j", 4) == (1, 0)
    assert peers(grid, "i", 4) == (0, 1)
    assert peers(Grid3D(1, 8, 1), "j", 4) == (3, 4)
    s = situation(8, 8192, 4096, node=4, between=Link(0.0, 1e7), save="gathered")
    best = ranking(s)[0][0]
    assert best.axis_bytes["i"] <= 3 * 12 * 8192 * 8192 * 2  # little crosses between nodes
    assert best.seconds < one_axis(s, ranking(s)[0]).seconds


def test_overlap_hides_weights():
    fast = evaluate(situation(8, 4096, 4096, flops=1e9), Grid3D(8, 1, 1))
    plain = evaluate(situation(8, 4096, 4096, flops=1e9, overlap=False), Grid3D(8, 1, 1))
    assert fast.communication == plain.communication
    assert plain.seconds - fast.seconds == pytest.approx(plain.communication)


def test_memory_decides_last():
    s = situation(8, 8192, 65536, save="gathered")
    found, _ = ranking(s)
    limit = min(c.memory for c in found)
    limited, _ = ranking(Situation(**{**vars(s), "memory_limit": limit}))
    assert limited[0].memory == limit
    assert [c.fits for c in limited] == sorted((c.fits for c in limited), reverse=True)


def test_refused_grids_say_why():
    s = situation(8, 4096, 4096, batch=2)
    _, refused = ranking(s)
    reasons = {r.grid.sizes: r.reasons for r in refused}
    assert reasons[8, 1, 1] == ("--micro-batch-size 2 by 8",)
    assert (1, 8, 1) not in reasons


@pytest.mark.parametrize(
    ("grid", "vectors"), [((2, 2, 2), 1472), ((2, 4, 1), 1984), ((1, 4, 2), 1120), ((1, 8, 1), 1760)]
)
def test_parameters_of_a_rank(grid, vectors):
    """Acceptance check 4."""
    assert layer_parameters(AC3, Grid3D(*grid)) == (98304, vectors)


def test_edges_and_activations():
    cube = Grid3D(2, 2, 2)
    assert (
        edge_parameters(AC3, cube, "grid") == edge_parameters(AC3, cube, "plane") == 2 * 1024 * 256 // 8 + 256
    )
    gathered, shards = (layer_memory(AC3, cube, save) for save in ("gathered", "shard_all"))
    assert gathered.parameters == shards.parameters == 99776
    assert gathered.activations > shards.activations
    # 7 M h + 3 M h + 4 M h + 2 M h over P, with everything in shards.
    assert shards.activations * 8 == 16 * 512 * 256
    assert saved_by_linears(AC3, cube, "gathered") == (16384 * 2 + 16384 * 2 + 32768 + 131072, 4 * 98304 // 2)


def run(capsys, *extra):
    base = (
        "--tensor-model-parallel-size 8 --hidden-size 4096 --num-attention-heads 32 --num-layers 4 "
        "--seq-length 2048 --micro-batch-size 8 --padded-vocab-size 51200 --bf16"
    ).split()
    code = plan_linear3d.main([*base, *extra])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_report(capsys):
    code, out, _ = run(capsys, "--tflops", "300", "--rate-inside", "2400gbit", "--linear-3d-save", "gathered")
    assert code == 0
    assert "Take" in out
    assert "1 x 8 x 1" in out
    code, out, _ = run(capsys, "--json")
    data = json.loads(out)
    assert len(data["grids"]) + len(data["refused"]) == 10
    assert data["grids"][0]["seconds"] <= data["grids"][-1]["seconds"]


def test_bad_arguments(capsys):
    code, _, err = run(capsys, "--rate-inside", "fast", "--memory", "much", "--num-layers", "0")
    assert code == 2
    assert all(flag in err for flag in ("--rate-inside fast", "--memory much", "--num-layers 0"))
    sizes = "--seq-length 2047 --micro-batch-size 7 --hidden-size 4097 --kv-channels 3 --ffn-hidden-size 11"
    code, _, err = run(capsys, *sizes.split(), "--num-attention-heads", "7")
    assert code == 2
    assert "no grid splits this model" in err


def test_no_compute_no_time():
    assert situation(8, 4096, 4096).flops == inf
