"""One end of a data-plane connection."""

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from emberscale_api.wire import HEADER_BYTES, MAX_PAYLOAD_BYTES, Header, WireError
from emberscale_trainer.transport.sockets import prepare

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]


class ConnectionLostError(ConnectionError):
    """The peer is gone, or was never reached."""


class Connection:
    """Sends and receives frames; the receive buffer is reused, so a payload is valid until the next `receive`."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._header = bytearray(HEADER_BYTES)
        self._payload = np.empty(0, dtype=np.uint8)
        self.sent_bytes = 0
        self.received_bytes = 0

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Sends a frame; `header.payload_bytes` must be the buffers' total. Raises ConnectionLostError."""
        pending = [memoryview(header.pack()), *(view for view in map(as_bytes, buffers) if view)]
        self.sent_bytes += HEADER_BYTES + header.payload_bytes
        try:
            while pending:
                sent = self._stream.sendmsg(pending)
                while pending and sent >= len(pending[0]):
                    sent -= len(pending.pop(0))
                if sent:
                    pending[0] = pending[0][sent:]
        except OSError as error:
            raise ConnectionLostError(f"the connection broke while sending: {error}") from error

    def receive(self) -> tuple[Header, NDArray[np.uint8]]:
        """The next frame. Raises ConnectionLostError, or WireError for bytes that are no frame."""
        header = self.receive_header()
        if header.payload_bytes > len(self._payload):
            size = min(header.payload_bytes * 5 // 4, MAX_PAYLOAD_BYTES)
            self._payload = np.empty(size, dtype=np.uint8)
        payload = self._payload[: header.payload_bytes]
        self.receive_payload(payload)
        return header, payload

    def handshake(self, seconds: float) -> None:
        """Agrees with the peer on encryption, where there is any. Raises ConnectionLostError."""

    def receive_first(self, most_bytes: int, seconds: float) -> tuple[Header, bytes]:
        """The first frame of a peer that is not trusted yet, after the handshake, both within `seconds`.

        Reserves nothing beforehand. Raises ConnectionLostError, or WireError for bytes that are no frame of at most
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
        """From now on the peer may be slow, and send much."""
        prepare(self._stream)

    def receive_header(self) -> Header:
        """The header of the next frame; its payload must be received next."""
        self.receive_payload(self._header)
        return Header.unpack(self._header)

    def receive_payload(self, *targets: Buffer) -> None:
        """Fills the targets, one after another, with payload bytes that follow."""
        pending = [view for view in map(as_bytes, targets) if view]
        self.received_bytes += sum(map(len, pending))
        try:
            while pending:
                received = self._receive_into(pending)
                if not received:
                    raise ConnectionLostError("the peer closed the connection")
                while pending and received >= len(pending[0]):
                    received -= len(pending.pop(0))
                if received:
                    pending[0] = pending[0][received:]
        except OSError as error:
            raise ConnectionLostError(f"the connection broke while receiving: {error}") from error

    def _receive_into(self, targets: list[memoryview]) -> int:
        """The number of bytes received, 0 at the end of the stream. Raises OSError."""
        return self._stream.recvmsg_into(targets, 0, socket.MSG_WAITALL)[0]

    def hang_up(self) -> None:
        """Ends the connection for a thread that is blocked on it, which is to close it."""
        with contextlib.suppress(OSError):  # it may not be connected any more
            # SSLSocket's own would make a plain socket of it, on which another thread might still send
            socket.socket.shutdown(self._stream, socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection, also for a thread that is blocked on it.

        Over TLS nothing is said to the peer: a frame that is cut off is noticed by its length.
        """
        self.hang_up()
        self._stream.close()


def as_bytes(buffer: Buffer) -> memoryview:
    """The buffer's bytes, without a copy."""
    view = memoryview(buffer)  # type: ignore[arg-type]  # numpy declares the buffer protocol from Python 3.12 on
    return view.cast("B") if view.nbytes else memoryview(b"")
