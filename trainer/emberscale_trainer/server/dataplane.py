"""The data plane of a parameter server: one thread per connection, which answers requests in order."""

import contextlib
import errno
import socket
import ssl
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator

import numpy as np
import structlog
from numpy.typing import NDArray

from emberscale_api.errors import problem_of
from emberscale_api.rpc.token import tokens_match
from emberscale_api.wire import MAX_HELLO_BYTES, MAX_PAYLOAD_BYTES, Header, Hello, Kind, Status, WireError, counts_bytes
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.server.waiting import SessionEndedError
from emberscale_trainer.stream import StreamLostError, StreamReceivers
from emberscale_trainer.stream.receiver import refuse_all
from emberscale_trainer.transport import Connection, ConnectionLostError, accept_connection

_log = structlog.get_logger()

_STRANGER_SECONDS = 5.0
"""The time limit for the TLS handshake and HELLO together."""

_MOST_STRANGERS = 64
"""The most peers that have not shown the token; one more displaces the one that connected first."""

_MOST_HOSTS = 256
"""The most hosts whose peers are counted by themselves when they are turned away; all others count as one."""

_ACCEPT_PAUSE_SECONDS = 0.1


class DataPlane:
    """Accepts connections on a listening socket and serves `state` to peers that know the token.

    A peer that expects an `incarnation` other than this process's is refused. With a context, TCP
    connections must use TLS. `streams` receives the rows that other servers send.
    """

    def __init__(
        self,
        listener: socket.socket,
        state: ServerState,
        token: str,
        incarnation: str,
        context: ssl.SSLContext | None = None,
        streams: StreamReceivers | None = None,
    ) -> None:
        self._listener = listener
        self._state = state
        self._token = token
        self._incarnation = incarnation
        self._context = context
        self._streams = StreamReceivers(refuse_all) if streams is None else streams
        self._strangers = _Strangers(_MOST_STRANGERS)
        self._turned_away = _TurnedAway(_MOST_HOSTS)
        self._pause = threading.Event()

    def start(self) -> None:
        """Starts to accept connections, in a daemon thread."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                stream, address = self._listener.accept()
            except OSError as error:
                if self._listener.fileno() < 0 or error.errno in (errno.EBADF, errno.EINVAL):
                    return  # the listener is closed: the server is going down
                _log.warning("accept_failed", problem=str(error))
                self._pause.wait(_ACCEPT_PAUSE_SECONDS)
                continue
            try:
                host = address[0] if isinstance(address, tuple) else "localhost"  # a Unix socket has no address
                threading.Thread(target=self._serve, args=(stream, host), name="connection", daemon=True).start()
            except RuntimeError as error:  # no more threads
                _log.warning("accept_failed", problem=str(error))
                stream.close()
                self._pause.wait(_ACCEPT_PAUSE_SECONDS)

    def _serve(self, stream: socket.socket, host: str) -> None:
        try:
            connection = accept_connection(stream, self._context)
        except OSError as error:
            self._log_refusal(host, error)
            stream.close()
            return
        try:
            with self._strangers.among(connection):
                first, payload = connection.receive_first(MAX_HELLO_BYTES, _STRANGER_SECONDS)
                if first.kind != Kind.HELLO:
                    raise WireError("the first frame must be HELLO")
                hello = Hello.unpack(payload)
                if not tokens_match(hello.token, self._token):
                    raise WireError("HELLO has another token than the job's")
            if hello.incarnation != self._incarnation:
                _log.info("another_incarnation_is_meant", incarnation=hello.incarnation)
                connection.send(Header(Status.REFRESH))
                return
            connection.trust()
            _Session(connection, self._state, hello.session, first.worker, self._streams).run()
        except (ConnectionLostError, OSError) as error:
            if attempts := self._turned_away.to_tell(host, "no_hello"):
                _log.info("no_hello", host=host, problem=str(error), attempts=attempts)
        except WireError as error:
            self._log_refusal(host, error)
            _refuse(connection, str(error))
        finally:
            connection.close()

    def _log_refusal(self, host: str, error: Exception) -> None:
        if attempts := self._turned_away.to_tell(host, "connection_refused"):
            _log.warning("connection_refused", host=host, problem=str(error), attempts=attempts)


class _TurnedAway:
    """Counts the peers that were turned away, by host and event, so that they cannot fill the log."""

    def __init__(self, most_hosts: int) -> None:
        self._most_hosts = most_hosts
        self._lock = threading.Lock()
        self._hosts: set[str] = set()
        self._attempts: Counter[tuple[str, str]] = Counter()

    def to_tell(self, host: str, event: str) -> int:
        """Counts a peer; returns its number if it is the first or their number has doubled, and else 0."""
        with self._lock:
            if len(self._hosts) < self._most_hosts:
                self._hosts.add(host)
            counted = (host if host in self._hosts else "", event)
            self._attempts[counted] += 1
            attempts = self._attempts[counted]
        return attempts if attempts.bit_count() == 1 else 0


class _Strangers:
    """The connections whose peers have not shown the token yet."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._connections: OrderedDict[int, Connection] = OrderedDict()

    @contextlib.contextmanager
    def among(self, connection: Connection) -> Iterator[None]:
        """Counts the connection as a stranger within the context."""
        with self._lock:
            if len(self._connections) >= self._most:
                _, oldest = self._connections.popitem(last=False)
                oldest.hang_up()
            self._connections[id(connection)] = connection
        try:
            yield
        finally:
            with self._lock:
                self._connections.pop(id(connection), None)


class _Session:
    """One connection of a worker or of another server, from the answer to HELLO to its end."""

    def __init__(
        self, connection: Connection, state: ServerState, session: int, worker: int, streams: StreamReceivers
    ) -> None:
        self._connection = connection
        self._state = state
        self._session = session
        self._worker = worker
        self._streams = streams
        self._answer = np.empty(0, dtype=np.float32)

    def run(self) -> None:
        try:
            self._connection.send(Header(Status.OK))
            while True:
                self._serve(*self._connection.receive())
        except (ConnectionLostError, SessionEndedError):
            pass  # workers come and go; the master notices by their heartbeats
        except StreamLostError as error:  # of another server; its sender says what it makes of that
            _log.info("stream_refused", problem=str(error))
            _refuse(self._connection, str(error))
        except (WireError, ValueError) as error:
            _log.warning("request_refused", member=f"worker-{self._worker}", problem=str(error))
            _refuse(self._connection, str(error))
        except MemoryError as error:
            _log.error("out_of_memory", member=f"worker-{self._worker}", problem=problem_of(error))
        finally:
            self._state.disconnected(self._session)

    def _serve(self, header: Header, payload: NDArray[np.uint8]) -> None:
        match header.kind:
            case Kind.PULL | Kind.PUSH:
                self._serve_rows(header, payload)
            case Kind.COMPLETE:
                self._state.complete(self._session, header)
            case Kind.OPEN:
                self._streams.serve(self._connection, header)
            case unknown:
                raise WireError(f"a request of kind {unknown} is not known")

    def _serve_rows(self, header: Header, payload: NDArray[np.uint8]) -> None:
        start = counts_bytes(header.tables)
        if len(payload) < start:
            raise WireError("the payload ends within the counts")
        counts = payload[: header.tables * 4].view(np.uint32)
        stop = start + 8 * sum(counts.tolist())  # numpy's own sum takes longer for so few
        if len(payload) < stop:
            raise WireError("the payload ends within the keys")
        keys = payload[start:stop].view(np.int64)
        if header.kind == Kind.PULL:
            status, rows, round_limit = self._state.pull(self._session, header, counts, keys, self._room)
            if rows is not None:
                self._connection.send(Header(status, payload_bytes=rows.nbytes, batches=round_limit), [rows])
                return
        else:
            status = self._state.push(self._session, header, counts, keys, payload[stop:].view(np.float32))
        self._connection.send(Header(status))

    def _room(self, floats: int) -> NDArray[np.float32]:
        """Returns memory for an answer; the next answer reuses it."""
        if 4 * floats > MAX_PAYLOAD_BYTES:
            raise WireError(f"an answer of {4 * floats} bytes is beyond the limit of a frame")
        if floats > len(self._answer):
            self._answer = np.empty(min(floats * 5 // 4, MAX_PAYLOAD_BYTES // 4), dtype=np.float32)
        return self._answer[:floats]


def _refuse(connection: Connection, reason: str) -> None:
    text = reason.encode()
    with contextlib.suppress(ConnectionLostError):  # the peer may be gone
        connection.send(Header(Status.REFUSED, payload_bytes=len(text)), [text])
