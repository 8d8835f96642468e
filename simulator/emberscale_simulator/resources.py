"""Cores and bytes: those that a live change needs while pods overlap, and those that jobs held and used."""

from dataclasses import dataclass

from emberscale_api.shape import JobShape
from emberscale_simulator.ground_truth import Rate


@dataclass(frozen=True, slots=True)
class Amounts:
    """Cores and bytes."""

    cpu: float
    memory: int

    def fits(self, free: "Amounts") -> bool:
        """Whether the amounts fit into `free`; a thousandth of a core counts as rounding."""
        return self.cpu <= free.cpu + 1e-3 and self.memory <= free.memory

    def __add__(self, other: "Amounts") -> "Amounts":
        return Amounts(self.cpu + other.cpu, self.memory + other.memory)

    def __sub__(self, other: "Amounts") -> "Amounts":
        return Amounts(self.cpu - other.cpu, self.memory - other.memory)

    def __mul__(self, count: int) -> "Amounts":
        return Amounts(self.cpu * count, self.memory * count)

    def larger(self, other: "Amounts") -> "Amounts":
        """Returns the larger amount of each."""
        return Amounts(max(self.cpu, other.cpu), max(self.memory, other.memory))


NOTHING = Amounts(0.0, 0)


@dataclass(frozen=True, slots=True)
class RoleResources:
    """The resources of all workers and of all parameter servers."""

    worker: Amounts
    ps: Amounts

    @property
    def total(self) -> Amounts:
        """The resources of both roles."""
        return self.worker + self.ps


def worker_pod(shape: JobShape) -> Amounts:
    """Returns the resources of one worker."""
    return Amounts(shape.worker_cpu, shape.worker_memory)


def ps_pod(shape: JobShape) -> Amounts:
    """Returns the resources of one parameter server."""
    return Amounts(shape.ps_cpu, shape.ps_memory)


def role_resources(shape: JobShape) -> RoleResources:
    """Returns the resources of all pods of a shape."""
    return RoleResources(worker_pod(shape) * shape.workers, ps_pod(shape) * shape.ps)


@dataclass(frozen=True, slots=True)
class Overlap:
    """The extra resources of a live change, in the three ways to do it.

    `at_once`: all new pods start beside the old ones. `one_by_one`: a new pod starts, then an old one ends, and so on.
    `in_place`: an old pod ends, then a new one starts, and so on. `new_workers` and `new_ps` are the numbers of pods
    that start.
    """

    at_once: RoleResources
    one_by_one: RoleResources
    in_place: RoleResources
    new_workers: int
    new_ps: int


def overlap_of(present: JobShape, target: JobShape, resized: bool) -> Overlap:
    """Returns the resources that a change from one shape to another needs.

    A role with pods of the same size, or `resized` in place, only gains or loses pods. Otherwise all are replaced.
    """
    worker = _role_overlap(worker_pod(present), present.workers, worker_pod(target), target.workers, resized)
    ps = _role_overlap(ps_pod(present), present.ps, ps_pod(target), target.ps, resized)
    at_once, one_by_one, in_place = (RoleResources(*both) for both in zip(worker[:3], ps[:3], strict=True))
    return Overlap(at_once, one_by_one, in_place, worker[3], ps[3])


def _role_overlap(
    old: Amounts, old_count: int, new: Amounts, new_count: int, resized: bool
) -> tuple[Amounts, Amounts, Amounts, int]:
    """Returns what one role needs at once, one by one and in place, and the number of its pods that start."""
    if old == new or resized:
        added, leaving = max(0, new_count - old_count), max(0, old_count - new_count)
        kept = old.larger(new) * min(old_count, new_count) + new * added + old * leaving
        return kept, kept, kept, added
    before, after = old * old_count, new * new_count
    larger = before.larger(after)
    return before + after, larger + new, larger, new_count


@dataclass(slots=True)
class Usage:
    """Integrals over a job's life: core-seconds and byte-seconds, per role."""

    worker_busy: float = 0.0
    worker_allocated: float = 0.0
    ps_busy: float = 0.0
    ps_allocated: float = 0.0
    memory_used: float = 0.0
    memory_allocated: float = 0.0

    def hold(self, reserved: RoleResources, memory_used: float, seconds: float) -> None:
        """Counts `seconds` in which the job held these resources and used this memory."""
        self.worker_allocated += reserved.worker.cpu * seconds
        self.ps_allocated += reserved.ps.cpu * seconds
        self.memory_allocated += reserved.total.memory * seconds
        self.memory_used += memory_used * seconds

    def train(self, rate: Rate, seconds: float) -> None:
        """Counts `seconds` in which the job trained at this rate."""
        self.worker_busy += rate.worker_busy_cores * seconds
        self.ps_busy += rate.ps_busy_cores * seconds
