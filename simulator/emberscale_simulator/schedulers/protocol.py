"""The input and the output of a scheduler in the simulation."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import ClusterCapacity, JobId, JobView, ScalingOverheads
from emberscale_brain.preferences import START_UPS_REMEMBERED
from emberscale_simulator.job import SimulatedJob
from emberscale_simulator.pods import StartTime


@dataclass(frozen=True, slots=True)
class ScheduledJob:
    """A job under a scheduler. `view` is all that a planner may see; `request` is the owner's request.

    A job whose `view.current` is None waits. A `view.fixed` job counts against the capacity and keeps its shape.
    """

    view: JobView
    request: JobShape


class Scheduler(Protocol):
    """Decides on shapes. It may keep state, but reads no clock and draws random numbers only from a seed."""

    def decide(self, jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, now: float) -> Mapping[JobId, JobShape]:
        """Returns shapes for waiting jobs that should start and running jobs that should change.

        `jobs` are by arrival. Shapes that do not fit into the cluster are ignored; a job left out keeps its shape.
        """
        ...

    def observe_starts(self, starts: Sequence[StartTime]) -> None:
        """Takes the start times of pods, and the pauses of jobs for them."""
        ...

    def job_ended(self, job: SimulatedJob, final_shape: JobShape, completed: bool, now: float) -> None:
        """Learns that a job has ended."""
        ...


class Memoryless:
    """A scheduler that learns nothing from start-ups and ends of jobs."""

    def observe_starts(self, starts: Sequence[StartTime]) -> None:
        """Ignored."""

    def job_ended(self, job: SimulatedJob, final_shape: JobShape, completed: bool, now: float) -> None:
        """Ignored."""


class LearnsOverheads:
    """Learns medians of the latest start-ups and standstills of each role, as the brain does."""

    def __init__(self) -> None:
        self._starts = {role: deque[float](maxlen=START_UPS_REMEMBERED) for role in ("worker", "ps")}
        self._pauses = {role: deque[float](maxlen=START_UPS_REMEMBERED) for role in ("worker", "ps")}

    def observe_starts(self, starts: Sequence[StartTime]) -> None:
        """Remembers the latest starts."""
        for start in starts:
            if start.seconds is not None:
                self._starts[start.role].append(start.seconds)
            if start.paused_seconds is not None:
                self._pauses[start.role].append(start.paused_seconds)

    def overheads(self, resize: float | None) -> ScalingOverheads:
        """Returns the observed overheads, or else the product's assumptions. `resize` as in `ScalingOverheads`."""
        return replace(ScalingOverheads.learned(self._starts, self._pauses), resize_seconds=resize)


def admit(
    jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, wanted: Mapping[JobId, JobShape]
) -> dict[JobId, JobShape]:
    """Starts waiting jobs that fit completely, in order of arrival; smaller jobs may overtake larger ones."""
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
