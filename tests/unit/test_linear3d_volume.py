"""Bytes of 3-D linear layers: formulas against the closed forms of the specification."""

from collections import Counter

import pytest

from megatron_ext.linear3d.grid import Grid3D, factorizations
from megatron_ext.linear3d.sizes import ModelSizes
from megatron_ext.linear3d.volume import edge_bytes, layer_bytes

# Acceptance check 3: one GPT layer, s 128, b 4, h 256, 8 heads, f 1024, fp32.
GPT = ModelSizes(128, 4, 256, 8, 8, 32, 1024, 1024, tied=False, learned=False)
FORWARD = {
    (2, 2, 2): {"i": 393216, "gather j": 131072, "gather l": 327680, "reduce j": 131072, "reduce l": 458752},
    (2, 4, 1): {"i": 393216, "gather j": 393216, "reduce j": 393216},
    (1, 4, 2): {"gather j": 393216, "gather l": 327680, "reduce j": 393216, "reduce l": 458752},
    (1, 8, 1): {"gather j": 917504, "reduce j": 917504},
}
BOTH = {(2, 2, 2): 2883584, (2, 4, 1): 2359296, (1, 4, 2): 3145728, (1, 8, 1): 3670016}


def by_axis(volume):
    found = Counter()
    for (site, kind, axis), amount in volume.items():
        if site != "norm":
            found["i" if axis == "i" else f"{'gather' if kind == 'all_gather' else 'reduce'} {axis}"] += (
                amount
            )
    return dict(found)


@pytest.mark.parametrize("sizes", FORWARD, ids=str)
def test_the_table(sizes):
    grid = Grid3D(*sizes)
    forward = layer_bytes(GPT, grid, save="gathered", how="native", backward=0)
    assert by_axis(forward) == FORWARD[sizes]
    both = layer_bytes(GPT, grid, save="gathered", how="native")
    assert sum(by_axis(both).values()) == BOTH[sizes]
    norms = {key: amount for key, amount in both.items() if key[0] == "norm"}
    gl = sizes[2]
    assert norms == ({("norm", "all_gather", "l"): 2048, ("norm", "all_reduce", "l"): 2048} if gl > 1 else {})


def test_fc1_alone():
    forward = layer_bytes(GPT, Grid3D(2, 2, 2), save="gathered", how="native", backward=0)
    assert {key[1:]: n for key, n in forward.items() if key[0] == "fc1"} == {
        ("all_gather", "j"): 65536,
        ("all_gather", "i"): 131072,
        ("reduce_scatter", "l"): 262144,
    }


def test_saving_less_costs_gathers():
    grid = Grid3D(2, 2, 2)
    total = {
        save: by_axis(layer_bytes(GPT, grid, save=save, how="ordered"))
        for save in ("gathered", "shard_weight", "shard_all")
    }
    assert total["shard_weight"]["i"] - total["gathered"]["i"] == 393216
    assert total["shard_all"]["gather j"] - total["gathered"]["gather j"] == 131072
    assert total["shard_all"]["gather l"] - total["gathered"]["gather l"] == 327680
    kept = layer_bytes(GPT, grid, save="shard_weight", how="ordered", kept=1)
    assert by_axis(kept) == total["gathered"]


def test_vocabulary_layers_on_the_grid():
    """The rest of acceptance check 3: V 1024, mode grid, untied, forward."""
    found = edge_bytes(GPT, Grid3D(2, 2, 2), "grid", save="gathered", how="native", backward=0)
    linear = Counter()
    for (site, kind, axis), amount in found.items():
        if site in ("embedding", "head"):
            linear[kind, axis] += amount
    assert dict(linear) == {
        ("all_gather", "i"): 262144,
        ("all_gather", "j"): 65536,
        ("reduce_scatter", "j"): 65536,
        ("reduce_scatter", "l"): 262144,
    }
    assert found["norm", "all_gather", "l"] == 1024
    assert (found["loss", "all_gather", "l"], found["loss", "all_gather", "i"]) == (512, 1024)


@pytest.mark.parametrize("ranks", [4, 8, 12, 16, 27, 64])
def test_closed_form(ranks):
    """2/P {[4(Gj-1) + 12(Gl-1)] M h + 12(Gi-1) h^2} elements a layer and step, on every grid that divides."""
    h, m = 432 * 4, 432 * 16
    model = ModelSizes(432, 16, h, 432, 432, 4, 4 * h, 0, itemsize=2)
    for grid in factorizations(ranks):
        gi, gj, gl = grid.sizes
        if model.batch % gi or 432 % (gj * gl) or 432 % (gi * gj) or 432 % (gi * gl):
            continue
        found = layer_bytes(model, grid, save="gathered", how="native")
        linear = sum(n for key, n in found.items() if key[0] != "norm")
        expected = 2 * ((4 * (gj - 1) + 12 * (gl - 1)) * m * h + 12 * (gi - 1) * h * h) * 2
        assert linear * ranks == expected, grid


def test_plane_sends_less_than_grid_for_a_head():
    """Logits are not scattered: 1536 M elements against 6912 M for h 4096, V 51200 on the cube."""
    model = ModelSizes(4096, 2, 4096, 32, 32, 128, 16384, 51200, tied=False, learned=False, itemsize=1)
    m, grid = 8192, Grid3D(2, 2, 2)
    for mode, elements in (("plane", 1536), ("grid", 6912)):
        found = edge_bytes(model, grid, mode, save="gathered", how="native", backward=0)
        head = sum(n for (site, _, axis), n in found.items() if site == "head" and axis != "i")
        assert head == elements * m


def test_axes_of_one_rank_send_nothing():
    for mode in ("plane", "grid", "stages"):
        found = edge_bytes(GPT, Grid3D(1, 1, 1), mode, save="shard_all", how="ordered")
        assert not found
    assert not layer_bytes(GPT, Grid3D(1, 1, 1), save="shard_all", how="ordered")
