"""Frames of `emberscale_api.wire` over stream sockets.

An address is `tcp://host:port` across machines and `unix:///path` within one. TLS secures TCP; Unix sockets stay plain.
"""

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from emberscale_api.certificates import SERVER_NAME
from emberscale_api.wire import HEADER_BYTES, MAX_PAYLOAD_BYTES, Header, WireError

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]


class ConnectionLostError(ConnectionError):
    """The peer is gone, or could not be reached."""


class Connection:
    """Sends and receives frames; the receive buffer is reused, so a payload is valid until the next `receive`."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._payload = np.empty(0, dtype=np.uint8)
        self.sent_bytes = 0
        self.received_bytes = 0

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Sends a frame; `header.payload_bytes` must be the buffers' total. Raises ConnectionLostError."""
        parts: list[Any] = [header.pack(), *buffers]  # arrays are typed as buffers from Python 3.12 on
        size = HEADER_BYTES + header.payload_bytes
        self.sent_bytes += size
        try:
            sent = self._stream.sendmsg(parts)
            if sent < size:
                self._send_rest(parts, sent)
        except OSError as error:
            raise ConnectionLostError(f"the connection broke while sending: {error}") from error

    def _send_rest(self, parts: Iterable[Buffer], sent: int) -> None:
        """Sends what follows the first `sent` bytes. Raises OSError."""
        pending = [view for view in map(as_bytes, parts) if view]
        _drop(pending, sent)
        while pending:
            _drop(pending, self._stream.sendmsg(pending))

    def await_frame(self, seconds: float | None) -> bool:
        """Returns whether a frame, or the end of the connection, is there within this time; None: without looking.

        A frame whose first bytes are there is complete, or follows without its sender's doing.
        """
        if seconds is None:
            return True
        readable = select.poll()
        readable.register(self._stream, select.POLLIN)
        return bool(readable.poll(1000 * seconds))

    def receive(self) -> tuple[Header, NDArray[np.uint8]]:
        """Receives the next frame. Raises ConnectionLostError, or WireError for bytes that are not a frame."""
        header = self.receive_header()
        size = header.payload_bytes
        if size > len(self._payload):
            self._payload = np.empty(min(size * 5 // 4, MAX_PAYLOAD_BYTES), dtype=np.uint8)
        payload = self._payload[:size]
        if size:
            self._fill([payload.data])
        return header, payload

    def handshake(self, seconds: float) -> None:
        """Performs the TLS handshake, if there is TLS. Raises ConnectionLostError."""

    def receive_first(self, most_bytes: int, seconds: float) -> tuple[Header, bytes]:
        """Receives the first frame of a peer that is not trusted yet, after the handshake, both within `seconds`.

        Reserves no memory in advance. Raises ConnectionLostError, or WireError for bytes that are no frame of at most
        `most_bytes`.
        """
        deadline = time.monotonic() + seconds
        self.handshake(seconds)
        header = Header.unpack(self._receive_until(deadline, HEADER_BYTES))
        if header.payload_bytes > most_bytes:
            raise WireError(f"the first frame has {header.payload_bytes} bytes, more than {most_bytes}")
        return header, self._receive_until(deadline, header.payload_bytes)

    def _receive_until(self, deadline: float, size: int) -> bytes:
        received = bytearray()
        try:
            while len(received) < size:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("timed out")
                self._stream.settimeout(left)
                data = self._stream.recv(size - len(received))
                if not data:
                    raise ConnectionLostError("the peer closed the connection")
                received += data
        except OSError as error:
            raise ConnectionLostError(f"the connection broke while receiving: {error}") from error
        return bytes(received)

    def trust(self) -> None:
        """Lifts the limits of a stranger: the peer may be slow, and send much."""
        prepare(self._stream)

    def receive_header(self) -> Header:
        """Receives the header of the next frame; the caller then receives its payload."""
        self._fill([self._header])
        return Header.unpack(self._header)

    def receive_payload(self, *targets: Buffer) -> None:
        """Fills the targets, one after another, with payload bytes that follow."""
        self._fill([view for view in map(as_bytes, targets) if view])

    def _fill(self, pending: list[memoryview]) -> None:
        """Fills views that are not empty, and removes them from the list. Raises ConnectionLostError."""
        self.received_bytes += sum(map(len, pending))
        try:
            while pending:
                received = self._receive_into(pending)
                if not received:
                    raise ConnectionLostError("the peer closed the connection")
                _drop(pending, received)
        except OSError as error:
            raise ConnectionLostError(f"the connection broke while receiving: {error}") from error

    def _receive_into(self, targets: list[memoryview]) -> int:
        """Returns the number of bytes received, 0 at the end of the stream. Raises OSError."""
        if len(targets) == 1:
            return self._stream.recv_into(targets[0], 0, socket.MSG_WAITALL)
        return self._stream.recvmsg_into(targets, 0, socket.MSG_WAITALL)[0]

    def hang_up(self) -> None:
        """Ends the connection for a thread that is blocked on it, which is to close it."""
        with contextlib.suppress(OSError):  # it may not be connected any more
            # SSLSocket's own would make a plain socket of it, on which another thread might still send
            socket.socket.shutdown(self._stream, socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection, also for a thread that is blocked on it.

        Sends no close_notify over TLS: the peer recognises a cut frame by its length.
        """
        self.hang_up()
        self._stream.close()


def _drop(pending: list[memoryview], size: int) -> None:
    """Removes the first `size` bytes of views that follow each other."""
    while pending and size >= len(pending[0]):
        size -= len(pending.pop(0))
    if size:
        pending[0] = pending[0][size:]


def as_bytes(buffer: Buffer) -> memoryview:
    """Returns a view of the buffer's bytes."""
    view = memoryview(buffer)  # type: ignore[arg-type]  # numpy declares the buffer protocol from Python 3.12 on
    return view.cast("B") if view.nbytes else memoryview(b"")


_RECORD_BYTES = 1 << 14


class SecureConnection(Connection):
    """A Connection over TLS: the same frames, which OpenSSL cuts into records."""

    def __init__(self, stream: ssl.SSLSocket) -> None:
        super().__init__(stream)
        self._secure = stream

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """As `Connection.send`; small parts share a record with the part before."""
        self.sent_bytes += HEADER_BYTES + header.payload_bytes
        gathered = bytearray(header.pack())
        try:
            for view in map(as_bytes, buffers):
                if len(view) < _RECORD_BYTES:
                    gathered += view
                    continue
                room = -len(gathered) % _RECORD_BYTES
                gathered += view[:room]
                self._stream.sendall(gathered)
                gathered = bytearray()
                self._stream.sendall(view[room:])
            if gathered:
                self._stream.sendall(gathered)
        except OSError as error:
            raise ConnectionLostError(f"the connection broke while sending: {error}") from error

    def await_frame(self, seconds: float | None) -> bool:
        """As `Connection.await_frame`."""
        return self._secure.pending() > 0 or super().await_frame(seconds)

    def _receive_into(self, targets: list[memoryview]) -> int:
        return self._stream.recv_into(targets[0])  # SSLSocket fills no more than one buffer

    def handshake(self, seconds: float) -> None:
        """As `Connection.handshake`."""
        try:
            self._secure.settimeout(seconds)
            self._secure.do_handshake()
        except OSError as error:
            raise ConnectionLostError(f"no TLS handshake: {error}") from error


def open_connection(address: str, context: ssl.SSLContext | None, timeout: float) -> Connection:
    """Connects to `address`; over TCP with TLS, if there is a context. `timeout` bounds each step.

    Raises OSError, which ssl.SSLError is.
    """
    stream = connect(address, timeout)
    if context is None or stream.family == socket.AF_UNIX:
        return Connection(stream)
    stream.settimeout(timeout)
    connection = SecureConnection(context.wrap_socket(stream, server_hostname=SERVER_NAME))
    connection.trust()
    return connection


def accept_connection(stream: socket.socket, context: ssl.SSLContext | None) -> Connection:
    """The other end of `open_connection`, before the handshake and not trusted yet. Raises OSError."""
    restrict(stream)
    if context is None or stream.family == socket.AF_UNIX:
        return Connection(stream)
    return SecureConnection(context.wrap_socket(stream, server_side=True, do_handshake_on_connect=False))


_BUFFER_BYTES = 4 << 20
_STRANGER_BUFFER_BYTES = 64 << 10
_BACKLOG = 1024


def listen(address: str) -> tuple[socket.socket, str]:
    """Returns a listening socket and its address with the real port (port 0 asks for any). Raises OSError."""
    scheme, location = _split(address)
    if scheme == "unix":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(location).unlink(missing_ok=True)
        listener.bind(location)
        actual = address
    else:
        host, port = location.rsplit(":", 1)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        actual = f"tcp://{host}:{listener.getsockname()[1]}"
    listener.listen(_BACKLOG)
    return listener, actual


def connect(address: str, timeout: float) -> socket.socket:
    """Returns a connected socket without a time limit on later calls. Raises OSError."""
    scheme, location = _split(address)
    if scheme == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        connection.connect(location)
    else:
        host, port = location.rsplit(":", 1)
        connection = socket.create_connection((host, int(port)), timeout)
    prepare(connection)
    return connection


def restrict(connection: socket.socket) -> None:
    """Has the kernel keep little of what an accepted peer sends, until it is trusted and `prepare` is called."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _STRANGER_BUFFER_BYTES)


def prepare(connection: socket.socket) -> None:
    """Makes a connection blocking, quick to send, and quick to notice a dead peer."""
    connection.settimeout(None)
    _enlarge(connection)
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)


def _enlarge(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


def _split(address: str) -> tuple[str, str]:
    scheme, separator, location = address.partition("://")
    if not separator or scheme not in ("tcp", "unix") or not location:
        raise ValueError(f"{address!r} is not an address: expected tcp://host:port or unix:///path")
    return scheme, location
