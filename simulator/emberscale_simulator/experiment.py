"""Compares schedulers: runs every scheduler on every seed, in parallel processes, and gives the comparison as JSON."""

import math
import multiprocessing
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import Any

from emberscale_api.errors import InvalidError
from emberscale_api.job.units import memory_bytes
from emberscale_brain.preferences import load_planner
from emberscale_simulator.engine import Simulation
from emberscale_simulator.job import SimulatedJob
from emberscale_simulator.results import Estimate, SchedulerSummary, SeedOutcome, summarize, summarize_seed
from emberscale_simulator.scenario import RoundsWorkload, Scenario, SchedulerKind, SchedulerSpec
from emberscale_simulator.schedulers.elastic import ElasticScheduler
from emberscale_simulator.schedulers.optimus import OptimusScheduler
from emberscale_simulator.schedulers.planned import PlannedScheduler
from emberscale_simulator.schedulers.protocol import Scheduler
from emberscale_simulator.schedulers.static import StaticScheduler, WellTunedScheduler
from emberscale_simulator.workload import make_jobs


def as_json(scenario: str, seeds: Sequence[int], summaries: Sequence[SchedulerSummary]) -> dict[str, Any]:
    """Returns the comparison as JSON; `schedulers` by name, see `scheduler_json`."""
    return {
        "scenario": scenario,
        "seeds": list(seeds),
        "schedulers": {summary.scheduler: scheduler_json(summary) for summary in summaries},
    }


def scheduler_json(summary: SchedulerSummary) -> Mapping[str, Any]:
    """Returns the figures of one scheduler: each a mean with `ci95`, [lower, upper], null for a single seed."""
    return {
        "jct_seconds": {
            **_estimate(summary.jct),
            "p50": _number(summary.jct_p50.mean),
            "p90": _number(summary.jct_p90.mean),
        },
        "wait_seconds": _estimate(summary.wait),
        "worker_cpu_utilization": _estimate(summary.worker_cpu_utilization),
        "ps_cpu_utilization": _estimate(summary.ps_cpu_utilization),
        "memory_utilization": _estimate(summary.memory_utilization),
        "completion_rate": _estimate(summary.completion_rate),
        "scalings": _estimate(summary.scalings),
        "core_hours": _estimate(summary.core_hours),
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    bounded = math.isfinite(estimate.half_width)
    return {"mean": _number(estimate.mean), "ci95": list(estimate.interval) if bounded else None}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


TIMELINES_UP_TO = 50


def choose_schedulers(scenario: Scenario, names: Sequence[str] | None) -> list[SchedulerSpec]:
    """Returns the scenario's schedulers with these names, or all. Raises InvalidError."""
    by_name = {spec.name: spec for spec in scenario.schedulers}
    for name in names or ():
        if name not in by_name:
            raise InvalidError(f"the scenario has no scheduler {name!r}; it has {', '.join(by_name)}")
    return [by_name[name] for name in names] if names else list(scenario.schedulers)


def simulate_seed(scenario: Scenario, scheduler: str, seed: int, folder: Path) -> SeedOutcome:
    """Runs one scheduler on one seed. `folder` is where relative paths of the scenario start."""
    (spec,) = choose_schedulers(scenario, [scheduler])
    jobs = make_jobs(scenario, seed, folder)
    result = Simulation(scenario, spec, make_scheduler(scenario, spec, jobs, seed), jobs, seed).run()
    measured = sum(job.measured for job in jobs)
    return summarize_seed(scheduler, seed, result, keep_timelines=measured <= TIMELINES_UP_TO)


def make_scheduler(scenario: Scenario, spec: SchedulerSpec, jobs: Sequence[SimulatedJob], seed: int) -> Scheduler:
    """Returns the algorithm that a scenario asks for. Raises InvalidError."""
    mechanics = scenario.mechanics[spec.mechanics]
    match spec.kind:
        case SchedulerKind.STATIC:
            return StaticScheduler()
        case SchedulerKind.WELL_TUNED:
            workload = scenario.workload
            shares = len(workload.models) if isinstance(workload, RoundsWorkload) and workload.spacing == 0 else 1
            return WellTunedScheduler(jobs, shares, scenario.ps_memory_skew)
        case SchedulerKind.OPTIMUS:
            return OptimusScheduler(jobs, mechanics, spec.min_gain, scenario.profiling.noise, seed)
        case SchedulerKind.ELASTIC:
            return ElasticScheduler(spec.step, spec.min_gain)
        case SchedulerKind.PLANNER:
            return PlannedScheduler(
                load_planner(spec.planner.name, spec.planner.settings(seed, spec.interval)),
                spec.planner.prices(),
                mechanics,
                memory_bytes(scenario.cluster.ps_bandwidth),
                spec.use_history,
            )


def run_experiment(
    scenario: Scenario,
    schedulers: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    processes: int,
    progress: Callable[[SeedOutcome], None],
) -> list[SeedOutcome]:
    """Runs every scheduler on every seed; calls `progress` as each run ends.

    With one process, everything runs in the caller's process. Raises what a planner raises.
    """
    tasks = [(scheduler, seed) for seed in seeds for scheduler in schedulers]
    outcomes: dict[tuple[str, int], SeedOutcome] = {}
    with closing(_outcomes(scenario, tasks, folder, min(processes, len(tasks)))) as finished:
        for outcome in finished:
            outcomes[outcome.scheduler, outcome.seed] = outcome
            progress(outcome)
    return [outcomes[scheduler, seed] for scheduler in schedulers for seed in seeds]


def _outcomes(
    scenario: Scenario, tasks: Sequence[tuple[str, int]], folder: Path, processes: int
) -> Generator[SeedOutcome]:
    if processes <= 1:
        for scheduler, seed in tasks:
            yield simulate_seed(scenario, scheduler, seed, folder)
        return
    # fork would copy the locks that the caller's threads (progress bars, gRPC) hold
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures: list[Future[SeedOutcome]] = [
            pool.submit(simulate_seed, scenario, scheduler, seed, folder) for scheduler, seed in tasks
        ]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def summarize_experiment(outcomes: Sequence[SeedOutcome], schedulers: Sequence[str]) -> list[SchedulerSummary]:
    """Returns one summary per scheduler, in the order given."""
    return [summarize([outcome for outcome in outcomes if outcome.scheduler == scheduler]) for scheduler in schedulers]
