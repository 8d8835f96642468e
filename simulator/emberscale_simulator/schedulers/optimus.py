"""Optimus (Peng et al., EuroSys 2018) as DLRover-RM section 6 runs it: one worker or PS at a time, by its own model.

Its model of asynchronous training knows the numbers of workers and servers only, neither cores nor look-ups:

    speed = w / (t0 + t1 * w / p + t2 * w + t3 * p)

fitted by non-negative least squares to what was measured. Before a job starts, Optimus measures a few steps at several
pairs (w, p); here those are free and take no time, which is in its favour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from emberscale_brain.planner.types import ClusterCapacity, JobId, JobShape
from emberscale_simulator.ground_truth import batch_rate
from emberscale_simulator.job import SimulatedJob
from emberscale_simulator.schedulers.protocol import Memoryless, ScheduledJob, admit

_TRIALS = ((1, 1), (2, 1), (1, 2), (4, 2), (2, 4))


class OptimusScheduler(Memoryless):
    """Starts from the owner's request; at each look adds what shortens the job most per core, if anything does.

    `step` pods are added at a time, while the predicted speed-up is at least `min_gain`. As published, it does not
    weigh what the change itself costs.
    """

    def __init__(self, jobs: Sequence[SimulatedJob], step: int, min_gain: float, noise: float, seed: int) -> None:
        self._truth = {job.id: job for job in jobs}
        self._step = step
        self._min_gain = min_gain
        self._noise = noise
        self._random = np.random.default_rng([seed, 11])
        self._trials: dict[JobId, list[tuple[float, float, float]]] = {}

    def decide(self, jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, now: float) -> Mapping[JobId, JobShape]:
        """Starts, and for each running job at most one role that grows, greatest gain per core first."""
        decided = admit(jobs, capacity, {job.view.id: job.request for job in jobs})
        free = capacity.cpu - sum(shape.cpu for shape in decided.values())
        free -= sum(job.view.current.cpu for job in jobs if job.view.current is not None)
        grown = [option for job in jobs if (option := self._best_growth(job)) is not None]
        for _, job_id, shape, added in sorted(grown, key=lambda option: -option[0]):
            if added <= free:
                decided[job_id] = shape
                free -= added
        return decided

    def _best_growth(self, job: ScheduledJob) -> tuple[float, JobId, JobShape, float] | None:
        present = job.view.current
        if present is None or job.view.fixed:
            return None
        fit = self._fit(job)
        speed = _speed(fit, present.workers, present.ps)
        bounds, options = job.view.bounds, []
        if present.workers + self._step <= bounds.workers[1]:
            options.append(replace(present, workers=present.workers + self._step))
        if present.ps + self._step <= bounds.ps[1]:
            options.append(replace(present, ps=present.ps + self._step))
        best = None
        for shape in options:
            faster = _speed(fit, shape.workers, shape.ps)
            if faster < speed * (1 + self._min_gain):
                continue
            remaining = job.view.remaining_samples / job.view.metadata.batch_size
            added = shape.cpu - present.cpu
            gain = (remaining / speed - remaining / faster) / added
            if best is None or gain > best[0]:
                best = (gain, job.view.id, shape, added)
        return best

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


def _speed(fit: NDArray[np.float64], workers: int, ps: int) -> float:
    """Batches per second by Optimus's model."""
    seconds = float(fit @ np.array([1.0, workers / ps, workers, ps]))
    return workers / max(seconds, 1e-9)
