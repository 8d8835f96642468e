"""`python -m emberscale_trainer.fork_server`: forks parameter servers and workers that need not import anything.

Standard input is the socket on which it is asked (`emberscale_api.fork_server`). It ends when that is closed, and the
kernel kills every process that it forked when it ends. One thread only: a fork copies no other, and a lock that another
thread holds would stay locked forever.
"""

import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from setproctitle import setproctitle

from emberscale_api import environment as names
from emberscale_api.fork_server import Ended, Forked, ForkRequest, LineBuffer, decode, encode
from emberscale_trainer.server.__main__ import main as serve_tables
from emberscale_trainer.worker.__main__ import main as work

_PR_SET_PDEATHSIG = 1
_ROLES: Mapping[str, Callable[[], NoReturn]] = {"ps": serve_tables, "worker": work}


@dataclass(frozen=True)
class _Child:
    ticket: int
    pid: int
    pidfd: int


class ForkServer:
    """Forks what `connection` asks for, and tells it when each process has ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
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
            _become(request, parent)
        child = _Child(request.ticket, pid, os.pidfd_open(pid))
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._connection.sendall(encode(Forked(child.ticket, child.pid)))

    def _reap(self, child: _Child) -> None:
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        _, status = os.waitpid(child.pid, 0)
        self._connection.sendall(encode(Ended(child.ticket, os.waitstatus_to_exitcode(status))))


def _become(request: ForkRequest, parent: int) -> NoReturn:
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
        _ROLES[request.role]()
    except BaseException:  # noqa: BLE001 - the copy must not continue as the server
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _step_an_optimizer() -> None:
    """Torch imports much of itself at the first step of an optimizer; on one thread that starts no other."""
    torch.set_num_threads(1)
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    torch.optim.Adagrad([parameter]).step()


def main() -> None:
    """Serves the socket that standard input is."""
    connection = socket.socket(fileno=os.dup(0))
    _step_an_optimizer()
    gc.freeze()  # a collection in a copy would touch, and so copy, every page that is shared
    ForkServer(connection).serve()


if __name__ == "__main__":
    main()
