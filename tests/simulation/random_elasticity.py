"""Random numbers of servers and workers while a scenario's job runs, and faults that strike the moves to them."""

from dataclasses import replace
from random import Random

from tests.simulation.faults import FOR_EVER, SWITCHED, Fault, Kind
from tests.simulation.scenario import MOST_SERVERS, Scenario

from emberscale_jobmaster.operations import MovePhase

_MOVE_FAULTS: dict[str, tuple[Kind, ...]] = {
    MovePhase.PREPARE: (Kind.KILL, Kind.HANG, Kind.CUT, Kind.SPLIT, Kind.SPLIT, Kind.LOST_TAIL),
    MovePhase.COPY: (Kind.KILL, Kind.KILL, Kind.HANG, Kind.CUT, Kind.SPLIT, Kind.LOST_TAIL),
    MovePhase.BARRIER: (Kind.KILL, Kind.KILL, Kind.HANG, Kind.CUT, Kind.SPLIT, Kind.LOST_TAIL),
    MovePhase.SWITCH: (Kind.KILL, Kind.KILL, Kind.KILL, Kind.HANG, Kind.SPLIT, Kind.SPLIT, Kind.LOST_TAIL),
    SWITCHED: (Kind.LOST_TAIL, Kind.LOST_TAIL, Kind.LOST_TAIL, Kind.KILL),
}
"""The faults that may strike in each phase of a move; repetition makes a fault more likely."""


def rescaled(random: Random, base: Scenario) -> Scenario:
    """Gives half of the scenarios other numbers of servers, long enough training, and faults that strike moves."""
    times = sorted(random.sample(range(5, 60), random.choice((0, 0, 0, 1, 1, 2, 3))))
    if not times:
        return base
    wanted, rescales = base.servers, []
    for time in times:
        wanted = random.choice([count for count in range(1, MOST_SERVERS + 1) if count != wanted])
        rescales.append((time / 10, wanted))
    most = max(base.servers, *(count for _, count in rescales))
    faults = [fault for _ in range(random.choice((0, 1, 1, 1, 2))) for fault in _move_faults(random, most)]
    return replace(
        base,
        batches=base.batches + random.randint(0, 4),
        compute_seconds=random.choice((0.3, 0.4, 0.9)),
        rescales=tuple(rescales),
        faults=tuple(sorted((*base.faults, *faults))),
    )


def edited(random: Random, base: Scenario) -> Scenario:
    """Edits the manifest in almost half of the scenarios, some of them to more servers than there is room for."""
    times = sorted(random.sample(range(5, 90), random.choice((0, 0, 0, 0, 1, 2, 4))))
    if not times:
        return base
    room = random.choice((base.servers, MOST_SERVERS, MOST_SERVERS))
    edits = tuple((time / 10, random.randint(1, MOST_SERVERS), random.randint(1, 3)) for time in times)
    most = max(base.servers, *(servers for _, servers, _ in edits))
    faults = [fault for _ in range(random.choice((0, 1, 2))) for fault in _move_faults(random, most)]
    if random.random() < 0.4:  # rows are lost just before or just after an edit
        at = max(0.5, random.choice(edits)[0] + random.choice((-0.6, -0.2, 0.3)))
        faults.append(Fault(round(at, 3), Kind.KILL, "ps", random.randrange(base.servers)))
    return replace(
        base,
        batches=base.batches + random.randint(0, 4),
        compute_seconds=random.choice((0.3, 0.4, 0.9)),
        edits=edits,
        room=room,
        faults=tuple(sorted((*base.faults, *faults))),
    )


def switched_in_part(random: Random, base: Scenario) -> Scenario:
    """In some scenarios, loses a server after some others have switched, and before the rest hear of the switch."""
    if random.random() > 0.4 or not base.rescales:
        return base
    most = max(base.servers, *(count for _, count in base.rescales))
    at = random.choice((0.02, 0.1))
    late = Fault(0.0, Kind.LATE_CALLS, seconds=at, during=MovePhase.SWITCH)
    lost = Fault(at, Kind.KILL, "ps", random.randrange(most), during=MovePhase.SWITCH)
    return replace(base, dawdling=0.0, faults=tuple(sorted((*base.faults, late, lost))))


def drained(random: Random, base: Scenario) -> Scenario:
    """Drains parameter servers in half of the scenarios: one, two or four of them, at random times."""
    times = sorted(random.sample(range(5, 80), random.choice((0, 0, 0, 0, 1, 1, 2, 4))))
    if not times:
        return base
    servers = base.servers
    first = random.randrange(servers)
    drains = tuple((time / 10, (first + number) % servers) for number, time in enumerate(times))
    faults = [fault for _ in range(random.choice((0, 0, 1, 1))) for fault in _move_faults(random, servers)]
    return replace(
        base,
        batches=base.batches + random.randint(0, 5),
        compute_seconds=random.choice((0.3, 0.4, 0.9)),
        drains=drains,
        faults=tuple(sorted((*base.faults, *faults))),
    )


def _move_faults(random: Random, servers: int) -> list[Fault]:
    """Returns a fault at a moment of a move, with faults that aggravate it."""
    during = random.choice(tuple(_MOVE_FAULTS))
    at = random.choice((0.0, 0.002, 0.01, 0.05, 0.4))
    kind = random.choice(_MOVE_FAULTS[during])
    match kind:
        case Kind.KILL | Kind.HANG:
            role = random.choice(("ps", "ps", "ps", "master", "master", "redis"))
            lasting = random.choice((0.3, 3.0, 9.0, 20.0, FOR_EVER)) if kind is Kind.HANG else 0.0
            return [Fault(at, kind, role, random.randrange(servers) if role == "ps" else 0, lasting, during)]
        case Kind.CUT:
            return [Fault(at, kind, "ps", random.randrange(servers), 0.0, during)]
        case Kind.SPLIT:
            at = random.choice((0.0, 0.0, at))  # at once, while calls that were decided are still to be made
            parted = Fault(at, kind, seconds=random.choice((0.0, 4.0, 9.0)), during=during)
            # If the store has forgotten who came last, either master may write.
            forgets = Fault(at + random.uniform(0.2, 1.5), Kind.LOST_WRITES, during=during)
            return [parted, forgets] if random.random() < 0.3 else [parted]
        case _:
            return [Fault(at, kind, during=during)]
