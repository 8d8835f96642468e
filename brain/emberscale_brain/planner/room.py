"""The room left in a cluster and in its owners' quotas while a plan is made, and how a first shape is cut to it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import MEMORY_UNIT, ClusterCapacity, Quota, ShapeBounds

ROUNDING = 1e-9  # of a limit: cores summed in another order are not over it
_UNLIMITED = Quota(math.inf, math.inf)


def fits(shape: JobShape, room: ClusterCapacity) -> bool:
    """Whether there is room for all processes together, and for each on the largest node."""
    return (
        shape.cpu <= room.cpu * (1 + ROUNDING)
        and shape.memory <= room.memory
        and max(shape.worker_cpu, shape.ps_cpu) <= room.largest_node_cpu
        and max(shape.worker_memory, shape.ps_memory) <= room.largest_node_memory
    )


def cut_to(wanted: JobShape, bounds: ShapeBounds, room: ClusterCapacity, *, keep_memory: bool) -> JobShape | None:
    """Returns the shape itself if it fits, else a smaller one that does; None if not even `least_of` fits.

    `wanted` is within `bounds`, and so is the result. Starting from the least shape, the dimension with the smallest
    share of its wanted value grows a step at a time, until no further step fits.
    """
    if fits(wanted, room):
        return wanted
    shape = least_of(wanted, bounds, room, keep_memory=keep_memory)
    if not fits(shape, room):
        return None
    most = replace(
        _on_largest_node(wanted, bounds, room),
        ps=max(wanted.ps, shape.ps),
        worker_memory=shape.worker_memory,
    )
    tables = shape.ps * shape.ps_memory
    while True:
        larger = (one for one in _one_step_more(shape, most, bounds, tables) if fits(one, room))
        grown = next(larger, None)
        if grown is None:
            return shape
        shape = grown


def least_of(wanted: JobShape, bounds: ShapeBounds, room: ClusterCapacity, *, keep_memory: bool) -> JobShape:
    """Returns the smallest shape within the bounds that holds the same tables, on as many PS as they need.

    If the tables and the workers' memory do not fit, and `keep_memory` is False, both lose the same share of what they
    have above their lower bounds. A worker's memory is always cut to that of the largest node.
    """
    cut = _on_largest_node(wanted, bounds, room)
    tables = wanted.ps * wanted.ps_memory
    ps = min(bounds.ps[1], max(bounds.ps[0], math.ceil(tables / _most_ps_memory(bounds, room))))
    shape = JobShape(
        workers=bounds.workers[0],
        ps=ps,
        worker_cpu=bounds.worker_cpu[0],
        ps_cpu=bounds.ps_cpu[0],
        worker_memory=cut.worker_memory,
        ps_memory=_ps_memory(tables, ps, bounds, room),
    )
    if keep_memory or fits(shape, room):
        return shape
    fewest = replace(shape, ps=bounds.ps[0], ps_memory=_ps_memory(tables, bounds.ps[0], bounds, room))
    bottom = fewest.with_memory(bounds.worker_memory[0], bounds.ps_memory[0])
    above = fewest.memory - bottom.memory
    share = min(1.0, max(0.0, (room.memory - bottom.memory) / above)) if above else 0.0
    return fewest.with_memory(
        _part(bottom.worker_memory, fewest.worker_memory, share), _part(bottom.ps_memory, fewest.ps_memory, share)
    )


def _on_largest_node(wanted: JobShape, bounds: ShapeBounds, room: ClusterCapacity) -> JobShape:
    """Returns the shape with cores and workers' memory cut to the largest node, as far as the bounds allow."""

    def cores(value: float, least: float) -> float:
        if value <= room.largest_node_cpu:
            return value
        return max(least, math.floor(room.largest_node_cpu / bounds.cpu_step + ROUNDING) * bounds.cpu_step)

    return replace(
        wanted,
        worker_cpu=cores(wanted.worker_cpu, bounds.worker_cpu[0]),
        ps_cpu=cores(wanted.ps_cpu, bounds.ps_cpu[0]),
        worker_memory=max(bounds.worker_memory[0], int(min(wanted.worker_memory, room.largest_node_memory))),
    )


def _most_ps_memory(bounds: ShapeBounds, room: ClusterCapacity) -> int:
    return max(bounds.ps_memory[0], int(min(bounds.ps_memory[1], room.largest_node_memory)))


def _ps_memory(tables: int, ps: int, bounds: ShapeBounds, room: ClusterCapacity) -> int:
    """Returns the memory that each of this number of PS needs for the tables, up to its bound."""
    return min(_most_ps_memory(bounds, room), max(bounds.ps_memory[0], math.ceil(tables / ps)))


def _part(low: int, high: int, share: float) -> int:
    return low + int((high - low) * share) // MEMORY_UNIT * MEMORY_UNIT


def _one_step_more(shape: JobShape, most: JobShape, bounds: ShapeBounds, tables: int) -> list[JobShape]:
    """Returns shapes with one dimension larger, starting with the dimension that has the smallest share of its most."""
    step, low = bounds.cpu_step, bounds.ps_memory[0]

    def more(cores: float, most_cores: float) -> float:
        return min(most_cores, (math.floor(cores / step + ROUNDING) + 1) * step)

    larger: list[tuple[float, JobShape]] = []
    if shape.workers < most.workers:
        larger.append((shape.workers / most.workers, replace(shape, workers=shape.workers + 1)))
    if shape.worker_cpu < most.worker_cpu:
        cores = more(shape.worker_cpu, most.worker_cpu)
        larger.append((shape.worker_cpu / most.worker_cpu, replace(shape, worker_cpu=cores)))
    if shape.ps < most.ps:
        memory = max(low, math.ceil(tables / (shape.ps + 1)))
        larger.append((shape.ps / most.ps, replace(shape, ps=shape.ps + 1, ps_memory=memory)))
    if shape.ps_cpu < most.ps_cpu:
        cores = more(shape.ps_cpu, most.ps_cpu)
        larger.append((shape.ps_cpu / most.ps_cpu, replace(shape, ps_cpu=cores)))
    return [one for _, one in sorted(larger, key=lambda item: item[0])]


EVERY_OTHER = "*"
"""In quotas, stands for every owner without a quota."""


def quota_of(owner: str, quotas: Mapping[str, Quota]) -> Quota:
    """Returns the quota of all jobs of an owner together."""
    return quotas.get(owner) or quotas.get(EVERY_OTHER) or _UNLIMITED


class Room:
    """The room of a cluster: shapes are taken from it and given back. If it is overdrawn, it has no room.

    Jobs report their own shapes. Shapes beyond an owner's quota leave that owner no room, but take none from others, so
    that no job can fill the cluster by its reports alone.
    """

    def __init__(self, capacity: ClusterCapacity, quotas: Mapping[str, Quota]) -> None:
        self._capacity = capacity
        self._quotas = quotas
        self._taken: dict[str, tuple[float, float]] = {}
        self._cpu, self._memory = capacity.cpu, float(capacity.memory)

    def take(self, owner: str, shape: JobShape | None) -> None:
        """Takes a shape of an owner's job."""
        if shape is not None:
            self._add(owner, shape.cpu, shape.memory)

    def give_back(self, owner: str, shape: JobShape | None) -> None:
        """The inverse of `take`."""
        if shape is not None:
            self._add(owner, -shape.cpu, -shape.memory)

    def _add(self, owner: str, cpu: float, memory: float) -> None:
        quota, (cpu_before, memory_before) = quota_of(owner, self._quotas), self.taken_by(owner)
        now = self._taken[owner] = (cpu_before + cpu, memory_before + memory)
        self._cpu -= cpu - (max(0.0, now[0] - quota.cpu) - max(0.0, cpu_before - quota.cpu))
        self._memory -= memory - (max(0.0, now[1] - quota.memory) - max(0.0, memory_before - quota.memory))

    @property
    def owners(self) -> Iterable[str]:
        """Whose jobs have taken shapes."""
        return self._taken

    @property
    def taken(self) -> tuple[float, float]:
        """The cores and bytes that were taken in all."""
        return self._capacity.cpu - self._cpu, self._capacity.memory - self._memory

    def taken_by(self, owner: str) -> tuple[float, float]:
        """The cores and bytes that were taken for the owner's jobs, also beyond the quota."""
        return self._taken.get(owner, (0.0, 0.0))

    def _left_of_quota(self, owner: str) -> Quota:
        quota, (cpu, memory) = quota_of(owner, self._quotas), self.taken_by(owner)
        return Quota(max(0.0, quota.cpu - cpu), max(0.0, quota.memory - memory))

    def limits(self, owner: str) -> tuple[float, float]:
        """The total cores and bytes that a job of the owner may have."""
        quota = self._left_of_quota(owner)
        return max(0.0, min(self._cpu, quota.cpu)), max(0.0, min(self._memory, quota.memory))

    def left(self, owner: str) -> ClusterCapacity:
        """Returns the room for one job of the owner, in total and for each process."""
        cpu, memory = self.limits(owner)
        return replace(self._capacity, cpu=cpu, memory=int(memory))

    def fits(self, owner: str, shape: JobShape) -> bool:
        """Whether a job of the owner may have the shape."""
        cpu, memory = self.limits(owner)
        return shape.cpu <= cpu * (1 + ROUNDING) and shape.memory <= memory

    def rest(self, owners: Iterable[str]) -> tuple[ClusterCapacity, dict[str, Quota]]:
        """Returns the room that is left, as a capacity and as quotas of the owners that have one."""
        quotas = {
            owner: self._left_of_quota(owner) for owner in owners if quota_of(owner, self._quotas) is not _UNLIMITED
        }
        left = replace(self._capacity, cpu=max(0.0, self._cpu), memory=int(max(0.0, self._memory)))
        return left, quotas
