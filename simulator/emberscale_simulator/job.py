"""A job as it enters the simulation: its metadata, its owner's request, and its true costs.

Also the phases and events of a job.
"""

from dataclasses import dataclass
from enum import StrEnum

from emberscale_api.job.status import JobPhase
from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import JobId, JobMetadata, ShapeBounds
from emberscale_simulator.ground_truth import Physics, TableGrowth


class RunPhase(StrEnum):
    """The phase of a simulated job."""

    QUEUED = "Queued"
    STARTING = "Starting"
    TRAINING = JobPhase.TRAINING
    STANDSTILL = "Standstill"
    COMPLETE = JobPhase.COMPLETE
    FAILED = JobPhase.FAILED


class Happening(StrEnum):
    """The kind of a job's next event."""

    READY = "Ready"  # a start or a standstill ends
    DONE = "Done"
    FAILURE = "Failure"
    OUT_OF_MEMORY = "OutOfMemory"
    CHANGE_READY = "ChangeReady"
    MENDED = "Mended"  # slow pods are worked around
    WORKER_BACK = "WorkerBack"


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """One submission. `arrival` is in seconds from the start of the simulation.

    Schedulers see `metadata`, `owner`, `request` and `bounds`. They can only measure the truth: `physics`, `growth`,
    `worker_memory` (bytes that a worker really uses) and `ps_base` (bytes that each PS uses apart from its share of the
    tables). `row_bytes` converts memory into rows. A job that is not `measured` only adds to the history, and is left
    out of every result.
    """

    id: JobId
    owner: str
    metadata: JobMetadata
    physics: Physics
    growth: TableGrowth
    row_bytes: int
    worker_memory: int
    ps_base: int
    arrival: float
    request: JobShape
    bounds: ShapeBounds
    measured: bool = True

    def largest_ps(self, samples: float, ps: int, skew: float) -> float:
        """Bytes of the largest of `ps` servers after `samples`; it has `skew` times the mean share of the tables."""
        return self.ps_base + self.growth.bytes_at(samples) * (skew if ps > 1 else 1.0) / ps

    def samples_that_fit(self, ps_memory: float, ps: int, skew: float) -> float:
        """Samples at which the largest of `ps` servers has used `ps_memory` bytes."""
        return self.growth.samples_at((ps_memory - self.ps_base) * ps / (skew if ps > 1 else 1.0))
