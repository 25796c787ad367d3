"""What goes round a ring: tensors that move on while they are used, and sums that follow them.

Both make the same hops, over more than one position where steps are left out. A hop starts before the
computation beside which it runs, and is waited for after it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron_ext.wallfacer.comm import Pending

Hop = Callable[[Sequence[Tensor], Sequence[Tensor], int], Pending]
"""(what to send, where to receive, over how many positions) -> the transfer."""


def circulate(
    hop: Hop, own: Sequence[Tensor], spares: Sequence[Sequence[Tensor]], hops: Sequence[int]
) -> Iterator[Sequence[Tensor]]:
    """What is here after each of `hops` hops, in ascending order; the next one is on its way meanwhile.

    Args:
        own: what is here at first. spares: two sets of buffers like it, used in turn; the second may be `own`
        itself, if that may be lost.
    """
    here, at, turn = own, 0, 0
    ahead = list(hops)
    if ahead and ahead[0]:
        hop(here, spares[turn], ahead[0]).wait()
        here, at, turn = spares[turn], ahead[0], 1
    for index, count in enumerate(ahead):
        assert count == at, (hops, at)
        pending = Pending()
        if index + 1 < len(ahead):
            pending = hop(here, spares[turn], ahead[index + 1] - at)
        yield here
        if index + 1 < len(ahead):
            pending.wait()
            here, at, turn = spares[turn], ahead[index + 1], 1 - turn


class FollowingSum:
    """A sum over the ranks of a ring for each thing that circulates, moving on behind it.

    After each step's computation `add` takes what this rank has to add for what is here now, and sends the
    sum so far after it; it arrives while the next step is computed.

    Args:
        outbox, inbox: buffers in the type that travels.
        hops: as for `circulate`.
    """

    def __init__(self, hop: Hop, outbox: Tensor, inbox: Tensor, hops: Sequence[int]):
        self._hop, self._outbox, self._inbox = hop, outbox, inbox
        self._distances = [later - earlier for earlier, later in pairwise(hops)]
        self._pending = Pending()
        self._first = True

    def add(self, part: Tensor) -> None:
        """Add this step's part; it may be overwritten afterwards. The only step's may be in the outbox."""
        self._pending.wait()
        if self._first and part is not self._outbox:
            self._outbox.copy_(part)
        elif not self._first:
            torch.add(part, self._inbox, out=self._outbox)
        self._first = False
        if self._distances:
            self._pending = self._hop([self._outbox], [self._inbox], self._distances.pop(0))

    def result(self) -> Tensor:
        """The sum for what was here last; zeros if there was no step."""
        assert not self._distances, "a step is missing"
        if self._first:
            self._outbox.zero_()
        return self._outbox
