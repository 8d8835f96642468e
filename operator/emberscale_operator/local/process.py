"""One tethered process: started, watched, stopped."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from emberscale_api import environment as names
from emberscale_api.environment import SUPERSEDED_EXIT_CODE
from emberscale_operator.local.starters import Starter, execute
from emberscale_operator.machine import ExitReason


@dataclass(frozen=True)
class Memory:
    """Resident bytes now, and at most since the process started."""

    resident: int
    peak: int


def read_memory(pid: int) -> Memory | None:
    """Returns the kernel's record of a process; None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    kibibytes = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            kibibytes[name] = int(value.split()[0])
    if len(kibibytes) < 2:
        return None  # it has ended and waits to be reaped
    return Memory(kibibytes["VmRSS"] * 1024, kibibytes["VmHWM"] * 1024)


@dataclass(frozen=True)
class Launch:
    """How to start an instance: the command, its environment, the name of its incarnation, and who starts it."""

    command: Sequence[str]
    environment: Mapping[str, str]
    incarnation: str
    starter: Starter = execute


class TetheredProcess:
    """A command that ends with the calling thread.

    It runs in a session of its own, so that a Ctrl-C in the terminal reaches only the program that started it. What it
    prints is appended to `log`, after a line that says which incarnation speaks.
    """

    def __init__(self, launch: Launch, name: str, log: Path, cores: Sequence[int] | None) -> None:
        self.incarnation = launch.incarnation
        self._log = log
        self._speaker = {
            "job": launch.environment.get(names.JOB_NAME, ""),
            "role": launch.environment.get(names.ROLE, name),
            "index": int(launch.environment.get(names.INDEX, "0")),
            "incarnation": launch.incarnation,
        }
        self.resident_bytes = 0
        self.peak_bytes = 0
        self.out_of_memory = False
        self.stop_asked = False
        self._kill_at: float | None = None
        self._ended = False
        self._note("process starting", command=list(launch.command), cores="all" if cores is None else list(cores))
        self._process = launch.starter(launch.command, launch.environment, log, cores)

    @property
    def pid(self) -> int | None:
        """The process's id, also after it has ended; None until it exists."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Returns the exit code: None while the process runs, negative for a signal."""
        code = self._process.poll()
        if code is not None and not self._ended:
            self._ended = True
            self._note("process ended", exit_code=code, reason=str(self.exit_reason(code)))
        return code

    def exit_reason(self, code: int) -> ExitReason:
        """The class of an exit code.

        SIGKILL, SIGTERM and being superseded come from outside; other signals are crashes.
        """
        if self.out_of_memory:
            return ExitReason.OOM_KILLED
        if code == 0:
            return ExitReason.COMPLETED
        not_its_own = (-signal.SIGKILL, -signal.SIGTERM, SUPERSEDED_EXIT_CODE)
        return ExitReason.KILLED if code in not_its_own else ExitReason.ERROR

    def watch_memory(self, limit: int | None) -> None:
        """Notes what it uses, and kills the process if it is above its limit, as a kubelet would."""
        memory = read_memory(self.pid) if self.pid is not None else None
        if memory is None:
            self.resident_bytes = 0
            return
        self.resident_bytes = memory.resident
        self.peak_bytes = max(self.peak_bytes, memory.peak)
        if limit is not None and memory.resident > limit and self.exit_code() is None:
            self.out_of_memory = True
            self._note("memory limit exceeded", limit_bytes=limit, resident_bytes=memory.resident)
            self.kill()

    def end_overdue(self, now: float) -> None:
        """Kills a process that was asked to stop and has not within its grace."""
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()

    def stop(self, now: float, grace: float) -> None:
        """Sends SIGTERM; `end_overdue` sends SIGKILL after `grace` seconds."""
        if not self.stop_asked and self.exit_code() is None:
            self.stop_asked = True
            self._kill_at = now + grace
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGKILL)

    def wait(self, seconds: float) -> int | None:
        """The exit code once it has ended; None when it still runs after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.exit_code()

    def set_cores(self, cores: Sequence[int]) -> None:
        """Moves all its threads to these cores."""
        with suppress(psutil.NoSuchProcess):
            for thread in psutil.Process(self.pid).threads() if self.pid is not None else ():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, cores)

    def _note(self, event: str, **fields: object) -> None:
        line = {
            "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": "info",
            "event": event,
            **self._speaker,
            **fields,
        }
        with self._log.open("a", encoding="utf-8") as output:
            output.write(json.dumps(line) + "\n")
