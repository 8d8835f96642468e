"""What a scheduler is given and answers, in the simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from emberscale_brain.planner.types import ClusterCapacity, JobId, JobShape, JobView
from emberscale_simulator.job import SimulatedJob


@dataclass(frozen=True, slots=True)
class ScheduledJob:
    """A job under a scheduler. `view` is all that a planner may see; `request` is what the owner asked for.

    A job whose `view.current` is None waits. One that is `view.fixed` counts against the capacity and stays as it is.
    """

    view: JobView
    request: JobShape


class Scheduler(Protocol):
    """Decides on shapes. It may remember, but reads no clock and draws no random number of its own without a seed."""

    def decide(self, jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, now: float) -> Mapping[JobId, JobShape]:
        """Shapes for waiting jobs that are to start and for running ones that are to change.

        `jobs` are by arrival. What does not fit the cluster is not carried out; a job left out stays as it is.
        """
        ...

    def observe_starts(self, role: str, seconds: Sequence[float]) -> None:
        """What pods took to start."""
        ...

    def job_ended(self, job: SimulatedJob, final_shape: JobShape, completed: bool, now: float) -> None:
        """A job is over."""
        ...


class Memoryless:
    """Learns nothing from start-ups and ends."""

    def observe_starts(self, role: str, seconds: Sequence[float]) -> None:
        """Ignored."""

    def job_ended(self, job: SimulatedJob, final_shape: JobShape, completed: bool, now: float) -> None:
        """Ignored."""


def admit(
    jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, wanted: Mapping[JobId, JobShape]
) -> dict[JobId, JobShape]:
    """Starts of waiting jobs: in order of arrival, each whole or not at all, smaller ones passing larger ones."""
    cpu = capacity.cpu - sum(job.view.current.cpu for job in jobs if job.view.current is not None)
    memory = capacity.memory - sum(job.view.current.memory for job in jobs if job.view.current is not None)
    starts = {}
    for job in jobs:
        shape = wanted.get(job.view.id)
        if job.view.current is not None or shape is None:
            continue
        if shape.cpu <= cpu and shape.memory <= memory:
            starts[job.view.id] = shape
            cpu -= shape.cpu
            memory -= shape.memory
    return starts
