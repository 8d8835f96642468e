import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.planner.types import ClusterCapacity, JobId, PlannerSettings
from emberscale_simulator.adviser import CheckpointAdviser
from emberscale_simulator.engine import Simulation, capacity_fractions, whole_cluster
from emberscale_simulator.experiment import make_scheduler, simulate_seed
from emberscale_simulator.job import RunPhase
from emberscale_simulator.run import JobRun
from emberscale_simulator.scenario import (
    CapacityStep,
    DailyDip,
    GeneratedWorkload,
    Scenario,
    SchedulerKind,
    SchedulerSpec,
)
from emberscale_simulator.scenario_file import load_scenario
from emberscale_simulator.schedulers.protocol import ScheduledJob
from emberscale_simulator.schedulers.static import StaticScheduler
from emberscale_simulator.workload import make_jobs
from eventually import unwrap

BUSY: dict[str, Any] = {
    "kind": "Generated",
    "jobs": 40,
    "period": "12h",
    "families": 6,
    "owners": 3,
    "models": [{"model": "dlrm"}],
    "duration": {"median": 2400, "spread": 0.5},
    "reference_workers": {"median": 8, "spread": 0.4},
    "sizing": {
        "workers": {"median": 1, "spread": 0.3},
        "worker_cpu": {"median": 2, "spread": 0.3},
        "ps": {"median": 1.2, "spread": 0.3},
        "ps_cpu": {"median": 2, "spread": 0.3},
        "memory": {"median": 3, "spread": 0.5},
        "memory_shortage": {"probability": 0.1, "factor": {"low": 0.4, "high": 0.9}},
    },
}
LARGE = {"nodes": 40, "nodeCpu": 32, "nodeMemory": "128Gi", "workerBandwidth": "600M", "psBandwidth": "600M"}
TROUBLED = {
    "workload": BUSY,
    "cluster": LARGE,
    "horizon": "2d",
    "failures": {"dailyPodFailures": 0.5},
    "stragglers": {"workerProbability": 0.05, "psProbability": 0.05},
}


class Watchful(StaticScheduler):
    """A static scheduler that checks at every decision that the cluster is not over-committed."""

    def __init__(self) -> None:
        self.looks = 0

    def decide(self, jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, now: float) -> Mapping[JobId, JobShape]:
        self.looks += 1
        running = [job.view.current for job in jobs if job.view.current is not None]
        # jobs with less than their shape lost the rest to the cluster
        assert sum(shape.cpu for shape in running) <= capacity.cpu + 1e-6
        assert sum(shape.memory for shape in running) <= capacity.memory
        return super().decide(jobs, capacity, now)


@pytest.mark.parametrize("scheduler", ["static", "well-tuned", "elastic-scheduler", "optimus"])
def test_the_seed_decides_everything(make_scenario: Callable[..., Scenario], scheduler: str) -> None:
    scenario = make_scenario(**TROUBLED)
    first, again, other = (simulate_seed(scenario, scheduler, seed, Path()) for seed in (3, 3, 4))
    assert first.jobs == again.jobs
    assert first.jobs != other.jobs


@pytest.mark.parametrize("scheduler", ["static", "elastic-scheduler", "optimus"])
def test_every_job_ends_and_no_job_outruns_its_best_shape(
    make_scenario: Callable[..., Scenario], scheduler: str
) -> None:
    outcome = simulate_seed(make_scenario(), scheduler, 0, Path())
    best = simulate_seed(make_scenario(), "well-tuned", 0, Path())
    assert outcome.completion_rate == best.completion_rate == 1
    assert min(outcome.completed_jcts) >= max(best.completed_jcts) * 0.9
    assert 0 < outcome.worker_cpu_utilization < 1
    assert 0 < outcome.ps_cpu_utilization < 1


def test_the_cluster_is_never_over_committed_while_its_capacity_comes_and_goes(
    make_scenario: Callable[..., Scenario],
) -> None:
    document = make_scenario(**TROUBLED).model_copy()
    cluster = document.cluster.model_copy(
        update={
            "daily_dip": DailyDip(start_hour=2, end_hour=5, fraction=0.7),
            "capacity_steps": (CapacityStep(at=6 * 3600, fraction=0.6),),
        }
    )
    scenario = document.model_copy(update={"cluster": cluster})
    watchful = Watchful()
    jobs = make_jobs(scenario, 0, Path())
    result = Simulation(scenario, scenario.schedulers[0], watchful, jobs, 0).run()
    assert watchful.looks > len(jobs)
    assert all(run.phase in (RunPhase.COMPLETE, RunPhase.FAILED, RunPhase.QUEUED) for run in result.runs)
    assert sum(run.phase is RunPhase.COMPLETE for run in result.runs) > len(jobs) / 2


def test_work_is_conserved(make_scenario: Callable[..., Scenario]) -> None:
    scenario = make_scenario()
    jobs = make_jobs(scenario, 0, Path())
    (spec,) = [spec for spec in scenario.schedulers if spec.name == "static"]
    (run,) = Simulation(scenario, spec, make_scheduler(scenario, spec, jobs, 0), jobs, 0).run().runs
    batches = run.job.metadata.total_samples / run.job.metadata.batch_size
    assert run.usage.worker_busy == pytest.approx(batches * run.job.physics.worker_work)
    assert run.usage.ps_busy == pytest.approx(batches * run.job.physics.ps_work)
    assert run.finished_at is not None
    assert run.usage.worker_allocated == pytest.approx(run.finished_at * 4 * 4)


def test_the_horizon_ends_what_never_would(make_scenario: Callable[..., Scenario]) -> None:
    outcome = simulate_seed(make_scenario(horizon="5m"), "static", 0, Path())
    assert outcome.completion_rate == 0


def test_owners_who_ask_for_too_little_memory_lose_time_and_no_job(make_scenario: Callable[..., Scenario]) -> None:
    sizing = {**BUSY["sizing"], "memory_shortage": {"probability": 0.5, "factor": {"low": 0.4, "high": 0.9}}}
    scenario = make_scenario(workload={**BUSY, "sizing": sizing}, cluster=LARGE)
    jobs = make_jobs(scenario, 0, Path())
    outcome = simulate_seed(scenario, "static", 0, Path())
    short = {
        job.id
        for job in jobs
        if job.largest_ps(job.metadata.total_samples, job.request.ps, scenario.ps_memory_skew) > job.request.ps_memory
    }
    assert short
    assert outcome.completion_rate == 1
    assert {job.job for job in outcome.jobs if job.restarts} == short


def test_owners_ask_for_as_much_too_little_as_too_much(make_scenario: Callable[..., Scenario]) -> None:
    path = Path(__file__).parents[2] / "deploy/examples/scenarios/production-week.yaml"
    scenario = load_scenario(path)
    assert isinstance(scenario.workload, GeneratedWorkload)
    reference = scenario.workload.reference_cpu
    cores = [math.log(job.request.worker_cpu / reference) for job in make_jobs(scenario, 0, path.parent)]
    assert abs(sum(cores) / len(cores)) < 0.2


def test_schedulers_plan_for_the_whole_cluster_while_a_part_of_it_is_gone(
    make_scenario: Callable[..., Scenario],
) -> None:
    scenario = make_scenario()
    cluster = scenario.cluster.model_copy(update={"capacity_steps": (CapacityStep(at=0.0, fraction=0.5),)})
    seen: set[float] = set()

    class Curious(StaticScheduler):
        def decide(
            self, jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, now: float
        ) -> Mapping[JobId, JobShape]:
            seen.add(capacity.cpu)
            return super().decide(jobs, capacity, now)

    scenario = scenario.model_copy(update={"cluster": cluster})
    jobs = make_jobs(scenario, 0, Path())
    Simulation(scenario, scenario.schedulers[0], Curious(), jobs, 0).run()
    assert seen == {320.0}


def test_workers_that_the_cluster_takes_come_back_when_it_has_room(make_scenario: Callable[..., Scenario]) -> None:
    steps = (CapacityStep(at=600.0, fraction=20 / 320), CapacityStep(at=900.0, fraction=1.0))
    scenario = make_scenario()
    cluster = scenario.cluster.model_copy(update={"capacity_steps": steps})
    jobs = make_jobs(scenario, 0, Path())
    lives = []
    for one in (scenario, scenario.model_copy(update={"cluster": cluster})):
        (run,) = Simulation(one, one.schedulers[0], StaticScheduler(), jobs, 0).run().runs
        assert run.phase is RunPhase.COMPLETE
        lives.append(run)
    undisturbed, squeezed = lives
    assert squeezed.shape == undisturbed.shape
    assert squeezed.restarts == 0
    assert squeezed.finished_at is not None
    assert undisturbed.finished_at is not None
    assert 0 < squeezed.finished_at - undisturbed.finished_at < 300 + 120


def test_capacity_follows_the_steps_and_the_daily_dip(make_scenario: Callable[..., Scenario]) -> None:
    cluster = make_scenario().cluster.model_copy(
        update={
            "daily_dip": DailyDip(start_hour=9, end_hour=21, fraction=0.25),
            "capacity_steps": (CapacityStep(at=30 * 3600, fraction=0.5),),
        }
    )
    assert [(at / 3600, fraction) for at, fraction in capacity_fractions(cluster, 48 * 3600)] == [
        (9, 0.75),
        (21, 1),
        (30, 0.5),
        (33, 0.375),
        (45, 0.5),
    ]
    assert whole_cluster(cluster).cpu == 320


@pytest.mark.parametrize("interval", [60.0, 180.0])
def test_a_planner_is_told_how_often_it_plans_as_the_brain_tells_it(
    make_scenario: Callable[..., Scenario], interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[PlannerSettings] = []
    monkeypatch.setattr("emberscale_simulator.experiment.load_planner", lambda name, settings: told.append(settings))
    spec = SchedulerSpec(name="ours", kind=SchedulerKind.PLANNER, interval=interval, mechanics="as-built")
    make_scheduler(make_scenario(), spec, [], 0)
    assert [settings.planning_seconds for settings in told] == [interval]


def test_every_job_is_advised_how_often_to_save_whoever_decides_on_its_shape(
    make_scenario: Callable[..., Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: dict[str, list[float]] = {}
    advise = JobRun.advise

    def record(run: JobRun, interval: float, now: float) -> None:
        advised.setdefault(run.job.id, []).append(interval)
        advise(run, interval, now)

    monkeypatch.setattr(JobRun, "advise", record)
    scenario = make_scenario(**TROUBLED)
    for scheduler in ("static", "elastic-scheduler"):
        advised.clear()
        outcome = simulate_seed(scenario, scheduler, 0, Path())
        assert advised.keys() >= {job.job for job in outcome.jobs if job.jct is not None and job.jct > 900}
        assert all(math.isfinite(interval) and interval >= 1 for told in advised.values() for interval in told)


def test_the_advice_is_the_square_root_interval_of_what_was_seen_of_the_fleet() -> None:
    adviser = CheckpointAdviser()
    shape = JobShape(4, 2, 4, 4, 1 << 30, 1 << 30)
    profile = JobProfile(
        time=1e5, shape=shape, batch_size=512, iteration_seconds=1, throughput=2048, samples=1, rows=1, restarted=False
    )
    calm = adviser.interval(JobId("a"), "ann", profile, 0.0, 10**9, 2.0)
    failing = adviser.interval(JobId("a"), "ann", replace(profile, failures=9), 0.0, 10**9, 2.0)
    other = adviser.interval(JobId("b"), "ann", replace(profile, time=1.0), 0.0, 10**9, 2.0)
    assert calm is not None
    assert failing is not None
    assert other is not None
    assert failing == pytest.approx(math.sqrt(2 * 2.0 * 1e5 / 9), rel=0.2)
    assert failing <= other < calm
    unknown = replace(profile, restarted=True)
    assert adviser.interval(JobId("c"), "ann", unknown, 0.0, 10**9, 2.0) is None


def test_time_in_the_queue_is_no_time_of_servers(
    make_scenario: Callable[..., Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[JobId, float] = {}
    interval = CheckpointAdviser.interval

    def remember(
        adviser: CheckpointAdviser, job: JobId, owner: str, profile: JobProfile, since: float, *rest: Any
    ) -> float | None:
        begun[job] = since
        return interval(adviser, job, owner, profile, since, *rest)

    monkeypatch.setattr(CheckpointAdviser, "interval", remember)
    scenario = make_scenario(cluster={**LARGE, "nodes": 1})  # room for one of the two jobs
    workload = scenario.workload.model_copy(update={"models": ("dlrm", "dlrm")})
    scenario = scenario.model_copy(update={"workload": workload})
    jobs = [replace(job, id=JobId(f"job-{number}")) for number, job in enumerate(make_jobs(scenario, 0, Path()))]
    result = Simulation(scenario, scenario.schedulers[0], StaticScheduler(), jobs, 0).run()
    started = {run.job.id: run.started_at for run in result.runs}
    assert begun == started
    assert unwrap(started[JobId("job-1")]) > 600
