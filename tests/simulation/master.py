"""The master: the real machine and its surroundings. No answer leaves before the state behind it is durable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from tests.simulation.calls import CallError
from tests.simulation.network import UnavailableError
from tests.simulation.parameter_server import ParameterServer
from tests.simulation.store import DeposedError
from tests.simulation.world import Condition, Process, Task

from emberscale_api.checkpoint import CheckpointFile, number_of
from emberscale_api.dataset import DataFile
from emberscale_api.job import MOST_PARITY
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import JobPhase
from emberscale_api.routing import RoutingTable
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.shape import RoleShape
from emberscale_jobmaster import draining, messages, takeover
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
    LeasesVoid,
    LogEvent,
    PrepareCall,
    PruneCheckpoints,
    ResumeCall,
    SavedCall,
    SettleCall,
    SnapshotCall,
    SwitchCall,
    WriteManifest,
)
from emberscale_jobmaster.events import (
    Advised,
    AppliedReport,
    CheckpointFound,
    DrainWanted,
    Event,
    Exited,
    GrantLost,
    HeartbeatReceived,
    Loaded,
    ManifestWritten,
    Prepared,
    PruningDone,
    Registered,
    Rescaled,
    Saved,
    ServerAnswer,
    ServerAnswered,
    ServerFailed,
    StorageFailed,
    TakenOver,
    TaskFinished,
    TaskWanted,
    TimePassed,
)
from emberscale_jobmaster.figures import drained_servers, phase_of, sizes_of, wanted_sizes
from emberscale_jobmaster.machine import MasterState, step
from emberscale_jobmaster.membership import Process as Joined
from emberscale_jobmaster.membership import SupersededMemberError, UnknownMemberError
from emberscale_jobmaster.operations import CopyReport, HandedPull
from emberscale_jobmaster.ranges import Applied
from emberscale_jobmaster.reports import ServerReport
from emberscale_jobmaster.scaling import Advice
from emberscale_jobmaster.sizes import RoleShapes
from emberscale_jobmaster.state import JobState, Stage
from emberscale_jobmaster.statistics import Tally
from emberscale_jobmaster.tasks import Discovered, Finding, Indexed, acquire
from emberscale_operator.machine import Scale
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.staleness import OutstandingPull, Ticket
from emberscale_trainer.worker.leases import FinishedTask

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

WALL = 1_000_000.0
"""The wall clock, in seconds since 1970, at the start of a simulation."""

TICK_SECONDS = 1.3
_ADVICE_SECONDS = 1.7


@dataclass(frozen=True)
class BeatReply:
    """The reply to a heartbeat. `leases`, for a server of the generation: the live tokens and the next one."""

    generation: int
    version: int
    revoked: tuple[int, ...]
    stop: bool
    leases: tuple[tuple[int, ...], int] | None


@dataclass(frozen=True)
class Plan:
    """What the master tells the operator."""

    servers: int
    workers: int
    phase: JobPhase
    given_up: tuple[MemberId, ...]
    drained: tuple[MemberId, ...]
    job: JobState
    asked: Scale

    @property
    def asked_for(self) -> tuple[object, ...]:
        """The parts that the operator acts on."""
        return (self.servers, self.workers, self.phase, self.given_up, self.drained, self.asked)


class Master(Process):
    """One process. Its gRPC server runs the coroutines in the second half."""

    def __init__(self, cluster: "Cluster", name: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.spec = cluster.manifest
        self.state: MasterState | None = None
        self.is_parted = False
        """Whether another master was started beside this one."""
        self.cut_off_until = 0.0
        """When it reaches Redis again, and so learns of the other master."""
        self._term = 0
        self._version, self._durable = 1, 0
        self._writable = True
        self._changed = Condition()
        self._effects: list[tuple[int, Effect]] = []

    def cut_off(self, seconds: float) -> None:
        """Cuts the connection to Redis for this long."""
        self.cut_off_until = self.world.now + seconds

    def live(self) -> Task[None]:
        """Takes over, then keeps the state durable and ticks."""
        while True:
            try:
                self._term, found = yield self.cluster.call_redis(self, lambda redis: redis.open(self.name))
                break
            except UnavailableError:
                yield self.sleep(0.25)
        self.trace(f"takes over as term {self._term}, {'anew' if found is None else 'from Redis'}")
        job = self._initial() if found is None else found
        self.state = MasterState(job)
        self.tell(TakenOver(now=self.world.now, wall=WALL + self.world.now))
        self.spawn(self._write())
        self.spawn(self._follow_brain())
        while True:
            yield self.sleep(TICK_SECONDS)
            self.tell(TimePassed(now=self.world.now))
            if self.state.job.over and self._durable == self._version:
                yield self.sleep(1.0)

    def _initial(self) -> JobState:
        """Returns a new job with its sizes decided, since looking them up in the manifest at every step takes long."""
        job = takeover.initial(WALL + self.world.now)
        return replace(job, scaling=replace(job.scaling, sizes=self._sizes(self.cluster.scenario.servers)))

    def _sizes(self, servers: int) -> RoleShapes:
        return RoleShapes(ps=RoleShape(servers), worker=RoleShape(self.cluster.scenario.workers))

    def _follow_brain(self) -> Task[None]:
        """Polls the number of servers that the brain wants."""
        rescales = self.cluster.scenario.rescales
        while rescales:
            yield self.sleep(_ADVICE_SECONDS)
            past = [number for number, (at, _) in enumerate(rescales, start=1) if at <= self.world.now]
            if past:
                advice = Advice(past[-1], "GrowMemory", self._sizes(rescales[past[-1] - 1][1]), "as the scenario says")
                self.tell(Advised(now=self.world.now, advice=advice, wall=WALL + self.world.now))

    def tell(self, event: Event) -> tuple[int, tuple[Effect, ...]]:
        """Steps the machine; effects other than the caller's answer follow once the state is durable."""
        before = self.state
        if before is None:
            raise CallError("UNAVAILABLE", "the master has not taken over")
        self.state, effects = step(before, event, self.spec)
        if self.state.job is not before.job:
            self._version += 1
            self.cluster.model.masters.stepped(self, before.job, self.state.job)
            self._changed.notify()
        for effect in effects:
            if isinstance(effect, LogEvent):
                self.trace(f"{effect.event} {dict(effect.fields)}")
            elif not isinstance(effect, (Granted, LeasesVoid)):
                self._effects.append((self._version, effect))
        if effects:
            self._carry_out()
        return self._version, effects

    def _write(self) -> Task[None]:
        while True:
            while self._durable >= self._version:
                yield self._changed
            assert self.state is not None
            job, version = self.state.job, self._version
            try:
                yield self.cluster.call_redis(self, methodcaller("save", self._term, self.name, job))
            except UnavailableError:
                self._writable = False
                self._changed.notify()
                yield self.sleep(0.25)
            except DeposedError as error:
                self.trace(f"deposed: {error}")
                self.cluster.exited(self, 3)
                return
            else:
                self._writable = True
                self._durable = version
                self._carry_out()
                self._changed.notify()

    def _carry_out(self) -> None:
        if not self._effects:
            return
        due = [effect for version, effect in self._effects if version <= self._durable]
        self._effects = [entry for entry in self._effects if entry[0] > self._durable]
        for effect in due:
            match effect:
                case CallServer():
                    self.spawn(self._call_server(effect))
                case FindCheckpoint() | WriteManifest() | PruneCheckpoints() | DeleteCheckpoint():
                    self.spawn(self._use_storage(effect))

    def _call_server(self, effect: CallServer) -> Task[None]:
        operation, serial, server = effect.operation, effect.serial, effect.server.index
        event: Event
        if pause := self.cluster.dawdle(self):
            yield self.sleep(pause)
        try:
            answer = yield self.cluster.network.call(
                self,
                lambda: self.cluster.server_at(effect.server.control),
                lambda found: _request(found, effect.server.incarnation, effect.request),
                effect.seconds,
            )
        except (CallError, UnavailableError) as error:
            code, problem = error.code if isinstance(error, CallError) else "UNAVAILABLE", str(error)
            self.trace(f"{type(effect.request).__name__} to ps-{server}: {code} {problem}")
            event = ServerFailed(
                now=self.world.now, operation=operation, serial=serial, server=server, code=code, problem=problem
            )
        else:
            event = ServerAnswered(now=self.world.now, operation=operation, serial=serial, server=server, answer=answer)
        if serial:
            self.tell(event)

    def _use_storage(self, effect: FindCheckpoint | WriteManifest | PruneCheckpoints | DeleteCheckpoint) -> Task[None]:
        folder = self.cluster.folder
        event: Event | None = None
        try:
            match effect:
                case FindCheckpoint(operation, serial, refused):
                    source, damaged, newest = yield from folder.find(self, refused)
                    event = CheckpointFound(
                        now=self.world.now,
                        operation=operation,
                        serial=serial,
                        source=source,
                        damaged=damaged,
                        newest=newest,
                    )
                case WriteManifest(operation, serial):
                    yield from folder.write(self, effect)
                    event = ManifestWritten(now=self.world.now, operation=operation, serial=serial)
                case PruneCheckpoints(operation, serial, keep, damaged_ones):
                    yield from folder.prune(self, keep, damaged_ones)
                    event = PruningDone(now=self.world.now, operation=operation, serial=serial)
                case DeleteCheckpoint(checkpoint):
                    yield from folder.discard(self, checkpoint)
        except OSError as error:
            if not isinstance(effect, DeleteCheckpoint):
                event = StorageFailed(
                    now=self.world.now, operation=effect.operation, serial=effect.serial, problem=str(error)
                )
        if event is not None:
            self.tell(event)

    # What its gRPC server runs

    def _changing(self, event: Event) -> Task[tuple[JobState, tuple[Effect, ...]]]:
        """Steps the machine, waits until the new state is durable, and returns it. Raises CallError."""
        if not self._writable:
            raise CallError("UNAVAILABLE", "the store cannot be written")
        try:
            version, effects = self.tell(event)
        except UnknownMemberError as error:
            raise CallError("NOT_FOUND", str(error)) from error
        except SupersededMemberError as error:
            raise CallError("FAILED_PRECONDITION", str(error)) from error
        assert self.state is not None
        job = self.state.job
        yield from self._until_durable(version, effects)
        return job, effects

    def _until_durable(self, version: int, effects: Sequence[Effect] = ()) -> Task[None]:
        while self._durable < version:
            yield self._changed
            if not self._writable:
                for effect in effects:
                    if isinstance(effect, Granted):
                        self.tell(GrantLost(now=self.world.now, token=effect.task.token))
                raise CallError("UNAVAILABLE", "the store cannot be written")

    def register(self, member: MemberId, address: str, generation: int = 0, version: int = 0) -> Task[None]:
        """Registers a member."""
        most_parity = MOST_PARITY if member.role is Role.PS else 0
        joined = Joined(
            member.incarnation,
            address,
            address,
            "",
            most_parity=most_parity,
            knows_async_parity=member.role is Role.PS,
            adopts_rows=member.role is Role.PS,
            rebuilds_on_demand=member.role is Role.PS and self.cluster.scenario.rebuilds_on_demand(member.incarnation),
        )
        yield from self._changing(
            Registered(now=self.world.now, member=member, process=joined, generation=generation, version=version)
        )

    def heartbeat(
        self,
        member: MemberId,
        progress: Mapping[int, int],
        generation: int = 0,
        version: int = 0,
        sequence: int = 0,
        served: bool = False,
        report: ServerReport | None = None,
        numbers: tuple[int, int, int] = (0, 0, 0),
    ) -> Task[BeatReply]:
        """Takes a heartbeat."""
        job, effects = yield from self._changing(
            HeartbeatReceived(
                now=self.world.now,
                member=member,
                leases=progress,
                sequence=sequence,
                generation=generation,
                version=version,
                next_token=numbers[0],
                next_barrier=numbers[1],
                next_checkpoint=numbers[2],
                served=report,
            )
        )
        table, live = job.routing.table, None
        if served and job.routing.ready and generation == table.generation:
            tokens = messages.lease_tokens(job)
            live = (tuple(tokens.live), tokens.next)
        dropped = next(effect.tokens for effect in effects if isinstance(effect, LeasesVoid))
        return BeatReply(table.generation, table.version, dropped, job.over, live)

    def acquire_task(
        self, member: MemberId, finished: Sequence[FinishedTask], wait: float
    ) -> Task[tuple[pb.Task | None, bool]]:
        """Takes a worker's finished tasks, and gives it the next one."""
        for result in finished:
            finding = self._finding(member, result.token)
            if finding is not _UNKNOWN:
                yield from self._changing(
                    TaskFinished(now=self.world.now, member=member, token=result.token, finding=finding)
                )
        deadline = self.world.now + wait
        self.after(wait, self._changed.notify)
        while True:
            job, effects = yield from self._changing(TaskWanted(now=self.world.now, member=member))
            granted = next((effect.task for effect in effects if isinstance(effect, Granted)), None)
            if granted is not None:
                self.cluster.model.masters.granted(member, granted)
                return messages.wire_task(granted), False
            if job.over or self.world.now >= deadline:
                return None, job.over
            while self.world.now < deadline and not self._has_work(member):
                yield self._changed

    def _has_work(self, member: MemberId) -> bool:
        return self.state is not None and (
            self.state.job.over or acquire(self.state.job, self.spec, member, 1)[1] is not None
        )

    def _finding(self, member: MemberId, token: int) -> Finding | Any:
        if self.state is None:
            raise CallError("UNAVAILABLE", "the master has not taken over")
        job = self.state.job
        lease = job.ledger.leases.get(token)
        if lease is None or lease.holder != member:
            return _UNKNOWN
        scenario = self.cluster.scenario
        match job.stage:
            case Stage.DISCOVER:
                evaluation = (DataFile("evaluation", 1),) if scenario.evaluation_batches else ()
                return Discovered((DataFile("train", 1),), evaluation)
            case Stage.INDEX:
                return Indexed(scenario.batches if lease.start == 0 else scenario.evaluation_batches)
            case Stage.EVALUATE:
                return Tally(samples=lease.stop - lease.start)
            case _:
                return None

    def get_routing(self, member: MemberId, newer_than: int, wait: float) -> Task[tuple[RoutingTable, bool]]:
        """Returns the routing table once a newer one is ready, or after the wait."""
        deadline = self.world.now + wait
        self.after(wait, self._changed.notify)
        while True:
            if self.state is None:
                raise CallError("UNAVAILABLE", "the master has not taken over")
            try:
                self.state.job.members.check(member)
            except UnknownMemberError as error:
                raise CallError("NOT_FOUND", str(error)) from error
            except SupersededMemberError as error:
                raise CallError("FAILED_PRECONDITION", str(error)) from error
            routing = self.state.job.routing
            newer = routing.ready and routing.table.version > newer_than
            if newer or self.state.job.over or self.world.now >= deadline:
                yield from self._until_durable(self._version)
                return routing.table, routing.ready
            yield self._changed

    def drain(self, index: int, incarnation: str) -> Task[bool]:
        """Drains a server that is to go; returns whether it may go yet."""
        asked = DrainWanted(now=self.world.now, index=index, incarnation=incarnation, why="told to end")
        job, _ = yield from self._changing(asked)
        return draining.may_go(job, index, incarnation)

    def report_exit(self, member: MemberId, code: int, reason: str) -> Task[None]:
        """Takes the operator's report that a process has ended."""
        yield from self._changing(Exited(now=self.world.now, member=member, exit_code=code, reason=reason))

    def plan(self) -> Task[Plan]:
        """Returns what the operator should run."""
        yield from ()
        if self.state is None:
            raise CallError("UNAVAILABLE", "the master has not taken over")
        yield from self._until_durable(self._version)
        job = self.state.job
        sizes = wanted_sizes(job, self.spec)
        phase = phase_of(job, self.spec)
        asked = Scale(self.spec.ps.replicas or 0, self.spec.worker.replicas or 0, job.scaling.waits)
        given_up, drained = job.members.given_up(), drained_servers(job)
        return Plan(sizes.ps.replicas, sizes.worker.replicas, phase, given_up, drained, job, asked)

    def scale(self, edit: Scale) -> Task[None]:
        """Takes an edit of the manifest."""
        if self.state is None or not self._writable:
            raise CallError("UNAVAILABLE", "the store cannot be written")
        before = sizes_of(self.state.job, self.spec)
        self.spec = self.spec.resized(edit.ps, edit.workers)
        wall = WALL + self.world.now
        yield from self._changing(Rescaled(now=self.world.now, before=before, waits=edit.waits, wall=wall))


_UNKNOWN = object()


def _request(server: ParameterServer, incarnation: str, request: Any) -> Task[ServerAnswer | None]:
    if not server.is_meant(incarnation):
        raise CallError("FAILED_PRECONDITION", f"{incarnation} is meant")
    match request:
        case AssignCall(table, checkpoint, wait, parity=order):
            server.protection.is_forgone, server.protection.is_async = order.is_forgone, order.is_async
            done, loading = yield from server.assign(table, checkpoint, wait)
            return Loaded(done, loading.bytes, loading.problem, ranges_of(loading.applied) if done else {})
        case HoldCall(generation, version, barrier, seconds, checkpoint):
            number = number_of(checkpoint) if checkpoint else 0
            return AppliedReport(ranges_of((yield from server.hold(generation, version, barrier, seconds, number))))
        case SettleCall(generation, barrier, seconds, settle, wait):
            asked = [(epoch, first, stop) for epoch, batches in settle.items() for first, stop in batches]
            return AppliedReport(ranges_of((yield from server.settle(generation, barrier, asked, seconds, wait))))
        case SnapshotCall(generation, barrier, _, checkpoint):
            applied, held = yield from server.snapshot(generation, barrier, checkpoint)
            return AppliedReport(ranges_of(applied), held)
        case PrepareCall(move, since, table, _, checkpoint, lost, parity=order):
            on_demand = request.on_demand
            server.protection.is_async = order.is_async
            if not since:
                server.protection.is_forgone = order.is_forgone
            return Prepared((yield from server.prepare(move, since, table, checkpoint, lost, on_demand)))
        case CopyCall(move, wait, _):
            ready, rounds, rebuilt = yield from server.copy(move, wait)
            return CopyReport(
                ready, rounds, rounds, {server: ranges_of(batches) for server, batches in rebuilt.items()}
            )
        case HandOverCall(generation, barrier, seconds, move, wait):
            handed = yield from server.hand_over(generation, barrier, seconds, move, wait)
            return AppliedReport(ranges_of(handed.applied), pulls=tuple(map(_handed, handed.pulls)))
        case SwitchCall(generation, barrier, move, applied, handed_pulls, rebuilt):
            adopted = {lost: _record(batches) for lost, batches in rebuilt.items()}
            pulls = tuple(map(_taken, handed_pulls))
            has = yield from server.switch(generation, barrier, move, _record(applied), pulls, adopted)
            return AppliedReport(ranges_of(has))
        case AbandonCall(move):
            server.mover.abandon(move)
            return None
        case ResumeCall(generation, barrier):
            yield from server.resume_pushes(generation, barrier)
            return None
        case SavedCall(generation, barrier, wait):
            saving = yield from server.saves.saved(generation, barrier, wait)
            files = (CheckpointFile(path=saving.path, bytes=1, crc32=0),) if saving.done else ()
            return Saved(saving.done, saving.written, saving.problem, files)
    raise TypeError(request)


def _handed(pull: OutstandingPull) -> HandedPull:
    session, epoch, batch, batches, is_round = pull.ticket
    return HandedPull(session, epoch, batch, pull.token, pull.unseen, batches, is_round)


def _taken(pull: HandedPull) -> OutstandingPull:
    ticket = Ticket(pull.session, pull.epoch, pull.batch, pull.batches, pull.is_round)
    return OutstandingPull(ticket, pull.token, pull.unseen)


def _record(applied: Applied) -> AppliedBatches:
    return AppliedBatches.from_runs(
        (epoch, [(first, stop, 1) for first, stop in batches]) for epoch, batches in applied.items()
    )


def ranges_of(applied: AppliedBatches) -> dict[int, tuple[tuple[int, int], ...]]:
    """Converts a server's record to the master's type."""
    return {epoch: tuple(found) for epoch in applied.epochs() if (found := applied.ranges(epoch))}
