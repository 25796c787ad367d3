"""When parameters are gathered for use, released again, and brought up to date after an optimizer step."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from megatron_ext.paro.strategy import Level
from megatron_ext.paro.unit import Unit
from megatron_ext.schedules.lane import Lane, Ticket

if TYPE_CHECKING:
    from megatron_ext.paro.collectives import Collectives


class ParamFlow:
    """Gathers of all units, in one order on every rank.

    Args:
        units: in the order in which a forward pass uses them.
        collectives: over communicators that nothing else uses.
        lane: where they run; beside compute, or at once.
        prefetch: whether a unit's gather starts while the unit before it computes.
    """

    def __init__(self, units: list[Unit], collectives: "Collectives", lane: Lane, *, prefetch: bool):
        self.units = units
        self._collectives = collectives
        self._lane = lane
        self._prefetch = prefetch
        self._pending: dict[Unit, Ticket] = {}

    def need(self, units: Iterable[Unit]) -> None:
        """Have these units' parameters whole and up to date when this returns."""
        for unit in units:
            if unit.split and not unit.gathered:
                self._gather(unit)
            self.wait(unit)

    def prefetch(self, units: Iterable[Unit]) -> None:
        """Start to gather what is needed next."""
        if self._prefetch:
            for unit in units:
                if unit.split and not unit.gathered:
                    self._gather(unit)

    def release(self, units: Iterable[Unit]) -> None:
        """Drop the gathered parameters of units that are split."""
        for unit in units:
            if unit.split and unit.gathered:
                self.wait(unit)
                unit.drop_full()

    def wait(self, unit: Unit) -> None:
        """Until what has been started for a unit is done."""
        ticket = self._pending.pop(unit, None)
        if ticket is not None:
            ticket.wait()

    def settle(self) -> None:
        """Until everything that has been started is done."""
        for unit in list(self._pending):
            self.wait(unit)

    def gather_all(self, collectives: "Collectives") -> None:
        """Have all parameters whole, with collectives that are counted apart."""
        self.settle()
        for unit in self.units:
            if unit.split and not unit.gathered:
                unit.place_own()
                collectives.gather(unit.full, unit.strategy.params, Level.N)

    def _gather(self, unit: Unit) -> None:
        self.wait(unit)
        unit.place_own()
        have = unit.strategy.params
        self._submit(unit, lambda: self._collectives.gather(unit.full, have, Level.N))

    def update(self, units: Iterable[Unit]) -> None:
        """After an optimizer step: give the other ranks the parts that this one has updated.

        Gathered copies are out of date and dropped.
        """
        for unit in units:
            self.release([unit])
            if unit.trainable and unit.strategy.optimizer is not unit.strategy.params:
                self.wait(unit)
                self._submit(unit, lambda unit=unit: self._send(unit))

    def _send(self, unit: Unit) -> None:
        have, want = unit.strategy.optimizer, unit.strategy.params
        if unit.staged is None:
            self._collectives.gather(unit.rest, have, want)
        else:
            self._collectives.gather_update(unit.rest, have, want, unit.staged)

    def _submit(self, unit: Unit, work: Callable[[], None]) -> None:
        # No inputs, whose memory CUDA would hold back until the host sees the lane's end: `release` lets the
        # stream that owns a gathered buffer wait before it is released, and the other buffers stay.
        self._pending[unit] = self._lane.submit(work, (), unit.name)
