"""Stream sockets by address: `tcp://host:port` across machines, `unix:///path` within one."""

import socket
from pathlib import Path

_BUFFER_BYTES = 4 << 20
_STRANGER_BUFFER_BYTES = 64 << 10
_BACKLOG = 1024


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and its address with the port that it got (port 0 asks for any). Raises OSError."""
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
    """A connected socket without a time limit on what follows. Raises OSError."""
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
