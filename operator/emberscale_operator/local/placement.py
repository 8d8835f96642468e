"""Which cores a process runs on."""

import math
from collections.abc import Mapping


def place(cpu_cores: float | None, loads: Mapping[int, float]) -> tuple[int, ...] | None:
    """The cores for a process that may use `cpu_cores` of them: as many as that rounded up, the least loaded first.

    `loads` is the number of cores' worth of work that every usable core has been promised to others. None: no limit
    was given, so the process may run anywhere.
    """
    if cpu_cores is None:
        return None
    wanted = min(math.ceil(cpu_cores), len(loads))
    return tuple(sorted(sorted(loads, key=lambda core: (loads[core], core))[:wanted]))


def loads_of(
    placed: Mapping[str, tuple[float | None, tuple[int, ...] | None]], usable: frozenset[int]
) -> dict[int, float]:
    """What each usable core has been promised, given each process's limit and cores."""
    loads = dict.fromkeys(sorted(usable), 0.0)
    for cpu_cores, cores in placed.values():
        for core in cores or ():
            if core in loads and cpu_cores is not None and cores:
                loads[core] += cpu_cores / len(cores)
    return loads
