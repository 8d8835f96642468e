"""What a seed stands for: a random job on a random network, under random faults."""

from dataclasses import replace
from random import Random

from tests.simulation.faults import FOR_EVER, HORIZON, Fault, Kind
from tests.simulation.random_elasticity import drained, edited, rescaled, switched_in_part
from tests.simulation.random_recovery import (
    adopted,
    followed,
    lagging,
    parted,
    protected,
    protected_twice,
    recovered_partially,
    restored_in_vain,
    torn,
)
from tests.simulation.scenario import Scenario

_WEIGHTS = {
    Kind.KILL: 5,
    Kind.HANG: 3,
    Kind.CUT: 3,
    Kind.SPLIT: 1,
    Kind.NO_MEMORY: 2,
    Kind.LOST_TAIL: 2,
    Kind.LOST_WRITES: 1,
    Kind.LOST_STORE: 1,
    Kind.STORAGE_FAILS: 2,
    Kind.STORAGE_HANGS: 1,
    Kind.TEAR: 1,
}


def _in_rounds(random: Random, base: Scenario) -> Scenario:
    """Makes half of the scenarios without parity train in rounds."""
    if base.parity or random.random() < 0.5:
        return base
    return replace(
        base,
        batches=base.batches + random.randint(3, 9),
        max_staleness=random.choice((base.max_staleness, 4, 8, 16)),
        compute_seconds=random.choice((0.05, 0.2, 0.3, 0.6)),
        rounds=random.choice((1, 2, 4, 8)),
    )


_CHANGES = (
    ("rescales", rescaled),
    ("edits", edited),
    ("switches", switched_in_part),
    ("drains", drained),
    ("restores", restored_in_vain),
    ("reloads", recovered_partially),
    ("parity", protected),
    ("partitions", parted),
    ("two parities", protected_twice),
    ("lags", lagging),
    ("slow successors", adopted),
    ("torn batches", torn),
    ("rows on demand", followed),
    ("rounds", _in_rounds),
)
"""What changes a scenario, in this order. Each has random numbers of its own, so that no other disturbs them."""


def scenario_of(seed: int) -> Scenario:
    """Returns the scenario of a seed."""
    random = Random(seed)
    workers, servers = random.randint(1, 3), random.randint(1, 3)
    base = Scenario(
        seed=seed,
        workers=workers,
        servers=servers,
        batches=random.randint(4, 9),
        epochs=random.choice((1, 1, 2)),
        evaluation_batches=random.choice((0, 0, 0, 2)),
        max_staleness=random.choice((0, 1, 2, 4)),
        pull_ahead=random.choice((0, 1, 2)),
        interval=random.choice((1.5, 3.0, 6.0)),
        compute_seconds=random.choice((0.1, 0.3, 0.7)),
        slow=random.choice((0.0, 0.02, 0.1)),
        lossy=random.choice((0.0, 0.0, 0.02, 0.05)),
        dawdling=random.choice((0.0, 0.0, 0.05, 0.2)),
        faults=(),
    )
    faults = [_fault(random, workers, servers) for _ in range(random.choice((0, 1, 2, 3, 4)))]
    faults += [company for fault in faults for company in _company(random, fault, workers, servers)]
    scenario = replace(base, faults=tuple(sorted(faults)))
    for numbers, changed in _CHANGES:
        scenario = changed(Random(f"{numbers} of {seed}"), scenario)
    return scenario


def _fault(random: Random, workers: int, servers: int) -> Fault:
    at = round(random.uniform(0.5, HORIZON), 3)
    kind = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    match kind:
        case Kind.KILL | Kind.HANG:
            role = random.choice(("worker", "worker", "ps", "ps", "master", "redis"))
            index = random.randrange({"worker": workers, "ps": servers}.get(role, 1))
            lasting = random.choice((0.3, 3.0, 9.0, 20.0, FOR_EVER)) if kind is Kind.HANG else 0.0
            return Fault(at, kind, role, index, lasting)
        case Kind.CUT:
            role = random.choice(("worker", "ps"))
            return Fault(at, kind, role, random.randrange(workers if role == "worker" else servers))
        case Kind.NO_MEMORY:
            return Fault(at, kind, "ps", random.randrange(servers))
        case Kind.STORAGE_FAILS | Kind.STORAGE_HANGS:
            return Fault(at, kind, seconds=random.choice((1.0, 5.0, 30.0)))
        case _:
            return Fault(at, kind)


def _company(random: Random, fault: Fault, workers: int, servers: int) -> list[Fault]:
    """Returns faults that aggravate another: a worker misses a roll-back, a server must load while storage is away."""
    if random.random() < 0.6:
        return []
    match fault.kind, fault.role:
        case Kind.KILL, "ps":
            at = max(0.0, round(fault.at - 0.1, 3))
            return [Fault(at, Kind.HANG, "worker", random.randrange(workers), random.choice((3.0, 5.0)))]
        case ((Kind.STORAGE_FAILS | Kind.STORAGE_HANGS), _):
            at = max(0.0, round(fault.at - 0.5, 3))
            return [Fault(at, Kind.KILL, "ps", random.randrange(servers))]
        case Kind.SPLIT, _:
            return [Fault(round(fault.at + random.uniform(0.6, 1.6), 3), Kind.LOST_WRITES)]
        case Kind.LOST_TAIL, _:
            return [Fault(round(fault.at + random.uniform(0.6, 2.0), 3), Kind.LOST_TAIL)]
        case _:
            return []
