"""What a job has held and used of the cluster."""

from dataclasses import dataclass

from emberscale_simulator.ground_truth import Rate
from emberscale_simulator.resources import RoleResources


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
        """The job had these resources for so long, and used so many bytes of them."""
        self.worker_allocated += reserved.worker.cpu * seconds
        self.ps_allocated += reserved.ps.cpu * seconds
        self.memory_allocated += reserved.total.memory * seconds
        self.memory_used += memory_used * seconds

    def train(self, rate: Rate, seconds: float) -> None:
        """The job trained at this rate for so long."""
        self.worker_busy += rate.worker_busy_cores * seconds
        self.ps_busy += rate.ps_busy_cores * seconds
