"""When gradients are reduced: after every backward pass if they are split, and once per step in any case.

Every rank reduces the units in one order (that of a backward pass), whatever the order in which gradients
come; a unit whose turn it is not waits. What is left is reduced when the backward pass ends, or at the
latest when the step does. So nothing depends on every parameter having a gradient, nor on which microbatch is
said to be the last: that only lets the last reductions start earlier.
"""

from typing import TYPE_CHECKING

from torch.nn import Parameter

from megatron_ext.paro.strategy import Level
from megatron_ext.paro.unit import Unit
from megatron_ext.schedules.lane import Lane, Ticket

if TYPE_CHECKING:
    from megatron_ext.paro.collectives import Collectives
    from megatron_ext.paro.value_check import ValueCheck

IN_FLIGHT = 2
"""Units whose whole gradients may wait for their reduction at once."""


class _State:
    """One unit within a step."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.reset()
        self.reduction: Ticket | None = None
        self.sync: Ticket | None = None
        self.synced = False

    def reset(self) -> None:
        """Before a backward pass."""
        self.missing = set(self.unit.params)
        self.touched = False


class GradFlow:
    """Reductions of all trainable units.

    Args:
        units: in the order of a backward pass.
        late: units whose gradients come outside of autograd and at any time of a step; reduced at its end.
        collectives: over communicators that nothing else uses.
        lane: where they run.
        early: whether the reductions of a step start during its last backward pass.
        check: notes a unit's gradients before they are reduced, and reports at the end of the pass or step;
            None for no check.
    """

    def __init__(
        self,
        units: list[Unit],
        late: list[Unit],
        collectives: "Collectives",
        lane: Lane,
        *,
        early: bool,
        check: "ValueCheck | None" = None,
    ):
        self.units, self.late = units, late
        self.last = True
        """Whether the coming backward pass is the last one of the step."""
        self._collectives, self._lane = collectives, lane
        self._early, self._check = early, check
        self._state = {unit: _State(unit) for unit in [*units, *late]}
        self._next = 0
        self._open: list[Unit] = []

    # --- backward -------------------------------------------------------------------------------------------

    def begin(self, unit: Unit) -> None:
        """Gradients of a unit are about to come."""
        state = self._state[unit]
        if state.synced:
            raise RuntimeError(
                f"{unit.name} got a gradient after its gradients were reduced: a backward pass ran after the "
                "one that the pipeline schedule announced as the last (no_sync)"
            )
        self._close(unit)
        unit.open_grads()
        state.touched = True

    def ready(self, unit: Unit, param: Parameter) -> bool:
        """The gradient of one parameter has come; True when it was the unit's last one."""
        state = self._state[unit]
        state.missing.discard(param)
        if state.missing:
            return False
        if unit not in self.late:
            self._advance(everything=False)
        return True

    def end_of_backward(self) -> None:
        """Reduce what has not had its turn yet."""
        if self._next or any(self._state[unit].touched for unit in self.units):
            self._advance(everything=True)
        self._report()

    def _advance(self, *, everything: bool) -> None:
        while self._next < len(self.units):
            unit = self.units[self._next]
            if self._state[unit].missing and not everything:
                return
            self._next += 1
            self._turn(unit)
        self._next = 0

    def _turn(self, unit: Unit) -> None:
        state = self._state[unit]
        if unit.transient:
            self.begin(unit)
            self._checked(unit)
            # Not among the lane's inputs, whose memory CUDA would hold back until the host sees the lane's
            # end: `_close` lets the stream that owns the buffer wait before it is released.
            state.reduction = self._lane.submit(lambda: self._add(unit), (), unit.name)
            self._open.append(unit)
            if len(self._open) > IN_FLIGHT:
                self._close(self._open[0])
        state.reset()
        if self._early and self.last:
            self._sync(unit)

    def _add(self, unit: Unit) -> None:
        """Add one backward pass's gradients, summed over the group or over all ranks."""
        level, flat = unit.strategy.grads, unit.grad_full
        flat.mul_(unit.factor)
        if level is Level.I:
            self._collectives.scatter_in_group(flat)
        else:
            self._collectives.sync(flat, Level.N, Level.G)
        unit.grads.add_(flat[unit.own(Level.N, level)])

    def _close(self, unit: Unit) -> None:
        """Wait for a unit's reduction, and free its whole gradients."""
        state = self._state[unit]
        if state.reduction is not None:
            state.reduction.wait()
            state.reduction = None
            self._open.remove(unit)
            unit.close_grads()

    # --- the step -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all reductions of the step that have not started."""
        self.end_of_backward()
        for unit in [*self.units, *self.late]:
            if not self._state[unit].synced:
                self._sync(unit)
        self._report()

    def finish(self) -> None:
        """All gradients are complete when this returns; parameters point at the parts that ranks update."""
        self.start()
        for unit in [*self.units, *self.late]:
            self._close(unit)
            state = self._state[unit]
            if state.sync is not None:
                state.sync.wait()
                state.sync = None
            unit.point_at_shards()

    def _sync(self, unit: Unit) -> None:
        """Bring the accumulated gradient to the level of the optimizer states, summed over all ranks."""
        state = self._state[unit]
        state.synced = True
        have, want = unit.strategy.grads, unit.strategy.optimizer
        if have is Level.G:
            return
        if have is Level.N:
            self._checked(unit)

        def work() -> None:
            if have is Level.N:
                unit.grads.mul_(unit.factor)
            self._collectives.sync(unit.grads, have, want)

        state.sync = self._lane.submit(work, [unit.grads], unit.name)

    def _checked(self, unit: Unit) -> None:
        if self._check is not None:
            self._check.note(unit)

    def _report(self) -> None:
        if self._check is not None:
            self._check.report()

    def reset(self) -> None:
        """Start a step with zeros."""
        self._next = 0
        for unit, state in self._state.items():
            self._close(unit)
            if state.sync is not None:
                state.sync.wait()
            state.reset()
            state.sync, state.synced = None, False
            unit.grads.zero_()
            unit.point_at_full()
            unit.check_unchanged()
