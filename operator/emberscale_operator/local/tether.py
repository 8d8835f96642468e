"""Ties a process to the one that started it, then becomes the real command.

Run as a script: `python -I -S tether.py PARENT_PID CORES COMMAND...`, where CORES is `0,1` or `-` for all. From then on
the kernel kills the process when the thread that started it ends, however that came about. Nothing but the standard
library is imported: every process of a job starts with this.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NOT_STARTED = 127


def main(arguments: list[str]) -> None:
    """Never returns: the command replaces this program, or it exits with status 127."""
    parent, cores, *command = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _give_up(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # the parent may have died before the line above took effect; the signal would then never come
    if os.getppid() != int(parent):
        _give_up("the parent process has ended")
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    try:
        os.execv(command[0], command)
    except OSError as error:
        _give_up(f"{command[0]}: {error.strerror}")


def _give_up(problem: str) -> None:
    sys.stderr.write(f"{problem}\n")
    sys.exit(_NOT_STARTED)


if __name__ == "__main__":
    main(sys.argv[1:])
