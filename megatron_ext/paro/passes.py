"""Which collective calls a strategy makes in one optimizer step, for each unit. The schedule as data.

Parameters that are split are gathered for every forward and, unless they are kept, every backward pass.
Gradients that are split are reduced after every backward pass. What is left of the way from gradients to
optimizer states, and from optimizer states to parameters, happens once a step:

    gradients, states     once a step                  parameters, states    once a step
    N, any                sum over all ranks           N, I or G             gather
    I, I or G             sum over the groups          I, G                  gather over the groups
    G, G                  nothing                      equal                 nothing

Volumes and times are computed from this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_ext.paro.strategy import Level, Strategy

Operation = Literal["gather", "scatter", "sync"]
Content = Literal["params", "grads", "update"]
Phase = Literal["forward", "backward", "boundary", "update"]


@dataclass(frozen=True)
class UnitSize:
    """A flat buffer of parameters of one kind, as volumes, times and memory need it."""

    padded: int
    """Elements, a multiple of the number of data-parallel ranks."""
    itemsize: int
    """Bytes per parameter."""
    grad_itemsize: int = 4
    """Bytes per accumulated gradient; of no meaning when frozen."""
    trainable: bool = True
    layer: str = ""
    """Units of the same layer are in use together; "" is what lies outside of layers, in use all the time."""
    late: bool = False
    """Gradients come all through the step (vocabulary passes), and are not split until its end."""

    @classmethod
    def of_record(cls, row: Mapping[str, Any]) -> "UnitSize":
        """From a unit in a run's record: name, padded, param_bytes, grad_bytes (0 if frozen), late."""
        name = row["name"]
        layer = "" if name.split(".")[0] == "root" else name.removesuffix(".frozen")
        sizes = row["padded"], row["param_bytes"], row["grad_bytes"]
        return cls(*sizes, trainable=row["grad_bytes"] > 0, layer=layer, late=row["late"])

    def grad_level(self, strategy: Strategy) -> Level:
        """How finely its accumulated gradients are split."""
        return Level.N if self.late else strategy.grads

    def nbytes(self, content: Content) -> int:
        """Bytes of the whole buffer as it is communicated: gradients in their type, else parameters."""
        return self.padded * (self.grad_itemsize if content == "grads" else self.itemsize)


@dataclass(frozen=True)
class Call:
    """A collective call on a unit: from the part held at level `have` to the one at level `want`."""

    operation: Operation
    """gather; scatter: sum over the members of a group; sync: sum over all ranks, of parts that are summed
    over the members already where `have` is I."""
    content: Content
    phase: Phase
    have: Level
    want: Level
    times: int
    """Calls per optimizer step."""


def calls(
    strategy: Strategy, unit: UnitSize, microbatches: int, *, reshard_after_forward: bool = True
) -> list[Call]:
    """All calls of a training step on one unit."""
    p, g, o = strategy.params, unit.grad_level(strategy), strategy.optimizer
    found = [
        Call("gather", "params", "forward", p, Level.N, microbatches),
        Call("gather", "params", "backward", p, Level.N, microbatches * reshard_after_forward),
    ]
    if unit.trainable:
        if g is Level.I:
            found.append(Call("scatter", "grads", "backward", Level.N, Level.I, microbatches))
        if g is Level.G:
            found.append(Call("sync", "grads", "backward", Level.N, Level.G, microbatches))
        else:
            found.append(Call("sync", "grads", "boundary", g, o, 1))
        found.append(Call("gather", "update", "update", o, p, 1))
    return [call for call in found if call.times and (call.operation != "gather" or call.have > call.want)]


def evaluation_calls(strategy: Strategy, microbatches: int) -> list[Call]:
    """All calls of forward passes that no backward pass follows, on any unit."""
    p = strategy.params
    call = Call("gather", "params", "forward", p, Level.N, microbatches)
    return [call] if microbatches and p is not Level.N else []
