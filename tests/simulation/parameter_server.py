"""A parameter server: the real core, over rows that are sets of batches."""

from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from tests.simulation.calls import Answer, CallError, Request
from tests.simulation.group import Open
from tests.simulation.mover import DamagedError, SimulatedMover
from tests.simulation.network import BrokenError, End, Stream, UnavailableError
from tests.simulation.protection import SimulatedProtection
from tests.simulation.saves import LoadProgress, SimulatedSaves
from tests.simulation.units import UNITS, Batch, Unit, batches_in, named_by, owner, request, touching
from tests.simulation.world import Process, Signal, Task

from emberscale_api.routing import RoutingTable
from emberscale_api.wire import Kind, Status
from emberscale_jobmaster.reports import ServerReport
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.core import Assigning, Assignment, HandedOver, LaterError, ServerCore, Wait
from emberscale_trainer.server.missing import MissingPart, MissingRows
from emberscale_trainer.server.staleness import OutstandingPull, StalenessBound

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

_Decision = TypeVar("_Decision")


class ParameterServer(Process):
    """One process. Its gRPC server runs the coroutines below `Control`."""

    forgets_sessions = True
    """Whether the model may treat a session as ended once one of its connections has ended."""

    def __init__(self, cluster: "Cluster", name: str, index: int, incarnation: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.index = index
        self.incarnation = incarnation
        self.address = f"ps-{index}"
        self.core = ServerCore()
        self.mover = SimulatedMover(self)
        self.protection = SimulatedProtection(self)
        self.saves = SimulatedSaves(self)
        self.rows: dict[Unit, set[Batch]] = {}
        self.table: RoutingTable | None = None
        self.failing_pushes = 0
        self.ended_sessions: set[int] = set()
        """Sessions that have lost a connection here."""
        self.missing: MissingRows | None = None
        self._told: tuple[int, frozenset[int], int] = (0, frozenset(), 0)
        self._waiting: list[Signal[None]] = []
        self._notifying = False
        self._loading = LoadProgress()
        self._held_until = 0.0
        self.registered = False

    # The data plane

    def accept(self, stream: Stream) -> None:
        """Serves a stream in its own thread."""
        self.spawn(self._serve(stream.server))

    def _serve(self, end: End) -> Task[None]:
        session: int | None = None
        try:
            hello = yield end.receive()
            if not self.is_meant(hello.incarnation):
                end.send(Status.REFRESH)
                return
            session = hello.session
            end.send(Status.OK)
            while True:
                asked = yield end.receive()
                if isinstance(asked, Open):
                    yield from self.protection.serve(end, asked)
                    return
                answer = yield from self._answer(session, asked)
                if answer is not None:
                    end.send(answer)
        except BrokenError:
            pass
        except MemoryError:
            end.close()
        finally:
            if session is not None and self.alive:
                self.core.disconnected(session)
                if self.forgets_sessions:
                    self.ended_sessions.add(session)
                self.notify()

    def is_meant(self, incarnation: str) -> bool:
        """Whether a call is for this process, and not for a predecessor at the same address."""
        return incarnation == self.incarnation

    def _answer(self, session: int, asked: Request) -> Task[Answer | None]:
        header, arrived, core = asked.header, self.world.now, self.core
        if header.kind == Kind.COMPLETE:
            core.complete(session, header)
            self.notify()
            return None
        if header.kind == Kind.PULL:
            counts, keys = request(asked.units)
            status = yield from self._decided(
                asked, lambda: core.pull(session, header, counts, keys, arrived, self.world.now)
            )
            if status is Status.OK:
                self.cluster.model.pulled(self, session, header, asked.units)
        else:
            status = yield from self._decided(asked, lambda: self._push(session, asked, arrived))
            self.notify()
            if status in (Status.OK, Status.REPEATED):
                if self.protection.protector is not None:
                    yield from self.protection.protector.await_pushes()
                if core.trains(header.generation):
                    self.cluster.model.acknowledged(self, header, asked.units)
                else:
                    status = Status.REFRESH
        self.notify()
        if self.world.traced:
            batch = (header.epoch, header.batch)
            self.trace(f"answers {Kind(header.kind).name} {batch} of worker-{header.worker}: {status.name}")
        return Answer(status, core.round_limit(session) if header.kind == Kind.PULL else 1)

    def _push(self, session: int, asked: Request, arrived: float) -> Status | Wait:
        """Decides, records and applies, with nothing in between."""
        decision = self.core.push(session, asked.header, arrived, self.world.now)
        if decision is Status.OK:
            self.apply(session, asked)
        return decision

    def apply(self, session: int, asked: Request) -> None:
        """Applies a push completely or, without room, not at all. Raises MemoryError."""
        self._reserve()
        lacking = self.core.lacking(asked.header)
        self._record(session, asked)
        if lacking is not None:
            chosen = zip(asked.units, lacking.of_request(*request(asked.units)).tolist(), strict=True)
            asked = Request(asked.header, tuple(unit for unit, is_lacking in chosen if is_lacking))
        self._step(session, asked)

    def _reserve(self) -> None:
        if self.failing_pushes:
            self.failing_pushes -= 1
            raise MemoryError

    def _record(self, session: int, asked: Request) -> None:
        self.core.record(session, asked.header, self.world.now)

    def _step(self, session: int, asked: Request) -> None:
        batch = (asked.header.epoch, asked.header.batch)
        self.cluster.model.applying(self, session, asked.header, asked.units)
        batches = batches_in(asked.header)
        for unit in asked.units:
            self.rows.setdefault(unit, set()).update(touching(batches, unit))
            self.mover.dirty.add(unit)
        if self.protection.protector is not None:
            self.protection.protector.pushed(batch, asked.units)

    def _once_there(self, asked: Request, decide: Callable[[], Status | Wait]) -> Callable[[], Status | Wait]:
        """Returns a decision that waits while rows of the request are missing."""
        seen: MissingRows | None = None
        part: MissingPart | None = None

        def decide_once_there() -> Status | Wait:
            nonlocal seen, part
            if self.missing is not seen:
                seen = self.missing
                part = None if seen is None else seen.of_request(named_by(asked.units))
                if part is not None:
                    self.notify()
            return decide() if part is None or part.is_there() else Wait(None)

        return decide_once_there

    def miss(self, missing: MissingRows | None) -> None:
        """Notes the rows that have yet to arrive; None: all are there."""
        self.missing = missing
        self.core.misses_rows = missing is not None
        self.notify()

    def misses(self, unit: Unit) -> bool:
        """Whether a row has yet to arrive."""
        if self.missing is None:
            return False
        return bool(self.missing.still_missing(int(unit[0] == "piece"), np.array([unit[1]], np.int64)).any())

    def await_wanted(self, missing: MissingRows) -> Task[tuple[int, ...] | None]:
        """Waits until requests wait for missing rows; returns their places, or None once none are missing."""
        while self.missing is missing:
            if wanted := missing.take_wanted().tolist():
                return tuple(wanted)
            yield self.changed(None)
        return None

    def drop_rows(self) -> None:
        """Ends the protection of the rows, which are no longer served."""
        self.protection.drop()
        self.miss(None)

    def _decided(self, asked: Request, decide: Callable[[], Status | Wait]) -> Task[Status]:
        decide = self._once_there(asked, decide)
        while True:
            decision = decide()
            if not isinstance(decision, Wait):
                return decision
            yield self.changed(decision.until)

    def changed(self, until: float | None) -> Signal[None]:
        """Returns what is set at the next change, or at this time."""
        signal: Signal[None] = Signal()
        self._waiting.append(signal)
        if until is not None:
            self.world.at(until, signal.set, self)
        return signal

    def notify(self) -> None:
        """Wakes all waiting requests, which are then decided again."""
        if self._waiting and not self._notifying:
            self._notifying = True
            self.after(0.0, self._wake)

    def _wake(self) -> None:
        self._notifying = False
        waiting, self._waiting = self._waiting, []
        for signal in waiting:
            signal.set()

    # Control

    def assign(self, table: RoutingTable, checkpoint: str, wait_seconds: float) -> Task[tuple[bool, LoadProgress]]:
        """Adopts a table of a new generation. Returns whether it is done, and the progress."""
        incarnations = tuple(server.incarnation for server in table.servers)
        wanted = Assignment(table.generation, table.version, checkpoint, incarnations)
        try:
            step = self.core.assign(wanted)
        except LaterError as error:
            raise CallError("ABORTED", str(error)) from error
        if step is Assigning.LOAD:
            self._loading = LoadProgress()
            self.saves.stop()
            self.drop_rows()
            self.mover.stop()
            self.spawn(self._load(wanted, table, checkpoint, self._loading))
        deadline = self.world.now + wait_seconds
        loading = self._loading
        while True:
            if loading.error is not None:
                if isinstance(loading.error, DamagedError):
                    raise CallError("DATA_LOSS", str(loading.error))
                raise CallError("UNAVAILABLE", str(loading.error))
            if loading is not self._loading:
                raise CallError("ABORTED", "another assignment has replaced this one")
            done = self.core.serving and self.core.known == (table.generation, table.version)
            if done:
                self.cluster.model.assigned(self, loading.applied)
            if done or self.world.now >= deadline:
                return done, loading
            yield self.changed(deadline)

    def _load(self, wanted: Assignment, table: RoutingTable, checkpoint: str, loading: LoadProgress) -> Task[None]:
        own = {unit for unit in UNITS if owner(table, unit) == self.index}
        try:
            rows, records = yield from self.saves.load(checkpoint, own, loading)
        except DamagedError as error:
            loading.error = error
            self.core.give_up(wanted)
            self.notify()
            return
        applied = AppliedBatches.merged([record.copy() for record in records])
        bound = self.bound_after(applied) if table.owners[0].index == self.index else None
        if self.core.adopt(wanted, Ownership.of(table, self.index), applied, bound):
            self.rows, self.table = rows, table
            loading.applied = applied
            self.cluster.model.adopted(self, table, checkpoint)
            self.protection.form(table)
        self.notify()

    def bound_after(self, applied: AppliedBatches) -> StalenessBound:
        """Returns the staleness bound over rows that have these batches."""
        spec = self.cluster.spec.training
        return StalenessBound(spec.max_staleness, spec.staleness_warmup, applied.total)

    def hold(
        self, generation: int, version: int, barrier: int, seconds: float, checkpoint: int
    ) -> Task[AppliedBatches]:
        """Takes the first step of a barrier."""
        yield from ()
        now = self.world.now
        applied = self._controlled(lambda: self.core.hold(generation, version, barrier, seconds, now, checkpoint))
        self._held_until = self.world.now + seconds
        self.notify()
        return applied

    def settle(
        self, generation: int, barrier: int, settle: Sequence[tuple[int, int, int]], seconds: float, wait: float
    ) -> Task[AppliedBatches]:
        """Takes the second step of a barrier."""
        self._controlled(lambda: self.core.settle(generation, barrier, settle, seconds, self.world.now))
        self._held_until = self.world.now + seconds
        self.notify()
        deadline = self.world.now + wait
        while True:
            applied = self._controlled(lambda: self.core.settled(generation, barrier, self.world.now))
            if applied is not None:
                return applied
            if self.world.now >= deadline:
                raise CallError("DEADLINE_EXCEEDED", "batches that others have applied did not come")
            yield self.changed(deadline)

    def snapshot(self, generation: int, barrier: int, checkpoint: str) -> Task[tuple[AppliedBatches, float]]:
        """Takes a snapshot within a barrier."""
        yield from ()
        outcome = self._controlled(lambda: self.core.snapshot(generation, barrier, self.world.now))
        if not outcome.repeated:
            self.cluster.model.snapshot_taken(self, self._held_until, checkpoint, barrier)
            self.saves.begin(generation, barrier, checkpoint)
        self.notify()
        return outcome.applied, outcome.held_seconds

    def prepare(
        self, move: int, since: int, table: RoutingTable, checkpoint: str, lost: tuple[int, ...], on_demand: bool
    ) -> Task[bool]:
        """Begins a move."""
        yield self.sleep(self.world.random.uniform(0.0, 0.3))
        try:
            return self._controlled(lambda: self.mover.prepare(move, since, table, checkpoint, lost, on_demand))
        except DamagedError as error:
            raise CallError("DATA_LOSS", str(error)) from error

    def copy(self, move: int, wait: float) -> Task[tuple[bool, int, Mapping[int, AppliedBatches]]]:
        """Returns the progress of a move's copying."""
        try:
            return (yield from self.mover.copy(move, wait))
        except NotHeldError as error:
            raise CallError("FAILED_PRECONDITION", str(error)) from error

    def hand_over(self, generation: int, barrier: int, seconds: float, move: int, wait: float) -> Task[HandedOver]:
        """Sends the last changes within a barrier."""
        self._held_until = self.world.now + seconds
        try:
            return (yield from self.mover.hand_over(generation, barrier, seconds, move, wait))
        except NotHeldError as error:
            raise CallError("FAILED_PRECONDITION", str(error)) from error
        except LaterError as error:
            raise CallError("ABORTED", str(error)) from error
        except TimeoutError as error:
            raise CallError("DEADLINE_EXCEEDED", str(error)) from error

    def switch(
        self,
        generation: int,
        barrier: int,
        move: int,
        settled: AppliedBatches,
        pulls: tuple[OutstandingPull, ...],
        rebuilt: Mapping[int, AppliedBatches],
    ) -> Task[AppliedBatches]:
        """Adopts the table of a move."""
        yield from ()
        return self._controlled(lambda: self.mover.switch(generation, barrier, move, settled, pulls, rebuilt))

    def resume_pushes(self, generation: int, barrier: int) -> Task[None]:
        """Releases a barrier."""
        yield from ()
        self.core.resume(generation, barrier)
        self.saves.resumed(generation, barrier)
        self.notify()

    def _controlled(self, call: Callable[[], _Decision]) -> _Decision:
        try:
            return call()
        except NotHeldError as error:
            raise CallError("FAILED_PRECONDITION", str(error)) from error
        except LaterError as error:
            raise CallError("ABORTED", str(error)) from error

    # Its life

    def live(self) -> Task[None]:
        """Registers, then sends heartbeats."""
        member = self.cluster.member_of(self)
        while True:
            self.mover.look()
            known = self.core.known
            if self.registered:
                ask = methodcaller(
                    "heartbeat",
                    member,
                    {},
                    *known,
                    served=self.core.serving,
                    report=self._report() if self.cluster.scenario.parity else None,
                    numbers=(*self.core.next_numbers, self.core.next_checkpoint),
                )
            else:
                ask = methodcaller("register", member, self.address, *known)
            call = self.cluster.call_master(self, ask)
            try:
                reply = yield call
            except UnavailableError:
                yield self.sleep(0.3)
                continue
            except CallError as error:
                if error.code == "FAILED_PRECONDITION":
                    self.exit(3)
                    return
                self.registered = self.registered and error.code != "NOT_FOUND"
                yield self.sleep(0.3)
                continue
            if self.registered:
                if reply.stop:
                    self.exit(0)
                    return
                self.core.hear_generation(reply.generation)
                self.notify()
                if reply.leases is not None:
                    self._hear_leases(reply.generation, *reply.leases)
            self.registered = True
            yield self.sleep(self.cluster.spec.sharding.heartbeat_interval)

    def _report(self) -> ServerReport:
        return ServerReport(
            {},
            0,
            0,
            0,
            {},
            protected_version=self.protection.version,
            parity_trouble=self.mover.trouble,
            missing_rows=0 if self.missing is None else self.missing.count,
        )

    def _hear_leases(self, generation: int, live: Sequence[int], next_token: int) -> None:
        if generation == self.core.known[0] and (generation, next_token) >= (self._told[0], self._told[2]):
            self._told = (generation, frozenset(live), next_token)
        self.core.hear_leases(generation, live, next_token)
        self.notify()

    def knows_dead(self, token: int) -> bool:
        """Whether the master has said, in this generation, that a lease has ended."""
        generation, live, next_token = self._told
        return generation == self.core.known[0] and token < next_token and token not in live

    def exit(self, code: int) -> None:
        """Ends by itself."""
        self.cluster.exited(self, code)
