"""A job as it enters the simulation: what is known of it, what its owner asked for, and what it really costs."""

from dataclasses import dataclass

from emberscale_brain.planner.types import JobId, JobMetadata, JobShape, ShapeBounds
from emberscale_brain.simulator.ground_truth import Physics, TableGrowth


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """One submission. `arrival` is in seconds from the start of the simulation.

    Schedulers see `metadata`, `owner`, `request` and `bounds`; `physics`, `growth` and `worker_memory` (bytes that a
    worker really uses) are the truth that they can only measure. `row_bytes` turns memory into rows. A job that is not
    `measured` only makes history: it is left out of every result.
    """

    id: JobId
    owner: str
    metadata: JobMetadata
    physics: Physics
    growth: TableGrowth
    row_bytes: int
    worker_memory: int
    arrival: float
    request: JobShape
    bounds: ShapeBounds
    measured: bool = True
