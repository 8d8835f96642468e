"""The place of the brain beside this user's jobs on this machine.

All runs share one brain, so that together they stay within the machine. It is beside the run that holds the seat, a
lock that ends with the run's program however that ends; then another takes the seat, and starts the brain anew at the
same address and with the same token. What the one before it knew is in the database, and masters tell it of their jobs.
"""

import fcntl
import os
import secrets
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from emberscale_api.errors import StartError
from emberscale_operator.local.folder import write_private

_HOST = "127.0.0.1"


class BrainSeatUnavailableError(StartError):
    """The folder in which runs find the brain cannot be used."""


class BrainSeat:
    """One run's view of the seat, to be entered while the run lasts. Raises BrainSeatUnavailableError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None
        self._socket: socket.socket | None = None
        self._held = False

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder / "brain.lock", os.O_RDWR | os.O_CREAT, 0o600)
            self._socket = self._bound()
        except (OSError, ValueError) as error:
            self.__exit__(None, None, None)
            raise BrainSeatUnavailableError(f"{self._folder}: cannot start a brain there: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._lock is not None:
            os.close(self._lock)
        self._socket = self._lock = None
        self._held = False

    @property
    def address(self) -> str:
        """Where the brain listens, `host:port`, whoever runs it."""
        return f"{_HOST}:{self._port_file.read_text(encoding='ascii')}"

    @property
    def token(self) -> str:
        """The secret by which masters and the brain know each other."""
        return self.token_file.read_text(encoding="ascii")

    @property
    def token_file(self) -> Path:
        """The secret, in a file that only its owner can read."""
        return self._folder / "brain.token"

    def take(self) -> bool:
        """Whether the brain is to run beside this run; takes the seat if nobody has it."""
        if not self._held and self._lock is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self._held = True
        return self._held

    def _give_up(self) -> None:
        if self._held and self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._held = False

    @property
    def _port_file(self) -> Path:
        return self._folder / "brain.port"

    def _bound(self) -> socket.socket:
        """Keeps the port from others; the first run ever chooses it, as does one that finds it taken and nobody seated.

        Runs and brain bind it together, as the kernel lets one user do, and only the brain listens.
        """
        beginning = os.open(self._folder / "brain.begin", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(beginning, fcntl.LOCK_EX)
            try:
                return _bind(int(self._port_file.read_text(encoding="ascii")))
            except OSError:
                if not self.take():  # the port is the seated run's
                    raise
            bound = _bind(0)
            write_private(self.token_file, secrets.token_hex(32))
            write_private(self._port_file, str(bound.getsockname()[1]))
            self._give_up()
            return bound
        finally:
            os.close(beginning)


def _bind(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((_HOST, port))
    except OSError:
        bound.close()
        raise
    return bound
