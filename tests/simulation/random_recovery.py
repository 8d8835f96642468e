"""Random recoveries of a scenario: servers are lost, and faults strike while checkpoints or parity bring rows back."""

from dataclasses import replace
from random import Random

from tests.simulation.faults import (
    ADOPTED,
    ARRIVED,
    DEGRADED,
    FOR_EVER,
    FOUND,
    MISSING,
    PROTECTED,
    REBUILD,
    REBUILT,
    RELOAD,
    RELOADED,
    RESTORED,
    SAVED,
    Fault,
    Kind,
    torn_push,
)
from tests.simulation.scenario import Scenario

from emberscale_api.job import MOST_STRIPE_WIDTH
from emberscale_jobmaster.operations import MovePhase, ReloadPhase
from emberscale_trainer.server.lag import LagBound

_REBUILD_PHASES = (MovePhase.PREPARE, MovePhase.COPY, MovePhase.SWITCH)

_REBUILD_MOMENTS = (DEGRADED, REBUILT, PROTECTED, *(f"{REBUILD}{phase}" for phase in _REBUILD_PHASES))


def restored_in_vain(random: Random, base: Scenario) -> Scenario:
    """In some scenarios, forgets a restore that servers have made, and loses other servers."""
    if random.random() > 0.1 or base.servers < 2:
        return base
    at = random.choice((0.0, 0.0, 0.02, 0.3))
    lost, other = random.sample(range(base.servers), 2)
    faults = (
        Fault(round(random.uniform(1.0, 6.0), 3), Kind.KILL, "ps", lost),
        Fault(at, Kind.LOST_TAIL, during=RESTORED),
        Fault(at + random.choice((0.0, 0.05)), Kind.KILL, "ps", other, during=RESTORED),
    )
    return replace(base, faults=tuple(sorted((*base.faults, *faults))))


def recovered_partially(random: Random, base: Scenario) -> Scenario:
    """Makes a third of the scenarios with several servers recover partially, with faults that strike just then."""
    if base.servers < 2 or random.random() > 0.35:
        return base
    servers = base.servers
    lost = random.sample(range(servers), random.choice((1, 1, 1, 2)) if servers > 2 else 1)
    at = round(random.uniform(0.0, 2.5), 3)
    faults = [Fault(at, Kind.KILL, "ps", index, during=SAVED) for index in lost]
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        during = random.choice((*(f"{RELOAD}{phase}" for phase in ReloadPhase), RELOADED))
        at = random.choice((0.0, 0.0, 0.002, 0.01, 0.1, 0.4))
        kind = random.choice((Kind.KILL, Kind.KILL, Kind.KILL, Kind.HANG, Kind.CUT, Kind.SPLIT, Kind.LOST_TAIL))
        role = random.choice(("ps", "ps", "ps", "master", "master", "redis", "worker"))
        if kind in (Kind.SPLIT, Kind.LOST_TAIL):
            faults.append(Fault(at, kind, during=during))
            continue
        if kind is Kind.CUT:
            role = "ps"
        index = random.randrange({"ps": servers, "worker": base.workers}.get(role, 1))
        lasting = random.choice((0.3, 3.0, 9.0, 20.0)) if kind is Kind.HANG else 0.0
        faults.append(Fault(at, kind, role, index, lasting, during))
    return replace(
        base,
        batches=base.batches + random.randint(4, 9),
        interval=random.choice((1.0, 1.5, 3.0)),
        compute_seconds=random.choice((0.3, 0.4, 0.9)),
        target_pls=random.choice((1.0, 1.0, 0.3, 0.05)),
        faults=tuple(sorted((*base.faults, *faults))),
    )


def protected(random: Random, base: Scenario) -> Scenario:
    """Makes every third scenario keep parity and lose servers that it covers, with faults that strike rebuilds."""
    if base.seed % 3 != 2:
        return base
    servers = max(base.servers, random.choice((2, 2, 3, 4)))
    if random.random() < 0.6:  # little else happens
        base = replace(base, faults=base.faults[:1], drains=(), edits=(), rescales=base.rescales[:1])
    rescales = tuple((at, max(2, count)) for at, count in base.rescales)
    edits = tuple((at, max(2, count), workers) for at, count, workers in base.edits)
    faults = []
    for _ in range(random.choice((1, 1, 2, 3))):
        at = round(random.choice((0.0, random.uniform(0.0, 1.0), random.uniform(0.0, 3.0))), 3)
        during = random.choice((PROTECTED, PROTECTED, REBUILT))
        faults.append(Fault(at, Kind.KILL, "ps", random.randrange(servers), during=during))
    faults += [_rebuild_fault(random, servers, base.workers) for _ in range(random.choice((0, 0, 1, 1, 2)))]
    return replace(
        base,
        servers=servers,
        rescales=rescales,
        edits=edits,
        room=max(servers, base.room),
        batches=base.batches + random.randint(4, 7),
        epochs=1,
        compute_seconds=random.choice((0.3, 0.4, 0.9)),
        target_pls=0.0,
        parity=1,
        most_width=(MOST_STRIPE_WIDTH, 1, 2)[base.seed // 3 % 3],
        faults=tuple(sorted((*base.faults, *faults))),
    )


def parted(random: Random, base: Scenario) -> Scenario:
    """In a quarter of the scenarios with parity, two servers cannot reach each other; some of them never can again."""
    if not base.parity or random.random() > 0.25:
        return base
    during = random.choice((PROTECTED, PROTECTED, DEGRADED, REBUILT, f"{REBUILD}{MovePhase.COPY}"))
    seconds = random.choice((3.0, 10.0, 45.0, 100.0, FOR_EVER))
    fault = Fault(round(random.uniform(0.0, 2.0), 3), Kind.PART, "ps", random.randrange(base.servers), seconds, during)
    return replace(base, faults=tuple(sorted((*base.faults, fault))))


def protected_twice(random: Random, base: Scenario) -> Scenario:
    """In a third of the scenarios with parity, two servers may be lost, and are, at once or soon after each other."""
    if not base.parity or random.random() > 0.35:
        return base
    servers = random.choice((3, 4, 4))
    faults = []
    for during in random.choice(((PROTECTED,), (PROTECTED,), (PROTECTED, REBUILT))):
        at = round(random.choice((0.0, random.uniform(0.0, 2.0))), 3)
        apart = random.choice((0.0, 0.0, 0.0, 0.01, 0.3, 2.0))
        one, other = random.sample(range(servers), 2)
        faults.append(Fault(at, Kind.KILL, "ps", one, during=during))
        faults.append(Fault(at + apart, Kind.KILL, "ps", other, during=during))
    if random.random() < 0.3:
        moment = random.choice((DEGRADED, *(f"{REBUILD}{phase}" for phase in _REBUILD_PHASES)))
        faults.append(Fault(random.choice((0.0, 0.01, 0.1)), Kind.KILL, "ps", random.randrange(servers), during=moment))
    kept = base.faults if random.random() < 0.3 else ()
    return replace(
        base,
        servers=servers,
        rescales=tuple((at, max(3, count)) for at, count in base.rescales),
        edits=tuple((at, max(3, count), workers) for at, count, workers in base.edits),
        room=max(servers, base.room),
        parity=2,
        faults=tuple(sorted((*kept, *faults))),
    )


def lagging(random: Random, base: Scenario) -> Scenario:
    """Lets the parity lag in a third of the scenarios that keep it, and loses servers then, or takes them for lost."""
    if not base.parity or base.seed % 9 != 5:
        return base
    pushes = random.choice((1, 2, 3, 5, 8))
    faults = []
    for _ in range(random.choice((1, 1, 2))):
        at, index = round(random.uniform(0.0, 2.5), 3), random.randrange(base.servers)
        kind, seconds = random.choice(((Kind.KILL, 0.0), (Kind.KILL, 0.0), (Kind.PART, 30.0), (Kind.HANG, 20.0)))
        faults.append(Fault(at, kind, "ps", index, seconds, during=random.choice((PROTECTED, PROTECTED, REBUILT))))
    return replace(
        base,
        lag=LagBound(pushes, 1, random.randint(1, pushes), 1),
        batches=base.batches + random.randint(4, 12),
        compute_seconds=random.choice((0.05, 0.1, 0.3)),
        max_staleness=random.choice((base.max_staleness, 4, 8)),
        workers=random.randint(1, 3),
        faults=tuple(sorted((*base.faults, *faults))),
    )


def adopted(random: Random, base: Scenario) -> Scenario:
    """Lets successors wait for a place in half of the scenarios with parity, with faults that strike adoptions."""
    if not base.parity or random.random() < 0.5:
        return base
    faults = []
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        fault = _rebuild_fault(random, base.servers, base.workers)
        during = random.choice((ADOPTED, ADOPTED, *(f"{REBUILD}{phase}" for phase in _REBUILD_PHASES)))
        faults.append(replace(fault, during=during))
    if random.random() < 0.3:  # a worker sends its torn batch again late, and another server is lost before
        worker, server = random.randrange(base.workers), random.randrange(base.servers)
        faults.append(Fault(0.0, Kind.HANG, "worker", worker, random.choice((9.0, 20.0)), during=DEGRADED))
        faults.append(Fault(random.choice((0.5, 1.5, 3.0)), Kind.KILL, "ps", server, during=ADOPTED))
    return replace(
        base,
        batches=base.batches + random.randint(4, 12),
        placing_seconds=random.choice((3.5, 5.0, 9.0, 20.0)),
        faults=tuple(sorted((*base.faults, *faults))),
    )


def torn(random: Random, base: Scenario) -> Scenario:
    """In a fifth of the scenarios with parity, tears a push, which goes on after the rebuild while others train."""
    if not base.parity or random.random() > 0.2:
        return base
    workers = random.choice((2, 2, 3))
    # a worker that hangs for longer may lose its lease
    faults = torn_push(random.randrange(workers), random.choice((4.5, 5.5, 6.5)), random.choice((0.005, 0.1, 0.5)))
    return replace(
        base,
        workers=workers,
        batches=base.batches + random.randint(6, 12),
        max_staleness=random.choice((0, 1, 1, 2)),
        pull_ahead=random.choice((0, 0, base.pull_ahead)),
        compute_seconds=random.choice((0.05, 0.1)),
        faults=tuple(sorted((*(base.faults if random.random() < 0.3 else ()), *faults))),
    )


def followed(random: Random, base: Scenario) -> Scenario:
    """Strikes in half of the scenarios with parity while rows follow on demand; in some, not all servers know how."""
    if not base.parity:
        return base
    base = replace(base, outdated=random.choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.3)))
    if random.random() < 0.5:
        return base
    servers = random.choice((base.servers, base.servers, 4))
    base = replace(base, servers=servers, room=max(servers, base.room))
    faults = [
        Fault(round(random.uniform(0.0, 2.5), 3), Kind.KILL, "ps", random.randrange(base.servers), 0.0, PROTECTED)
    ]
    for _ in range(random.choice((0, 1, 1, 1, 2))):
        fault = replace(
            _rebuild_fault(random, base.servers, base.workers), during=random.choice((FOUND, MISSING, MISSING, ARRIVED))
        )
        faults.append(replace(fault, at=random.choice((0.0, 0.0, 0.001, 0.003, 0.02, 0.1, 0.4, 1.0))))
    if random.random() < 0.3:  # survivors that cannot reach each other keep rows from coming for a while
        lasting = random.choice((1.0, 3.0, 10.0, FOR_EVER))
        faults.append(
            Fault(0.0, Kind.PART, "ps", random.randrange(base.servers), lasting, random.choice((FOUND, MISSING)))
        )
    return replace(
        base,
        batches=base.batches + random.randint(3, 10),
        interval=random.choice((0.5, 1.0, base.interval)),
        compute_seconds=random.choice((0.05, 0.1, 0.3)),
        faults=tuple(sorted((*(base.faults if random.random() < 0.4 else ()), *faults))),
    )


def _rebuild_fault(random: Random, servers: int, workers: int) -> Fault:
    during, at = random.choice(_REBUILD_MOMENTS), random.choice((0.0, 0.0, 0.002, 0.01, 0.1, 0.4))
    kind = random.choice((Kind.KILL, Kind.KILL, Kind.KILL, Kind.HANG, Kind.CUT, Kind.CUT, Kind.SPLIT, Kind.LOST_TAIL))
    if kind in (Kind.SPLIT, Kind.LOST_TAIL):
        return Fault(at, kind, during=during)
    role = "ps" if kind is Kind.CUT else random.choice(("ps", "ps", "ps", "master", "master", "redis", "worker"))
    index = random.randrange({"ps": servers, "worker": workers}.get(role, 1))
    return Fault(at, kind, role, index, random.choice((0.3, 3.0, 9.0, 20.0)) if kind is Kind.HANG else 0.0, during)
