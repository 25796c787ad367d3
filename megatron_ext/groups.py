"""Process groups: made from rank lists, shared by rank set, warmed, named, and destroyed with Megatron's.

Layouts come from `megatron_ext.layout`. The launcher makes one `GroupRegistry` and passes it on; features ask
it for groups, in one order on every rank:

    ranks = grid.groups("tp", "pp")
    layers = registry.get("vocab", ranks)  # shares the communicator of Megatron's `mp`
    stats = registry.get("vocab-stats", ranks, communicator="vocab-stats")  # has one of its own

torch sorts the ranks of a group, so every rank list must be sorted: a rank's place in it is its group rank.
"""

import functools
import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_ext import traffic
from megatron_ext.group_names import MEGATRON_NAMES, existing_groups, name_of, ranks_by_name
from megatron_ext.layout import short_list
from megatron_ext.patching import Patch

__all__ = ["GroupRegistry", "catalogue", "describe", "device_of", "name_of"]

# Registries whose groups die with Megatron's; one that is dropped leaves by itself.
_REGISTRIES: "weakref.WeakSet[GroupRegistry]" = weakref.WeakSet()


def device_of(group: ProcessGroup | None) -> torch.device:
    """Device whose tensors `group` communicates: the current CUDA device for nccl and ucc, else CPU."""
    backend = dist.get_backend(group)
    if "nccl" in backend or "ucc" in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def describe() -> dict[str, list[int]]:
    """Ranks of this rank's groups by name, for the run record: all of torch's but the world, and ours."""
    found = ranks_by_name() if dist.is_initialized() else {}
    for registry in _REGISTRIES:
        found.update(registry.describe())
    return found


@dataclass(frozen=True)
class _Request:
    """What must be equal on all ranks."""

    lists: tuple[tuple[int, ...], ...]
    communicator: str
    backend: str | None

    def __str__(self) -> str:
        own = f", communicator {self.communicator!r}" if self.communicator else ""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=4).hexdigest()
        return f"{len(self.lists)} rank lists like {short_list(self.lists[0])}{own} (digest {digest})"


@dataclass(frozen=True)
class _Entry:
    request: _Request
    group: ProcessGroup | None
    ranks: tuple[int, ...]


class GroupRegistry:
    """Groups by name. Every rank must make the same calls of `get` in the same order."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._created: list[ProcessGroup] = []
        self._warm: set[ProcessGroup] = set()
        self._world: ProcessGroup | None = None
        _REGISTRIES.add(self)

    def __getitem__(self, name: str) -> ProcessGroup | None:
        """The group made under this name, None if this rank is in none; KeyError if none was made."""
        if name not in self._entries:
            raise KeyError(f"no process group {name!r} was made; there are {sorted(self._entries)}")
        return self._entries[name].group

    def get(
        self,
        name: str,
        rank_lists: Sequence[Sequence[int]],
        *,
        communicator: str = "",
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
    ) -> ProcessGroup | None:
        """This rank's group among `rank_lists`, or None when it is in none of them.

        A collective call: all ranks of the world pass the same arguments. Asking again for a name returns its
        group without communication.

        The communicator of an existing group of the same ranks and backend is shared (ours or Megatron's, the
        oldest, the world's as a last resort) if every rank has one. Otherwise a group is created, described
        as `name`. Collectives that overlap must not share: with `communicator`, only requests of that
        communicator name share, and the first of them hands its `timeout` and `pg_options` to torch. Every
        group is warmed by an all-reduce of one element.

        Raises:
            ValueError: a name that is taken, or rank lists that torch would reorder or cannot make.
            RuntimeError: ranks disagree on the arguments.
        """
        if not communicator and (timeout is not None or pg_options is not None):
            raise ValueError(
                f"group {name!r}: a timeout or pg_options cannot be set on a shared communicator: name one "
                f"of the feature's own, such as communicator={name!r}"
            )
        self._forget_a_destroyed_world()
        request = _Request(tuple(tuple(ranks) for ranks in rank_lists), communicator, backend)
        _check_name(name)
        if name in self._entries:
            if self._entries[name].request != request:
                raise ValueError(
                    f"the group {name!r} exists with other ranks, communicator or backend "
                    f"({self._entries[name].request}): ask for another name"
                )
            return self._entries[name].group
        _check_lists(name, request.lists, dist.get_world_size())
        entry = next((entry for entry in self._entries.values() if entry.request == request), None)
        if entry is None:
            entry = self._find_or_create(name, request, timeout, pg_options)
        self._entries[name] = entry
        self._warm_up(entry.group)
        return entry.group

    def describe(self) -> dict[str, list[int]]:
        """Ranks of this rank's group, by the name it was asked for."""
        return {name: list(entry.ranks) for name, entry in self._entries.items() if entry.ranks}

    def destroy(self) -> None:
        """Destroy the groups that this registry created, last first, and forget all. May be called again."""
        for group in reversed(self._created):
            if dist.is_initialized() and group in existing_groups():
                _leave_timeout_list(group)
                dist.destroy_process_group(group)
        self._forget()

    def reserved(self) -> set[ProcessGroup | None]:
        """Groups that were asked for with a communicator name: not to be shared otherwise."""
        return {entry.group for entry in self._entries.values() if entry.request.communicator}

    def _forget(self) -> None:
        self._entries.clear()
        self._created.clear()
        self._warm.clear()

    def _forget_a_destroyed_world(self) -> None:
        if self._world is not dist.group.WORLD:
            self._forget()
        self._world = dist.group.WORLD

    def _find_or_create(
        self, name: str, request: _Request, timeout: timedelta | None, pg_options: Any
    ) -> _Entry:
        own = next((ranks for ranks in request.lists if dist.get_rank() in ranks), ())
        shared = None
        if own and not request.communicator:
            shared = _find(own, request.backend)
        # One rank cannot decide to share, since creation needs all of them.
        if _agree(name, request, shared is not None or not own):
            return _Entry(request, shared, own)
        group = _create(name, request, timeout, pg_options)
        if group is not None:
            self._created.append(group)
        return _Entry(request, group, own)

    def _warm_up(self, group: ProcessGroup | None) -> None:
        # NCCL connects on first use, which must not be a point-to-point call of some ranks only.
        if group is None or group in self._warm:
            return
        with traffic.label("groups"):
            ones = torch.ones(1, device=device_of(group))
            dist.all_reduce(ones, group=group)
        assert int(ones.item()) == dist.get_world_size(group), f"all-reduce in {name_of(group)} gave {ones}"
        self._warm.add(group)


def catalogue() -> list[Patch]:
    """Patches of this module: our groups are destroyed together with Megatron's."""
    return [
        Patch(
            target="megatron.core.parallel_state:destroy_model_parallel",
            make=_destroy_ours_first,
            kind="wrap",
            why="process groups of ours are destroyed with Megatron's",
            feature="groups",
        )
    ]


def _destroy_ours_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def destroy_model_parallel(*args: Any, **kwargs: Any) -> Any:
        for registry in list(_REGISTRIES):
            registry.destroy()
        return original(*args, **kwargs)

    return destroy_model_parallel


# --- checks ------------------------------------------------------------------------------------------------


def _check_name(name: str) -> None:
    if not name:
        raise ValueError("a group needs a name: give it that of its feature")
    if name in MEGATRON_NAMES.values():
        raise ValueError(f"the group name {name!r} is Megatron's: put the feature's name in front")


def _check_lists(name: str, lists: tuple[tuple[int, ...], ...], world_size: int) -> None:
    if not lists or not all(lists):
        raise ValueError(f"group {name!r} has {'an empty' if lists else 'no'} rank list: list ranks to group")
    seen: set[int] = set()
    for ranks in lists:
        shown = f"group {name!r}: the rank list {short_list(ranks)}"
        if list(ranks) != sorted(set(ranks)):
            raise ValueError(
                f"{shown} is not sorted or names a rank twice; torch would sort it and move group ranks: "
                "list sorted ranks, and compute another order from group ranks"
            )
        if ranks[0] < 0 or ranks[-1] >= world_size:
            raise ValueError(
                f"{shown} leaves the world of {world_size} ranks: use ranks 0 to {world_size - 1}"
            )
        if not seen.isdisjoint(ranks):
            raise ValueError(
                f"{shown} shares rank {min(seen.intersection(ranks))} with another: ask for two groups under "
                "two names"
            )
        seen.update(ranks)


def _agree(name: str, request: _Request, found: bool) -> bool:
    """Whether `found` holds on all ranks; RuntimeError when the ranks do not ask for the same group."""
    digest = hashlib.blake2b(repr((name, request)).encode(), digest_size=7).digest()
    number = int.from_bytes(digest)
    with traffic.label("groups"):
        votes = torch.tensor([number, -number, int(found)], dtype=torch.int64, device=device_of(None))
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
        least, minus_greatest, everywhere = votes.tolist()
        if least == -minus_greatest:
            return bool(everywhere)
        asked: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(asked, f"{name!r}: {request}")
    rank = dist.get_rank()
    other = next(other for other, theirs in enumerate(asked) if theirs != asked[rank])
    raise RuntimeError(
        f"ranks ask for different process groups at the same time: rank {rank} for {asked[rank]}, "
        f"rank {other} for {asked[other]}. All ranks must ask for the same groups in the same order"
    )


def require_equal(what: str, values: Mapping[str, Any]) -> None:
    """A collective call over the world: stop all ranks where they do not have the same values.

    Raises:
        RuntimeError: on every rank; names what differs, and ranks that have it.
    """
    mine = {name: str(value) for name, value in values.items()}
    digest = hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=7).digest()
    number = int.from_bytes(digest)
    with traffic.label("groups"):
        votes = torch.tensor([number, -number], dtype=torch.int64, device=device_of(None))
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
        least, minus_greatest = votes.tolist()
        if least == -minus_greatest:
            return
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    different = []
    for name in sorted({name for theirs in everyone for name in theirs}):
        ranks: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            ranks.setdefault(theirs.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            found = ", ".join(f"{value} on ranks {short_list(of)}" for value, of in ranks.items())
            different.append(f"  {name}: {found}")
    raise RuntimeError(
        f"{what} is not the same on all ranks, so nothing was trained:\n" + "\n".join(different)
    )


# --- torch and Megatron ------------------------------------------------------------------------------------


def _find(ranks: tuple[int, ...], backend: str | None) -> ProcessGroup | None:
    """The group of these ranks to share: the oldest, but the world's last."""
    reserved = set().union(*(registry.reserved() for registry in _REGISTRIES))
    fitting = [group for group in existing_groups() if group not in reserved and _fits(group, ranks, backend)]
    fitting.sort(key=lambda group: group is dist.group.WORLD)
    return fitting[0] if fitting else None


def _fits(group: ProcessGroup, ranks: tuple[int, ...], backend: str | None) -> bool:
    if tuple(dist.get_process_group_ranks(group)) != ranks:
        return False
    if backend is not None:
        return dist.get_backend(group) == backend
    return dist.get_backend_config(group) == dist.get_backend_config()


def _create(name: str, request: _Request, timeout: timedelta | None, pg_options: Any) -> ProcessGroup | None:
    # Megatron's create_group also lists the group for --distributed-timeout-seconds-after-init.
    from megatron.core.parallel_state import create_group

    mine = None
    for ranks in request.lists:
        group = create_group(
            list(ranks), timeout=timeout, backend=request.backend, pg_options=pg_options, group_desc=name
        )
        if dist.get_rank() in ranks:
            mine = group
    return mine


def _leave_timeout_list(group: ProcessGroup) -> None:
    from megatron.core import parallel_state

    listed = parallel_state._global_process_group_list
    if listed is not None and group in listed:
        listed.remove(group)
