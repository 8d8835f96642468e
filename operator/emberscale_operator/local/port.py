"""A port for the master that stays its own while it is restarted."""

import errno
import os
import socket
from dataclasses import dataclass
from typing import Self

from emberscale_api.errors import UnavailableError


@dataclass(frozen=True)
class ReservedPort:
    """A bound socket that never listens.

    The kernel gives the port to nobody who asks for any port, and the master, whose socket allows the address to be
    reused, can bind it and listen.
    """

    host: str
    port: int
    _socket: socket.socket

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{self.host}:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()


def reserve_port(port: int = 0, host: str = "127.0.0.1") -> ReservedPort:
    """Reserves a port, any free one for 0. Raises UnavailableError."""
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # gRPC's sockets set this one too; all that share a port must agree
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _refuse_if_served(host, port)
        reserved.bind((host, port))
    except OSError as error:
        reserved.close()
        reason = os.strerror(error.errno or errno.EADDRINUSE)
        raise UnavailableError(
            f"--master-port {port}: port {port} on {host} is unavailable: {reason}; choose another, or 0 for any"
        ) from error
    return ReservedPort(host, reserved.getsockname()[1], reserved)


def _refuse_if_served(host: str, port: int) -> None:
    """With SO_REUSEPORT, two servers of a user could bind the same port and would share its connections."""
    if port == 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
