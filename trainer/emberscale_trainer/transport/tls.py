"""Frames over TLS, between processes of different machines; Unix sockets stay plain."""

import socket
import ssl
from collections.abc import Sequence

from emberscale_api.certificates import SERVER_NAME
from emberscale_api.wire import HEADER_BYTES, Header
from emberscale_trainer.transport.connection import Buffer, Connection, ConnectionLostError, as_bytes
from emberscale_trainer.transport.sockets import connect, restrict

_RECORD_BYTES = 1 << 14


class SecureConnection(Connection):
    """A Connection over TLS: the same frames, which OpenSSL cuts into records."""

    def __init__(self, stream: ssl.SSLSocket) -> None:
        super().__init__(stream)
        self._secure = stream

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """As `Connection.send`; what is small travels with what comes before it, in one record."""
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
    """A connection to `address`; over TCP with TLS, if there is a context. `timeout` holds for each step of it.

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
