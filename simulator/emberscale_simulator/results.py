"""Summarizes runs: one seed's outcome, and several seeds' means with confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student_t

from emberscale_api.shape import JobShape
from emberscale_simulator.engine import RunResult
from emberscale_simulator.job import RunPhase


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The result of a measured job. Times are seconds of the simulation; `jct` is None unless it completed.

    `shapes` are (time, shape): the first shape, and one entry per change.
    """

    job: str
    arrival: float
    waited: float
    jct: float | None
    scalings: int
    restarts: int
    first_shape: JobShape | None
    final_shape: JobShape | None
    timeline: tuple[tuple[float, float], ...]
    shapes: tuple[tuple[float, JobShape], ...] = ()


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """One seed under one scheduler. Utilizations are busy over allocated core-seconds of all measured jobs."""

    scheduler: str
    seed: int
    jobs: tuple[JobOutcome, ...]
    worker_cpu_utilization: float
    ps_cpu_utilization: float
    memory_utilization: float
    core_hours: float

    @property
    def completed_jcts(self) -> list[float]:
        """Seconds from submission to completion of the jobs that completed."""
        return [job.jct for job in self.jobs if job.jct is not None]

    @property
    def completion_rate(self) -> float:
        """Completed jobs over submitted jobs."""
        return len(self.completed_jcts) / len(self.jobs)


def summarize_seed(scheduler: str, seed: int, result: RunResult, keep_timelines: bool) -> SeedOutcome:
    """Computes the figures of one run over its measured jobs."""
    runs = [run for run in result.runs if run.job.measured]
    usages = [run.usage for run in runs]

    def share(busy: str, allocated: str) -> float:
        total = sum(getattr(usage, allocated) for usage in usages)
        return sum(getattr(usage, busy) for usage in usages) / total if total > 0 else 0.0

    return SeedOutcome(
        scheduler=scheduler,
        seed=seed,
        jobs=tuple(
            JobOutcome(
                job=run.job.id,
                arrival=run.job.arrival,
                waited=(run.started_at if run.started_at is not None else result.ended_at) - run.job.arrival,
                jct=(
                    run.finished_at - run.job.arrival
                    if run.phase is RunPhase.COMPLETE and run.finished_at is not None
                    else None
                ),
                scalings=run.scalings,
                restarts=run.restarts,
                first_shape=run.first_shape,
                final_shape=run.shape,
                timeline=tuple(run.timeline) if keep_timelines else (),
                shapes=tuple(run.shapes),
            )
            for run in runs
        ),
        worker_cpu_utilization=share("worker_busy", "worker_allocated"),
        ps_cpu_utilization=share("ps_busy", "ps_allocated"),
        memory_utilization=share("memory_used", "memory_allocated"),
        core_hours=sum(usage.worker_allocated + usage.ps_allocated for usage in usages) / 3600,
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and the half-width of its 95% interval (Student's t); infinite with a single seed."""

    mean: float
    half_width: float

    @property
    def interval(self) -> tuple[float, float]:
        """The lower and upper end."""
        return self.mean - self.half_width, self.mean + self.half_width


def estimate(values: Sequence[float]) -> Estimate:
    """Estimates a mean from one value per seed."""
    if not values:
        return Estimate(math.nan, math.inf)
    if len(values) == 1:
        return Estimate(float(values[0]), math.inf)
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(float(np.mean(values)), float(student_t.ppf(0.975, len(values) - 1)) * spread)


@dataclass(frozen=True, slots=True)
class SchedulerSummary:
    """All seeds of one scheduler. `jct_p50` and `jct_p90` are means over seeds of each seed's percentile."""

    scheduler: str
    seeds: int
    jct: Estimate
    jct_p50: Estimate
    jct_p90: Estimate
    wait: Estimate
    worker_cpu_utilization: Estimate
    ps_cpu_utilization: Estimate
    memory_utilization: Estimate
    completion_rate: Estimate
    scalings: Estimate
    core_hours: Estimate


def summarize(outcomes: Sequence[SeedOutcome]) -> SchedulerSummary:
    """Computes the figures of one scheduler over its seeds. A seed in which no job completed has no JCT."""
    with_jcts = [outcome for outcome in outcomes if outcome.completed_jcts]
    return SchedulerSummary(
        scheduler=outcomes[0].scheduler,
        seeds=len(outcomes),
        jct=estimate([float(np.mean(outcome.completed_jcts)) for outcome in with_jcts]),
        jct_p50=estimate([float(np.percentile(outcome.completed_jcts, 50)) for outcome in with_jcts]),
        jct_p90=estimate([float(np.percentile(outcome.completed_jcts, 90)) for outcome in with_jcts]),
        wait=estimate([float(np.mean([job.waited for job in outcome.jobs])) for outcome in outcomes]),
        worker_cpu_utilization=estimate([outcome.worker_cpu_utilization for outcome in outcomes]),
        ps_cpu_utilization=estimate([outcome.ps_cpu_utilization for outcome in outcomes]),
        memory_utilization=estimate([outcome.memory_utilization for outcome in outcomes]),
        completion_rate=estimate([outcome.completion_rate for outcome in outcomes]),
        scalings=estimate([sum(job.scalings for job in outcome.jobs) / len(outcome.jobs) for outcome in outcomes]),
        core_hours=estimate([outcome.core_hours for outcome in outcomes]),
    )
