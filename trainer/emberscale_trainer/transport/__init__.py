"""Frames of `emberscale_api.wire` over stream sockets."""

from emberscale_trainer.transport.connection import Buffer, Connection, ConnectionLostError
from emberscale_trainer.transport.sockets import connect, listen

__all__ = ["Buffer", "Connection", "ConnectionLostError", "connect", "listen"]
