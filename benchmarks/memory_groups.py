"""Limits the memory of running processes with cgroups, as a container runtime does."""

import contextlib
import time
import uuid
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_END_SECONDS = 30.0


class MemoryGroups:
    """One cgroup for each process; the kernel kills a process that outgrows its own.

    A cgroup is not charged for memory that a process already has when it joins, so its limit is the rest: the process's
    limit minus its resident bytes. Pages that it shared with its parent and then writes are charged although they were
    resident, so the kernel kills it slightly below its limit rather than above.

    Raises OSError if cgroups cannot be made.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._v1 = (_V1 / "memory.limit_in_bytes").exists()
        self._parent = _V1 if self._v1 else _V2
        self._groups: dict[int, Path] = {}
        self._probe()

    def hold(self, pid: int) -> None:
        """Limits one more process; ignores one that has ended."""
        resident = resident_bytes(pid)
        if pid in self._groups or not resident:
            return
        group = self._made()
        self._groups[pid] = group
        room = max(1 << 20, self._limit - resident)
        (group / ("memory.limit_in_bytes" if self._v1 else "memory.max")).write_text(str(room))
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))

    @property
    def killed(self) -> int:
        """The number of processes that the kernel has killed."""
        file = "memory.oom_control" if self._v1 else "memory.events"
        counts = [dict(line.split() for line in (g / file).read_text().splitlines()) for g in self._groups.values()]
        return sum(int(count["oom_kill"]) for count in counts)

    def close(self) -> None:
        """Removes the cgroups once their processes have ended."""
        deadline = time.monotonic() + _END_SECONDS
        for group in self._groups.values():
            while True:
                try:
                    group.rmdir()
                except OSError:  # a killed process counts until it is reaped
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
                else:
                    break
        self._groups.clear()

    def _made(self) -> Path:
        group = self._parent / f"emberscale-memory-{uuid.uuid4().hex[:8]}"
        group.mkdir()
        return group

    def _probe(self) -> None:
        if not self._v1 and "memory" not in (_V2 / "cgroup.subtree_control").read_text().split():
            raise OSError("memory cgroups cannot be made here: run as root, with the memory controller delegated")
        self._made().rmdir()


def resident_bytes(pid: int) -> int:
    """Returns the resident bytes of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0
