"""Optimus (Peng et al., EuroSys 2018): fits a model of the speed, and gives free cores to the job that gains most.

Its model of asynchronous training (equation 4 there) is, for w workers and p parameter servers (PS),

    f(w, p) = w / (t0 + t1 * w / p + t2 * w + t3 * p)

fitted by non-negative least squares to the measurements. In every round it divides the cluster anew: each job begins
with one worker and one PS, and the scheduler repeatedly adds the pod that shortens its job most for its share of the
cluster (algorithm 1 there).

It is stronger than published in three ways. A few measured steps at several pairs (w, p) before a job starts are free
and take no time. It changes a job only if the change saves more time, by the model, than past changes cost; the
published algorithm does not weigh that. If the number of PS falls, the remaining ones keep the total memory.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import ClusterCapacity, JobId
from emberscale_simulator.ground_truth import batch_rate
from emberscale_simulator.job import SimulatedJob
from emberscale_simulator.mechanics import ChangeMethod, Mechanics
from emberscale_simulator.resources import NOTHING, Amounts, role_resources
from emberscale_simulator.schedulers.protocol import LearnsOverheads, ScheduledJob

_TRIALS = ((1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (8, 4))


class OptimusScheduler(LearnsOverheads):
    """Chooses the numbers of pods; their sizes are the owner's request.

    A running job changes only if that ends it sooner by the fraction `min_gain`, including the change.
    """

    def __init__(
        self, jobs: Sequence[SimulatedJob], mechanics: Mechanics, min_gain: float, noise: float, seed: int
    ) -> None:
        super().__init__()
        self._truth = {job.id: job for job in jobs}
        self._mechanics = mechanics
        self._min_gain = min_gain
        self._noise = noise
        self._random = np.random.default_rng([seed, 11])
        self._trials: dict[JobId, list[tuple[float, float, float]]] = {}

    def job_ended(self, job: SimulatedJob, final_shape: JobShape, completed: bool, now: float) -> None:
        """Forgets the job's trials."""
        self._trials.pop(job.id, None)

    def decide(self, jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, now: float) -> Mapping[JobId, JobShape]:
        """Divides the whole cluster again; running jobs keep their shapes if a change does not pay."""
        free = Amounts(capacity.cpu, capacity.memory)
        whole = free
        for job in jobs:
            if job.view.fixed and job.view.current is not None:
                free = free - role_resources(job.view.current).total
        movable = [job for job in jobs if not job.view.fixed]
        fits = {job.view.id: self._fit(job) for job in movable}
        shapes = self._divide(movable, fits, free, whole)
        wanted = {
            job.view.id: shape for job in movable if (shape := shapes.get(job.view.id)) != job.view.current and shape
        }
        paying = {
            job.view.id: wanted[job.view.id]
            for job in movable
            if job.view.id in wanted
            and (job.view.current is None or self._pays(job, fits[job.view.id], job.view.current, wanted[job.view.id]))
        }
        taken = NOTHING
        for job in movable:
            shape = paying.get(job.view.id, job.view.current)
            taken = taken if shape is None else taken + role_resources(shape).total
        return paying if taken.fits(free) else wanted  # some job has to make room

    def _divide(
        self,
        jobs: Sequence[ScheduledJob],
        fits: Mapping[JobId, NDArray[np.float64]],
        free: Amounts,
        whole: Amounts,
    ) -> dict[JobId, JobShape]:
        shapes: dict[JobId, JobShape] = {}
        by_id = {job.view.id: job for job in jobs}
        for job in sorted(jobs, key=lambda job: job.view.current is None):  # running jobs keep their place
            least = _sized(job, job.view.bounds.workers[0], job.view.bounds.ps[0])
            needed = role_resources(least).total
            if needed.fits(free):
                shapes[job.view.id] = least
                free = free - needed
        heap: list[tuple[float, JobId, JobShape]] = []

        def offer(job_id: JobId) -> None:
            found = self._best_addition(by_id[job_id], fits[job_id], shapes[job_id], whole)
            if found is not None:
                heapq.heappush(heap, (-found[0], job_id, found[1]))

        for job_id in shapes:
            offer(job_id)
        while heap:
            _, job_id, shape = heapq.heappop(heap)
            added = role_resources(shape).total - role_resources(shapes[job_id]).total
            if not added.fits(free):
                continue
            shapes[job_id] = shape
            free = free - added.larger(NOTHING)
            offer(job_id)
        return shapes

    def _best_addition(
        self, job: ScheduledJob, fit: NDArray[np.float64], shape: JobShape, whole: Amounts
    ) -> tuple[float, JobShape] | None:
        """Returns one more worker or PS, whichever saves more seconds for its share of the cluster, or None."""
        bounds, options = job.view.bounds, []
        if shape.workers < bounds.workers[1]:
            options.append(_sized(job, shape.workers + 1, shape.ps))
        if shape.ps < bounds.ps[1]:
            options.append(_sized(job, shape.workers, shape.ps + 1))
        before = self._seconds(job, fit, shape)
        best = None
        for option in options:
            saved = before - self._seconds(job, fit, option)
            added = role_resources(option).total - role_resources(shape).total
            share = max(added.cpu / whole.cpu, added.memory / whole.memory, 1e-9)
            if saved > 0 and (best is None or saved / share > best[0]):
                best = (saved / share, option)
        return best

    def _seconds(self, job: ScheduledJob, fit: NDArray[np.float64], shape: JobShape) -> float:
        return job.view.remaining_samples / job.view.metadata.batch_size / _speed(fit, shape.workers, shape.ps)

    def _pays(self, job: ScheduledJob, fit: NDArray[np.float64], present: JobShape, target: JobShape) -> bool:
        """Whether the change ends the job sooner, including its own cost."""
        costs = self.overheads(self._mechanics.resize)
        pause = costs.worker_pause_seconds if present.workers != target.workers else 0.0
        if present.ps != target.ps:
            pause = max(pause, costs.ps_pause_seconds)
        delay = 0.0
        if self._mechanics.change is ChangeMethod.LIVE:
            delay = max(
                costs.worker_start_seconds if target.workers > present.workers else 0.0,
                costs.ps_start_seconds if target.ps > present.ps else 0.0,
            )
        now, then = self._seconds(job, fit, present), self._seconds(job, fit, target)
        if now <= delay:
            return False
        return delay + pause + (1 - delay / now) * then < now * (1 - self._min_gain)

    def _fit(self, job: ScheduledJob) -> NDArray[np.float64]:
        batch = job.view.metadata.batch_size
        points = list(self._trial_runs(job))
        points += [
            (profile.shape.workers, profile.shape.ps, profile.throughput / batch)
            for profile in job.view.profiles
            if not profile.restarted
        ]
        workers, servers, speeds = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
        seconds = workers / speeds
        features = np.stack([np.ones_like(workers), workers / servers, workers, servers], axis=1)
        coefficients, _ = nnls(features / seconds[:, None], np.ones_like(seconds))
        return np.asarray(coefficients, dtype=np.float64)

    def _trial_runs(self, job: ScheduledJob) -> list[tuple[float, float, float]]:
        if job.view.id not in self._trials:
            truth, request = self._truth[job.view.id].physics, job.request
            self._trials[job.view.id] = [
                (
                    workers,
                    ps,
                    batch_rate(truth, workers, ps, request.worker_cpu, request.ps_cpu)
                    * float(np.exp(self._random.normal(0.0, self._noise))),
                )
                for workers, ps in _TRIALS
            ]
        return self._trials[job.view.id]


def _sized(job: ScheduledJob, workers: int, ps: int) -> JobShape:
    """Returns the owner's pods in other numbers, with at least the requested and the present memory for the tables."""
    request, present = job.request, job.view.current
    tables = request.ps * request.ps_memory
    memory = max(request.ps_memory, math.ceil(tables / ps))
    if present is not None:
        memory = max(memory, math.ceil(present.ps * present.ps_memory / ps))
    return replace(request, workers=workers, ps=ps, ps_memory=min(memory, job.view.bounds.ps_memory[1]))


def _speed(fit: NDArray[np.float64], workers: int, ps: int) -> float:
    """Batches per second by Optimus's model."""
    seconds = float(fit @ np.array([1.0, workers / ps, workers, ps]))
    return workers / max(seconds, 1e-9)
