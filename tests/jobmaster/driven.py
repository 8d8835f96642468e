"""A whole job around the master's machine, in this thread: servers, a checkpoint folder, workers and a clock.

Everything that the machine asks for is done at once, in order, unless a fault says otherwise.
"""

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter
from tests.jobmaster.fakes import BATCH, job

from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest, is_priority, number_of, rows_suffix
from emberscale_api.dataset import DataFile, Split
from emberscale_api.job import MOST_PARITY, FaultToleranceStrategy
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.origin import InitialCheckpoints, UnusableOriginError
from emberscale_api.routing import ParityTrouble, RoutingTable
from emberscale_api.shape import RoleShape
from emberscale_jobmaster import ranges, takeover
from emberscale_jobmaster.effects import (
    AbandonCall,
    AssignCall,
    CallServer,
    CopyCall,
    DeleteCheckpoint,
    Effect,
    FindCheckpoint,
    Granted,
    HandOverCall,
    HoldCall,
    Moved,
    PrepareCall,
    PruneCheckpoints,
    ResumeCall,
    SavedCall,
    SettleCall,
    SnapshotCall,
    StartedUp,
    SwitchCall,
    WriteManifest,
)
from emberscale_jobmaster.events import (
    Advised,
    AppliedReport,
    CheckpointFound,
    Event,
    Exited,
    HeartbeatReceived,
    IntervalAdvised,
    Loaded,
    ManifestWritten,
    Prepared,
    PruningDone,
    Registered,
    Saved,
    ServerAnswer,
    ServerAnswered,
    ServerFailed,
    StorageFailed,
    SuspensionWanted,
    TakenOver,
    TaskFinished,
    TaskWanted,
    TimePassed,
)
from emberscale_jobmaster.initial import initial_source
from emberscale_jobmaster.machine import MasterState, step
from emberscale_jobmaster.membership import Process
from emberscale_jobmaster.observations import ServerReport, WorkReport
from emberscale_jobmaster.operations import (
    Checkpointing,
    CopyReport,
    Move,
    Reload,
    Restore,
    Restored,
    Source,
)
from emberscale_jobmaster.ranges import Applied
from emberscale_jobmaster.scaling import Advice
from emberscale_jobmaster.sizes import RoleShapes
from emberscale_jobmaster.state import JobState, Stage, phase_of
from emberscale_jobmaster.tasks import Discovered, Finding, Indexed, Task

Holding = dict[int, set[int]]
_state_json = TypeAdapter(JobState)
TICK = 0.25


def as_ranges(holding: Holding) -> Applied:
    return {
        epoch: ranges.normalised((batch, batch + 1) for batch in batches)
        for epoch, batches in holding.items()
        if batches
    }


INITIAL = "/another/checkpoints"

ALL = frozenset({0, 1, 2})
"""The parameter servers of a job that has three."""


@dataclass
class ServerDouble:
    """A parameter server that remembers what it has applied."""

    member: MemberId
    generation: int = 0
    version: int = 0
    applied: Holding = field(default_factory=dict)
    held: int | None = None
    over: int = 0
    snapshots: dict[int, tuple[str, Holding]] = field(default_factory=dict)
    move: tuple[int, RoutingTable] | None = None
    moves_over: int = 0
    owns: bool = False
    switched: int = 0
    rebuilds: tuple[int, ...] = ()
    parity: int = 0
    async_parity: bool = False


@dataclass
class Fault:
    """What happens to a call: it fails with `code`, is never answered (`hangs`), or a batch slips in after it.

    `problem`: the server reports what it keeps trying, and answers the next call only when the test says so.
    `damaged_file`: the file that is the reason for a refusal.
    """

    code: str = ""
    hangs: bool = False
    lapses: bool = False
    batch: int | None = None
    problem: str = ""
    damaged_file: str = ""
    times: int = 1


@dataclass
class Driven:
    """One job. `now` is the clock; `saves` are the durable states, and a new master begins with the last of them.

    Each server has 10 bytes of rows, of which `changed_bytes` change between two checkpoints. For each checkpoint,
    `built_on` has the one on which it was to build, `stored` the endings of the names of its row files, and `limits`
    the bytes per second that a server could write, 0 without a limit. `initial` are another job's checkpoints in the
    folder from which this one starts, by id. With `forgets_anew`, the servers run a version that takes the batches of
    such a checkpoint for applied. `strategy` and `durability` are for `parity`.
    """

    records: int = 500
    evaluation: int = 0
    servers: int = 2
    interval: float = 1000.0
    lease_timeout: float = 15.0
    sizes_open: bool = False
    flash_interval: float | None = None
    target_pls: float = 0.0
    priority: str = "None"
    incremental: str = "Full"
    quantization: str = "None"
    write_bandwidth: str | None = None
    changed_bytes: int = 2
    parity: int = 0
    strategy: str = "ErasureCoding"
    durability: str = "Sync"
    now: float = 0.0
    initial: dict[str, CheckpointManifest] | None = None
    continuation: str = "Fresh"
    forgets_anew: bool = False
    files: tuple[str, ...] = ("/data/day_0",)

    def __post_init__(self) -> None:
        self.manifest = job(
            data={"continuation": self.continuation},
            ps={"replicas": None, "minReplicas": self.servers} if self.sizes_open else {"replicas": self.servers},
            worker={"replicas": None, "minReplicas": 2} if self.sizes_open else {"replicas": 2},
            sharding={"minBatches": 1, "maxBatches": 4, "leaseTimeout": self.lease_timeout, "heartbeatInterval": 1},
            checkpoint={
                "uri": "/checkpoints",
                "interval": self.interval,
                "keep": 2,
                "incremental": self.incremental,
                "quantization": self.quantization,
                "writeBandwidth": self.write_bandwidth,
                "flash": {"interval": self.flash_interval},
                "initialFrom": None if self.initial is None else {"uri": INITIAL},
            },
            faultTolerance=self._tolerance,
        )
        self.spec = self.manifest.spec
        self.written: dict[str, WriteManifest] = {}
        self.ps: dict[int, ServerDouble] = {}
        self.workers: dict[int, MemberId] = {}
        self.tasks: dict[MemberId, Task] = {}
        self.committed: dict[int, int] = {}
        self.names = 0
        self.quiet: set[str] = set()
        self.factors: dict[str, float] = {}
        self.troubles: dict[int, ParityTrouble] = {}
        self.worked: Counter[str] = Counter()
        self.spent: dict[str, float] = {}
        self.faults: dict[tuple[str, int], Fault] = {}
        self.storage = "works"
        self.checkpoints: dict[str, tuple[Holding, bool]] = {}
        self.damaged: dict[str, str] = {}
        self.built_on: dict[str, str] = {}
        self.lost: dict[int, Holding] = {}
        self.stored: dict[str, str] = {}
        self.limits: dict[str, int] = {}
        self.unanswered: list[Effect] = []
        self.called: Counter[tuple[str, int]] = Counter()
        self.start_ups: list[StartedUp] = []
        self.moved: list[Moved] = []
        self.log: list[str] = []
        self.saves: deque[JobState] = deque(maxlen=50)
        self.state = MasterState(takeover.initial(wall=0.0))
        self.found: list[FindCheckpoint] = []
        self.tell(TakenOver(now=self.now, wall=1000.0, has_flash_store=self._has_flash))

    @property
    def _tolerance(self) -> dict[str, Any]:
        if self.parity:
            return {"strategy": self.strategy, "parity": self.parity, "durability": self.durability}
        partial = {"strategy": "PartialRecovery", "targetPLS": self.target_pls, "priority": self.priority}
        return partial if self.target_pls else {}

    @property
    def _has_flash(self) -> bool:
        return self.flash_interval is not None

    @property
    def job(self) -> JobState:
        return self.state.job

    # The machine

    def tell(self, event: Event) -> Task | None:
        """Steps the machine, and carries out everything that it asks for and everything that follows from that."""
        todo: deque[Event] = deque([event])
        task = None
        while todo:
            self.state, effects = step(self.state, todo.popleft(), self.spec)
            self.saves.append(self.state.job)
            for effect in effects:
                if isinstance(effect, Granted):
                    task = effect.task
                elif (answer := self._carry_out(effect)) is not None:
                    todo.append(answer)
        return task

    def master_dies(self, lost_writes: int = 0) -> None:
        """Starts a new master from the durable state, without the last `lost_writes` writes."""
        kept = list(self.saves)[: len(self.saves) - lost_writes]
        self.state = MasterState(_read_back(kept[-1]))
        self.tell(TakenOver(now=self.now, wall=2000.0 + self.now, has_flash_store=self._has_flash))

    def all_die(self) -> None:
        """Ends every process at once; a new master begins alone with the durable state."""
        for member in (*(server.member for server in self.ps.values()), *self.workers.values()):
            self.quiet.add(member.slot)
        self.tasks.clear()
        self.state = MasterState(_read_back(self.saves[-1]))
        self.tell(TakenOver(now=self.now, wall=2000.0 + self.now, alone=True, has_flash_store=self._has_flash))

    def pass_time(self, seconds: float, tick: float = TICK) -> None:
        """Lets time pass, in which members that are not quiet send heartbeats.

        If nothing happens for very long, `tick` may be longer than the second between heartbeats.
        """
        between = max(1, round(1 / tick))
        for number in range(1, round(seconds / tick) + 1):
            self.now += tick
            self.tell(TimePassed(now=self.now))
            if number % between == 0:
                self.beat()

    def beat(self) -> None:
        """Every member that is not quiet sends a heartbeat."""
        for server in self.ps.values():
            numbers: dict[str, Any] = {"generation": server.generation, "version": server.version}
            if self._speaks(server.member):
                served = self._served(server.member)
                self.tell(HeartbeatReceived(now=self.now, member=server.member, served=served, **numbers))
            elif self._is_unknown(server.member):
                process = _process(server.member)
                self.tell(Registered(now=self.now, member=server.member, process=process, **numbers))
        for worker in self.workers.values():
            if self._speaks(worker):
                task = self.tasks.get(worker)
                leases = {task.token: self.committed[task.token]} if task is not None else {}
                self._work(worker)
                number = self.worked[worker.incarnation]
                work = WorkReport(10, 1.0, (), (), {"compute": self.spent[worker.incarnation]})
                self.tell(HeartbeatReceived(now=self.now, member=worker, leases=leases, sequence=number, work=work))

    def _work(self, member: MemberId) -> None:
        """Counts a second of work: ten samples or a batch, which takes longer by the factor of a slow member."""
        name = member.incarnation
        self.worked[name] += 1
        self.spent[name] = self.spent.get(name, 0.0) + 0.01 * self.factors.get(member.slot, 1.0)

    def _served(self, member: MemberId) -> ServerReport:
        self._work(member)
        name = member.incarnation
        protected = self.ps[member.index].version if self.ps[member.index].parity else 0
        trouble = self.troubles.get(member.index)
        return ServerReport(
            {},
            0,
            self.worked[name],
            0,
            {"push": self.spent[name]},
            protected_version=protected,
            parity_trouble=trouble,
        )

    def _speaks(self, member: MemberId) -> bool:
        slot = self.job.members.slot(member.role, member.index)
        known = slot.process is not None and slot.process.incarnation == member.incarnation
        return known and member.slot not in self.quiet

    def _is_unknown(self, member: MemberId) -> bool:
        slot = self.job.members.slot(member.role, member.index)
        known = slot.process is not None and slot.process.incarnation == member.incarnation
        return not known and member.incarnation not in slot.past and member.slot not in self.quiet

    # Members

    def join(self, role: Role, index: int, most_parity: int = MOST_PARITY, *, knows_async: bool = True) -> MemberId:
        """A process joins; a server with `most_parity` 0, or that does not know `Async`, runs an earlier version."""
        self.names += 1
        member = MemberId(role, index, f"{role.value}-{index}-{self.names}")
        self.quiet.discard(member.slot)
        if role is Role.PS:
            self.ps[index] = ServerDouble(member)
        else:
            self.workers[index] = member
        self.tell(Registered(now=self.now, member=member, process=_process(member, most_parity, knows_async)))
        return member

    def start(self) -> None:
        """All servers and a worker join, and the worker prepares the data."""
        for index in range(self.servers):
            self.join(Role.PS, index)
        self.prepare()

    def prepare(self) -> None:
        """A worker joins, and prepares the data as far as it may."""
        worker = self.join(Role.WORKER, 0)
        found = tuple(DataFile(file, 1000) for file in self.files)
        others = (DataFile("/data/test", 500),) if self.evaluation else ()
        self._finish(worker, self._ask(worker), Discovered(found, others))
        while self.job.stage is Stage.INDEX and not self.job.over:
            task = self._ask(worker)
            evaluates = task.split is Split.EVALUATION
            self._finish(worker, task, Indexed(self.evaluation if evaluates else self.records))

    def plan(self, servers: int, workers: int = 2) -> None:
        """The brain plans another number of servers, or of workers."""
        sizes = RoleShapes(RoleShape(servers, 1.0, 1 << 30), RoleShape(workers, 1.0, 1 << 30))
        advice = Advice(self.job.scaling.plan_version + 1, "GrowMemory", sizes, "tables grow")
        self.tell(Advised(now=self.now, advice=advice, wall=1e9))

    def suspend(self) -> None:
        self.tell(SuspensionWanted(now=self.now))

    def kill(self, role: Role, index: int) -> None:
        member = self.ps[index].member if role is Role.PS else self.workers[index]
        if role is Role.PS:
            self.lost[index] = self.ps[index].applied
        self.quiet.add(member.slot)
        self.tell(Exited(now=self.now, member=member, exit_code=137, reason="Killed"))

    def train(self, batches: int, worker: int = 0) -> None:
        """A worker trains this many batches, each on every server."""
        member = self.workers[worker]
        for _ in range(batches):
            task = self.tasks.get(member) or self.take(member)
            batch = self.committed[task.token] // BATCH
            for routed in self.job.routing.table.servers:
                self.ps[routed.index].applied.setdefault(task.epoch, set()).add(batch)
            self.committed[task.token] = min((batch + 1) * BATCH, task.stop)
            if self.committed[task.token] == task.stop:
                del self.tasks[member]
                self._finish(member, task, None)
            else:
                self.tell(
                    HeartbeatReceived(now=self.now, member=member, leases={task.token: self.committed[task.token]})
                )

    def train_for(self, seconds: float, every: float = 5.0) -> None:
        """Lets time pass, in which a worker trains a batch every few seconds."""
        end = self.now + seconds
        while end - self.now >= TICK:
            self.train(1)
            self.pass_time(min(every, end - self.now))

    def train_all(self) -> None:
        while self.job.stage is Stage.TRAIN:
            self.train(1)

    def take(self, member: MemberId) -> Task:
        """A worker gets a lease, and begins to work on it."""
        task = self._ask(member)
        self.tasks[member] = task
        self.committed[task.token] = task.start
        return task

    def _ask(self, member: MemberId) -> Task:
        task = self.tell(TaskWanted(now=self.now, member=member))
        assert task is not None, f"no task for {member.slot}"
        return task

    def _finish(self, member: MemberId, task: Task, finding: Finding) -> None:
        self.tell(TaskFinished(now=self.now, member=member, token=task.token, finding=finding))

    # What the machine asks for

    def _carry_out(self, effect: Effect) -> Event | None:
        match effect:
            case CallServer():
                return self._call(effect)
            case FindCheckpoint(operation=operation, serial=serial):
                if (failed := self._storage_fails(effect, operation, serial)) is not None:
                    return failed[0]
                return self._find(effect)
            case WriteManifest(operation=operation, serial=serial):
                if (failed := self._storage_fails(effect, operation, serial)) is not None:
                    return failed[0]
                applied = {epoch: _numbers(batches) for epoch, batches in effect.applied.items()}
                self.checkpoints[effect.checkpoint] = (applied, True)
                self.written[effect.checkpoint] = effect
                return ManifestWritten(now=self.now, operation=operation, serial=serial)
            case PruneCheckpoints(operation=operation, serial=serial):
                if (failed := self._storage_fails(effect, operation, serial)) is not None:
                    return failed[0]
                own = sorted(one for one in self.checkpoints if one.isdigit())
                old = [one for one in self.checkpoints if is_priority(one) and number_of(one) < int(own[-1])]
                for identifier in (*own[: -effect.keep], *old):
                    del self.checkpoints[identifier]
                return PruningDone(now=self.now, operation=operation, serial=serial)
            case DeleteCheckpoint(checkpoint=identifier):
                if not self.checkpoints.get(identifier, ({}, False))[1]:  # a checkpoint with a manifest stays
                    self.checkpoints.pop(identifier, None)
            case StartedUp():
                self.start_ups.append(effect)
            case Moved():
                self.moved.append(effect)
        return None

    def _held(self, checkpoint: str) -> Holding:
        """Returns the batches in a checkpoint of this job, by id, or of another job, by URI."""
        if "/" not in checkpoint:
            return self.checkpoints[checkpoint][0]
        assert self.initial is not None
        applied = self.initial[checkpoint.rpartition("/")[2]].applied
        return {each.epoch: _numbers(each.ranges) for each in applied}

    def _storage_fails(self, effect: Effect, operation: int, serial: int) -> tuple[Event | None] | None:
        if self.storage == "works":
            return None
        if self.storage == "hangs":
            self.unanswered.append(effect)
            return (None,)
        return (
            StorageFailed(
                now=self.now,
                operation=operation,
                serial=serial,
                problem="EIO",
                lacks_credentials=self.storage == "lacks credentials",
            ),
        )

    def _find(self, effect: FindCheckpoint) -> Event:
        refused = {*effect.refused, *self.damaged}
        whole = [name for name, (_, complete) in self.checkpoints.items() if complete and not is_priority(name)]
        sound = [name for name in whole if name not in refused]
        source, unusable = None, ""
        self.found.append(effect)
        if sound:
            newest_sound = max(sound, key=number_of)
            applied = as_ranges(self.checkpoints[newest_sound][0])
            held = self.written.get(newest_sound)
            data = (("/data/day_0", 1000),) if held is None else held.training_files
            origin = None if held is None else held.image.origin
            source = Source(newest_sound, Restored(applied, data=data, origin=origin))
        elif self.initial is not None and effect.initial is not None:
            failed = {uri.rpartition("/")[2]: why for uri, why in effect.initial.refused.items()}
            there = InitialCheckpoints(INITIAL, sorted(self.initial), self.initial.__getitem__, failed)
            try:
                manifest, _ = there.choose(self.manifest, effect.initial.pinned)
                source = initial_source(manifest, there.uri_of(manifest.id), self.manifest)
            except UnusableOriginError as error:
                unusable = str(error)
        newest = max(map(number_of, self.checkpoints), default=0)
        return CheckpointFound(
            now=self.now,
            operation=effect.operation,
            serial=effect.serial,
            source=source,
            damaged=self.damaged,
            newest=newest,
            unusable=unusable,
        )

    def _call(self, call: CallServer) -> Event | None:
        index, name = call.server.index, type(call.request).__name__.removesuffix("Call")
        server = self.ps[index]
        self.called[name, index] += 1
        where: dict[str, Any] = {"now": self.now, "operation": call.operation, "serial": call.serial, "server": index}
        fault = self._fault(name, index)
        if server.member.incarnation != call.server.incarnation or server.member.slot in self.quiet:
            if server.member.incarnation == call.server.incarnation and fault.code == "":
                self.unanswered.append(call)
                return None
            return ServerFailed(code="UNAVAILABLE", problem="connection refused", **where)
        if fault.hangs:
            self.unanswered.append(call)
            return None
        if fault.code:
            return ServerFailed(code=fault.code, problem=f"{name} failed", damaged_file=fault.damaged_file, **where)
        if fault.problem:
            self.faults[name, index] = Fault(hangs=True)
            return ServerAnswered(answer=Prepared(done=False, problem=fault.problem), **where)
        if fault.lapses:
            self._let_go(server)
        answer = self._answer(server, call)
        if fault.batch is not None:
            server.applied.setdefault(0, set()).add(fault.batch)
        if call.serial == 0 or answer is None:
            return None
        if isinstance(answer, str):
            return ServerFailed(code="FAILED_PRECONDITION", problem=answer, **where)
        return ServerAnswered(answer=answer, **where)

    def answer(self, call: CallServer) -> None:
        """Answers a call that hung."""
        if (event := self._call(call)) is not None:
            self.tell(event)

    def answer_all(self) -> None:
        """Answers all calls that hung. All must be calls to servers."""
        for call in self.unanswered:
            assert isinstance(call, CallServer)
            self.answer(call)

    def _fault(self, name: str, index: int) -> Fault:
        fault = self.faults.get((name, index))
        if fault is None:
            return Fault()
        left = replace(fault, times=fault.times - 1)
        if left.times:
            self.faults[name, index] = left
        else:
            del self.faults[name, index]
        return fault

    def _answer(self, server: ServerDouble, call: CallServer) -> ServerAnswer | str | None:
        match call.request:
            case AssignCall(table=table, checkpoint=checkpoint, anew=anew):
                server.parity = 0 if call.request.no_parity else call.request.parity
                server.async_parity = call.request.async_parity
                if (table.generation, table.version) != (server.generation, server.version):
                    server.generation, server.version = table.generation, table.version
                    held = self._held(checkpoint) if checkpoint and (self.forgets_anew or not anew) else {}
                    server.applied = {epoch: set(batches) for epoch, batches in held.items()}
                    server.move, server.owns = None, True
                    self._let_go(server)
                return Loaded(done=True, loaded_bytes=1, applied=as_ranges(server.applied))
            case HoldCall(barrier=number):
                if number <= server.over:
                    return f"barrier {number} is over"
                server.held = number
                return AppliedReport(as_ranges(server.applied))
            case SettleCall(barrier=number, settle=settle):
                if server.held != number:
                    return f"barrier {number} is not held"
                for epoch, batches in settle.items():
                    server.applied.setdefault(epoch, set()).update(_numbers(batches))
                return AppliedReport(as_ranges(server.applied))
            case SnapshotCall(barrier=number, checkpoint=checkpoint, since=since, weight_bits=bits):
                self.built_on[checkpoint], self.stored[checkpoint] = since, rows_suffix(bits)
                self.limits[checkpoint] = call.request.bytes_per_second
                if server.held != number:
                    return f"barrier {number} is not held"
                copy = {epoch: set(batches) for epoch, batches in server.applied.items()}
                server.snapshots[number] = (checkpoint, copy)
                self._let_go(server)
                return AppliedReport(as_ranges(copy), held_seconds=0.01)
            case SavedCall(barrier=number):
                checkpoint, copy = server.snapshots[number]
                self.checkpoints.setdefault(checkpoint, (copy, False))
                stem, since = f"ps-{server.member.index}/table", self.built_on[checkpoint]
                path = stem + self.stored[checkpoint]
                files: tuple[CheckpointFile, ...] = (CheckpointFile(path=path, bytes=10, crc32=1),)
                if since and not is_priority(checkpoint):
                    base = CheckpointFile(path=stem + self.stored[since], bytes=10, crc32=1, checkpoint=since)
                    files = (base, CheckpointFile(path=path, bytes=self.changed_bytes, crc32=1))
                return Saved(done=True, written_bytes=10, files=files)
            case PrepareCall() | CopyCall() | HandOverCall() | SwitchCall() | AbandonCall() as request:
                return self._answer_of_move(server, request)
            case ResumeCall(barrier=number):
                server.over = max(server.over, number)
                if server.held is not None and server.held <= number:
                    server.held = None
                return None

    def _answer_of_move(
        self, server: ServerDouble, request: PrepareCall | CopyCall | HandOverCall | SwitchCall | AbandonCall
    ) -> ServerAnswer | str | None:
        if isinstance(request, SwitchCall) and server.switched == request.move:
            return AppliedReport(as_ranges(server.applied))
        if isinstance(request, PrepareCall) and request.move > server.moves_over:
            serves = server.version if server.owns and server.generation == request.table.generation else 0
            if serves != request.since and (server.move is None or server.move[0] != request.move):
                return f"version {serves} is served"
            if request.lost and server.owns and server.async_parity and not request.knows_async_parity:
                return "rebuilt rows may lack batches, and this master would not know which"
            server.move, server.rebuilds = (request.move, request.table), request.lost
            server.parity = 0 if request.no_parity else request.parity
            server.async_parity = request.async_parity
        if isinstance(request, AbandonCall):
            server.move, server.moves_over = None, max(server.moves_over, request.move)
            return None
        if server.move is None or server.move[0] != request.move:
            return f"move {request.move} is not under way"
        match request:
            case PrepareCall():
                return Prepared(done=True)
            case CopyCall() if server.rebuilds and server.owns:
                rebuilt = {index: as_ranges(self.lost.get(index, {})) for index in server.rebuilds}
                return CopyReport(True, 1000, 0, rebuilt)
            case CopyCall():
                return CopyReport(ready=True, copied_bytes=1000, rounds=2)
            case HandOverCall(barrier=number):
                return (
                    AppliedReport(as_ranges(server.applied))
                    if server.held == number
                    else f"barrier {number} is not held"
                )
            case SwitchCall(barrier=number, applied=applied):
                table = server.move[1]
                keeps = bool(server.rebuilds) and server.owns
                joins = not keeps and not (server.owns and server.generation == table.generation)
                if server.held != number and not keeps and not joins:
                    return f"barrier {number} is not held"
                self._let_go(server)
                if joins:  # the others keep what they have applied
                    server.applied = {epoch: _numbers(batches) for epoch, batches in applied.items()}
                server.owns = any(one.index == server.member.index for one in table.owners)
                server.generation, server.version = table.generation, table.version
                server.move, server.moves_over, server.switched = None, request.move, request.move
                return AppliedReport(as_ranges(server.applied))

    def _let_go(self, server: ServerDouble) -> None:
        if server.held is not None:
            server.over = max(server.over, server.held)
        server.held = None

    # For people

    def describe(self) -> str:
        state = self.job
        table = state.routing.table
        ledger = state.ledger
        done = f"{ledger.done_count} of {ledger.batches}" if state.stage is Stage.TRAIN else str(state.stage)
        parts = [f"{phase_of(state, self.spec)}, generation {table.generation}, version {table.version}, {done}"]
        if state.checkpoint:
            parts.append(f"checkpoint {int(state.checkpoint)}")
        parts += [_described(operation) for operation in state.operations]
        for trouble in state.troubles.values():
            parts.append(f"{trouble.reason}: {trouble.message} ({trouble.attempts})")
        if given_up := state.members.given_up():
            parts.append("silent: " + ", ".join(sorted(member.slot for member in given_up)))
        if held := [server.member.slot for server in self.ps.values() if server.held is not None]:
            parts.append("held: " + ", ".join(held))
        parts += [
            f"forgotten by {', '.join(f'ps-{index}' for index in share.servers)}: {share.samples} samples on "
            f"{share.share:.0%} of the rows, "
            f"{f'from checkpoint {int(share.checkpoint)}' if share.checkpoint else 'rebuilt from parity'}"
            for share in state.forgotten
        ]
        slow = [(name, one.told) for name, one in sorted(self.state.seen.slow.items()) if one.lasting]
        parts += [f"slow: {name}, {factor:g} times" for name, factor in slow]
        if state.outcome is not None:
            parts.append(f"{state.outcome.reason}: {state.outcome.message}")
        return "\n  ".join(parts)


def protected(servers: int = 3, interval: float = 1000.0, parity: int = 1, durability: str = "Sync") -> Driven:
    """A job that has trained a little, and whose servers hold parity of each other."""
    driven = Driven(servers=servers, interval=interval, parity=parity, durability=durability)
    driven.start()
    driven.train(4)
    driven.pass_time(1)
    assert driven.job.parity_group.protected == frozenset(range(servers))
    return driven


def advise(driven: Driven, strategy: FaultToleranceStrategy) -> None:
    driven.tell(IntervalAdvised(now=driven.now, seconds=1000.0, strategy=strategy))


def _read_back(saved: JobState) -> JobState:
    """Returns the state as a new master finds it. Only states that are read go through JSON, since most never are."""
    return _state_json.validate_json(_state_json.dump_json(saved))


def _described(operation: object) -> str:
    match operation:
        case Restore(phase=phase):
            return f"restore: {phase}"
        case Reload(phase=phase):
            return f"reload: {phase}"
        case Checkpointing(checkpoint=checkpoint, phase=phase, purpose=purpose):
            return f"{purpose} checkpoint {number_of(checkpoint)}: {phase}"
        case Move(phase=phase, table=table):
            return f"move to {len(table.servers)} ps: {phase}"
        case _:
            return "pruning"


def _process(member: MemberId, most_parity: int = MOST_PARITY, knows_async: bool = True) -> Process:
    return Process(
        member.incarnation,
        f"tcp://{member.slot}",
        f"{member.slot}:1",
        "",
        most_parity=most_parity,
        knows_async_parity=knows_async,
    )


def _numbers(batches: ranges.Ranges) -> set[int]:
    return {batch for start, stop in batches for batch in range(start, stop)}
