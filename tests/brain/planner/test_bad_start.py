"""A job that starts with a tenth of the cores, and follows one plan after another."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from emberscale_api.shape import GIB, JobProfile, JobShape
from emberscale_brain.planner.default import DefaultPlanner
from emberscale_brain.planner.types import (
    ClusterCapacity,
    ClusterView,
    JobId,
    JobMetadata,
    JobView,
    PlanAction,
    PlannerSettings,
    ShapeBounds,
    ThroughputFit,
)
from eventually import unwrap

CORES, STEP, BATCH = 0.8, 0.02, 256
WORKER_SECONDS, PS_SECONDS = 0.010, 0.0034
"""Of a processor for a batch: of its worker, and of its PS."""
DATA = JobMetadata("DLRM", BATCH, 500_000, 416, 26, 1_200_000_000, epochs=10_000)
BOUNDS = ShapeBounds((1, 6), (1, 1), (STEP, CORES), (STEP, CORES), (GIB, GIB), (GIB, GIB), STEP)
BAD_START = JobShape(1, 1, CORES / 20, CORES / 20, GIB, GIB)
INTERVAL, COOLDOWN = 10.0, 30.0
JOB = JobId("job")


def computing(shape: JobShape) -> tuple[float, float]:
    """Seconds of an iteration that a worker and the PS compute."""
    return WORKER_SECONDS / shape.worker_cpu, shape.workers * PS_SECONDS / shape.ps_cpu


def speed(shape: JobShape, overlap: float) -> float:
    """Samples per second where workers read, pull and push while they compute; at an overlap of 1 they do not."""
    worker, ps = computing(shape)
    return float(shape.workers * BATCH / (worker**overlap + ps**overlap) ** (1 / overlap))


def best_speed(overlap: float) -> float:
    """The most that these cores can do."""
    return max(
        speed(JobShape(workers, 1, (CORES - ps_cpu) / workers, ps_cpu, GIB, GIB), overlap)
        for workers in range(1, 7)
        for ps_cpu in np.arange(STEP, CORES, STEP).tolist()
    )


@dataclass
class Followed:
    """A job that reports a profile every 10 s, and follows the brain's plans after a cooldown."""

    overlap: float
    seed: int
    shape: JobShape = BAD_START
    planned: list[tuple[PlanAction, JobShape]] = field(default_factory=list)

    def follow(self, plans: int, rounds: int = 100) -> None:
        """Follows so many plans, or those of so many rounds of planning."""
        random, planner = np.random.default_rng(self.seed), DefaultPlanner(PlannerSettings(planning_seconds=INTERVAL))
        now = changed = 1e6
        samples, profiles = 0, list[JobProfile]()
        for _ in range(rounds):
            now += INTERVAL
            profile = self.measured(now, float(np.exp(0.04 * random.standard_normal())))
            samples += int(profile.throughput * INTERVAL)
            profiles.append(replace(profile, samples=samples))
            job = JobView(JOB, "ads", DATA, DATA.total_samples - samples, self.shape, BOUNDS, tuple(profiles[-64:]))
            plan = planner.plan(ClusterView((job,), ClusterCapacity(CORES, 16 * GIB)), now)[JOB]
            if plan.shape not in (None, self.shape) and now - changed >= COOLDOWN:
                assert plan.shape is not None
                self.planned.append((plan.action, plan.shape))
                self.shape, changed = plan.shape, now
                now += 2 * INTERVAL
                if len(self.planned) == plans:
                    return

    def measured(self, now: float, noise: float) -> JobProfile:
        rate = speed(self.shape, self.overlap) / noise
        seconds = self.shape.workers * BATCH / rate
        of_worker, of_ps = (min(1.0, busy / seconds) for busy in computing(self.shape))
        return JobProfile(
            now,
            self.shape,
            BATCH,
            seconds,
            rate,
            ps_memory=300 << 20,
            worker_memory=500 << 20,
            worker_cpu_utilization=of_worker,
            ps_cpu_utilization=of_ps,
        )


def test_processor_times_are_kept_however_long_a_job_does_something_else_than_training() -> None:
    """Planners see the latest 64 profiles. A long evaluation, for example, makes more of them useless."""
    job, planner = Followed(4.0, 0), DefaultPlanner(PlannerSettings(exploration=0))

    def explained(count: int) -> ThroughputFit:
        profiles = [job.measured(INTERVAL * (number + 1), 1.0) for number in range(count)]
        profiles[5:] = [replace(profile, restarted=True) for profile in profiles[5:]]
        view = JobView(JOB, "ads", DATA, DATA.total_samples, job.shape, BOUNDS, tuple(profiles[-64:]))
        plan = planner.plan(ClusterView((view,), ClusterCapacity(CORES, 16 * GIB)), 1e6)[JOB]
        return unwrap(plan.explanation.fit)

    before = explained(5)
    for count in (40, 80):
        assert explained(count).overlap == before.overlap
        assert explained(count).coefficients[:2] == pytest.approx(before.coefficients[:2], rel=0.05)


@pytest.mark.parametrize("overlap", [4.0, 8.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_bad_start_becomes_nearly_the_best_shape_of_these_cores_within_five_plans(overlap: float, seed: int) -> None:
    job = Followed(overlap, seed)
    job.follow(5)
    chosen = [shape for action, shape in job.planned if action is not PlanAction.EXPLORE]
    assert chosen
    for shape in chosen:
        assert speed(shape, overlap) >= 0.95 * best_speed(overlap), job.planned


@pytest.mark.parametrize("overlap", [1.0, 2.0, 8.0])
def test_no_shape_is_tried_twice(overlap: float) -> None:
    job = Followed(overlap, 0)
    job.follow(12)
    tried = [shape for action, shape in job.planned if action is PlanAction.EXPLORE]
    assert 0 < len(set(tried)) == len(tried)
