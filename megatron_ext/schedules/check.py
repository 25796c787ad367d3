"""Proves that a program can run and is what it says, before anything runs.

check(lower(build(4, 8, vocab="vocab-2")))      # raises ScheduleError, with the grid and the place marked
"""

from collections import Counter, defaultdict

from megatron_ext.schedules.action import COLLECTIVES, P2P, TRANSFORMER, Action, needs
from megatron_ext.schedules.build import Schedule
from megatron_ext.schedules.costs import Costs
from megatron_ext.schedules.lower import Program, Stuck, lower
from megatron_ext.schedules.simulate import Deadlock, simulate


class ScheduleError(ValueError):
    """A program that must not run; the text shows every rank's list around the place."""


def check(program: Program) -> None:
    """Check a program.

    Every pass runs once for every microbatch; what a pass or launch needs comes before it; collectives are
    launched in one order by all ranks, and transfers in one order at both ends; nothing deadlocks; and no
    rank holds more microbatches than the schedule says.

    Raises:
        ScheduleError: names what is wrong, the rank and the action.
    """
    schedule = program.schedule
    _check_passes(program)
    for rank in range(schedule.p):
        _check_needs(program, rank)
        _check_in_flight(program, rank)
    _check_collectives(program)
    _check_transfers(program)
    for rank in range(schedule.p):
        _check_launches(program, rank)
    try:
        simulate(program, Costs())
    except Deadlock as error:
        raise ScheduleError(_with_grid(str(error), program, dict(enumerate(error.places)))) from None


def checked(schedule: Schedule, *, overlap: bool = True) -> Program:
    """The program of a schedule, checked.

    Raises:
        ScheduleError: as `check` does, also when the schedule cannot be lowered to a program.
    """
    try:
        program = lower(schedule, overlap=overlap)
    except Stuck as error:
        bare = Program(schedule, overlap, schedule.ranks)
        raise ScheduleError(_with_grid(str(error), bare, dict(enumerate(error.places)))) from None
    check(program)
    return program


def expected_passes(schedule: Schedule, rank: int) -> dict[str, int]:
    """How often each kind of pass runs on a rank; those of the transformer layers, in each of its chunks."""
    kinds = ["F"] if schedule.forward_only else ["F", "B", "W"] if schedule.split else ["F", "B"]
    if schedule.vocab != "off":
        kinds += ["IF", "S"]
        kinds += ["U"] if schedule.vocab == "naive" else []
        kinds += [] if schedule.forward_only else ["IB", "T"]
        kinds += ["L"] if rank == schedule.place.last.rank else []
    return dict.fromkeys(kinds, schedule.m)


def _check_passes(program: Program) -> None:
    schedule = program.schedule
    for rank, row in enumerate(program.ranks):
        for action, count in Counter(row).items():
            if count > 1:
                places = [at for at, other in enumerate(row) if other == action]
                raise _error(f"rank {rank} has {action} {count} times", program, rank, places[1])
        passes = [action for action in row if action.kind not in COLLECTIVES + P2P]
        for kind, count in expected_passes(schedule, rank).items():
            for chunk in range(schedule.chunks if kind in TRANSFORMER else 1):
                _check_kind(program, rank, passes, Action(kind, count, chunk))
        extra = next((a for a in passes if not _has_place(a, schedule, rank)), None)
        if extra is not None:
            raise _error(f"rank {rank} has {extra}, which has no place here", program, rank, row.index(extra))


def _has_place(action: Action, schedule: Schedule, rank: int) -> bool:
    chunks = schedule.chunks if action.kind in TRANSFORMER else 1
    return action.kind in expected_passes(schedule, rank) and action.chunk < chunks


def _check_kind(program: Program, rank: int, passes: list[Action], what: Action) -> None:
    """`what` has the number of microbatches in place of one."""
    kind, count, chunk = what
    found = sorted(a.microbatch for a in passes if (a.kind, a.chunk) == (kind, chunk))
    if found == list(range(count)):
        return
    missing = sorted(set(range(count)) - set(found))
    of_chunk = f" of chunk {chunk}" if chunk else ""
    raise _error(
        f"rank {rank} should run {kind}{of_chunk} for microbatches 0 to {count - 1}, but runs "
        f"{len(found)} of them" + (f"; {Action(kind, missing[0], chunk)} is missing" if missing else ""),
        program,
        rank,
        len(program.ranks[rank]) - 1,
    )


def expected_launches(schedule: Schedule, rank: int) -> list[tuple[str, int]]:
    """(kind, chunk) of communication that a rank launches once for every microbatch."""
    training, place = not schedule.forward_only, schedule.place
    transfers = P2P if training else ("SF", "RF")
    found = [
        (kind, chunk)
        for kind in transfers
        for chunk in range(schedule.chunks)
        if place.edge(kind, rank, chunk) is not None
    ]
    return found + [(kind, 0) for kind in expected_collectives(schedule)]


def expected_collectives(schedule: Schedule) -> list[str]:
    """Kinds of collectives that all ranks launch once for every microbatch."""
    if schedule.vocab == "off":
        return []
    training, kinds = not schedule.forward_only, []
    kinds += ["e", "C0", "C1"]
    kinds += ["C2"] if schedule.vocab == "naive" else []
    if training:
        kinds += ["G", "g"]
        kinds += {"naive": ["C3"], "vocab-2": []}.get(schedule.vocab, ["C2"])
    return kinds


def _check_launches(program: Program, rank: int) -> None:
    schedule, row = program.schedule, program.ranks[rank]
    allowed = expected_launches(schedule, rank)
    for at, action in enumerate(row):
        if action.kind not in COLLECTIVES + P2P:
            continue
        if (action.kind, action.chunk) not in allowed or not 0 <= action.microbatch < schedule.m:
            raise _error(f"rank {rank} launches {action}, which has no place here", program, rank, at)
    for kind, chunk in allowed:
        found = sorted(action.microbatch for action in row if (action.kind, action.chunk) == (kind, chunk))
        if found != list(range(schedule.m)):
            missing = sorted(set(range(schedule.m)) - set(found))
            raise _error(
                f"rank {rank} launches {kind} for {len(found)} of {schedule.m} microbatches"
                + (f"; {Action(kind, missing[0], chunk)} is missing" if missing else ""),
                program,
                rank,
                len(row) - 1,
            )


def _check_needs(program: Program, rank: int) -> None:
    schedule, row = program.schedule, program.ranks[rank]
    seen: set[Action] = set()
    for at, action in enumerate(row):
        for need in needs(action, rank, schedule.place, schedule.vocab):
            if need not in seen:
                where = "comes after it" if need in row else "is missing"
                raise _error(f"rank {rank}: {action} needs {need}, which {where}", program, rank, at)
        seen.add(action)


def _check_in_flight(program: Program, rank: int) -> None:
    schedule = program.schedule
    if schedule.forward_only:
        return
    now, cap = 0, schedule.cap(rank)
    for at, action in enumerate(program.ranks[rank]):
        now += (action.kind == "F") - (action.kind == schedule.releases)
        if now > cap:
            what = "microbatches" if schedule.chunks == 1 else "chunk activations"
            raise _error(
                f"rank {rank} holds {now} {what} at {action}, and {cap} are allowed",
                program,
                rank,
                at,
            )


def _check_collectives(program: Program) -> None:
    expected = program.schedule.collectives
    for rank, row in enumerate(program.ranks):
        launched = [(at, action) for at, action in enumerate(row) if action.kind in COLLECTIVES]
        found = tuple(action for _, action in launched)
        if found == expected:
            continue
        first = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
        if first is None:
            more, fewer = len(found) > len(expected), len(found) < len(expected)
            what = f"{'more' if more else 'fewer'} collectives than the others"
            at = launched[len(expected)][0] if more else len(row) - 1
            assert more or fewer
        else:
            what = f"{found[first]} where the other ranks have {expected[first]}"
            at = launched[first][0]
        raise _error(f"collective order: rank {rank} launches {what}", program, rank, at)


def _check_transfers(program: Program) -> None:
    """Both ends of a link have its transfers in one order: of one direction, from a rank to another."""
    place = program.schedule.place
    moved: dict[tuple, list[tuple[Action, tuple[int, int]]]] = defaultdict(list)
    for rank, row in enumerate(program.ranks):
        for action in row:
            edge = place.edge(action.kind, rank, action.chunk) if action.kind in P2P else None
            if edge is not None:
                link = (action.kind[1], edge.source, edge.target)
                moved[(*link, action.kind[0])].append((action, (action.microbatch, edge.stage)))
    for direction, source, target in dict.fromkeys(key[:3] for key in moved):
        sent = moved[direction, source, target, "S"]
        received = moved[direction, source, target, "R"]
        if [what for _, what in sent] == [what for _, what in received]:
            continue
        wrong = next((b for a, b in zip(sent, received, strict=False) if a[1] != b[1]), None)
        row = program.ranks[target]
        raise _error(
            f"transfer order: rank {source} sends S{direction} of microbatches {[i for _, (i, _) in sent]}, "
            f"rank {target} receives {[i for _, (i, _) in received]}",
            program,
            target,
            row.index(wrong[0]) if wrong else len(row) - 1,
        )


def _error(text: str, program: Program, rank: int, at: int) -> ScheduleError:
    return ScheduleError(_with_grid(text, program, {rank: at}))


def _with_grid(text: str, program: Program, places: dict[int, int], width: int = 12) -> str:
    """The problem, and every rank's actions around the marked places."""
    lines = [text + ". The program, with the place marked >here<:"]
    centre = next(iter(places.values()))
    for rank, row in enumerate(program.ranks):
        at = places.get(rank)
        middle = centre if at is None else at
        begin, end = max(0, middle - width), middle + width + 1
        words = [f">{a}<" if i == at else str(a) for i, a in enumerate(row[begin:end], start=begin)]
        head = "... " if begin else ""
        tail = " ..." if end < len(row) else ""
        lines.append(f"  rank {rank}: {head}{' '.join(words)}{tail}")
    return "\n".join(lines)
