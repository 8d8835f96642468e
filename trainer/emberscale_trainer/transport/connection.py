"""One end of a data-plane connection."""

import contextlib
import socket
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from emberscale_api.wire import HEADER_BYTES, Header

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]


class ConnectionLostError(ConnectionError):
    """The peer is gone, or was never reached."""


class Connection:
    """Sends and receives frames; the receive buffer is reused, so a payload is valid until the next `receive`."""

    _receive_flags: int = socket.MSG_WAITALL

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._header = bytearray(HEADER_BYTES)
        self._payload = np.empty(1 << 16, dtype=np.uint8)
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
            self._payload = np.empty(header.payload_bytes * 5 // 4, dtype=np.uint8)
        payload = self._payload[: header.payload_bytes]
        self.receive_payload(payload)
        return header, payload

    def receive_header(self) -> Header:
        """The header of the next frame; its payload must be received next."""
        self._receive_into(memoryview(self._header))
        return Header.unpack(self._header)

    def receive_payload(self, target: Buffer) -> None:
        """Fills `target` with payload bytes that follow."""
        self._receive_into(as_bytes(target))

    def _receive_into(self, target: memoryview) -> None:
        missing = len(target)
        self.received_bytes += missing
        try:
            while missing:
                received = self._stream.recv_into(target[-missing:], missing, self._receive_flags)
                if not received:
                    raise ConnectionLostError("the peer closed the connection")
                missing -= received
        except OSError as error:
            raise ConnectionLostError(f"the connection broke while receiving: {error}") from error

    def close(self) -> None:
        """Ends the connection, also for a thread that is blocked on it."""
        with contextlib.suppress(OSError):  # it may not be connected any more
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


def as_bytes(buffer: Buffer) -> memoryview:
    """The buffer's bytes, without a copy."""
    view = memoryview(buffer)  # type: ignore[arg-type]  # numpy declares the buffer protocol from Python 3.12 on
    return view.cast("B") if view.nbytes else memoryview(b"")
