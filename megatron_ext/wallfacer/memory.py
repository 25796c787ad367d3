"""Bytes that an attention call takes on a rank, besides its inputs and outputs. No torch.

    saved      from the forward to the backward pass, for every layer and microbatch in flight: q, k, v, the
               output and the log-sum-exps of the team's rows; with keep=team also the team's queries and the
               first bundle
    result     the part of it that a recomputed layer keeps: the output and the log-sum-exps
    forward,   buffers in use at a time, of one layer: the next one uses them again. Exact: what
    backward   Scratch.peak_bytes measures. Gathered queries C q, two bundles 2 K kv and sums in fp32 make
               the most of it; chunks of heads divide it
    kernel     what an attention kernel returns for the largest tile, on top

Symbols are those of volume.py.
"""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_ext.wallfacer.sequence import Rows
from megatron_ext.wallfacer.volume import Cost


@dataclass(frozen=True)
class Memory:
    """Of one rank, in bytes."""

    saved: int
    result: int
    forward: int
    backward: int
    kernel: int


class _Tally:
    """Buffers in use while a chunk runs: its peak in each stage, and what it holds between stages."""

    def __init__(self) -> None:
        self.now = self._peak = 0
        self.stages: list[tuple[int, int]] = []

    def take(self, *sizes: int) -> None:
        self.now += sum(sizes)
        self._peak = max(self._peak, self.now)

    def drop(self, *sizes: int) -> None:
        self.now -= sum(sizes)

    def keep_only(self, *sizes: int) -> None:
        self.now = sum(sizes)

    def end_stage(self) -> None:
        self.stages.append((self._peak, self.now))
        self._peak = self.now

    def sort(self, size: int, rows: Rows) -> None:
        """A sorted copy takes the place of a gathered buffer."""
        if not rows.sorted_already:
            self.take(size)
            self.drop(size)


def memory(cost: Cost, rank: int, *, attached: bool = False) -> Memory:
    """What a call takes on `rank`; `attached` where results come from `Rings.attach`, which keeps nothing."""
    chunks = cost.options.head_chunks
    shape = replace(
        cost.shape,
        query_heads=cost.shape.query_heads // chunks,
        key_heads=cost.shape.key_heads // chunks,
    )
    model = _Model(replace(cost, shape=shape), rank, kept=cost.options.keep == "team" and not attached)
    return Memory(
        saved=chunks * model.saved(),
        result=chunks * model.result(),
        forward=_peak(model.forward(), chunks),
        backward=_peak(model.backward(), chunks),
        kernel=model.kernel(),
    )


def _peak(stages: list[tuple[int, int]], chunks: int) -> int:
    """Most that is in use when chunks follow each other one stage apart, the latest first in each round."""
    most = 0
    for round_number in range(chunks + len(stages) - 1):
        at = [round_number - chunk for chunk in range(chunks)]  # stage of each chunk in this round
        here = sorted(stage for stage in at if 0 <= stage < len(stages))
        for stage in here:
            before = sum(stages[other][1] for other in here if other < stage)
            behind = sum(stages[other - 1][1] for other in here if other > stage)
            most = max(most, before + stages[stage][0] + behind)
    return most


class _Model:
    """Takes and gives back what forward.py, backward.py and bundle.py do, in their order."""

    def __init__(self, cost: Cost, rank: int, kept: bool):
        geometry, shape, plan = cost.plan.geometry, cost.shape, cost.plan
        self.cost, self.geometry, self.rank, self.kept = cost, geometry, rank, kept
        self.teams, self.size = geometry.team_size, geometry.bundle_size
        heads = shape.batch * plan.rows * shape.head_dim
        self.query, self.keys = heads * shape.query_heads, 2 * heads * shape.key_heads  # elements
        self.statistics = shape.batch * plan.rows * shape.query_heads * shape.wide
        self.item, self.wide = shape.itemsize, shape.wide
        self.grad = self.wide if cost.options.grad_type == "fp32" else self.item
        self.sum = self.wide if cost.options.sum_type == "fp32" else self.item
        self.place = geometry.place(rank)
        self.team_rows = plan.queries(geometry.team_of(rank))
        self.owned_rows = plan.keys(geometry.number_of(rank) // self.size)
        self.first_rows = plan.keys(geometry.bundle_at(rank, 0))
        self.steps = plan.key_steps(rank)
        self.direct = cost.options.movement == "direct"

    def saved(self) -> int:
        """Of one chunk."""
        own = (self.query + self.keys) * self.item + self.result()
        if self.kept:
            own += self.teams * self.query * self.item if self.teams > 1 else 0
            own += self.size * self.keys * self.item if self.size > 1 else 0
        return own

    def result(self) -> int:
        """Of one chunk."""
        return self.query * self.item + self.teams * self.statistics

    def kernel(self) -> int:
        """Gradients of the largest tile."""
        rows, keys = self.cost.plan.rows, self.cost.plan.rows
        sizes = [
            (t.q1 - t.q0) * self.query // rows + (t.k1 - t.k0) * self.keys // keys
            for step in self.steps
            for t in step.tiles
        ]
        return max(sizes, default=0) * self.item

    def _place(self, tally: _Tally, kept: bool) -> None:
        """Two stages; leaves a bundle, unless that is kept."""
        own, bundle = self.keys * self.item, self.size * self.keys * self.item
        if self.size == 1:
            tally.take(own)
            tally.end_stage()
            tally.end_stage()
            return
        tally.take(own)
        if self.direct:
            tally.take(bundle)
            tally.end_stage()
            tally.end_stage()
            tally.drop(own)
            if not kept:
                tally.take(bundle)
            tally.drop(bundle)
            return
        tally.take(bundle)
        tally.end_stage()
        tally.sort(bundle, self.owned_rows)
        tally.drop(own)
        stays = self.geometry.destination(self.rank) == self.rank
        if not kept and not stays:
            tally.take(bundle)
        tally.end_stage()
        if kept or not stays:
            tally.drop(bundle)

    def _spares(
        self, tally: _Tally, sizes: list[int], travels: Literal["keys", "queries"], owned: int
    ) -> None:
        """Buffers of a ring; `owned` of the travelling ones may be overwritten themselves."""
        transfers, _ = self.cost.plan.transfers(self.place.group, self.place.member, travels)
        if transfers > 0:
            tally.take(*sizes)
        if transfers > 1:
            tally.take(sum(sizes) - owned)

    def _sum(self, tally: _Tally, size: int) -> None:
        if not (self.cost.native_sums and self.grad == self.wide):
            tally.take(size)

    def forward(self) -> list[tuple[int, int]]:
        """(peak, left) of each stage."""
        tally = _Tally()
        team, bundle = self.teams * self.query, self.size * self.keys * self.item
        gathered = team * self.item if self.teams > 1 else 0
        tally.take(gathered)
        bundle_kept = self.kept and self.size > 1
        self._place(tally, bundle_kept)
        if gathered:
            tally.sort(gathered, self.team_rows)
        tally.take(team * self.wide, self.teams * self.statistics)
        self._spares(tally, [bundle], "keys", 0 if bundle_kept else bundle)
        if self.teams > 1:
            tally.take(self.teams**2 * self.statistics)
            tally.keep_only(team * self.wide)
            tally.take(team * self.sum)
            tally.drop(team * self.wide)
            tally.take(self.query * self.wide)
            if not (self.cost.native_sums and self.sum == self.wide):
                tally.take(team * self.sum)
            tally.end_stage()
        tally.end_stage()
        return tally.stages

    def backward(self) -> list[tuple[int, int]]:
        """(peak, left) of each stage."""
        tally, teams = _Tally(), self.teams
        team, keys_too = teams * self.query, self.cost.travels() == "keys"
        statistics = teams * self.statistics if self.cost.sends_dots() else team * self.item
        gathered = []
        if teams > 1:
            gathered = [team * self.item, statistics] + ([] if self.kept else [team * self.item])
        tally.take(*gathered)
        bundle_kept = self.kept and self.size > 1
        if not bundle_kept:
            self._place(tally, kept=False)
        for size in gathered:
            tally.sort(size, self.team_rows)
        (self._keys_travel if keys_too else self._queries_travel)(tally, sum(gathered), kept=bundle_kept)
        query_grad = team * (self.wide if keys_too else self.grad)
        tally.keep_only(query_grad, self.size * self.keys * self.grad)
        if teams > 1:
            tally.take(team * self.grad)
            tally.drop(query_grad)
            tally.take(self.query * self.wide)
            self._sum(tally, team * self.grad)
        self._bring_home(tally, keys_too)
        return tally.stages

    def _keys_travel(self, tally: _Tally, gathered: int, kept: bool) -> None:
        bundle = self.size * self.keys
        tally.take(self.teams * self.query * self.wide)
        self._mailboxes(tally, bundle)
        if self.cost.sends_dots():
            tally.take(self.teams * self.query * self.item)
        self._spares(tally, [bundle * self.item], "keys", 0 if kept else bundle * self.item)

    def _mailboxes(self, tally: _Tally, elements: int) -> None:
        tally.take(elements * self.grad)
        if len(self.steps) > 1:
            tally.take(elements * self.grad)
        if len(self.steps) > 1 or self.grad != self.wide:
            tally.take(elements * self.wide)

    def _queries_travel(self, tally: _Tally, gathered: int, kept: bool) -> None:
        team, bundle = self.teams * self.query, self.size * self.keys
        tally.take(bundle * self.wide)
        self._mailboxes(tally, team)
        _, followed = self.cost.plan.transfers(self.place.group, self.place.member, "queries")
        dots = self.cost.sends_dots()
        load = [team * self.item] * (2 if dots else 3) + [self.teams * self.statistics] * (2 if dots else 1)
        self._spares(tally, load, "queries", gathered)
        if dots:
            tally.take(team * self.item)
            tally.drop(team * self.item)
        if followed > max(len(self.steps) - 1, 0):
            tally.take(team * self.grad)
        if self.grad != self.wide:
            tally.take(bundle * self.grad)

    def _bring_home(self, tally: _Tally, keys_too: bool) -> None:
        """Two stages and the end."""
        bundle = self.size * self.keys * self.grad
        tally.take(self.keys * self.wide)
        if self.direct and self.size > 1:
            tally.take(bundle, bundle)
            tally.drop(bundle)
            tally.end_stage()
            tally.end_stage()
            tally.end_stage()
            return
        hops = self.cost.plan.last_hop(self.place.group, self.place.member) if keys_too else 0
        last = self.geometry.bundle_at(self.rank, hops)
        if self.geometry.owner(last, self.place.group) != self.rank:
            tally.take(bundle)
            tally.end_stage()
            tally.drop(bundle)
        else:
            tally.end_stage()
        if self.size > 1:
            tally.take(bundle)
            tally.drop(bundle)
            self._sum(tally, bundle)
        tally.end_stage()
        tally.end_stage()
