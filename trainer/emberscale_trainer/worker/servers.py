"""The parameter servers as one thread of a worker sees them: carries out exchanges over connections."""

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from emberscale_api.routing import PsAddress, RoutingTable
from emberscale_api.wire import MAX_HELLO_BYTES, Flag, Header, Hello, Kind, Status, WireError, counts_bytes
from emberscale_trainer.data.records import IdLists
from emberscale_trainer.transport import Connection, ConnectionLostError, open_connection
from emberscale_trainer.worker.core import (
    Answered,
    End,
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
from emberscale_trainer.worker.keys import KeyPlan, KeyPlanner, RequestTooLargeError
from emberscale_trainer.worker.routes import Routes
from emberscale_trainer.worker.rows import EmbeddingLayout

_CONNECT_SECONDS = 5.0
"""For each step until a server has answered HELLO: the kernel takes connections for one that is stopped, too."""


class HistoryChangedError(Exception):
    """The job is at another generation, or a server answers REFRESH: nothing under way can be completed."""


class LeaseFencedError(Exception):
    """The lease has ended; `token` is its own."""

    def __init__(self, token: int) -> None:
        super().__init__(f"lease {token} has ended")
        self.token = token


class PullLaterError(Exception):
    """The staleness bound does not admit a round before the previous round is pushed."""


class RoundSplitError(Exception):
    """A server has applied only some batches of a round; `token` is that of the lease."""

    def __init__(self, token: int) -> None:
        super().__init__(f"a part of a round under lease {token} is applied already")
        self.token = token


class RoundTooLargeError(Exception):
    """A round no longer fits into a frame, now that fewer servers own its rows."""


class RequestRefusedError(Exception):
    """A server refused a request as invalid, or sent an invalid answer."""


@dataclass(frozen=True)
class BatchName:
    """The name of a batch, or of the `batches` of a round, under a lease, for the ledger and the servers."""

    epoch: int
    number: int
    shard: int
    token: int
    batches: int = 1
    is_round: bool = False


@dataclass(frozen=True)
class Pulled:
    """Rows of the plan's keys, float32 [plan.values], and the flat dense vector, float32 [parameters or more].

    Those of a round have their state behind the weights of each row and of each dense piece. `round_limit` is how many
    batches the next round may have.
    """

    rows: NDArray[np.float32]
    dense: NDArray[np.float32]
    round_limit: int = 1


@dataclass(frozen=True)
class Identity:
    """A worker's identity: the job's token, its own index, and the session of its pipeline.

    With a `context`, connections to other machines go over TLS.
    """

    token: str
    worker: int
    session: int
    context: ssl.SSLContext | None = None


MakePlanner = Callable[[RoutingTable, bool], KeyPlanner]
"""Makes a planner for a table; with True, one for rounds."""


class Planners:
    """The planners for the newest routing table, for one thread: one for batches, one for rounds."""

    def __init__(self, make_planner: MakePlanner) -> None:
        self._make_planner = make_planner
        self._routing: RoutingTable | None = None
        self._planners: dict[bool, KeyPlanner] = {}

    def of(self, routing: RoutingTable, in_rounds: bool) -> KeyPlanner:
        """The planner of batches or of rounds."""
        if routing is not self._routing:
            self._routing, self._planners = routing, {}
        if in_rounds not in self._planners:
            self._planners[in_rounds] = self._make_planner(routing, in_rounds)
        return self._planners[in_rounds]


class Lookups(Protocol):
    """The ids that a batch or a round looks up."""

    @property
    def ids(self) -> NDArray[np.int64]:
        """One id for each record and column of one id: int64 [records, columns]."""

    @property
    def lists(self) -> Sequence[IdLists]:
        """The ids of each column of lists."""


class ParameterServers:
    """One connection to each server. Not thread-safe: pulls and pushes use two of these, each in its own thread."""

    def __init__(
        self,
        routes: Routes,
        identity: Identity,
        make_planner: MakePlanner,
        layout: EmbeddingLayout,
    ) -> None:
        """Connects to the servers of the newest table. Raises ConnectionLostError and RequestRefusedError."""
        self._routes = routes
        self._identity = identity
        self._planners = Planners(make_planner)
        self._layout = layout
        self._connections: dict[tuple[int, str], Connection] = {}  # by index and incarnation
        self._traffic = _Traffic()
        self._routing = routes.table
        self._closed = False
        self._connect()

    def take_traffic(self) -> tuple[int, int]:
        """Bytes received and sent since the last call."""
        traffic, self._traffic = self._traffic, _Traffic()
        for connection in self._connections.values():
            traffic.take(connection)
        return traffic.received, traffic.sent

    def pull(self, plan: KeyPlan, lookups: Lookups, name: BatchName, read_only: bool) -> tuple[KeyPlan, Pulled]:
        """Rows and dense vector for a batch, and the plan that laid them out, which is newer if owners have changed.

        Waits until the bound on staleness admits the batch, unless it is `read_only`. Raises HistoryChangedError,
        LeaseFencedError, RequestRefusedError, ConnectionLostError, RoundTooLargeError, and PullLaterError for a round,
        after which the same pull may be tried again.
        """
        plan = self._current(plan, lookups, name)
        rows, dense = np.empty(plan.values, np.float32), np.empty(plan.dense_values, np.float32)
        purpose = Purpose.EVALUATE if read_only else Purpose.TRAIN
        request = _Request(purpose, plan, lookups, name, self._identity.worker, rows, dense)
        self._run(request)
        return request.plan, Pulled(request.rows, request.dense, request.round_limit)

    def push(
        self,
        plan: KeyPlan,
        lookups: Lookups,
        name: BatchName,
        rows: NDArray[np.float32],
        dense: NDArray[np.float32],
    ) -> None:
        """Returns when every server has applied the batch, now or earlier. Raises as `pull` does, and RoundSplitError.

        `rows` float32 [plan.values] are laid out by the plan, `dense` float32 [all pieces] by pieces: gradients, or the
        changes of a round.
        """
        request = _Request(Purpose.PUSH, plan, lookups, name, self._identity.worker, rows, dense)
        self._lay_out(request, self._current(plan, lookups, name))
        self._run(request)

    def _run(self, request: "_Request") -> None:
        exchange = conversation(request.purpose, _planned(request.plan))
        event: Event | None = None
        while True:
            try:
                effect = exchange.send(event)
            except StopIteration as stopped:
                _check(stopped.value, request.name)
                return
            try:
                event = self._carried_out(effect, request)
            except ConnectionLostError as error:
                event = Lost(str(error))

    def _carried_out(self, effect: Send | Replan | Receive, request: "_Request") -> Event | None:
        match effect:
            case Send(server, kind):
                request.send(self._connection(server), server, kind)
                return None
            case Receive(server, kind):
                return self._receive(server, kind, request)
            case Replan(version):
                return self._replan(version, request)

    def _receive(self, server: int, kind: Kind, request: "_Request") -> Event:
        connection = self._connection(server)
        try:
            header = connection.receive_header()
            status = Status(header.kind)
        except (WireError, ValueError) as error:
            return Answered(server, Status.REFUSED, f"server {server}: {error}")
        if status is not Status.OK or kind is not Kind.PULL:
            return Answered(server, status, _text(connection, header))
        if not request.receive(connection, server, header):
            return Answered(
                server, Status.REFUSED, f"server {server} answered a pull with {header.payload_bytes} bytes"
            )
        return Answered(server, status)

    def _replan(self, version: int, request: "_Request") -> Event:
        table = self._routes.newer(version)
        if table is None:
            return HistoryChanged()
        self._adopt(table)
        self._lay_out(request, self._plan(request.lookups, request.name))
        return _planned(request.plan)

    def _lay_out(self, request: "_Request", plan: KeyPlan) -> None:
        """Gives a request another plan of the same keys; values that it pushes are laid out again."""
        if request.purpose is Purpose.PUSH and plan is not request.plan:
            request.rows = self._layout.relaid(request.rows, request.plan, plan)
        request.plan = plan

    def _current(self, plan: KeyPlan, lookups: Lookups, name: BatchName) -> KeyPlan:
        """Returns the plan, or a new plan if this worker has adopted a newer table."""
        if plan.routing.version > self._routing.version:
            self._adopt(plan.routing)
        return plan if plan.routing.version == self._routing.version else self._plan(lookups, name)

    def _plan(self, lookups: Lookups, name: BatchName) -> KeyPlan:
        try:
            return self._planners.of(self._routing, name.is_round).plan(lookups.ids, lookups.lists)
        except RequestTooLargeError as error:
            if name.is_round:
                raise RoundTooLargeError(str(error)) from error
            raise

    def _adopt(self, table: RoutingTable) -> None:
        self._routing = table
        self._connect()

    def _connect(self) -> None:
        """Opens missing connections to the servers of the table in force, and closes those to other servers."""
        wanted = {(server.index, server.incarnation): server for server in self._routing.owners}
        for one in self._connections.keys() - wanted.keys():
            gone = self._connections.pop(one)
            self._traffic.take(gone)
            gone.close()
        try:
            for one, server in wanted.items():
                if one not in self._connections:
                    self._connections[one] = _open(server, self._identity)
        except BaseException:  # nobody else closes those of one that does not come to be
            self.close()
            raise
        if self._closed:
            self.close()  # a concurrent `close` may have missed the new ones

    def _connection(self, server: int) -> Connection:
        return self._connections[server, self._routing.servers[server].incarnation]

    def close(self) -> None:
        """Ends all connections, also for a thread that waits on one."""
        self._closed = True
        for connection in list(self._connections.values()):
            connection.close()


@dataclass
class _Traffic:
    """Bytes that connections have received and sent."""

    received: int = 0
    sent: int = 0

    def take(self, connection: Connection) -> None:
        """Adds the counts of a connection, and resets them."""
        self.received += connection.received_bytes
        self.sent += connection.sent_bytes
        connection.received_bytes = connection.sent_bytes = 0


@dataclass
class _Request:
    """The frames of one exchange. A pull fills `rows` float32 [plan.values] and `dense`; a push sends them.

    `round_limit` is how many batches the next round may have, once a pull is answered.
    """

    purpose: Purpose
    plan: KeyPlan
    lookups: Lookups
    name: BatchName
    worker: int
    rows: NDArray[np.float32]
    dense: NDArray[np.float32]
    round_limit: int = 1

    def receive(self, connection: Connection, server: int, header: Header) -> bool:
        """Takes the payload of a pull's answer; False for one of the wrong size."""
        targets = self._values(server)
        if header.payload_bytes != sum(target.nbytes for target in targets):
            return False
        connection.receive_payload(*targets)
        if server == self.plan.routing.owners[0].index:
            self.round_limit = header.batches
        return True

    def send(self, connection: Connection, server: int, kind: Kind) -> None:
        """Sends the request of a kind. Raises ConnectionLostError."""
        if kind not in (Kind.PULL, Kind.PUSH):
            connection.send(self._header(kind, 0, 0))
            return
        counts = self.plan.counts[server]
        padding = counts_bytes(len(counts)) - counts.nbytes
        buffers: list[NDArray[Any]] = [self.plan.keys[server], *(self._values(server) if kind is Kind.PUSH else ())]
        size = counts.nbytes + padding + sum(buffer.nbytes for buffer in buffers)
        connection.send(self._header(kind, len(counts), size), [counts, bytes(padding), *buffers])

    def _values(self, server: int) -> list[NDArray[np.float32]]:
        """The rows and the dense pieces of a server, in the order of the wire."""
        dense = [self.dense[start:stop] for start, stop in self.plan.dense_runs[server]]
        return [self.rows[self.plan.values_of(server)], *dense]

    def _header(self, kind: Kind, tables: int, payload_bytes: int) -> Header:
        flags = Flag.READ_ONLY if self.purpose is Purpose.EVALUATE else Flag.NONE
        return Header(
            kind=kind,
            flags=flags | Flag.ROUND if self.name.is_round else flags,
            generation=self.plan.routing.generation,
            version=self.plan.routing.version,
            epoch=self.name.epoch,
            tables=tables,
            batch=self.name.number,
            shard=self.name.shard,
            token=self.name.token,
            payload_bytes=payload_bytes,
            worker=self.worker,
            batches=self.name.batches,
        )


def _planned(plan: KeyPlan) -> Planned:
    return Planned(plan.routing.version, tuple(server.index for server in plan.routing.owners))


def _open(server: PsAddress, identity: Identity) -> Connection:
    """Connects and says HELLO. Raises ConnectionLostError and RequestRefusedError."""
    try:
        connection = open_connection(server.data, identity.context, _CONNECT_SECONDS)
    except OSError as error:
        raise ConnectionLostError(f"{server.data}: {error}") from error
    try:
        hello = Hello(identity.session, server.incarnation, identity.token).pack()
        connection.send(Header(Kind.HELLO, payload_bytes=len(hello), worker=identity.worker), [hello])
        answer, reason = connection.receive_first(MAX_HELLO_BYTES, _CONNECT_SECONDS)
        if answer.kind == Status.REFRESH:
            raise ConnectionLostError("another process has this address now")
        if answer.kind != Status.OK:
            raise RequestRefusedError(reason.decode(errors="replace"))
        connection.trust()
    except (ConnectionLostError, RequestRefusedError, WireError) as error:
        connection.close()
        kind = ConnectionLostError if isinstance(error, ConnectionLostError) else RequestRefusedError
        raise kind(f"{server.data}: {error}") from error
    return connection


def _text(connection: Connection, header: Header) -> str:
    """The payload of an answer as text: why a request is refused."""
    if not header.payload_bytes:
        return ""
    reason = np.empty(header.payload_bytes, dtype=np.uint8)
    connection.receive_payload(reason)
    return reason.tobytes().decode(errors="replace")


def _check(end: End, name: BatchName) -> None:
    """Raises the error of an exchange that did not end well."""
    match end.how:
        case Ending.STALE:
            raise HistoryChangedError("the servers hold another generation, or do not know the pull of this batch")
        case Ending.FENCED:
            raise LeaseFencedError(name.token)
        case Ending.REFUSED:
            raise RequestRefusedError(end.reason)
        case Ending.LATER:
            raise PullLaterError
        case Ending.PARTIAL:
            raise RoundSplitError(name.token)
        case Ending.LOST:
            raise ConnectionLostError(end.reason)
