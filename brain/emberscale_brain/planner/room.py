"""What is left of a cluster and of its owners' quotas while a plan is made."""

from collections.abc import Iterable, Mapping

from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import ClusterCapacity, Quota


class Room:
    """Shapes are taken from it and given back; what is overdrawn shows as no room at all."""

    def __init__(self, capacity: ClusterCapacity, quotas: Mapping[str, Quota]) -> None:
        self._nodes = (capacity.largest_node_cpu, capacity.largest_node_memory)
        self._cpu, self._memory = capacity.cpu, float(capacity.memory)
        self._quotas = {owner: [quota.cpu, quota.memory] for owner, quota in quotas.items()}

    def take(self, owner: str, shape: JobShape | None) -> None:
        """Counts a shape of an owner's job."""
        self._add(owner, shape, -1)

    def give_back(self, owner: str, shape: JobShape | None) -> None:
        """The inverse of `take`."""
        self._add(owner, shape, 1)

    def _add(self, owner: str, shape: JobShape | None, sign: int) -> None:
        if shape is None:
            return
        self._cpu += sign * shape.cpu
        self._memory += sign * shape.memory
        if owner in self._quotas:
            self._quotas[owner][0] += sign * shape.cpu
            self._quotas[owner][1] += sign * shape.memory

    def limits(self, owner: str) -> tuple[float, float]:
        """Cores and bytes that a job of the owner may have in all."""
        cpu, memory = self._quotas.get(owner, (float("inf"), float("inf")))
        return max(0.0, min(self._cpu, cpu)), max(0.0, min(self._memory, memory))

    def left(self, owner: str) -> ClusterCapacity:
        """What a job of the owner may have, in all and for each process."""
        cpu, memory = self.limits(owner)
        return ClusterCapacity(cpu, int(memory), *self._nodes)

    def fits(self, owner: str, shape: JobShape) -> bool:
        """Whether a job of the owner may have the shape."""
        cpu, memory = self.limits(owner)
        return shape.cpu <= cpu and shape.memory <= memory

    def rest(self, owners: Iterable[str]) -> tuple[ClusterCapacity, dict[str, Quota]]:
        """What is left, as a capacity and quotas of those owners that have one."""
        quotas = {
            owner: Quota(max(0.0, self._quotas[owner][0]), max(0.0, self._quotas[owner][1]))
            for owner in owners
            if owner in self._quotas
        }
        return ClusterCapacity(max(0.0, self._cpu), int(max(0.0, self._memory)), *self._nodes), quotas
