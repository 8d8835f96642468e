"""`python -m emberscale_trainer.fork_server`: forks parameter servers and workers that need not import anything.

Standard input is the socket on which it is asked (`emberscale_api.fork_server`). It ends when that is closed, and the
kernel kills every process that it forked when it ends. One thread only: a fork copies no other, and a lock that another
thread holds would stay locked forever.
"""

import ctypes
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from setproctitle import setproctitle

from emberscale_api import environment as names
from emberscale_api.fork_server import Ended, Forked, ForkRequest, LineBuffer, decode, encode
from emberscale_api.start import without_collection

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Child:
    ticket: int
    pid: int
    pidfd: int


class ForkServer:
    """Forks what `connection` asks for, and tells it when each process has ended.

    `mains` are the entry points by role.
    """

    def __init__(self, connection: socket.socket, mains: Mapping[str, Callable[[], NoReturn]]) -> None:
        self._connection = connection
        self._mains = mains
        self._lines = LineBuffer()
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def serve(self) -> None:
        """Returns when the other end of the connection is closed."""
        while True:
            for key, _ in self._selector.select():
                if isinstance(key.data, _Child):
                    self._reap(key.data)
                    continue
                data = self._connection.recv(1 << 16)
                if not data:
                    return
                for line in self._lines.add(data):
                    request = decode(line)
                    if isinstance(request, ForkRequest):
                        self._fork(request)

    def _fork(self, request: ForkRequest) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            self._connection.close()
            _become(request, parent, self._mains)
        child = _Child(request.ticket, pid, os.pidfd_open(pid))
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._connection.sendall(encode(Forked(child.ticket, child.pid)))

    def _reap(self, child: _Child) -> None:
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        _, status = os.waitpid(child.pid, 0)
        self._connection.sendall(encode(Ended(child.ticket, os.waitstatus_to_exitcode(status))))


def _become(request: ForkRequest, parent: int, mains: Mapping[str, Callable[[], NoReturn]]) -> NoReturn:
    """Turns the forked copy into the process that was asked for, as if it had been started with its environment."""
    try:
        output = os.open(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # the server ended before the line above took effect
        if request.cores is not None:
            os.sched_setaffinity(0, request.cores)
        # before the environment changes: it finds the memory to write to by the old one
        setproctitle(f"emberscale-{request.role} {request.environment.get(names.INDEX, '')}")
        os.environ.clear()
        os.environ.update(request.environment)
        sys.argv = [f"emberscale-{request.role}"]
        mains[request.role]()
    except BaseException:  # noqa: BLE001 - the copy must not continue as the server
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def main() -> None:
    """Serves the socket that standard input is."""
    connection = socket.socket(fileno=os.dup(0))
    with without_collection():
        from emberscale_trainer.jit import warm_up
        from emberscale_trainer.server.__main__ import main as serve_tables
        from emberscale_trainer.worker.__main__ import main as work

        warm_up()  # otherwise each parameter server would load the kernels itself: half of the CPU time of its start
    ForkServer(connection, {"ps": serve_tables, "worker": work}).serve()


if __name__ == "__main__":
    main()
