"""A job's profiler: it reports the truth to a brain, with the noise of its windows."""

import math

import numpy as np

from emberscale_api.shape import JobProfile, JobShape
from emberscale_simulator.ground_truth import Rate
from emberscale_simulator.job import SimulatedJob
from emberscale_simulator.scenario import Surroundings


class Profiler:
    """The profiler of one job."""

    def __init__(self, job: SimulatedJob, surroundings: Surroundings, random: np.random.Generator) -> None:
        self._job = job
        self._profiling = surroundings.profiling
        self._ps_memory_skew = surroundings.ps_memory_skew
        self._random = random
        self._reported_at = -math.inf

    def report(
        self, now: float, shape: JobShape, samples: float, rate: Rate, steady_since: float, failures: int
    ) -> JobProfile | None:
        """Reports the windows since the last report in which the rate was `rate`; None if nothing is trained.

        The windows are averaged into one profile, which divides the noise by the root of their number. `failures` is
        the number of PS that the job has lost so far.
        """
        if rate.samples_per_second <= 0:
            return None
        windows = math.floor((now - max(steady_since, self._reported_at)) / self._profiling.interval)
        self._reported_at = now
        noise = self._profiling.noise / math.sqrt(max(1, windows))
        speed = rate.samples_per_second * math.exp(self._random.normal(0.0, noise))
        batch = self._job.metadata.batch_size
        return JobProfile(
            time=now,
            shape=shape,
            batch_size=batch,
            iteration_seconds=shape.workers * batch / speed,
            throughput=speed,
            samples=int(samples),
            rows=self._rows(samples),
            ps_memory=int(self._job.largest_ps(samples, shape.ps, self._ps_memory_skew)),
            worker_memory=self._job.worker_memory,
            worker_cpu_utilization=rate.worker_busy_cores / (shape.workers * shape.worker_cpu),
            ps_cpu_utilization=rate.ps_busy_cores / (shape.ps * shape.ps_cpu),
            restarted=windows < 1,
            failures=failures,
        )

    def report_out_of_memory(self, now: float, shape: JobShape, samples: float, failures: int) -> JobProfile:
        """Reports processes that reached their limits and were killed."""
        return JobProfile(
            time=now,
            shape=shape,
            batch_size=self._job.metadata.batch_size,
            iteration_seconds=0.0,
            throughput=0.0,
            samples=int(samples),
            rows=self._rows(samples),
            ps_memory=shape.ps_memory,
            worker_memory=min(self._job.worker_memory, shape.worker_memory),
            restarted=True,
            failures=failures,
        )

    def _rows(self, samples: float) -> int:
        growth = self._job.growth
        return int((growth.bytes_at(samples) - growth.base_bytes) / self._job.row_bytes)
