"""Runs with PaRO through the real script: stock references, changed scripts, and the proof that it ran."""

import atexit
import functools
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from megatron_ext.paro.memory import memory
from megatron_ext.paro.passes import UnitSize
from megatron_ext.paro.strategy import Level, Strategy
from megatron_ext.paro.volume import Wire, evaluation_bytes, step_bytes
from tests.functional.parity import DISTOPT, OVERLAP, assert_parity
from tests.functional.runs import SCRIPT, Run, seed_checkpoint, train

AHEAD = [*DISTOPT, *OVERLAP]
GROUPS_OF_2 = ["--paro-group-size", "2"]
SEQ = 32


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="paro-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def seed(arch: tuple[str, ...] = ()) -> list[str]:
    """Flags that load one checkpoint in any layout; data parallelism alone starts from equal weights."""
    return seed_checkpoint(_folder() / f"seed-{abs(hash(arch))}", *arch)


@functools.cache
def stock(
    arch: tuple[str, ...] = (), training: tuple[str, ...] = (), *, seeded: bool = False, patch: str = ""
) -> Run:
    """Stock on one rank, with its gradients of step 1; made at first use."""
    folder = Path(tempfile.mkdtemp(prefix="stock-", dir=_folder()))
    flags = [*arch, *(seed(arch) if seeded else []), *training, "--ext-dump-grads", str(folder)]
    return train(folder, 1, *flags, script=script(patch))


@functools.cache
def script(patch: str = "") -> Path:
    """The script, with Python code that runs before it."""
    if not patch:
        return SCRIPT
    path = Path(tempfile.mkdtemp(prefix="script-", dir=_folder())) / "script.py"
    path.write_text(f"import runpy\n{patch}\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n")
    return path


def freeze(trained: str) -> str:
    """Code that trains only the parameters for whose `name` an expression holds."""
    return f"""
from megatron.core.models.gpt.gpt_model import GPTModel

init = GPTModel.__init__

def __init__(self, *args, **kwargs):
    init(self, *args, **kwargs)
    for name, param in self.named_parameters():
        param.requires_grad_(bool({trained}))

GPTModel.__init__ = __init__
"""


def like_stock(
    folder: Path,
    strategy: str,
    world: int,
    *flags: str,
    arch: tuple[str, ...] = (),
    training: tuple[str, ...] = (),
    patch: str = "",
    seeded: bool = False,
    timeout: float = 300.0,
) -> Run:
    """A run with a strategy whose losses, grad norms and gradients are stock's.

    `flags` say how it is trained, `training` and `patch` what; stock has them, too. The run itself checks its
    bytes and its replicas after every step.
    """
    reference = stock(tuple(arch), tuple(training), seeded=seeded, patch=patch)
    start = seed(tuple(arch)) if seeded else []
    run = checked(
        folder, world, *arch, *start, *training, *flags, "--paro-strategy", strategy,
        patch=patch, timeout=timeout,
    )  # fmt: skip
    assert_parity(reference, run, grad_norms=1e-5)
    return run


def checked(
    folder: Path, world: int, *flags: str, check: str = "bytes,replicas", patch: str = "", timeout: float
) -> Run:
    """A run that dumps its gradients and checks itself after every step."""
    dumped = ["--ext-check", check, "--ext-dump-grads", str(folder)]
    return train(folder, world, *flags, *dumped, script=script(patch), timeout=timeout)


def assert_ran(
    run: Run,
    strategy: str,
    k: int = 2,
    m: int = 2,
    *,
    comm: str = "two-phase",
    inter_dtype: str = "native",
    reshard: bool = True,
    micro_batch_size: int = 1,
    states: int = 8,
    evaluated: dict[int, int] | None = None,
) -> None:
    """The record shows the strategy, and on every rank bytes and memory that equal the formulas.

    `states` are the bytes of all optimizer states of a parameter, `evaluated` the forward passes of
    evaluations before a step.
    """
    levels, wire = Strategy.parse(strategy), Wire(k, m, comm, inter_dtype)
    owned: Counter[tuple] = Counter()
    numels: dict[tuple, int] = {}
    for rank in range(len(run.lines)):
        assert "paro" in run.start(rank)["features"]
        for line in run.steps(rank):
            assert "paro" in line, "the optimizer is not PaRO's"
            ours = line["paro"]
            assert (ours["strategy"], ours["groups"], ours["members"]) == (strategy, k, m)
            microbatches, rest = divmod(line["tokens"], SEQ * k * m * micro_batch_size)
            assert rest == 0
            expected = formula(ours["units"], levels, wire, microbatches, reshard, not line["skipped"])
            units = [UnitSize.of_record(unit) for unit in ours["units"]]
            passes = (evaluated or {}).get(line["step"], 0)
            expected = plus(expected, evaluation_bytes(levels, units, wire, passes))
            assert sent(line) == expected, (rank, line["step"])
            assert expected or k * m == 1
        assert_memory(run.steps(rank)[-1]["paro"], levels, wire, states)
        place = tuple(run.start(rank)["coords"][axis] for axis in ("tp", "pp"))
        for number, unit in enumerate(ours["units"]):
            owned[*place, number] += unit["owned"]
            numels[*place, number] = unit["numel"] * (unit["grad_bytes"] > 0)
    copies = {Level.N: k * m, Level.I: k, Level.G: 1}[levels.optimizer]
    assert owned == {key: copies * numel for key, numel in numels.items()}


def formula(units: list[dict], levels: Strategy, wire: Wire, microbatches: int, reshard: bool, updated: bool):
    """Bytes of a step by (kind, group)."""
    used = [UnitSize.of_record(unit) for unit in units if unit["backward"]]
    other = [UnitSize.of_record(unit) for unit in units if not unit["backward"]]
    passes = step_bytes(levels, used, wire, microbatches, reshard_after_forward=reshard, updated=updated)
    return plus(passes, evaluation_bytes(levels, other, wire, microbatches))


def plus(one: dict, other: dict) -> dict:
    """The sum of two volumes."""
    return dict(Counter(one) + Counter(other))


def assert_memory(ours: dict, levels: Strategy, wire: Wire, states: int = 8) -> None:
    """What a rank keeps is what the table says; of optimizer states, padding has none."""
    units = ours["units"]
    kept = memory(levels, [UnitSize.of_record(unit) for unit in units], wire, state_itemsize=states)
    staged = wire.inter_dtype == "int8" and levels.params < levels.optimizer is Level.G and wire.k > 1
    masters = sum(4 * u["owned"] for u in units if u["param_bytes"] < 4 or staged)
    optimizer = masters + kept.staged + sum(states * unit["owned"] for unit in units)
    assert ours["bytes"] == {"params": kept.weights, "grads": kept.gradients, "optimizer": optimizer}
    assert optimizer <= kept.optimizer
    if all(unit["padded"] == unit["numel"] for unit in units):
        assert optimizer == kept.optimizer


def sent(line: dict) -> dict:
    """Bytes by (kind, group) of a step."""
    return {
        (entry["kind"], entry["group"]): entry["bytes"]
        for entry in line["traffic"]
        if entry["feature"] == "paro" and entry["bytes"]
    }


def between_groups(run: Run) -> set[int]:
    """What a rank sends to other groups in a step: the values of all steps and ranks."""
    return {
        sum(count for (_, group), count in sent(line).items() if group.startswith("paro-groups"))
        for rank in range(len(run.lines))
        for line in run.steps(rank)
    }
