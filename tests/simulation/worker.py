"""A worker: the real exchange core and lease book, in a pipeline of coroutines in place of the real one's threads."""

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tests.simulation.calls import CallError, Request
from tests.simulation.network import BrokenError, End, Hello, UnavailableError
from tests.simulation.rounds import ClosedError, Turns, figures, lengths_of
from tests.simulation.units import Batch, Unit, changed, owner
from tests.simulation.world import Condition, Process, Signal, Task

from emberscale_api.routing import RoutingTable
from emberscale_api.wire import Flag, Header, Kind, Status
from emberscale_trainer.worker.core import (
    Answered,
    Ending,
    Event,
    HistoryChanged,
    Lost,
    Planned,
    Purpose,
    Receive,
    Replan,
    Send,
    conversation,
)
from emberscale_trainer.worker.leases import FinishedTask, LeaseBook, ShardLease
from emberscale_trainer.worker.messages import lease_of

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

_Item = TypeVar("_Item")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two pipelines, as in `emberscale_trainer.worker.runtime`."""


class StopError(Exception):
    """The pipeline ends; `drops` says which leases end with it."""


class StaleError(StopError):
    """The generation has changed."""


class FencedError(StopError):
    """A lease has ended."""

    def __init__(self, token: int) -> None:
        super().__init__(f"lease {token} has ended")
        self.token = token


class SplitError(StopError):
    """A part of a round is already applied."""

    def __init__(self, token: int) -> None:
        super().__init__(f"a part of a round under lease {token} is applied")
        self.token = token


class PullLaterError(Exception):
    """The round's pull has to be repeated once the previous round is pushed."""


class OverError(Exception):
    """The job has ended."""


class Queue(Generic[_Item]):
    """A bounded queue between two stages."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[_Item] = deque()
        self._changed = Condition()
        self._closed = False

    def put(self, item: _Item) -> Task[None]:
        """Waits for room. Raises StopError once closed."""
        while not self._closed and len(self._items) >= self._capacity:
            yield self._changed
        if self._closed:
            raise StopError("closed")
        self._items.append(item)
        self._changed.notify()

    def get(self) -> Task[_Item]:
        """Waits for an item. Raises StopError once closed."""
        while not self._closed and not self._items:
            yield self._changed
        if self._closed:
            raise StopError("closed")
        item = self._items.popleft()
        self._changed.notify()
        return item

    def close(self) -> None:
        """Closes both sides."""
        self._closed = True
        self._changed.notify()


@dataclass
class Work:
    """A batch or a round under way. `table` is the routing table of its plan.

    `pushed`: the number of rounds pushed before this one was pulled. `room`: the batches that the next round may have,
    known after the pull.
    """

    lease: ShardLease
    batches: tuple[Batch, ...]
    stop: int
    table: RoutingTable
    is_round: bool = False
    pushed: int = 0
    round_limit: int = 1


class Worker(Process):
    """One process."""

    def __init__(self, cluster: "Cluster", name: str, index: int, incarnation: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.index = index
        self.incarnation = incarnation
        self.address = f"worker-{index}"
        self.leases = LeaseBook()
        self.generation = 0
        self.pushed = 0
        self.pipeline: Pipeline | None = None
        self.stopping = False
        self.registered = False
        self._sequence = 0
        timeout = cluster.spec.sharding.lease_timeout
        self.lengths = lengths_of(
            cluster.scenario.rounds, timeout, cluster.scenario.compute_seconds, cluster.world.random
        )

    def live(self) -> Task[None]:
        """Registers, then runs one pipeline after another until the job is over."""
        member = self.cluster.member_of(self)
        try:
            yield from self.call(lambda master: master.register(member, self.address))
            self.registered = True
            self.spawn(self._beat())
            task = yield from self._next_task()
            self.leases.hold(task)
            pause = _FIRST_PAUSE
            while True:
                before = self.pushed
                try:
                    yield from self._run_pipeline()
                except StaleError:
                    pass
                except FencedError as error:
                    self.leases.revoke({error.token})
                except SplitError as error:
                    self.trace(f"pipeline ends: {error}")
                    self.lengths.split(error.token)
                except StopError as error:
                    self.trace(f"pipeline ends: {error}")
                pause = _FIRST_PAUSE if self.pushed > before else min(_LONGEST_PAUSE, 2 * pause)
                yield self.sleep(pause)
        except OverError:
            self.cluster.exited(self, 0)
        except CallError as error:
            self.cluster.exited(self, 3 if error.code == "FAILED_PRECONDITION" else 1)

    def call(self, ask: Callable[[Any], Task[Any]], wait: float = 0.0) -> Task[Any]:
        """Calls the master until it answers. Raises OverError and CallError."""
        pause = 0.05
        while not self.stopping:
            try:
                return (yield self.cluster.call_master(self, ask, wait))
            except UnavailableError:
                pass
            except CallError as error:
                if error.code == "NOT_FOUND":
                    member = self.cluster.member_of(self)
                    with contextlib.suppress(UnavailableError, CallError):
                        yield self.cluster.call_master(self, methodcaller("register", member, self.name))
                elif error.code != "UNAVAILABLE":
                    raise
            yield self.sleep(pause * self.world.random.uniform(0.5, 1.5))
            pause = min(1.0, pause * 2)
        raise OverError

    def _beat(self) -> Task[None]:
        member = self.cluster.member_of(self)
        while not self.stopping:
            progress = self.leases.progress()
            self._sequence += 1
            try:
                reply = yield from self.call(methodcaller("heartbeat", member, progress, 0, 0, self._sequence))
            except (OverError, CallError):
                self.stopping = True
                if self.pipeline is not None:
                    self.pipeline.abort(OverError())
                return
            lost = self.leases.revoke(set(reply.revoked))
            if reply.stop:
                self.stopping = True
                if self.pipeline is not None:
                    self.pipeline.abort(OverError())
                return
            if self.pipeline is not None:
                if reply.generation > self.generation:
                    self.pipeline.abort(StaleError("heartbeat"))
                elif lost:
                    self.pipeline.abort(StopError("leases revoked"))
            yield self.sleep(self.cluster.spec.sharding.heartbeat_interval)

    def _next_task(self, unwanted: Callable[[], bool] = lambda: False) -> Task[ShardLease]:
        """Returns the next lease, and prepares data on the way. Raises StopError once it is `unwanted`."""
        member = self.cluster.member_of(self)
        while True:
            if self.stopping:
                raise OverError
            if unwanted():
                raise StopError("closed")
            busy = bool(self.leases.held())
            finished = self.leases.take_finished()
            wait = 0.0 if busy else 5.0
            task, stop = yield from self.call(methodcaller("acquire_task", member, finished, wait), wait)
            if stop:
                raise OverError
            if task is None:
                if busy:
                    yield self.sleep(0.7)
                continue
            if (lease := lease_of(task)) is not None:
                return lease
            yield self.sleep(self.world.random.uniform(0.05, 0.3))
            self.leases.finish(FinishedTask(task.token))

    def next_task(self, unwanted: Callable[[], bool]) -> Task[ShardLease]:
        """Returns the next lease, held in the lease book."""
        task = yield from self._next_task(unwanted)
        self.leases.hold(task)
        return task

    def routing(self, newer_than: int, closed: Callable[[], bool]) -> Task[RoutingTable]:
        """Returns a table newer than a version that every server has adopted. Raises StopError once `closed`."""
        member = self.cluster.member_of(self)
        while not closed():
            table, ready = yield from self.call(lambda master: master.get_routing(member, newer_than, 2.5), 2.5)
            if ready and table.version > newer_than:
                return table  # type: ignore[no-any-return]  # a call may return anything
        raise StopError("closed")

    def _run_pipeline(self) -> Task[None]:
        table = yield from self.routing(0, lambda: False)
        if table.generation != self.generation:
            if self.generation:
                self.leases.drop_all()
            self.generation = table.generation
        self.trace(f"pipeline at generation {table.generation}")
        self.pipeline = Pipeline(self, table)
        try:
            yield from self.pipeline.run()
        finally:
            self.pipeline = None


class Pipeline:
    """Reads, pulls, computes and pushes within one generation."""

    def __init__(self, worker: Worker, table: RoutingTable) -> None:
        self.worker = worker
        self.table = table
        self.session = worker.world.random.getrandbits(64)
        training = worker.cluster.spec.training
        self._planned: Queue[Work] = Queue(training.prefetch_batches)
        self._unpushed: Queue[None] = Queue(training.pull_ahead + 1)
        self._ready: Queue[Work] = Queue(1)
        self._computed: Queue[Work] = Queue(1)
        self._turns = Turns()
        self._failure: Exception | None = None
        self._running = 0
        self._ended: Signal[None] = Signal()
        self._servers = (Servers(self), Servers(self))

    @property
    def closed(self) -> bool:
        """Whether it is torn down."""
        return self._failure is not None

    def abort(self, reason: Exception) -> None:
        """Tears it down."""
        if self._failure is None:
            self._failure = reason
            for queue in (self._planned, self._unpushed, self._ready, self._computed):
                queue.close()
            self._turns.close()
            for servers in self._servers:
                servers.close()

    def run(self) -> Task[None]:
        """Works until a stage stops, and raises the reason."""
        for stage in (self._read(), self._pull(), self._compute(), self._push()):
            self._running += 1
            self.worker.spawn(self._stage(stage))
        yield self._ended
        if self._failure is not None:
            raise self._failure

    def _stage(self, work: Task[None]) -> Task[None]:
        try:
            yield from work
        except (StopError, OverError, CallError, ClosedError) as error:
            self.abort(error)
        self._running -= 1
        if not self._running:
            self._ended.set()

    def _read(self) -> Task[None]:
        worker = self.worker
        resumed = [replace(lease, start=committed) for lease, committed in worker.leases.held()]
        while True:
            lease = resumed.pop(0) if resumed else (yield from worker.next_task(lambda: self.closed))
            size = worker.cluster.spec.training.batch_size
            in_rounds = lease.trains and worker.lengths.begin_lease(lease.token)
            start = lease.start
            while start < lease.stop:
                yield worker.sleep(worker.world.random.uniform(0.001, 0.01))
                first, length = start // size, worker.lengths.length if in_rounds else 1
                stop = min((first + length - first % length) * size, lease.stop)
                batches = tuple((lease.epoch, number) for number in range(first, -(-stop // size)))
                yield from self._planned.put(Work(lease, batches, stop, self.table, in_rounds))
                start = stop

    def _pull(self) -> Task[None]:
        yield from self._servers[0].connect(self.table)
        in_rounds = False
        while True:
            work = yield from self._planned.get()
            if work.lease.trains and work.is_round is not in_rounds:
                in_rounds = work.is_round
                yield from self._await_pushes()
            yield from self._unpushed.put(None)
            purpose = Purpose.TRAIN if work.lease.trains else Purpose.EVALUATE
            if work.is_round:
                yield from self._pull_round(work)
            else:
                yield from self._servers[0].exchange(purpose, work)
            self.worker.lengths.limit(work.round_limit)
            yield from self._ready.put(work)

    def _pull_round(self, work: Work) -> Task[None]:
        while True:
            work.pushed = yield from self._turns.begin_pull()
            try:
                yield from self._servers[0].exchange(Purpose.TRAIN, work)
                self._turns.pulled += 1
                return
            except PullLaterError:
                pass
            finally:
                self._turns.give()
            yield from self._turns.await_push(work.pushed)

    def _await_pushes(self) -> Task[None]:
        most = self.worker.cluster.spec.training.pull_ahead + 1
        for _ in range(most):
            yield from self._unpushed.put(None)
        for _ in range(most):
            yield from self._unpushed.get()

    def _compute(self) -> Task[None]:
        worker = self.worker
        while True:
            work = yield from self._ready.get()
            if work.is_round:
                unseen = self._turns.unseen(work.pushed)
                worker.cluster.model.staleness.begins_round(worker, self.session, work.batches, unseen)
            seconds = len(work.batches) * worker.cluster.compute_seconds * worker.world.random.uniform(0.5, 1.5)
            yield worker.sleep(seconds)
            if work.is_round:
                self._turns.trained(work.batches)
                worker.lengths.trained(figures(len(work.batches), seconds))
            if not work.lease.trains:
                if work.stop == work.lease.stop:
                    worker.leases.finish(FinishedTask(work.lease.token))
                    worker.cluster.model.evaluated(worker, work.lease)
                yield from self._unpushed.get()
                continue
            yield from self._computed.put(work)

    def _push(self) -> Task[None]:
        worker = self.worker
        yield from self._servers[1].connect(self.table)
        while True:
            work = yield from self._computed.get()
            if work.is_round:
                yield from self._turns.take()
                try:
                    yield from self._servers[1].exchange(Purpose.PUSH, work)
                    self._turns.pushed += 1
                finally:
                    self._turns.give()
            else:
                yield from self._servers[1].exchange(Purpose.PUSH, work)
            for batch in work.batches:
                worker.cluster.model.committed(worker, batch, work.table)
            worker.pushed += len(work.batches)
            yield from self._unpushed.get()
            worker.leases.commit(work.lease.token, work.stop)

    def newer(self, version: int) -> Task[RoutingTable | None]:
        """Returns a newer table of this generation; None if the generation has changed."""
        if self.table.version <= version:
            table = yield from self.worker.routing(version, lambda: self.closed)
            if table.generation != self.table.generation:
                return None
            self.table = table
        return self.table


class Servers:
    """One stream to each server, for one stage."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._worker = pipeline.worker
        self._ends: dict[str, End] = {}
        self._table = pipeline.table
        self._closed = False

    def close(self) -> None:
        """Ends all streams."""
        self._closed = True
        for end in self._ends.values():
            end.close()

    def connect(self, table: RoutingTable) -> Task[None]:
        """Opens missing streams to the table's servers, and closes the others. Raises StopError."""
        self._table = table
        wanted = {server.incarnation: server for server in table.owners}
        for gone in sorted(self._ends.keys() - wanted.keys()):
            self._ends.pop(gone).close()
        for incarnation, server in wanted.items():
            if incarnation in self._ends:
                continue
            found = self._worker.cluster.server_at(server.data)
            stream = None
            if found is not None:
                stream = self._worker.cluster.network.connect(self._worker, found, found.accept)
            if stream is None:
                yield self._worker.sleep(0.01)
                raise StopError(f"{server.data} is not there")
            end = stream.client
            self._ends[incarnation] = end
            if self._closed:
                self.close()
            try:
                end.send(Hello(self._pipeline.session, incarnation))
                if (yield end.receive()) is not Status.OK:
                    raise StopError(f"another server is at {server.data}")
            except BrokenError as error:
                raise StopError(str(error)) from error

    def exchange(self, purpose: Purpose, work: Work) -> Task[None]:
        """Pulls or pushes a batch. Raises StopError."""
        if work.table.version > self._table.version:
            yield from self.connect(work.table)
        work.table = self._table
        exchange = conversation(purpose, self._planned())
        event: Event | None = None
        while True:
            try:
                effect = exchange.send(event)
            except StopIteration as stopped:
                self._check(stopped.value.how, stopped.value.reason, work)
                return
            try:
                match effect:
                    case Receive(server):
                        answer = yield self._end(server).receive()
                        if server == self._table.owners[0].index:
                            work.round_limit = answer.round_limit
                        event = Answered(server, answer.status)
                    case Send(server, kind):
                        self._end(server).send(self._request(server, kind, purpose, work))
                        event = None
                    case Replan(version):
                        table = yield from self._pipeline.newer(version)
                        if table is None:
                            event = HistoryChanged()
                        else:
                            yield from self.connect(table)
                            work.table = table
                            event = self._planned()
            except BrokenError as error:
                event = Lost(str(error))

    def _check(self, how: Ending, reason: str, work: Work) -> None:
        if how is Ending.STALE:
            raise StaleError("stale")
        if how is Ending.FENCED:
            raise FencedError(work.lease.token)
        if how is Ending.LATER:
            raise PullLaterError
        if how is Ending.PARTIAL:
            raise SplitError(work.lease.token)
        if how is not Ending.DONE:
            raise StopError(reason)

    def _planned(self) -> Planned:
        return Planned(self._table.version, tuple(server.index for server in self._table.owners))

    def _end(self, server: int) -> End:
        return self._ends[self._table.servers[server].incarnation]

    def _request(self, server: int, kind: Kind, purpose: Purpose, work: Work) -> Request:
        units: tuple[Unit, ...] = ()
        if kind in (Kind.PULL, Kind.PUSH):
            units = tuple(unit for unit in changed(work.batches) if owner(self._table, unit) == server)
        epoch, number = work.batches[0]
        flags = (Flag.READ_ONLY if purpose is Purpose.EVALUATE else 0) + (Flag.ROUND if work.is_round else 0)
        return Request(
            Header(
                kind=kind,
                flags=flags,
                generation=self._table.generation,
                version=self._table.version,
                epoch=epoch,
                batch=number,
                shard=work.lease.shard,
                token=work.lease.token,
                worker=self._worker.index,
                batches=len(work.batches),
            ),
            units,
        )
