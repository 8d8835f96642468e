"""The parameter servers of one routing epoch, as a worker sees them."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberscale_api.routing import RoutingTable
from emberscale_api.wire import Flag, Header, Kind, Status, counts_bytes
from emberscale_trainer.transport import Connection, ConnectionLostError, open_connection
from emberscale_trainer.worker.keys import KeyPlan

_CONNECT_SECONDS = 5.0


class RoutingStaleError(Exception):
    """A server is at another routing epoch."""


class LeaseFencedError(Exception):
    """A newer lease of the shard has pushed already; `token` is that of the lost lease."""

    def __init__(self, token: int) -> None:
        super().__init__(f"lease {token} is superseded")
        self.token = token


class RequestRefusedError(Exception):
    """A server says that a request makes no sense."""


@dataclass(frozen=True)
class BatchName:
    """How the ledger and the servers name a batch under a lease."""

    epoch: int
    number: int
    shard: int
    token: int


@dataclass(frozen=True)
class Pulled:
    """Rows of the plan's keys, float32 [plan.values], and the whole dense vector, float32 [parameters]."""

    rows: NDArray[np.float32]
    dense: NDArray[np.float32]


class ParameterServers:
    """One connection to each server. Not thread-safe: pulls and pushes use two of these, each in its own thread."""

    def __init__(
        self,
        routing: RoutingTable,
        token: str,
        worker: int,
        parameters: int,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Connects; with a context, to servers on other machines over TLS. Raises ConnectionLostError."""
        self._epoch = routing.epoch
        self._worker = worker
        self._parameters = parameters
        self._slices = [routing.dense_slice(server, parameters) for server in range(len(routing.servers))]
        self._traffic = (0, 0)
        self._connections: list[Connection] = []
        try:
            for server in routing.servers:
                self._connections.append(_open(server.data, token, worker, context))
        except ConnectionLostError:
            self.close()
            raise

    def take_traffic(self) -> tuple[int, int]:
        """Bytes received and sent since the last call."""
        received = sum(connection.received_bytes for connection in self._connections)
        sent = sum(connection.sent_bytes for connection in self._connections)
        before, self._traffic = self._traffic, (received, sent)
        return received - before[0], sent - before[1]

    def pull(self, plan: KeyPlan, batch: BatchName, read_only: bool) -> Pulled:
        """Rows and dense vector for a batch; for training it waits until the bound on staleness admits the batch.

        `read_only` waits for nothing. Raises as `_check` does, and ConnectionLostError.
        """
        if not read_only:
            admission = self._connections[0]
            admission.send(self._header(Kind.ADMIT, batch))
            _check([_outcome(admission, admission.receive_header())], batch)
        flags = Flag.DENSE | (Flag.READ_ONLY if read_only else Flag.NONE)
        for connection, counts, keys in zip(self._connections, plan.counts, plan.keys, strict=True):
            self._send(connection, Kind.PULL, flags, batch, counts, [keys])
        pulled = Pulled(
            np.empty(plan.values, dtype=np.float32),
            np.empty(self._parameters, dtype=np.float32),
        )
        statuses = []
        for server, connection in enumerate(self._connections):
            header = connection.receive_header()
            start, stop = self._slices[server]
            rows = pulled.rows[plan.value_edges[server] : plan.value_edges[server + 1]]
            dense = pulled.dense[start:stop]
            if header.kind == Status.OK:
                if header.payload_bytes != rows.nbytes + dense.nbytes:
                    raise RequestRefusedError(f"server {server} answered {header.payload_bytes} bytes")
                connection.receive_payload(rows)
                connection.receive_payload(dense)
            statuses.append(_outcome(connection, header))
        _check(statuses, batch)
        return pulled

    def push(self, plan: KeyPlan, batch: BatchName, gradients: NDArray[np.float32], dense: NDArray[np.float32]) -> None:
        """Returns when every server has applied the batch, now or earlier. Raises as `pull` does."""
        servers = range(len(self._connections))
        for together in (servers[:1], servers[1:]):
            for server in together:
                start, stop = self._slices[server]
                rows = gradients[plan.value_edges[server] : plan.value_edges[server + 1]]
                buffers: list[NDArray[Any]] = [plan.keys[server], rows, dense[start:stop]]
                self._send(self._connections[server], Kind.PUSH, Flag.DENSE, batch, plan.counts[server], buffers)
            answers = [(self._connections[server], self._connections[server].receive_header()) for server in together]
            _check([_outcome(connection, header) for connection, header in answers], batch)
        self._connections[0].send(self._header(Kind.COMPLETE, batch))

    def _send(
        self,
        connection: Connection,
        kind: Kind,
        flags: Flag,
        batch: BatchName,
        counts: NDArray[np.uint32],
        buffers: Sequence[NDArray[Any]],
    ) -> None:
        padding = counts_bytes(len(counts)) - counts.nbytes
        size = counts.nbytes + padding + sum(buffer.nbytes for buffer in buffers)
        connection.send(self._header(kind, batch, flags, len(counts), size), [counts, bytes(padding), *buffers])

    def _header(
        self, kind: Kind, batch: BatchName, flags: Flag = Flag.NONE, tables: int = 0, payload_bytes: int = 0
    ) -> Header:
        return Header(
            kind=kind,
            flags=flags,
            routing_epoch=self._epoch,
            batch=batch.number,
            epoch=batch.epoch,
            tables=tables,
            shard=batch.shard,
            token=batch.token,
            payload_bytes=payload_bytes,
            worker=self._worker,
        )

    def close(self) -> None:
        """Ends all connections, also for a thread that waits on one."""
        for connection in self._connections:
            connection.close()


def _open(address: str, token: str, worker: int, context: ssl.SSLContext | None) -> Connection:
    try:
        connection = open_connection(address, context, _CONNECT_SECONDS)
    except OSError as error:
        raise ConnectionLostError(f"{address}: {error}") from error
    hello = token.encode()
    connection.send(Header(Kind.HELLO, payload_bytes=len(hello), worker=worker), [hello])
    _check([_outcome(connection, connection.receive_header())], None)
    return connection


def _outcome(connection: Connection, header: Header) -> tuple[Status, str]:
    """The status of an answer, and its reason where it is refused."""
    status = Status(header.kind)
    if status is not Status.REFUSED:
        return status, ""
    reason = np.empty(header.payload_bytes, dtype=np.uint8)
    connection.receive_payload(reason)
    return status, reason.tobytes().decode(errors="replace")


def _check(outcomes: Sequence[tuple[Status, str]], batch: BatchName | None) -> None:
    """Raises RequestRefusedError, RoutingStaleError or LeaseFencedError for the worst of the outcomes."""
    for status, reason in outcomes:
        if status is Status.REFUSED:
            raise RequestRefusedError(reason)
    statuses = {status for status, _ in outcomes}
    if Status.REFRESH in statuses:
        raise RoutingStaleError
    if Status.FENCED in statuses and batch is not None:
        raise LeaseFencedError(batch.token)
