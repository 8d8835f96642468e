"""What a seed stands for: the job, the state of the network, and the faults with their times."""

from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from emberscale_api.job import TrainingJob, TrainingJobSpec
from emberscale_jobmaster.operations import MovePhase, ReloadPhase
from emberscale_trainer.server.lag import LagBound


class Kind(StrEnum):
    """What goes wrong."""

    KILL = "kill"
    HANG = "hang"
    CUT = "cut"
    """All data-plane connections of a member break."""
    PART = "part"
    """A parameter server and the next one cannot reach each other for `seconds`; both still reach the master."""
    SPLIT = "split"
    """A second master starts while the first runs on, with late calls, and without Redis for `seconds`."""
    NO_MEMORY = "no memory"
    """The next push to a parameter server finds no room."""
    LOST_TAIL = "lost tail"
    """Redis dies with the master, and loses what it wrote within the last second."""
    LOST_WRITES = "lost writes"
    """Only Redis dies, and loses what it wrote within the last second."""
    LOST_STORE = "lost store"
    """Redis dies with all that it held."""
    STORAGE_FAILS = "storage fails"
    STORAGE_HANGS = "storage hangs"
    LATE_CALLS = "late calls"
    """Half of the master's calls within `seconds` are late, as if it got no CPU."""
    TEAR = "tear"
    """The next checkpoint file is silently damaged."""


FOR_EVER = 1e9

MOST_SERVERS = 4

GRACE_SECONDS = 10.0
"""The grace in which a server may drain before it is killed."""

HORIZON = 12.0
"""Faults begin within this many seconds."""

SWITCHED = "Switched"
"""A moment after the phases of a move: every server has adopted the new table; the master has yet to hear so."""

RESTORED = "Restored"
"""Servers were assigned after a roll-back, and the master has just learned that all have loaded."""


RELOAD = "Reload "
"""Prefix of the moments at which a reload enters a phase."""

RELOADED = "Reloaded"
"""The successor of a lost server has adopted the table that replaces it."""


PROTECTED = "Protected"
"""The others hold parity of every server's rows."""


DEGRADED = "Degraded"
"""A server is lost, and its rows are to be rebuilt."""


LAGGED = "Lagged"
"""A server is rebuilt without some batches that its predecessor has acknowledged."""


REBUILD = "Rebuild "
"""Prefix of the moments at which the move that rebuilds a lost server enters a phase."""


REBUILT = "Rebuilt"
"""The successor of a lost server has adopted the table that replaces it."""


ADOPTED = "Adopted"
"""A server has adopted the table by which it owns rows of a lost one."""


HALF_PUSHED = "Half pushed by "
"""Prefix of the moments at which the first server, whose rows can be rebuilt, has applied a worker's push, and others
have yet to; the worker's name follows."""


SAVED = "Saved"
"""A checkpoint is complete."""


@dataclass(frozen=True, order=True)
class Fault:
    """One fault, which begins after `at` seconds; some kinds last for `seconds`.

    `role` and `index` name the member that it strikes. With `during`, it strikes once, `at` seconds after that moment:
    a move or reload enters a phase, a restore reaches a point, a push is half applied, or a checkpoint is complete.
    """

    at: float
    kind: Kind
    role: str = ""
    index: int = 0
    seconds: float = 0.0
    during: str = ""

    def __str__(self) -> str:
        where = f" {self.role}-{self.index}" if self.role else ""
        lasts = " for ever" if self.seconds == FOR_EVER else f" for {self.seconds:.1f} s" if self.seconds else ""
        when = f" after {self.during}" if self.during else ""
        return f"{self.at:7.3f}{when}  {self.kind}{where}{lasts}"

    @property
    def over_at(self) -> float:
        """The latest time at which it has passed, though its effect may last for ever."""
        begins = self.at + (HORIZON if self.during else 0.0)
        return begins + (self.seconds if self.seconds < FOR_EVER else 0.0)


@dataclass(frozen=True)
class Scenario:
    """A job and its faults; `quiet_after` is when they are over.

    * `batches`, `evaluation_batches`: batches of one epoch. `compute_seconds`: how long one takes.
    * `slow`, `lossy`: probabilities that a message is late or lost.
    * `rescales`: when the brain wants another number of servers, and which.
    * `edits`: when a person edits the numbers in the manifest, and to which: PS and workers.
    * `drains`: when a parameter server is asked to go because its node is drained, and which.
    * `room`: the number of servers for which the cluster has room; others are never placed.
    * `target_pls`: the portion of samples that partial recoveries may lose; 0: every recovery is full.
    * `rounds`: the most batches of a round; 0: no rounds, 1: as many as `RoundLengths` says.
    * `parity`: the parity that servers keep of each other's rows; 0: none.
    * `lag`: how far it may lag behind pushes; None: not at all.
    * `dawdling`: the probability that the master delays a call, as if it got no CPU.
    * `placing_seconds`: how long the successor of a parameter server waits for a place.
    """

    seed: int
    workers: int
    servers: int
    batches: int
    epochs: int
    evaluation_batches: int
    max_staleness: int
    pull_ahead: int
    interval: float
    compute_seconds: float
    slow: float
    lossy: float
    dawdling: float
    faults: tuple[Fault, ...]
    rescales: tuple[tuple[float, int], ...] = ()
    edits: tuple[tuple[float, int, int], ...] = ()
    drains: tuple[tuple[float, int], ...] = ()
    room: int = MOST_SERVERS
    target_pls: float = 0.0
    parity: int = 0
    rounds: int = 0
    lag: LagBound | None = None
    placing_seconds: float = 0.0

    @property
    def quiet_after(self) -> float:
        """When the last fault has passed, and the network calms down."""
        return max(
            [
                *(fault.over_at for fault in self.faults),
                *(at for at, _, _ in self.edits),
                *(at + GRACE_SECONDS for at, _ in self.drains),
                HORIZON if self.slow or self.lossy or self.dawdling else 0.0,
            ]
        )

    def spec(self) -> TrainingJobSpec:
        """Returns the job's manifest, in which a record is a batch."""
        return TrainingJob.model_validate(
            {
                "apiVersion": "emberscale.io/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "simulated"},
                "spec": {
                    "data": {"train": ["train"], **({"evaluation": ["evaluation"]} if self.evaluation_batches else {})},
                    "training": {
                        "batchSize": 1,
                        "epochs": self.epochs,
                        "maxStaleness": self.max_staleness,
                        "stalenessWarmup": 0,
                        "pullAhead": self.pull_ahead,
                        "prefetchBatches": 1,
                    },
                    "ps": {"minReplicas": 1 + self.parity, "maxReplicas": MOST_SERVERS},
                    "worker": {"replicas": self.workers},
                    "sharding": {
                        "minBatches": 1,
                        "maxBatches": 12 if self.rounds else 6,
                        "leaseTimeout": "8s",
                        "heartbeatInterval": "2s",
                    },
                    "scaling": {"timeout": "6s"},
                    "checkpoint": {"uri": "/checkpoints", "interval": f"{self.interval:g}s"},
                    "faultTolerance": self._fault_tolerance(),
                },
            }
        ).spec

    def _fault_tolerance(self) -> dict[str, object]:
        if self.parity:
            durability = "Async" if self.lag is not None else "Sync"
            return {"strategy": "ErasureCoding", "parity": self.parity, "durability": durability}
        return {"strategy": "PartialRecovery", "targetPLS": self.target_pls} if self.target_pls else {}


_REBUILD_PHASES = (MovePhase.PREPARE, MovePhase.COPY, MovePhase.SWITCH)

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
    rescaled = _rescaled(Random(f"rescales of {seed}"), replace(base, faults=tuple(sorted(faults))))
    edited = _edited(Random(f"edits of {seed}"), rescaled)
    switched = _switched_in_part(Random(f"switches of {seed}"), edited)
    drained = _drained(Random(f"drains of {seed}"), switched)
    restored = _restored_in_vain(Random(f"restores of {seed}"), drained)
    reloaded = _recovered_partially(Random(f"reloads of {seed}"), restored)
    protected = _protected(Random(f"parity of {seed}"), reloaded)
    parted = _parted(Random(f"partitions of {seed}"), protected)
    twice = _protected_twice(Random(f"two parities of {seed}"), parted)
    lagging = _lagging(Random(f"lags of {seed}"), twice)
    adopted = _adopted(Random(f"slow successors of {seed}"), lagging)
    torn = _torn(Random(f"torn batches of {seed}"), adopted)
    return _in_rounds(Random(f"rounds of {seed}"), torn)


def _adopted(random: Random, base: Scenario) -> Scenario:
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


def torn_push(worker: int, seconds: float, lost_after: float = 0.005) -> tuple[Fault, Fault]:
    """Returns faults that lose the first server in the middle of a push, whose worker hangs for `seconds`."""
    moment = f"{HALF_PUSHED}worker-{worker}"
    return (
        Fault(0.0, Kind.HANG, "worker", worker, seconds, during=moment),
        Fault(lost_after, Kind.KILL, "ps", 0, during=moment),
    )


def _torn(random: Random, base: Scenario) -> Scenario:
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


def _lagging(random: Random, base: Scenario) -> Scenario:
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


def _recovered_partially(random: Random, base: Scenario) -> Scenario:
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


_REBUILD_MOMENTS = (DEGRADED, REBUILT, PROTECTED, *(f"{REBUILD}{phase}" for phase in _REBUILD_PHASES))


def _protected(random: Random, base: Scenario) -> Scenario:
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
        faults=tuple(sorted((*base.faults, *faults))),
    )


def _parted(random: Random, base: Scenario) -> Scenario:
    """In a quarter of the scenarios with parity, two servers cannot reach each other; some of them never can again."""
    if not base.parity or random.random() > 0.25:
        return base
    during = random.choice((PROTECTED, PROTECTED, DEGRADED, REBUILT, f"{REBUILD}{MovePhase.COPY}"))
    seconds = random.choice((3.0, 10.0, 45.0, 100.0, FOR_EVER))
    fault = Fault(round(random.uniform(0.0, 2.0), 3), Kind.PART, "ps", random.randrange(base.servers), seconds, during)
    return replace(base, faults=tuple(sorted((*base.faults, fault))))


def _protected_twice(random: Random, base: Scenario) -> Scenario:
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


def _rebuild_fault(random: Random, servers: int, workers: int) -> Fault:
    during, at = random.choice(_REBUILD_MOMENTS), random.choice((0.0, 0.0, 0.002, 0.01, 0.1, 0.4))
    kind = random.choice((Kind.KILL, Kind.KILL, Kind.KILL, Kind.HANG, Kind.CUT, Kind.CUT, Kind.SPLIT, Kind.LOST_TAIL))
    if kind in (Kind.SPLIT, Kind.LOST_TAIL):
        return Fault(at, kind, during=during)
    role = "ps" if kind is Kind.CUT else random.choice(("ps", "ps", "ps", "master", "master", "redis", "worker"))
    index = random.randrange({"ps": servers, "worker": workers}.get(role, 1))
    return Fault(at, kind, role, index, random.choice((0.3, 3.0, 9.0, 20.0)) if kind is Kind.HANG else 0.0, during)


def _rescaled(random: Random, base: Scenario) -> Scenario:
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


def _drained(random: Random, base: Scenario) -> Scenario:
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


def _edited(random: Random, base: Scenario) -> Scenario:
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


def _switched_in_part(random: Random, base: Scenario) -> Scenario:
    """In some scenarios, loses a server after some others have switched, and before the rest hear of the switch."""
    if random.random() > 0.4 or not base.rescales:
        return base
    most = max(base.servers, *(count for _, count in base.rescales))
    at = random.choice((0.02, 0.1))
    late = Fault(0.0, Kind.LATE_CALLS, seconds=at, during=MovePhase.SWITCH)
    lost = Fault(at, Kind.KILL, "ps", random.randrange(most), during=MovePhase.SWITCH)
    return replace(base, dawdling=0.0, faults=tuple(sorted((*base.faults, late, lost))))


def _restored_in_vain(random: Random, base: Scenario) -> Scenario:
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


_MOVE_FAULTS: dict[str, tuple[Kind, ...]] = {
    MovePhase.PREPARE: (Kind.KILL, Kind.HANG, Kind.CUT, Kind.SPLIT, Kind.SPLIT, Kind.LOST_TAIL),
    MovePhase.COPY: (Kind.KILL, Kind.KILL, Kind.HANG, Kind.CUT, Kind.SPLIT, Kind.LOST_TAIL),
    MovePhase.BARRIER: (Kind.KILL, Kind.KILL, Kind.HANG, Kind.CUT, Kind.SPLIT, Kind.LOST_TAIL),
    MovePhase.SWITCH: (Kind.KILL, Kind.KILL, Kind.KILL, Kind.HANG, Kind.SPLIT, Kind.SPLIT, Kind.LOST_TAIL),
    SWITCHED: (Kind.LOST_TAIL, Kind.LOST_TAIL, Kind.LOST_TAIL, Kind.KILL),
}
"""The faults that may strike in each phase of a move; repetition makes a fault more likely."""


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
