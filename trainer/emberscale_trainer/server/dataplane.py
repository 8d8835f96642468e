"""The data plane of a parameter server: a thread a connection, each request answered in order."""

import contextlib
import socket
import ssl
import threading

import numpy as np
import structlog
from numpy.typing import NDArray

from emberscale_api.rpc.token import tokens_match
from emberscale_api.wire import Flag, Header, Kind, Status, WireError, counts_bytes
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.transport import Connection, ConnectionLostError, accept_connection

log = structlog.get_logger()

_HANDSHAKE_SECONDS = 5.0


class DataPlane:
    """Accepts connections on a listening socket and serves `state` to those that know the token.

    With a context, what comes over TCP must be TLS.
    """

    def __init__(
        self, listener: socket.socket, state: ServerState, token: str, context: ssl.SSLContext | None = None
    ) -> None:
        self._listener = listener
        self._state = state
        self._token = token
        self._context = context

    def start(self) -> None:
        """Begins to accept, in a thread of its own that ends with the process."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return  # the listener is closed: the server is going down
            threading.Thread(target=self._serve, args=(stream,), name="connection", daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        try:
            connection = accept_connection(stream, self._context, _HANDSHAKE_SECONDS)
        except OSError as error:
            log.warning("no_handshake", problem=str(error))
            return
        _Session(connection, self._state, self._token).run()


class _Session:
    """One connection, from HELLO to its end."""

    def __init__(self, connection: Connection, state: ServerState, token: str) -> None:
        self._connection = connection
        self._state = state
        self._token = token
        self._answer = np.empty(1 << 14, dtype=np.float32)

    def run(self) -> None:
        worker: int | None = None
        try:
            hello, token = self._connection.receive()
            if hello.kind != Kind.HELLO or not tokens_match(token.tobytes(), self._token):
                self._refuse("the first frame must be HELLO with the job's token")
                return
            worker = hello.worker
            self._connection.send(Header(Status.OK))
            while True:
                self._serve(*self._connection.receive())
        except ConnectionLostError:
            pass  # workers come and go; the master notices by their heartbeats
        except (WireError, ValueError) as error:
            log.warning("connection_refused", worker=worker, reason=str(error))
            self._refuse(str(error))
        finally:
            self._connection.close()
            if worker is not None:
                self._state.disconnected(worker)

    def _refuse(self, reason: str) -> None:
        text = reason.encode()
        with contextlib.suppress(ConnectionLostError):  # nobody may be left to hear it
            self._connection.send(Header(Status.REFUSED, payload_bytes=len(text)), [text])

    def _serve(self, header: Header, payload: NDArray[np.uint8]) -> None:
        match header.kind:
            case Kind.ADMIT:
                self._connection.send(Header(self._state.admit(header)))
            case Kind.COMPLETE:
                self._state.complete(header)
            case Kind.PULL | Kind.PUSH:
                self._serve_rows(header, payload)
            case unknown:
                raise WireError(f"a request of kind {unknown} is not known")

    def _serve_rows(self, header: Header, payload: NDArray[np.uint8]) -> None:
        start = counts_bytes(header.tables)
        if len(payload) < start:
            raise WireError("the payload ends within the counts")
        counts = payload[: header.tables * 4].view(np.uint32)
        stop = start + 8 * int(counts.sum())
        if len(payload) < stop:
            raise WireError("the payload ends within the keys")
        keys = payload[start:stop].view(np.int64)
        expected = self._state.expected_values(counts)
        if expected is None:
            self._connection.send(Header(Status.REFRESH))
        elif header.kind == Kind.PULL:
            self._pull(header, counts, keys, *expected)
        else:
            self._push(header, counts, keys, payload[stop:].view(np.float32), *expected)

    def _pull(
        self, header: Header, counts: NDArray[np.uint32], keys: NDArray[np.int64], row_values: int, dense_values: int
    ) -> None:
        wanted = row_values + (dense_values if header.flags & Flag.DENSE else 0)
        if wanted > len(self._answer):
            self._answer = np.empty(wanted * 5 // 4, dtype=np.float32)
        answer = self._answer[:wanted]
        dense = answer[row_values:] if header.flags & Flag.DENSE else None
        status = self._state.pull(header, counts, keys, answer[:row_values], dense)
        if status is Status.OK:
            self._connection.send(Header(status, payload_bytes=answer.nbytes), [answer])
        else:
            self._connection.send(Header(status))

    def _push(
        self,
        header: Header,
        counts: NDArray[np.uint32],
        keys: NDArray[np.int64],
        values: NDArray[np.float32],
        row_values: int,
        dense_values: int,
    ) -> None:
        if len(values) != row_values + dense_values:
            raise WireError(f"a push of {len(values)} gradients where {row_values} + {dense_values} are expected")
        status = self._state.push(header, counts, keys, values[:row_values], values[row_values:])
        self._connection.send(Header(status))
