"""Static shapes: the owner's request (Kubeflow without auto-scaling), and the best shape found by manual trials."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from emberscale_api.shape import GIB, JobShape
from emberscale_brain.planner.types import ClusterCapacity, JobId, ShapeBounds
from emberscale_simulator.ground_truth import Physics, batch_rates
from emberscale_simulator.job import SimulatedJob
from emberscale_simulator.schedulers.protocol import Memoryless, ScheduledJob, admit

_MEMORY_ROOM = 1.2


class WellTunedScheduler(Memoryless):
    """Knows the truth: gives each job the fastest shape within its bounds and an equal share of the cluster.

    `shares` is the number of jobs that split the cluster. Ties (within a millionth) go to the fewest cores. Memory is
    the job's need at its end plus a fifth. Never changes a running job.
    """

    def __init__(self, jobs: Sequence[SimulatedJob], shares: int, ps_memory_skew: float) -> None:
        self._truth = {job.id: job for job in jobs}
        self._shares = shares
        self._skew = ps_memory_skew

    def decide(self, jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, now: float) -> Mapping[JobId, JobShape]:
        """Returns the best shapes of the waiting jobs that fit."""
        waiting = [job for job in jobs if job.view.current is None]
        return admit(jobs, capacity, {job.view.id: self._best(job, capacity) for job in waiting})

    def _best(self, job: ScheduledJob, capacity: ClusterCapacity) -> JobShape:
        truth = self._truth[job.view.id]
        shape = fastest_shape(truth.physics, truth.bounds, capacity.cpu / self._shares)
        held = truth.largest_ps(truth.metadata.total_samples, shape[1], self._skew)
        return JobShape(
            workers=shape[0],
            ps=shape[1],
            worker_cpu=shape[2],
            ps_cpu=shape[3],
            worker_memory=math.ceil(truth.worker_memory * _MEMORY_ROOM),
            ps_memory=max(GIB, math.ceil(held * _MEMORY_ROOM)),
        )


@lru_cache(maxsize=4096)
def fastest_shape(physics: Physics, bounds: ShapeBounds, cores: float) -> tuple[int, int, float, float]:
    """Returns workers, PS and their cores that train fastest with at most `cores` in total; tries all whole steps."""
    ps = np.arange(bounds.ps[0], bounds.ps[1] + 1)
    worker_cpu = _grid(bounds.worker_cpu, bounds.cpu_step)
    ps_cpu = _grid(bounds.ps_cpu, bounds.cpu_step)
    speed = batch_rates(physics, bounds.workers[1], ps, worker_cpu, ps_cpu)
    workers = np.arange(1, bounds.workers[1] + 1)
    used = (
        workers[:, None, None, None] * worker_cpu[None, None, :, None]
        + ps[None, :, None, None] * ps_cpu[None, None, None, :]
    )
    allowed = (used <= cores + 1e-9) & (workers >= bounds.workers[0])[:, None, None, None]
    if not allowed.any():
        return bounds.workers[0], bounds.ps[0], bounds.worker_cpu[0], bounds.ps_cpu[0]
    best = float(np.max(np.where(allowed, speed, 0.0)))
    cheapest = np.where(allowed & (speed >= best * (1 - 1e-6)), used, np.inf)
    i, j, k, n = np.unravel_index(int(np.argmin(cheapest)), cheapest.shape)
    return int(workers[i]), int(ps[j]), float(worker_cpu[k]), float(ps_cpu[n])


def _grid(bounds: tuple[float, float], step: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.arange(bounds[0], bounds[1] + step / 2, step, dtype=np.float64)


class StaticScheduler(Memoryless):
    """Starts each job as requested once all of it fits; never changes it."""

    def decide(self, jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, now: float) -> Mapping[JobId, JobShape]:
        """Returns the requests of the waiting jobs that fit."""
        return admit(jobs, capacity, {job.view.id: job.request for job in jobs})
