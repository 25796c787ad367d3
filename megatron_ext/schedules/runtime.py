"""Executes one rank's list of a program: compute in order, communication on lanes.

The runtime knows no model. `Passes` does the work: Megatron's model and the vocabulary shards in a training
run, sleeping in a paced run. What a pass waits for is what the schedule says (`needs`), the same table that
`check` and `simulate` use.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from megatron_ext.schedules.action import Action, needs
from megatron_ext.schedules.lane import Clock, Lane, Ticket
from megatron_ext.schedules.links import P2P, Boundary, Links
from megatron_ext.schedules.lower import Program


class Passes(Protocol):
    """The work behind the actions of one rank."""

    def compute(self, action: Action) -> None:
        """Run a pass; everything that it needs has arrived."""

    def collective(self, action: Action) -> tuple[Callable[[], Any], Sequence[Tensor]]:
        """The operation to run on the lane, and the tensors that it reads."""

    def arrived(self, action: Action, result: Any) -> None:
        """A receive or collective that a pass needs has ended."""

    def outgoing(self, action: Action) -> Tensor:
        """The tensor that a send ("SF", "SB") sends."""

    def sent(self, action: Action) -> None:
        """The send has been queued: the output is no longer needed here."""


class Runtime:
    """Runs programs on this rank; lanes and links live as long as the job."""

    def __init__(self, rank: int, links: Links, lane: Lane):
        self._rank = rank
        self._links = links
        self._lane = lane
        self._clock: Clock | None = None

    def trace(self, clock: Clock | None) -> None:
        """Record spans with `clock` from now on, or stop."""
        self._clock = clock
        self._lane.clock = clock
        self._links.trace(clock)

    def run(self, program: Program, passes: Passes, boundary: Boundary) -> None:
        """Execute this rank's list. Raises what a pass or an operation raises."""
        schedule = program.schedule
        tickets: dict[Action, Ticket] = {}
        for action in program.ranks[self._rank]:
            if action.kind in P2P:
                tickets[action] = self._post(action, passes, boundary)
            elif action.kind in COLLECTIVES:
                function, inputs = passes.collective(action)
                tickets[action] = self._lane.submit(function, inputs, str(action))
            else:
                for need in needs(action, self._rank, schedule.place, schedule.vocab):
                    ticket = tickets.pop(need, None)
                    if ticket is not None:
                        self._wait(need, ticket, action, passes)
                self._compute(action, passes)
        self._links.drain()
        self._lane.drain()

    def _post(self, action: Action, passes: Passes, boundary: Boundary) -> Ticket:
        if action.kind in ("RF", "RB"):
            return self._links.receive(action.kind, boundary, str(action), action.chunk)
        ticket = self._links.send(action.kind, passes.outgoing(action), str(action), action.chunk)
        passes.sent(action)
        return ticket

    def _wait(self, need: Action, ticket: Ticket, action: Action, passes: Passes) -> None:
        if self._clock is None:
            passes.arrived(need, ticket.wait())
            return
        start = self._clock.now()
        result = ticket.wait()
        self._clock.add("wait", str(action), start, self._clock.now())
        passes.arrived(need, result)

    def _compute(self, action: Action, passes: Passes) -> None:
        if self._clock is None:
            passes.compute(action)
            return
        with self._clock.computing(str(action)):
            passes.compute(action)


COLLECTIVES: frozenset[str] = frozenset(("e", "C0", "C1", "C2", "C3", "G", "g"))
