"""The cores of a job's processes: which cores each one runs on, and quotas for fractions of a core.

Quotas need cgroups, version 1 or 2, that this user may write. A process that is pinned to whole cores needs none. Where
no quota can be set, a fraction of a core is a core that others may be placed on as well.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


def place(cpu_cores: float | None, loads: Mapping[int, float]) -> tuple[int, ...] | None:
    """The cores for a process that may use `cpu_cores` of them: as many as that rounded up, the least loaded first.

    `loads` is the number of cores' worth of work that every usable core has been promised to others. None: no limit
    was given, so the process may run anywhere.
    """
    if cpu_cores is None:
        return None
    wanted = min(math.ceil(cpu_cores), len(loads))
    return tuple(sorted(sorted(loads, key=lambda core: (loads[core], core))[:wanted]))


def loads_of(placed: Iterable[tuple[float | None, tuple[int, ...] | None]], usable: frozenset[int]) -> dict[int, float]:
    """Returns the load that each usable core has been promised, given each process's limit and cores."""
    loads = dict.fromkeys(sorted(usable), 0.0)
    for cpu_cores, cores in placed:
        for core in cores or ():
            if core in loads and cpu_cores is not None and cores:
                loads[core] += cpu_cores / len(cores)
    return loads


_PERIOD_MICROSECONDS = 50_000
_PREFIX = "emberscale-"


@dataclass(frozen=True)
class CpuQuotas:
    """A folder of the cgroup file system in which groups can be made; `unified` for version 2."""

    parent: Path
    unified: bool

    def limit(self, pid: int, member: str, cores: float | None) -> None:
        """Limits a process to a fractional number of cores; pinning alone limits whole ones. None lifts the limit."""
        group = self._group(member)
        quota = None
        if cores is not None and cores != math.ceil(cores):
            quota = round(cores * _PERIOD_MICROSECONDS)
        if quota is None and not group.exists():
            return
        with contextlib.suppress(OSError):  # the process may be gone
            group.mkdir(exist_ok=True)
            if self.unified:
                (group / "cpu.max").write_text(f"{quota or 'max'} {_PERIOD_MICROSECONDS}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
                (group / "cpu.cfs_quota_us").write_text(str(quota or -1))
            (group / "cgroup.procs").write_text(str(pid))

    def forget(self, member: str) -> None:
        """Removes the group of a process that has ended."""
        with contextlib.suppress(OSError):
            self._group(member).rmdir()

    def _group(self, member: str) -> Path:
        return self.parent / f"{_PREFIX}{os.getpid()}-{member}"


def find_cpu_quotas() -> CpuQuotas | None:
    """Returns where quotas can be set, or None. Removes groups that dead runs have left."""
    for quotas in _candidates():
        probe = quotas.parent / f"{_PREFIX}{os.getpid()}-probe"
        try:
            probe.mkdir()
            usable = (probe / ("cpu.max" if quotas.unified else "cpu.cfs_quota_us")).exists()
            probe.rmdir()
        except OSError:
            continue
        if usable:
            _remove_leftovers(quotas.parent)
            return quotas
    return None


def _candidates() -> Iterator[CpuQuotas]:
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    paths = {}
    for line in own:
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in mounts:
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(",") and "cpu" in paths:
            yield CpuQuotas(_under(folder, paths["cpu"]), unified=False)
        elif kind == "cgroup2" and "" in paths:
            here = _under(folder, paths[""])
            # a group that contains processes cannot have child groups with quotas; its parent can
            yield CpuQuotas(here, unified=True)
            if here != Path(folder):
                yield CpuQuotas(here.parent, unified=True)


def _under(mount: str, path: str) -> Path:
    return Path(mount, path.lstrip("/"))


def _remove_leftovers(parent: Path) -> None:
    for group in parent.glob(f"{_PREFIX}*-*"):
        pid = group.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                group.rmdir()
