"""Ports of this machine that stay reserved for a server while it is restarted."""

import errno
import os
import socket

from emberscale_api.errors import UnavailableError

HOST = "127.0.0.1"


def bind_shared(port: int) -> socket.socket:
    """Binds a port of this machine, any free one for 0, with a socket that never listens. Raises OSError.

    The kernel gives the port to nobody who asks for any port, and a server of this user, whose socket allows the
    address to be reused, can bind it and listen.
    """
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # gRPC's sockets set this one too; all that share a port must agree
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((HOST, port))
    except OSError:
        bound.close()
        raise
    return bound


def reserve_port(port: int) -> socket.socket:
    """Binds the master's port, any free one for 0. Raises UnavailableError."""
    try:
        _refuse_if_served(port)
        return bind_shared(port)
    except OSError as error:
        reason = os.strerror(error.errno or errno.EADDRINUSE)
        raise UnavailableError(
            f"--master-port {port}: port {port} on {HOST} is unavailable: {reason}; choose another, or 0 for any"
        ) from error


def _refuse_if_served(port: int) -> None:
    """Raises OSError if another server listens at the port.

    `bind_shared` would not notice: with SO_REUSEPORT, two servers of a user would share the port's connections.
    """
    if port == 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, port))
