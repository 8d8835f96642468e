"""The input and the output of a scheduler in the simulation."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import ClusterCapacity, JobId, JobView, ScalingOverheads
from emberscale_simulator.job import SimulatedJob
from emberscale_simulator.pods import StartTime

_STARTS_REMEMBERED = 200


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

    def observe_starts(self, starts: Sequence[StartTime]) -> None:
        """Takes the start times of pods, and the pauses of jobs for them."""
        ...

    def job_ended(self, job: SimulatedJob, final_shape: JobShape, completed: bool, now: float) -> None:
        """A job is over."""
        ...


class Memoryless:
    """Learns nothing from start-ups and ends."""

    def observe_starts(self, starts: Sequence[StartTime]) -> None:
        """Ignored."""

    def job_ended(self, job: SimulatedJob, final_shape: JobShape, completed: bool, now: float) -> None:
        """Ignored."""


class LearnedOverheads:
    """Medians of the latest start-ups and standstills of each role, as the brain learns them."""

    def __init__(self) -> None:
        self._starts = {role: deque[float](maxlen=_STARTS_REMEMBERED) for role in ("worker", "ps")}
        self._pauses = {role: deque[float](maxlen=_STARTS_REMEMBERED) for role in ("worker", "ps")}

    def observe(self, starts: Sequence[StartTime]) -> None:
        """Remembers the latest."""
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
    """Starts waiting jobs in order of arrival, each as a whole; smaller jobs may overtake larger ones."""
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
