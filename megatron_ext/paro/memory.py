"""Bytes that parameters, gradients and optimizer states take on a rank, by strategy.

|level| is 1 for N, m for I, n for G; the strategy's levels are p, g and o. Held all the time:

    weights      all parameters in their type / |p|
    gradients    trainable ones in the type of gradients / |g|
    master       4 per trainable parameter of 16 bits / |o|; an fp32 parameter is its own
    states       8 per trainable parameter / |o|: Adam's two in fp32
    staged       4 per trainable parameter / |o| where updates are sent as int8 differences, which needs a
                 master of fp32 parameters, too

A frozen parameter costs its own bytes and nothing else. While passes run, whole units come on top: of split
parameters what lies outside layers, the layer in use and the next one (all layers when they are kept after
their forward pass); of split gradients what lies outside layers, the layer in use and two whose reduction has
not ended; and the scratch of one collective. Or, while the optimizer steps, fp32 copies of 16-bit gradients.
Activations are not part of it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_ext.paro.passes import Content, UnitSize
from megatron_ext.paro.strategy import Level, Strategy
from megatron_ext.paro.volume import Wire, sums_natively

ADAM_STATES = 8
"""Bytes of Adam's two moments in fp32."""
MASTER = 4
PARAMS_AHEAD = 1
"""Layers that are gathered ahead of the one in use."""
GRADS_BEHIND = 2
"""Layers whose whole gradients wait for their reduction."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank; all ranks hold the same."""

    weights: int
    gradients: int
    master: int
    states: int
    staged: int
    transient: int
    """The most that comes on top of the others while passes run."""

    @property
    def optimizer(self) -> int:
        """Master weights, states and staged values."""
        return self.master + self.states + self.staged

    @property
    def persistent(self) -> int:
        """What is held all the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The most at any time."""
        return self.persistent + self.transient


def memory(
    strategy: Strategy,
    units: Iterable[UnitSize],
    wire: Wire,
    *,
    state_itemsize: int = ADAM_STATES,
    reshard_after_forward: bool = True,
) -> Memory:
    """Bytes on each rank. `state_itemsize`: bytes of all optimizer states of one parameter."""
    units = list(units)
    trained = [unit for unit in units if unit.trainable]
    p, o = _parts(strategy.params, wire), _parts(strategy.optimizer, wire)
    staged = wire.inter_dtype == "int8" and strategy.params < strategy.optimizer is Level.G and wire.k > 1
    updated = sum(unit.padded // o for unit in trained)
    passes = _gathered(strategy, units, reshard_after_forward) + _in_reduction(strategy, trained)
    return Memory(
        weights=sum(unit.nbytes("params") // p for unit in units),
        gradients=sum(unit.nbytes("grads") // _parts(unit.grad_level(strategy), wire) for unit in trained),
        master=MASTER * sum(unit.padded // o for unit in trained if staged or unit.itemsize < MASTER),
        states=state_itemsize * updated,
        staged=MASTER * updated * staged,
        transient=max(passes + _scratch(units, wire), _gradients_in_fp32(trained, o)),
    )


def _parts(level: Level, wire: Wire) -> int:
    return {Level.N: 1, Level.I: wire.m, Level.G: wire.n}[level]


def _gathered(strategy: Strategy, units: list[UnitSize], reshard_after_forward: bool) -> int:
    """Whole parameters that exist beside the parts that a rank holds."""
    if strategy.params is Level.N:
        return 0
    return _in_use(units, "params", 1 + PARAMS_AHEAD if reshard_after_forward else len(units))


def _in_reduction(strategy: Strategy, trained: list[UnitSize]) -> int:
    """Whole gradients that exist beside the accumulated parts."""
    split = [unit for unit in trained if unit.grad_level(strategy) is not Level.N]
    return _in_use(split, "grads", 1 + GRADS_BEHIND)


def _scratch(units: list[UnitSize], wire: Wire) -> int:
    """What the largest collective holds beside its buffer; HO-Ring has only pieces."""
    if wire.n == 1 or wire.comm == "ho-ring":
        return 0
    sums = [u.nbytes("grads") for u in units if u.trainable and not sums_natively(u, wire)]
    gathers = [u.nbytes("params") for u in units] if wire.comm == "flat" else []
    return max([*sums, *gathers], default=0)


def _gradients_in_fp32(trained: list[UnitSize], parts: int) -> int:
    """Copies that the optimizer steps with."""
    return sum(MASTER * unit.padded // parts for unit in trained if unit.grad_itemsize < MASTER)


def _in_use(units: list[UnitSize], content: Content, count: int) -> int:
    """Bytes of what lies outside of layers, and of the `count` largest layers."""
    layers: Counter[str] = Counter()
    for unit in units:
        layers[unit.layer] += unit.nbytes(content)
    outside = layers.pop("", 0)
    return outside + sum(size for _, size in layers.most_common(count))
