"""Frames of `emberscale_api.wire` over stream sockets, with TLS or without."""

from emberscale_trainer.transport.connection import Buffer, Connection, ConnectionLostError
from emberscale_trainer.transport.sockets import connect, listen
from emberscale_trainer.transport.tls import accept_connection, open_connection

__all__ = [
    "Buffer",
    "Connection",
    "ConnectionLostError",
    "accept_connection",
    "connect",
    "listen",
    "open_connection",
]
