"""Elastic Scheduler (Or et al., MLSys 2020) as DLRover-RM section 6 runs it: only the number of workers changes.

It climbs: it adds workers as long as the last addition raised the measured throughput enough, and gives the last ones
back otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import ClusterCapacity, JobId
from emberscale_simulator.schedulers.protocol import Memoryless, ScheduledJob, admit


@dataclass(slots=True)
class _Climb:
    """The state of a job's climb: workers and throughput before the last addition, and whether the climb is over."""

    workers: int
    throughput: float
    over: bool = False


class ElasticScheduler(Memoryless):
    """Starts from the owner's request; adds `step` workers at each look while throughput grows in proportion.

    Or et al. stop scaling out once a new worker adds less than a fraction of the throughput per worker. `min_gain` is
    the least relative growth of the whole throughput per step.
    """

    def __init__(self, step: int, min_gain: float) -> None:
        self._step = step
        self._min_gain = min_gain
        self._climbs: dict[JobId, _Climb] = {}

    def decide(self, jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, now: float) -> Mapping[JobId, JobShape]:
        """Starts jobs, gives running jobs more workers, and takes back workers that did not pay."""
        decided = admit(jobs, capacity, {job.view.id: job.request for job in jobs})
        free = capacity.cpu - sum(shape.cpu for shape in decided.values())
        free -= sum(job.view.current.cpu for job in jobs if job.view.current is not None)
        for job in jobs:
            shape = self._next_step(job)
            present = job.view.current
            if shape is None or present is None:
                continue
            added = shape.cpu - present.cpu
            if added <= free:
                decided[job.view.id] = shape
                free -= added
        return decided

    def _next_step(self, job: ScheduledJob) -> JobShape | None:
        present = job.view.current
        if present is None or job.view.fixed:
            return None
        here = [profile for profile in job.view.profiles if profile.shape == present and not profile.restarted]
        if not here:
            return None
        measured = sum(profile.throughput for profile in here) / len(here)
        climb = self._climbs.get(job.view.id)
        if climb is not None:
            if climb.over:
                return None
            if present.workers > climb.workers and measured < climb.throughput * (1 + self._min_gain):
                climb.over = True
                return replace(present, workers=climb.workers)
        target = min(present.workers + self._step, job.view.bounds.workers[1])
        self._climbs[job.view.id] = _Climb(present.workers, measured)
        return replace(present, workers=target) if target > present.workers else None
