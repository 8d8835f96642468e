"""Takes CPU time away from a running process, as a busy neighbour or a slow machine does."""

import contextlib
import os
import signal
import threading
import time
import uuid
from pathlib import Path

_PERIOD_SECONDS = 0.1
_END_SECONDS = 30.0
_V1 = Path("/sys/fs/cgroup/cpu")
_V2 = Path("/sys/fs/cgroup")


class Throttle:
    """Limits processes to a share of one core while the body runs, by a cgroup if one can be made.

    Otherwise by a duty cycle of SIGSTOP and SIGCONT: a process then stands still for most of each tenth of a second,
    whether or not it has work.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._pids: set[int] = set()
        self._group = _make_group(share)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._cycle, name="throttle", daemon=True)

    @property
    def how(self) -> str:
        """How processes are limited, for people."""
        return "cgroup" if self._group is not None else "SIGSTOP and SIGCONT"

    def add(self, pid: int) -> None:
        """Limits one more process; ignores one that has ended."""
        self._pids.add(pid)
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError):
                (self._group / "cgroup.procs").write_text(str(pid))

    def __enter__(self) -> "Throttle":
        if self._group is None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._group is None:
            self._thread.join()
            return
        deadline = time.monotonic() + _END_SECONDS
        while True:
            for pid in (self._group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (self._group.parent / "cgroup.procs").write_text(pid)
            try:
                self._group.rmdir()
            except OSError:  # a killed process counts until it is reaped
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def _cycle(self) -> None:
        while not self._over.wait(self._share * _PERIOD_SECONDS):
            self._send(signal.SIGSTOP)
            self._over.wait((1 - self._share) * _PERIOD_SECONDS)
            self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for pid in tuple(self._pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _make_group(share: float) -> Path | None:
    """Makes a cgroup with this share of a core; returns None if none can be made."""
    name = f"emberscale-throttle-{uuid.uuid4().hex[:8]}"
    microseconds = int(1e6 * _PERIOD_SECONDS)
    quota = max(1000, int(share * microseconds))
    try:
        if (_V1 / "cpu.cfs_quota_us").exists() or (_V1 / "cgroup.procs").exists():
            group = _V1 / name
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(microseconds))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
            return group
        if "cpu" in (_V2 / "cgroup.subtree_control").read_text().split():
            group = _V2 / name
            group.mkdir()
            (group / "cpu.max").write_text(f"{quota} {microseconds}")
            return group
    except OSError:
        pass
    return None
