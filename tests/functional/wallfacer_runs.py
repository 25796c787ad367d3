"""Runs with WallFacer through the real script: stock references, and the proof that it ran."""

from collections import Counter
from pathlib import Path

from megatron_ext.wallfacer.geometry import Geometry
from megatron_ext.wallfacer.options import Options
from megatron_ext.wallfacer.plan import make_plan
from megatron_ext.wallfacer.sequence import whole
from megatron_ext.wallfacer.tiles import CAUSAL, Mask
from megatron_ext.wallfacer.volume import Cost, Shape, totals
from tests.functional.parity import assert_parity
from tests.functional.paro_runs import checked, seed, stock
from tests.functional.runs import LLAMA, Run

SEQ, HEADS, HEAD_DIM, LAYERS, BATCH = 32, 4, 16, 4, 8


def flags_of(cp: int, team: int | str, bundle: int | None = None) -> list[str]:
    """Flags that turn it on."""
    found = ["--context-parallel-size", str(cp), "--cp-comm-type", "wallfacer"]
    found += ["--wallfacer-team-size", str(team)]
    return found if bundle is None else [*found, "--wallfacer-kv-bundle", str(bundle)]


def like_stock(
    folder: Path,
    world: int,
    *flags: str,
    arch: tuple[str, ...] = tuple(LLAMA),
    training: tuple[str, ...] = (),
    patch: str = "",
    check: str = "bytes,replicas",
    timeout: float = 300.0,
) -> Run:
    """A run whose losses, grad norms and gradients are those of stock on one rank.

    `flags` say how it is trained, `training` and `patch` what; stock has them, too. The run itself checks its
    bytes and its replicas after every step.
    """
    reference = stock(tuple(arch), tuple(training), seeded=True, patch=patch)
    run = checked(
        folder, world, *arch, *seed(tuple(arch)), *training, *flags, check=check, patch=patch, timeout=timeout
    )
    assert_parity(reference, run)
    return run


def assert_ran(
    run: Run,
    cp: int,
    team: int,
    bundle: int,
    *,
    tp: int = 1,
    pp: int = 1,
    order: str = "gpa",
    options: Options | None = None,
    key_heads: int = 2,
    recomputed: bool = False,
    mask: Mask = CAUSAL,
    micro_batch_size: int = 1,
    itemsize: int = 4,
    frozen: int = 0,
) -> None:
    """The record shows the choice, kernel and backward pass, and on every rank and step bytes that equal the
    formulas, above zero. Of the layers, so many `frozen` ones have no backward pass."""
    world = len(run.lines)
    geometry = Geometry(cp, team, bundle, order)
    cost = Cost(
        make_plan(geometry, whole(SEQ), mask),
        Shape(micro_batch_size, HEADS // tp, key_heads // tp, HEAD_DIM, itemsize),
        options or Options(),
    )
    microbatches = BATCH // micro_batch_size // (world // (cp * tp * pp))
    assert_calls(run, cost, LAYERS // pp * microbatches, recomputed, frozen * microbatches)


def assert_calls(run: Run, cost: Cost, times: int, recomputed: bool, frozen: int = 0) -> None:
    """The record shows the geometry, the kernel and what went round in the backward pass, and on every rank
    and step bytes above zero of so many calls, of which `frozen` ones had no backward pass."""
    geometry = cost.plan.geometry
    kernel = "cpu-flash" if cost.options.kernel == "auto" else cost.options.kernel
    ran = {"kernels": [kernel], "backward": [cost.travels() if geometry.ring_length > 1 else "none"]}
    for rank in range(len(run.lines)):
        start = run.start(rank)
        assert "wallfacer" in start["features"]
        assert start["layout"]["cp"] == geometry.size
        said = start["wallfacer"]
        chosen = (geometry.team_size, geometry.bundle_size, geometry.order)
        assert (said["team_size"], said["kv_bundle"], said["order"]) == chosen
        assert said["ring_length"] == geometry.ring_length
        place = start["coords"]["cp"]
        expected = Counter({key: count * times for key, count in totals(cost.forward(place)).items()})
        back = totals(cost.backward(place, attached=recomputed))
        expected.update({key: count * (times - frozen) for key, count in back.items()})
        assert expected
        assert all(expected.values())
        for line in run.steps(rank):
            assert sent(line) == expected, (rank, line["step"])
            assert line["wallfacer"] == ran, (rank, line["step"])


def sent(line: dict) -> dict[tuple[str, str], int]:
    """Bytes of attention by (kind, group) of a step."""
    return {
        (entry["kind"], entry["group"]): entry["bytes"]
        for entry in line["traffic"]
        if entry["feature"] == "wallfacer" and entry["bytes"]
    }
