"""Two ways to start a process: execute a command, or fork a server that has already imported everything."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from emberscale_api.fork_server import Ended, Forked, ForkRequest, LineBuffer, decode, encode

_TETHER = Path(__file__).with_name("tether.py")


class Started(Protocol):
    """A process that was started; its life is tied to the thread that started it."""

    @property
    def pid(self) -> int | None:
        """The process's id; None until it exists."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing to a process that has ended."""

    def wait(self, timeout: float) -> object:
        """Returns when it has ended. After `timeout` seconds, returns or raises subprocess.TimeoutExpired."""


Starter = Callable[[Sequence[str], Mapping[str, str], Path, Sequence[int] | None], Started]
"""Starts a command with an environment in a session of its own, and appends its output to a log.

The last argument is the cores that it may use; None means all.
"""


def execute(command: Sequence[str], environment: Mapping[str, str], log: Path, cores: Sequence[int] | None) -> Started:
    """Starts a command by executing it; its first word is the program."""
    return _execute_tethered(command, environment, log, cores, subprocess.DEVNULL)


def _execute_tethered(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    cores: Sequence[int] | None,
    stdin: int,
) -> subprocess.Popen[bytes]:
    which = "-" if cores is None else ",".join(str(core) for core in cores)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), which, *command],
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


class ForkServerClient:
    """Forks processes from a server, which `prepare` starts, and which is restarted whenever it has died.

    The command of a process is one word, the role that the server knows. All calls come from one thread: the server,
    and so every process, dies with it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._command = command
        self._environment = environment
        self._log = log
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lines = LineBuffer()
        self._running: dict[int, _Forked] = {}
        self._tickets = 0
        self._unwanted: set[int] = set()

    def prepare(self) -> None:
        """Starts the server, so that it is ready when processes are wanted. Raises OSError."""
        self._connected()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, cores: Sequence[int] | None
    ) -> Started:
        """A Starter. Returns at once; the process exists when the server is ready. Raises OSError."""
        (role,) = command
        self.follow()  # if the server has died meanwhile, what it had forked died with it, and this does not
        self._tickets += 1
        request = ForkRequest(
            self._tickets, role, environment, str(log.resolve()), None if cores is None else tuple(cores)
        )
        connection = self._connected()
        process = _Forked(self, request.ticket)
        self._running[request.ticket] = process
        try:
            connection.sendall(encode(request))
        except OSError:
            self._bury_server()
        return process

    def follow(self, seconds: float = 0.0) -> None:
        """Handles messages of the server; waits up to `seconds` for one."""
        connection = self._connection
        while connection is not None and select.select([connection], [], [], seconds)[0]:
            seconds = 0.0
            try:
                data = connection.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self._bury_server()
                return
            for line in self._lines.add(data):
                match decode(line):
                    case Forked(ticket, pid) if ticket in self._unwanted:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    case Ended(ticket, _) if ticket in self._unwanted:
                        self._unwanted.discard(ticket)
                    case Forked(ticket, pid):
                        self._running[ticket].begin(pid)
                    case Ended(ticket, code):
                        self._running.pop(ticket).end(code)

    def give_up(self, ticket: int) -> None:
        """Kills a process that is no longer wanted, as soon as it exists."""
        del self._running[ticket]
        self._unwanted.add(ticket)

    def close(self) -> None:
        """Ends the server, and with it every process."""
        if self._server is not None and self._connection is not None:
            self._server.kill()
            self._bury_server()

    def _connected(self) -> socket.socket:
        if self._connection is None:
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._server = _execute_tethered(self._command, self._environment, self._log, None, theirs.fileno())
                except OSError:
                    ours.close()
                    raise
            self._lines = LineBuffer()
            self._connection = ours
        return self._connection

    def _bury_server(self) -> None:
        """Ends the processes of a server that has died: the kernel has killed those that it had forked already."""
        assert self._server is not None
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        code = self._server.wait()
        for process in self._running.values():
            process.end(-signal.SIGKILL if process.pid is not None else code)
        self._running.clear()
        self._unwanted.clear()


class _Forked:
    """A process that was requested from the server."""

    def __init__(self, server: ForkServerClient, ticket: int) -> None:
        self._server = server
        self._ticket = ticket
        self.pid: int | None = None
        self._pidfd: int | None = None
        self._code: int | None = None

    def begin(self, pid: int) -> None:
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # it has ended already, and the server says so next

    def end(self, code: int) -> None:
        self._code = code
        if self._pidfd is not None:
            select.select([self._pidfd], [], [])  # when the server has died, the kernel may still be at it
            os.close(self._pidfd)
            self._pidfd = None

    def poll(self) -> int | None:
        self._server.follow()
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)
        elif self._code is None and self.pid is None:
            # the server may take half a minute to import what it forks with; what never began has nothing to save
            self._server.give_up(self._ticket)
            self.end(-number)

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._code is None and (left := deadline - time.monotonic()) > 0:
            self._server.follow(left)
