"""The processes of a job on this machine: started, limited, watched and ended."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from emberscale_api.job.roles import Role
from emberscale_operator.local.cpu import find_cpu_quotas, loads_of, place
from emberscale_operator.local.process import Launch, TetheredProcess
from emberscale_operator.machine import Instance, InstanceExit, InstanceId, InstanceState, Resources


@dataclass(frozen=True)
class ProcessView:
    """One process as people see it; memory in bytes."""

    name: str
    pid: int
    state: InstanceState
    resident_bytes: int


@dataclass
class _OwnProcess:
    """One process. `started_at` is when it was asked for and, once `exists`, when that was first seen."""

    process: TetheredProcess
    resources: Resources
    cores: tuple[int, ...] | None
    started_at: float
    exists: bool
    exit: InstanceExit | None = None
    has_quota: bool = False


class JobProcesses:
    """The processes of one job.

    All calls come from one thread, and the processes die with it. `launch_of` says how an instance starts.
    """

    def __init__(
        self, launch_of: Callable[[InstanceId, Resources], Launch], logs: Path, stop_grace: float = 10.0
    ) -> None:
        self._launch_of = launch_of
        self._logs = logs
        self._stop_grace = stop_grace
        self._quotas = find_cpu_quotas()
        self._usable_cores = frozenset(os.sched_getaffinity(0))
        self._entries: dict[InstanceId, _OwnProcess] = {}
        self._newest: dict[tuple[Role, int], int] = {}
        self._peaks: dict[str, int] = {}

    def create(self, instance: InstanceId, resources: Resources, now: float) -> None:
        """Starts an incarnation, unless it or a newer one was started before."""
        slot = (instance.role, instance.index)
        if instance.incarnation <= self._newest.get(slot, 0):
            return
        self._newest[slot] = instance.incarnation
        cores = place(resources.cpu_cores, self._loads())
        launch = self._launch_of(instance, resources)
        process = TetheredProcess(launch, instance.member, self._logs / f"{instance.member}.log", cores)
        exists = process.pid is not None  # else the server that forks it is still importing what it forks with
        self._entries[instance] = _OwnProcess(process, resources, cores, now, exists)

    def resize(self, instance: InstanceId, resources: Resources) -> None:
        """Gives a running instance other cores and another limit of memory.

        One that is being killed for want of memory keeps the limit that it was above.
        """
        entry = self._entries.get(instance)
        if entry is None or entry.exit is not None or entry.process.out_of_memory:
            return
        if resources.cpu_cores != entry.resources.cpu_cores:
            entry.cores = place(resources.cpu_cores, self._loads(without=instance))
            entry.process.set_cores(entry.cores if entry.cores is not None else tuple(self._usable_cores))
            entry.has_quota = False
        entry.resources = resources

    def delete(self, instance: InstanceId, now: float) -> None:
        """Asks a live instance to end, and forgets one that has ended."""
        entry = self._entries.get(instance)
        if entry is None:
            return
        if entry.exit is not None:
            del self._entries[instance]
        else:
            entry.process.stop(now, self._stop_grace)

    def kill(self, instance: InstanceId) -> None:
        """Sends SIGKILL, which also ends a process that is stopped."""
        entry = self._entries.get(instance)
        if entry is not None:
            entry.process.kill()

    def observe(self, now: float) -> tuple[Instance, ...]:
        """Returns all instances; also enforces memory limits and ends overdue stops."""
        for instance, entry in self._entries.items():
            self._refresh(instance, entry, now)
        return tuple(
            Instance(
                instance, _state(entry), entry.resources, entry.started_at, entry.exit, name=entry.process.incarnation
            )
            for instance, entry in self._entries.items()
        )

    def processes(self) -> tuple[ProcessView, ...]:
        """Returns every process that is not forgotten, as of the last observation."""
        return tuple(
            ProcessView(instance.member, pid, _state(entry), entry.process.resident_bytes)
            for instance, entry in sorted(self._entries.items())
            if (pid := entry.process.pid) is not None
        )

    def unforked(self, asked_by: float) -> tuple[str, ...]:
        """Returns the members asked for by then, and yet to be forked as of the last observation."""
        pending = (
            instance
            for instance, entry in self._entries.items()
            if _state(entry) is InstanceState.PENDING and entry.started_at <= asked_by
        )
        return tuple(instance.member for instance in sorted(pending))

    def peak_memory(self) -> dict[str, int]:
        """The most resident bytes of each member over all its incarnations."""
        return dict(self._peaks)

    def kill_all(self) -> None:
        """Kills all processes, and waits until they are gone."""
        for entry in self._entries.values():
            entry.process.kill()
        for entry in self._entries.values():
            entry.process.wait(seconds=30)
        for instance in self._entries:
            self._forget_limit(instance.member)
        self._entries.clear()

    def _refresh(self, instance: InstanceId, entry: _OwnProcess, now: float) -> None:
        if entry.exit is not None:
            return
        process = entry.process
        if self._quotas is not None and not entry.has_quota and process.pid is not None:
            self._quotas.limit(process.pid, instance.member, entry.resources.cpu_cores)
            entry.has_quota = True
        process.watch_memory(entry.resources.memory_bytes)
        process.end_overdue(now)
        peak = max(self._peaks.get(instance.member, 0), process.peak_bytes)
        self._peaks[instance.member] = peak
        code = process.exit_code()
        if not entry.exists and process.pid is not None:
            entry.exists, entry.started_at = True, now
        if code is not None:
            entry.exit = InstanceExit(process.exit_reason(code), code, at=now, deleted=process.stop_asked)
            self._forget_limit(instance.member)

    def _forget_limit(self, member: str) -> None:
        if self._quotas is not None:
            self._quotas.forget(member)

    def _loads(self, without: InstanceId | None = None) -> dict[int, float]:
        others = (entry for instance, entry in self._entries.items() if entry.exit is None and instance != without)
        return loads_of(((entry.resources.cpu_cores, entry.cores) for entry in others), self._usable_cores)


def _state(entry: _OwnProcess) -> InstanceState:
    if entry.exit is not None:
        return InstanceState.EXITED
    if entry.process.stop_asked:
        return InstanceState.TERMINATING
    return InstanceState.RUNNING if entry.exists else InstanceState.PENDING
